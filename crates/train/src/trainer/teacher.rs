//! The teacher of distillation: another model, whose distributions of the tokens of a micro-batch are computed before it is
//! trained on, with a program and weights of its own. Knows no loss.

use std::borrow::Cow;

use compiler::CompileOptions;
use data::Batch;
use program::{Choices, Variant};

use crate::config::Task;
use crate::engine::{Engine, variant_of, weights};
use crate::error::{Result, TrainError};
use crate::model::weight_set::WeightSet;
use crate::plan::teacher::{Teacher, columns};
use crate::trainer::Trainer;

impl Trainer {
    /// Gives the micro-batches of a round the distributions of the teacher, where the task reads them and the caller did
    /// not.
    pub(crate) fn with_teacher<'b>(
        &mut self,
        round: impl Into<Cow<'b, [Batch]>>,
        one_per_row: bool,
    ) -> Result<Cow<'b, [Batch]>> {
        let mut round = round.into();
        if self.config.task != Task::Distil {
            return Ok(round);
        }
        self.check_taught(&round)?;
        if round.iter().all(|batch| !batch.teacher.is_empty()) {
            return Ok(round);
        }
        if self.config.distillation.precompute_teacher {
            let known = self.known_distributions(&round)?;
            round.to_mut().iter_mut().zip(known).for_each(|(batch, of)| batch.teacher = of);
            return Ok(round);
        }
        let Some(teacher) = self.plan.teacher.clone() else {
            let text =
                "`task: distil` without `teacher` trains on batches with `teacher_topk_ids` and `teacher_topk_logps`";
            return Err(TrainError::Usage(text.into()));
        };
        // The model in training first: the plan has left room for the teacher.
        self.engine_for(&round, one_per_row)?;
        let engine = self.teacher_engine(&teacher, variant_of(&round, one_per_row))?;
        let distributions = teacher.distributions(engine, &round, one_per_row)?;
        for (batch, of) in round.to_mut().iter_mut().zip(distributions) {
            batch.teacher = of;
        }
        Ok(round)
    }

    /// Refuses distributions that the loss was not recorded with.
    fn check_taught(&self, round: &[Batch]) -> Result<()> {
        let count = self.config.distillation.loss_top_k as usize;
        let vocabulary = columns(&self.source.model) as i32;
        for batch in round.iter().filter(|batch| !batch.teacher.ids.is_empty()) {
            let found = batch.teacher.ids.len() / batch.targets.len().max(1);
            if found != count {
                let text =
                    format!("the batch has {found} tokens of a teacher at each place, and `loss_top_k` is {count}");
                return Err(TrainError::Usage(text));
            }
            if let Some(id) = batch.teacher.ids.iter().find(|id| **id >= vocabulary) {
                let text = format!("token id {id} of the teacher is outside of the vocabulary of {vocabulary}");
                return Err(TrainError::Usage(text));
            }
        }
        Ok(())
    }

    /// The teacher with its weights, read when it is first needed.
    pub(super) fn teacher_engine(&mut self, teacher: &Teacher, variant: Variant) -> Result<&mut Engine> {
        if self.teacher.is_none() {
            let options = CompileOptions { variants: vec![variant], ..teacher.options(&self.plan.compile) };
            let (source, folder) = (teacher.source.clone(), &teacher.source.folder);
            let mut engine = Engine::new(self.device.clone(), source.clone(), options, &Choices::new())?;
            weights::load(&mut engine, WeightSet::Base, source.weights(folder)?, &folder.display().to_string())?;
            engine.weights_written()?;
            self.teacher = Some(engine);
        }
        Ok(self.teacher.as_mut().expect("just made"))
    }
}
