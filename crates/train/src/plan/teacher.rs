//! The teacher of distillation: which model it is, its entries, and the memory that it takes next to training. Knows no loss.

use std::path::Path;
use std::sync::Arc;

use compiler::{CompileOptions, EntryOptions, PlanOptions, Recipe, Sharding};
use data::{Batch, Taught, Tokenizer};
use graph::Model;
use program::{EntryKind, Machine};
use tensor::HostTensor;

use crate::config::{Config, Problem, Task};
use crate::engine::Engine;
use crate::error::{Result, TrainError};
use crate::model::source::ModelSource;
use crate::words;

/// Its forward pass, and its task with the likeliest tokens.
const TEACHER: &str = "teacher";

const LOGITS: &str = "logits";

const TOP: [&str; 2] = ["teacher_logps", "teacher_ids"];

/// A teacher as data, and what of its distributions the loss reads.
#[derive(Clone, Debug)]
pub(crate) struct Teacher {
    pub(crate) source: Arc<ModelSource>,
    /// Numbers of a token that it hands on: the size of the vocabulary, or the likeliest tokens.
    width: usize,
    /// True if it hands on its likeliest tokens alone.
    is_top: bool,
}

/// The teacher of a run, where it is available. Errors: a vocabulary that is not the student's, or options that do not go
/// with it.
pub(crate) fn open(config: &Config, student: &ModelSource, tokens: usize) -> Result<Option<Teacher>> {
    if config.task != Task::Distil {
        return Ok(None);
    }
    if student.model.images.is_some() {
        let message = "the student computes images, which a teacher does not read yet";
        return Err(TrainError::Config(vec![config.mistake("task", message, Some("take a model of text".into()))]));
    }
    let vocabulary = columns(&student.model);
    let count = config.distillation.loss_top_k as usize;
    if count > vocabulary {
        let message = format!("`loss_top_k` is {count}, and the vocabulary has {vocabulary} tokens");
        return Err(TrainError::Config(vec![config.mistake("loss_top_k", message, None)]));
    }
    let Some(fetched) = &config.fetched_teacher else { return Ok(None) };
    let source = ModelSource::open(&fetched.folder, &fetched.ir)?;
    let problems: Vec<Problem> = different_tokens(&source, student)
        .into_iter()
        .chain(too_few_positions(&source, tokens))
        .map(|message| config.mistake("teacher", message, None))
        .collect();
    if !problems.is_empty() {
        return Err(TrainError::Config(problems));
    }
    let (is_top, width) = if count > 0 { (true, count) } else { (false, vocabulary) };
    Ok(Some(Teacher { source: Arc::new(source), width, is_top }))
}

/// The columns of the logits.
pub(crate) fn columns(model: &Model) -> usize {
    model.columns_of(LOGITS).expect("a language model has logits")
}

/// The difference of the tokens of a teacher from those of the student, in words. Folders without a tokenizer are compared by the
/// sizes of their vocabularies alone.
fn different_tokens(teacher: &ModelSource, student: &ModelSource) -> Option<String> {
    let sizes = [&teacher.model, &student.model].map(columns);
    if sizes[0] != sizes[1] {
        let [of_teacher, own] = sizes;
        return Some(format!("`teacher` has logits of {of_teacher} tokens, the student of {own}: expected the same"));
    }
    let read = |folder: &Path| Tokenizer::from_folder(folder).ok();
    let (of_teacher, own) = (read(&teacher.folder)?, read(&student.folder)?);
    if of_teacher.digest() == own.digest() {
        return None;
    }
    let (of_teacher, own) = (of_teacher.encoder(), own.encoder());
    let most = of_teacher.vocab_size().max(own.vocab_size()) as u32;
    let differing = (0..most).find(|id| of_teacher.id_to_token(*id) != own.id_to_token(*id))?;
    let named = |token: Option<String>| token.map_or("no token".to_owned(), |text| format!("`{text}`"));
    Some(format!(
        "token {differing} of `teacher` is {}, of the student {}: expected the same vocabulary",
        named(of_teacher.id_to_token(differing)),
        named(own.id_to_token(differing)),
    ))
}

fn too_few_positions(teacher: &ModelSource, tokens: usize) -> Option<String> {
    let limit = teacher.model.max_positions.filter(|limit| *limit < tokens)?;
    Some(format!("`teacher` has {limit} positions, and rows have {tokens} tokens"))
}

impl Teacher {
    /// The note on how its distributions reach the loss.
    pub(crate) fn note(&self, config: &Config, tokens: usize) -> String {
        let name = config.teacher().unwrap_or_default();
        let rows = config.micro_rows() as usize;
        // A probability with its token takes two numbers.
        let bytes = rows * tokens * self.width * size_of::<f32>() * if self.is_top { 2 } else { 1 };
        let bytes = words::size(bytes);
        match self.is_top {
            true if config.distillation.precompute_teacher => format!(
                "the teacher, {name}, is computed before training: its {} likeliest tokens are kept on disk, {} for each \
                 trained token",
                self.width,
                words::size(self.width * 2 * size_of::<f32>())
            ),
            true => {
                format!(
                    "the teacher, {name}, hands on its {} likeliest tokens: up to {bytes} a micro-batch",
                    self.width
                )
            }
            false => format!(
                "the teacher, {name}, hands on its logits of all {} tokens: up to {bytes} a micro-batch; `loss_top_k` with \
                 `beta: 0` takes the likeliest alone",
                self.width
            ),
        }
    }

    /// The options of its program, next to those of the training: the same element type, and no recipe.
    pub(crate) fn options(&self, training: &CompileOptions) -> CompileOptions {
        let entry = match self.is_top {
            true => EntryOptions::new(EntryKind::Forward, Some(TEACHER)).keeping(TOP),
            false => EntryOptions::forward().keeping([LOGITS]),
        };
        CompileOptions {
            variants: Vec::new(),
            weights: training.weights,
            quantised: None,
            stored: Default::default(),
            compute: training.compute,
            recipe: Recipe::Uniform,
            training: None,
            adapter: None,
            entries: vec![EntryOptions { name: TEACHER.to_owned(), ..entry }],
            seed: 0,
            plan: PlanOptions::default(),
            sharding: Sharding { gradients: false, open: false, compression: Default::default(), ..training.sharding },
            branches: None,
            batch_invariant: false,
        }
    }

    /// Returns the bytes that its program takes next to the training.
    pub(crate) fn bytes(&self, training: &CompileOptions, machine: &Machine) -> Result<usize> {
        let options = CompileOptions { variants: training.variants.clone(), ..self.options(training) };
        let program = compiler::compile(&self.source.model, &options, machine)?;
        Ok(program.memory.iter().filter(|line| line.class.is_per_program()).map(|line| line.bytes).sum())
    }

    /// Its distributions of the tokens of a round.
    pub(crate) fn distributions(&self, engine: &mut Engine, round: &[Batch], one_per_row: bool) -> Result<Vec<Taught>> {
        let variant = engine.prepare(engine.variant_of(round, one_per_row))?;
        if !self.is_top {
            let logits = engine.forward(TEACHER, variant, round, LOGITS)?;
            return Ok(logits.into_iter().map(|logits| Taught { logits, ..Taught::default() }).collect());
        }
        let found = engine.forward_all(TEACHER, variant, round, &TOP)?;
        let of_batch = |[logps, ids]: [HostTensor; 2]| {
            let ids = ids.to_f64().into_iter().map(|id| id as i32).collect();
            Taught { logits: Vec::new(), ids, logps: logps.to_f32() }
        };
        Ok(found.into_iter().map(|of| of_batch(of.try_into().expect("as many results as were requested"))).collect())
    }
}
