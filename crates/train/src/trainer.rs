//! A run that is driven step by step: accumulation, update, evaluation. The same calls serve the
//! loop of the command line and Python.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use compiler::CompileOptions;
use data::safetensors::Weights;
use data::{Batch, IGNORE, Position};
use program::{Choices, EntryKind, Variant, scalar};
use serde::{Deserialize, Serialize};

use crate::advice::with_advice;
use crate::checkpoint::{Checkpoint, DataDigest, ModelDigest};
use crate::config::{Config, Init};
use crate::device::Device;
use crate::engine::{Engine, variant_of};
use crate::error::{Result, TrainError};
use crate::feed::Feed;
use crate::metrics::{EvaluationMetrics, StepMetrics};
use crate::plan::Plan;
use crate::schedule::LearningRate;
use crate::source::ModelSource;
use crate::time::time_breakdown;
use crate::weights::{self, Part};
use crate::written::Written;

/// How far a run is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Optimizer steps that are done.
    pub step: u64,
    /// Updates that were applied: those of steps with a norm that is not finite were suppressed. The
    /// optimizer's bias corrections follow it.
    pub updates: u64,
    /// Micro-steps that are done, over all steps: part of every dropout counter.
    pub micro_step: u64,
    /// Steps in a row, up to the last, whose update was suppressed.
    pub suppressed: u64,
    /// Steps that were done at the last evaluation.
    pub evaluated: Option<u64>,
}

/// A model in training, with its data where there is any.
pub struct Trainer {
    /// The run's name: what its checkpoints belong to.
    pub name: String,
    pub config: Arc<Config>,
    pub plan: Plan,
    pub source: Arc<ModelSource>,
    pub device: Arc<Device>,
    pub(crate) feed: Option<Feed>,
    engine: Option<Engine>,
    schedule: Option<LearningRate>,
    /// Folders that may be replaced, because this run wrote them.
    pub(crate) written: Written,
    pub(crate) progress: Progress,
    model_digest: Option<ModelDigest>,
    data_digest: Option<DataDigest>,
}

impl Trainer {
    /// Checks options against model and machine and reads the data, if data sets are configured.
    /// Nothing is compiled before the first batch is known.
    pub fn new(config: Arc<Config>, source: Arc<ModelSource>, device: Arc<Device>) -> Result<Trainer> {
        let plan = Plan::new(&config, &source)?;
        let source = match config.model.init_projections_to_zero {
            true => Arc::new(source.with_projections_at_zero()?),
            false => source,
        };
        check_batch_size(&config, plan.sequence_len, device.machine.memory)?;
        let feed = match config.data.datasets {
            Some(_) => Some(Feed::new(&config, &source, plan.sequence_len)?),
            None => None,
        };
        let total = feed.as_ref().map(|feed| feed.total_steps(&config)).or(config.training.fixed_steps());
        if let Some(total) = total {
            let problems = config.check_steps(total);
            if !problems.is_empty() {
                return Err(TrainError::Config(problems));
            }
        }
        let schedule = total.map(|total| LearningRate::new(&config.optimizer, total));
        let name = run_name(&config, &source);
        let written = Written::by(&new_run_id(&name));
        let data_digest = feed.as_ref().map(Feed::digest);
        Ok(Trainer {
            name,
            config,
            plan,
            source,
            device,
            feed,
            engine: None,
            schedule,
            written,
            progress: Progress::default(),
            model_digest: None,
            data_digest,
        })
    }

    /// Goes on where a checkpoint was written, as if nothing had been in between. Called before the first step.
    /// What the options must have in common with it is checked before, by [`crate::resume::check`].
    pub(crate) fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let state = &checkpoint.state;
        if let (Some(feed), Some(position)) = (&mut self.feed, state.position) {
            feed.seek(position)?;
        }
        let rows = self.config.training.per_device_train_batch_size as usize;
        let mut variants: Vec<Variant> = state.shapes.iter().map(Variant::from).collect();
        if variants.iter().any(|variant| variant.batch != rows) {
            variants = match &self.feed {
                Some(feed) => feed.variants(&self.device.machine)?,
                None => variants,
            };
        }
        let mut engine = self.start(variants, Some(checkpoint))?;
        checkpoint.load_optimizer(&mut engine)?;
        self.engine = Some(engine);
        self.progress = state.progress.clone();
        Ok(())
    }

    /// What identifies the model's files. Reads them once.
    pub(crate) fn model_digest(&mut self) -> Result<&ModelDigest> {
        if self.model_digest.is_none() {
            self.model_digest = Some(self.source.digest(self.config.model.init == Init::Pretrained)?);
        }
        Ok(self.model_digest.as_ref().expect("just made"))
    }

    /// What identifies the documents that are trained on.
    pub(crate) fn data_digest(&self) -> Option<DataDigest> {
        self.data_digest.clone()
    }

    /// Steps of the run, where it is known.
    pub fn total_steps(&self) -> Option<u64> {
        self.schedule.map(|schedule| schedule.total)
    }

    /// Optimizer steps that are done.
    pub fn steps_done(&self) -> u64 {
        self.progress.step
    }

    /// The place in the training data; `None` without data.
    pub fn position(&self) -> Option<Position> {
        self.feed.as_ref().map(|feed| feed.train.position())
    }

    /// The next micro-batches of the data: fewer than a full step at the end, none after it.
    fn next_batches(&mut self) -> Result<Vec<Batch>> {
        let wanted = self.config.training.gradient_accumulation_steps as usize;
        let Some(feed) = &mut self.feed else {
            let problems = self.config.check_datasets();
            return Err(TrainError::Config(problems));
        };
        Ok(feed.train.by_ref().take(wanted).collect())
    }

    /// One step on the next batches of the data; `None` at their end.
    pub fn next_step(&mut self, learning_rate: Option<f64>) -> Result<Option<StepMetrics>> {
        let batches = self.next_batches()?;
        if batches.is_empty() {
            return Ok(None);
        }
        let one_per_row = self.feed.as_ref().is_some_and(|feed| feed.one_per_row);
        self.step_on(&batches, one_per_row, learning_rate).map(Some)
    }

    /// One step on batches of the caller's: all of one shape, one for each micro-step.
    pub fn step(&mut self, batches: &[Batch], learning_rate: Option<f64>) -> Result<StepMetrics> {
        self.step_on(batches, false, learning_rate)
    }

    fn step_on(&mut self, batches: &[Batch], one_per_row: bool, learning_rate: Option<f64>) -> Result<StepMetrics> {
        let start = Instant::now();
        let learning_rate = self.rate(learning_rate)?;
        if batches.iter().all(|batch| batch.weight_sum() == 0.0) {
            let text = "no token of the step is trained: every label is -100 or has no token before it";
            return Err(TrainError::Usage(text.into()));
        }
        let Progress { step, updates, micro_step: first_micro_step, .. } = self.progress;
        self.source.check_ids(batches)?;
        let engine = self.engine_for(&batches[0], one_per_row)?;
        // All shapes first: compiling one moves the weights, but not the gradients.
        let variants = batches
            .iter()
            .map(|batch| engine.prepare(engine.variant_of(batch, one_per_row)))
            .collect::<Result<Vec<Variant>>>()?;
        for (index, (batch, variant)) in batches.iter().zip(variants).enumerate() {
            let kind = if index == 0 { EntryKind::FirstMicroStep } else { EntryKind::NextMicroStep };
            engine.set_i32(scalar::MICRO_STEP, (first_micro_step + index as u64) as i32)?;
            engine.run(kind, variant, batch)?;
        }
        write_update_scalars(engine, step, updates, learning_rate)?;
        engine.update()?;
        let (sum, weight) = (engine.get_f32(scalar::LOSS_SUM)?, engine.get_f32(scalar::WEIGHT_SUM)?);
        let grad_norm = f64::from(engine.get_f32(scalar::GRADIENT_NORM)?);
        let applied = engine.get_f32(scalar::UPDATE_APPLIED)? != 0.0;
        self.progress.step += 1;
        self.progress.updates += u64::from(applied);
        self.progress.micro_step += batches.len() as u64;
        self.progress.suppressed = if applied { 0 } else { self.progress.suppressed + 1 };
        Ok(StepMetrics {
            step,
            loss: f64::from(sum) / f64::from(weight),
            grad_norm,
            learning_rate,
            tokens: batches.iter().map(tokens).sum(),
            seconds: start.elapsed().as_secs_f64(),
            applied,
        })
    }

    /// Where the time of a micro-step goes, for the shape that ran last: see [`time_breakdown`].
    pub fn time_breakdown(&mut self) -> Result<serde_json::Value> {
        let engine = self.engine()?;
        let variant = *engine.options().variants.last().expect("an engine has at least one shape");
        time_breakdown(engine, variant)
    }

    fn rate(&self, given: Option<f64>) -> Result<f64> {
        match (given, &self.schedule) {
            (Some(rate), _) if rate.is_finite() && rate >= 0.0 => Ok(rate),
            (Some(rate), _) => Err(TrainError::Usage(format!("learning_rate is {rate}, expected a number from 0"))),
            (None, Some(schedule)) => Ok(schedule.at(self.progress.step)),
            (None, None) => Err(TrainError::Usage(
                "the schedule needs the number of steps: set `max_steps`, or give each step its learning rate".into(),
            )),
        }
    }

    /// The loss over all validation data; `None` where there is none.
    pub fn evaluate(&mut self) -> Result<Option<EvaluationMetrics>> {
        let start = Instant::now();
        let loader = match &self.feed {
            Some(feed) => feed.validation()?,
            None => None,
        };
        let Some(loader) = loader else { return Ok(None) };
        let one_per_row = self.feed.as_ref().is_some_and(|feed| feed.one_per_row);
        let (mut sum, mut weight, mut tokens_seen) = (0.0, 0.0, 0);
        for batch in loader {
            let engine = self.engine_for(&batch, one_per_row)?;
            let variant = engine.prepare(engine.variant_of(&batch, one_per_row))?;
            engine.set_f32(scalar::LOSS_SUM, 0.0)?;
            engine.set_f32(scalar::WEIGHT_SUM, 0.0)?;
            engine.run(EntryKind::Evaluate, variant, &batch)?;
            sum += f64::from(engine.get_f32(scalar::LOSS_SUM)?);
            weight += f64::from(engine.get_f32(scalar::WEIGHT_SUM)?);
            tokens_seen += tokens(&batch);
        }
        let seconds = start.elapsed().as_secs_f64();
        let step = self.progress.step;
        self.progress.evaluated = Some(step);
        Ok(Some(EvaluationMetrics { step, loss: sum / weight, tokens: tokens_seen, seconds }))
    }

    /// The compiled model; made when there is none yet: for the shapes of the data, or without data
    /// for this batch.
    pub(crate) fn engine_for(&mut self, batch: &Batch, one_per_row: bool) -> Result<&mut Engine> {
        if self.engine.is_none() {
            let variants = match &self.feed {
                Some(feed) => feed.variants(&self.device.machine)?,
                None => vec![variant_of(&self.device.machine, batch, one_per_row)],
            };
            self.engine = Some(self.start(variants, None)?);
        }
        Ok(self.engine.as_mut().expect("just made"))
    }

    /// What the backend chose by timing for the compiled model.
    pub(crate) fn choices(&mut self) -> Result<Choices> {
        Ok(self.engine()?.session().choices())
    }

    /// The compiled model, for reading parameters.
    pub(crate) fn engine(&mut self) -> Result<&mut Engine> {
        let batch = Batch::from_labels(1, LENGTH, vec![0; LENGTH], &[0; LENGTH], None, None);
        self.engine_for(&batch.expect("a small batch"), true)
    }

    /// Compiles and loads, with the weights of the options, or those of a checkpoint.
    fn start(&self, variants: Vec<Variant>, from: Option<&Checkpoint>) -> Result<Engine> {
        let options = CompileOptions { variants, ..self.plan.compile.clone() };
        let none = Choices::new();
        let choices = from.map_or(&none, |checkpoint| &checkpoint.state.choices);
        let advise = |error| with_advice(error, &self.config, &self.source, &self.device.machine);
        let mut engine = Engine::new(self.device.clone(), self.source.clone(), options, choices).map_err(advise)?;
        let program = engine.program().clone();
        let seed = self.config.data.train_seed;
        let adapted = self.plan.compile.adapter.is_some();
        // A checkpoint holds what is trained: the base weights under an adapter are those of the options.
        let base = from.filter(|_| !adapted).map(|checkpoint| checkpoint.folder.as_path());
        let adapter =
            from.map(|checkpoint| checkpoint.folder.as_path()).or(self.config.lora.adapter.as_deref().map(Path::new));
        match (base, self.config.model.init) {
            (Some(folder), _) => load(&mut engine, &self.source, Part::Base, folder)?,
            (None, Init::Pretrained) => load(&mut engine, &self.source, Part::Base, &self.source.folder)?,
            (None, Init::Random) => weights::draw(engine.session(), &program, Part::Base, seed)?,
        }
        match adapter.filter(|_| adapted) {
            Some(folder) => load(&mut engine, &self.source, Part::Adapter, folder)?,
            None => weights::draw(engine.session(), &program, Part::Adapter, seed)?,
        }
        Ok(engine)
    }
}

/// Reads the weights of a folder.
fn load(engine: &mut Engine, source: &ModelSource, part: Part, folder: &Path) -> Result<()> {
    let program = engine.program().clone();
    let files = match part {
        Part::Base => source.weights(folder)?,
        Part::Adapter => Weights::open(folder).map_err(TrainError::model_file)?,
    };
    weights::load(engine.session(), &program, part, &files, &folder.display().to_string())
}

/// An id that no other run has: the name, the time and the process, hashed.
fn new_run_id(name: &str) -> String {
    let now = jiff::Timestamp::now().as_nanosecond();
    crate::digest::of_bytes(format!("{name} {now} {}", std::process::id()).as_bytes())[..16].to_owned()
}

/// Bytes of a token in a batch: ids, positions, targets, weights, starts of documents.
const BYTES_PER_TOKEN: usize = 5 * size_of::<i32>();

/// Refuses micro-batches that do not fit by themselves, before the loader makes any. What does fit is
/// judged by the memory plan.
fn check_batch_size(config: &Config, sequence_len: usize, memory: usize) -> Result<()> {
    let rows = config.training.per_device_train_batch_size as usize;
    let bytes = rows.saturating_mul(sequence_len).saturating_mul(BYTES_PER_TOKEN * (1 + crate::feed::PREFETCH));
    if bytes <= memory {
        return Ok(());
    }
    Err(TrainError::Memory(format!(
        "`per_device_train_batch_size: {rows}` with rows of {sequence_len} tokens: the batches alone need {bytes} bytes, \
         {memory} are available; take fewer rows, and more `gradient_accumulation_steps` instead"
    )))
}

/// The name that the options give, or the model's with the time.
pub fn run_name(config: &Config, source: &ModelSource) -> String {
    let model = || source.folder.file_name().map_or("run".into(), |name| name.to_string_lossy());
    let named = || format!("{}-{}", model(), jiff::Zoned::now().strftime("%Y%m%d-%H%M%S"));
    config.run.run_name.clone().unwrap_or_else(named)
}

/// Row length of the program that is compiled when parameters are wanted before any batch.
const LENGTH: usize = 16;

/// Learning rate, bias corrections and step number of an update, of which `updates` were applied before.
fn write_update_scalars(engine: &mut Engine, step: u64, updates: u64, learning_rate: f64) -> Result<()> {
    let training = engine.options().training.clone().and_then(|training| training.optimizer);
    let optimizer = training.expect("a trainer has an optimizer");
    let correction = |beta: f64| (1.0 - beta.powi(updates as i32 + 1)) as f32;
    engine.set_f32(scalar::LEARNING_RATE, learning_rate as f32)?;
    engine.set_f32(scalar::BIAS_CORRECTION_1, correction(optimizer.beta1))?;
    engine.set_f32(scalar::BIAS_CORRECTION_2, correction(optimizer.beta2))?;
    engine.set_i32(scalar::STEP, step as i32)
}

/// Tokens of documents in which something is trained: padding does not count.
fn tokens(batch: &Batch) -> u64 {
    let rows = batch.document_start.chunks(batch.seq_len).zip(batch.targets.chunks(batch.seq_len));
    let in_row = |(starts, targets): (&[i32], &[i32])| -> u64 {
        let mut sum = 0;
        let mut begin = 0;
        for document in starts.chunk_by(|a, b| a == b) {
            let end = begin + document.len();
            if targets[begin..end].iter().any(|target| *target != IGNORE) {
                sum += document.len() as u64;
            }
            begin = end;
        }
        sum
    };
    rows.map(in_row).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_that_cannot_fit_are_refused_before_they_are_made() {
        let config = |rows: u64| {
            let options = serde_json::json!({"model": "m", "per_device_train_batch_size": rows});
            Config::load_json(&options.to_string(), crate::config::Task::Sft, &[]).unwrap()
        };
        assert!(check_batch_size(&config(1000), 1000, 1 << 30).is_ok());
        let error = check_batch_size(&config(u32::MAX.into()), 1000, 1 << 30).unwrap_err();
        assert!(error.exit_code() == 3 && error.to_string().contains("gradient_accumulation_steps"), "{error}");
    }

    #[test]
    fn padding_does_not_count_as_tokens() {
        let labels = [1, 1, 1, -100, -100, -100, -100, -100];
        let batch = Batch::from_labels(1, 8, vec![1; 8], &labels, Some(vec![0, 1, 2, 0, 1, 2, 3, 4]), None).unwrap();
        assert_eq!(tokens(&batch), 3);
    }
}
