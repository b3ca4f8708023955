//! A model in training: options, data and the compiled model, its progress, and how it resumes from a checkpoint.
//! `step.rs` has the step.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use compiler::{CompileOptions, ModelFlops};
use data::{Batch, Position, Purpose, Records, Stop};
use program::{Choices, Variant, scalar};

use crate::config::{Config, Init, Task};
use crate::engine::device::Device;
use crate::engine::time::{ClassTime, by_class, time_breakdown};
use crate::engine::weights;
use crate::engine::{Engine, variant_of};
use crate::error::{Result, TrainError};
use crate::files::written::Written;
use crate::inference::generate::Sample;
use crate::input::data_digest::DataDigest;
use crate::input::encoded::Encoded;
use crate::input::feed::Feed;
use crate::model::other_parts;
use crate::model::rounding::Rounding;
use crate::model::source::ModelDigest;
use crate::model::source::{ModelSource, SCORE};
use crate::model::weight_set::WeightSet;
use crate::plan::advice::with_advice;
use crate::plan::exact_sampling;
use crate::plan::formats;
use crate::plan::formats::LOSS_SCALE;
use crate::plan::milestones::Milestones;
use crate::plan::preflight;
use crate::plan::preview::Shapes;
use crate::plan::recommend::recommended;
use crate::plan::reference;
use crate::plan::{self, Plan};
use crate::trainer::checkpoint::{Checkpoint, ShapeRecord, State};
use crate::trainer::command::Part;
use crate::trainer::in_flight::InFlight;
use crate::trainer::lent::Live;
use crate::trainer::progress::Progress;
use crate::trainer::reference_table::ReferenceTable;
use crate::trainer::rollout::{OnPolicy, Rollouts};
use crate::trainer::schedule::LearningRate;
use crate::trainer::startup::Startup;

/// The report of a batch whose shape is in no plan, which is made once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Overflow {
    Never,
    Unreported(&'static str),
    Reported,
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
    /// Prompts and rewards, where the run samples the answers that it trains on.
    pub(crate) rollouts: Option<Rollouts>,
    /// The student's own answers in distillation; None without.
    pub(crate) on_policy: Option<OnPolicy>,
    /// Absent before the first step, and while it is lent.
    pub(crate) engine: Option<Engine>,
    /// A model over the same weights, once it was requested.
    pub(crate) live: Option<Live>,
    /// The reference, where it has weights of its own and was needed.
    pub(crate) reference: Option<Engine>,
    /// Its log-probabilities of the documents of the data, where they are computed before training.
    pub(crate) reference_table: Option<ReferenceTable>,
    /// The teacher of distillation, once it was needed.
    pub(crate) teacher: Option<Engine>,
    /// The likeliest tokens of the teacher for the documents of the run, if they are precomputed.
    pub(crate) taught: Option<Records>,
    /// The metrics of the task in the last evaluation.
    pub(crate) evaluated: Vec<(String, f64)>,
    /// The steps at which the run evaluates, once computed.
    pub(crate) milestones: Option<Milestones>,
    pub(crate) schedule: Option<LearningRate>,
    /// The step that was started and not read yet, and the state after the step before.
    pub(crate) in_flight: InFlight,
    /// Folders that may be replaced, because this run wrote them.
    pub(crate) written: Written,
    pub(crate) progress: Progress,
    /// Until the first step is reported.
    pub(crate) startup: Option<Startup>,
    /// True until the note on values that became 0 in 8 bits is shown.
    pub(crate) tells_flushed: bool,
    /// The report of a shape that is in no plan.
    pub(crate) overflow: Overflow,
    /// The differences from the checkpoint that it began at, where it may differ, a sentence each.
    pub differences: Vec<String>,
    /// The rounding of the last merged result.
    pub(crate) rounding: Rounding,
    model_digest: Option<ModelDigest>,
    /// Reads the model's files for the digest meanwhile.
    digesting: Option<JoinHandle<Result<ModelDigest>>>,
    data_digest: Option<DataDigest>,
    /// The shapes of the batches, once they were requested.
    shapes: Option<Shapes>,
    /// FLOPs of a micro-step by its shape.
    pub(crate) flops: HashMap<Variant, Option<Arc<ModelFlops>>>,
}

impl Trainer {
    /// Checks options against model and machine and reads the data, if datasets are configured.
    /// Nothing is compiled before the first batch is known.
    pub fn new(config: Arc<Config>, source: Arc<ModelSource>, device: Arc<Device>) -> Result<Trainer> {
        Trainer::unless_stopped(config, source, device, &|| false)
    }

    /// The same, aborted if a user requests the end while data are read.
    pub(crate) fn unless_stopped(
        config: Arc<Config>,
        source: Arc<ModelSource>,
        device: Arc<Device>,
        stop: Stop<'_>,
    ) -> Result<Trainer> {
        let mut startup = Startup::begin();
        if config.nodes() > 1 && device.nodes.is_none() {
            let text =
                "`distributed.num_nodes` is for `surogate sft` and `surogate pt`, which bring the nodes together";
            return Err(TrainError::Usage(text.to_owned()));
        }
        plan::require_machine(&config, &device.machine, device.gpus)?;
        let plan = Plan::new(&config, &source)?;
        preflight::check(&config, &source, &plan)?;
        let samples = config.task.purpose() == Purpose::Prompts;
        let encoded = match config.data.datasets {
            Some(_) if samples => None,
            Some(_) => Some(Encoded::read(&config, &source, plan.rows(), device.nodes.as_deref(), stop)?),
            None => None,
        };
        let config = Arc::new(recommended(&config, &source, &device.machine, encoded.as_ref(), stop)?);
        let plan = Plan::new(&config, &source)?;
        let mut plan = encoded.iter().fold(plan, Plan::with_data);
        plan.notes.extend(plan.note_on_teacher(&config));
        plan.notes.extend(formats::notes_on_recipe(&config, &device.machine));
        plan.notes.extend(exact_sampling::note(&config, &source, plan.compile.compute, &device.machine)?);
        let source = match config.model.init_projections_to_zero {
            true => Arc::new(source.with_projections_at_zero()?),
            false => source,
        };
        check_batch_size(&config, plan.sequence_len, device.machine.memory)?;
        let feed = encoded.map(|encoded| Feed::new(&config, encoded, plan.rows_of_feed(), stop)).transpose()?;
        let has_prompts = samples && config.data.datasets.is_some();
        let rollouts = has_prompts.then(|| Rollouts::new(&config, &source, &device, &plan)).transpose()?;
        let on_policy = OnPolicy::new(&config, &source)?;
        plan.notes.extend(rollouts.iter().flat_map(|of| of.notes().to_vec()));
        let of_data = feed.as_ref().map(|feed| feed.total_steps(&config));
        let of_data = of_data.or(rollouts.as_ref().map(|of| of.total_steps(&config)));
        let total = of_data.or(config.training.fixed_steps());
        if let Some(feed) = &feed {
            let notes = [feed.note_on_steps(&config), feed.note_on_judges(&config), feed.note_on_logits()];
            plan.notes.extend(notes.into_iter().flatten());
        }
        if let Some(total) = total {
            let problems = config.check_steps(total);
            if !problems.is_empty() {
                return Err(TrainError::Config(problems));
            }
        }
        let schedule = total.map(|total| LearningRate::new(&config.optimizer, total));
        let name = run_name(&config, &source);
        let written = Written::by(&new_run_id(&name));
        let data_digest = feed.as_ref().map(Feed::digest).or(rollouts.as_ref().map(Rollouts::digest));
        startup.done("data");
        let mut trainer = Trainer {
            startup: None,
            name,
            config,
            plan,
            source,
            device,
            feed,
            rollouts,
            on_policy,
            engine: None,
            live: None,
            reference: None,
            reference_table: None,
            teacher: None,
            taught: None,
            evaluated: Vec::new(),
            milestones: None,
            schedule,
            in_flight: InFlight::default(),
            written,
            progress: Progress::default(),
            tells_flushed: true,
            overflow: Overflow::Never,
            differences: Vec::new(),
            rounding: Rounding::default(),
            model_digest: None,
            digesting: None,
            data_digest,
            shapes: None,
            flops: HashMap::new(),
        };
        if let Some(phase) = trainer.precompute_reference(stop)? {
            startup.done(phase);
        }
        if let Some(phase) = trainer.precompute_teacher(stop)? {
            startup.done(phase);
        }
        trainer.startup = Some(startup);
        Ok(trainer)
    }

    /// Goes on where a checkpoint was written, as if nothing had been in between. Called before the first step.
    /// What the options must have in common with it is checked before, by [`crate::run::resume::check`].
    /// Gives what was left out, a sentence each.
    pub(crate) fn restore(&mut self, checkpoint: &Checkpoint) -> Result<Vec<String>> {
        let state = &checkpoint.state;
        self.take_up(state)?;
        let rows = self.config.micro_rows() as usize;
        let mut variants: Vec<Variant> = state.shapes.iter().map(Variant::from).collect();
        if let Some(feed) = &self.feed
            && variants.iter().any(|of| of.batch != rows || of.logits > 0 && of.logits != feed.logits_of(of.seq_len))
        {
            variants = feed.variants();
        }
        self.startup_phase("folders");
        let mut engine = self.start(variants, Some(checkpoint))?;
        let notes = checkpoint.load_optimizer(&mut engine, self.config.sharding.gradient_compression)?;
        self.tells_flushed = checkpoint.load_scaling(&mut engine)? == 0;
        if let Some(startup) = &mut self.startup {
            startup.split(engine.load_times(), "weights and optimizer");
        }
        self.engine = Some(engine);
        Ok(notes)
    }

    /// Goes on in the data, and with what is done, where a checkpoint was written.
    pub(crate) fn take_up(&mut self, state: &State) -> Result<()> {
        if let (Some(feed), Some(position)) = (&mut self.feed, &state.position) {
            if let Some(total) = feed.total_from(&self.config, position, state.progress.step)? {
                self.schedule = Some(LearningRate::new(&self.config.optimizer, total));
            }
            feed.seek(position.clone())?;
        }
        self.progress = state.progress.clone();
        Ok(())
    }

    /// Records the phase of the start that has just ended, while the run starts.
    pub(crate) fn startup_phase(&mut self, phase: &'static str) {
        if let Some(startup) = &mut self.startup {
            startup.done(phase);
        }
    }

    /// Begins to read the model's files for their digest: large ones take a while, in which a program is compiled.
    pub(crate) fn begin_digest(&mut self) {
        if self.model_digest.is_some() {
            return;
        }
        let (source, weights) = (self.source.clone(), self.config.model.init == Init::Pretrained);
        self.digesting =
            thread::Builder::new().name("digest".into()).spawn(digest_on_own_threads(source, weights)).ok();
    }

    /// True while the model's files are still being read.
    pub(crate) fn is_digesting(&self) -> bool {
        self.digesting.as_ref().is_some_and(|reading| !reading.is_finished())
    }

    /// The identity of the model's files, unless they are still being read.
    pub(crate) fn known_digest(&mut self) -> Result<Option<&ModelDigest>> {
        if self.is_digesting() { Ok(None) } else { self.model_digest().map(Some) }
    }

    /// The identity of the model's files. Reads them once.
    pub(crate) fn model_digest(&mut self) -> Result<&ModelDigest> {
        if self.model_digest.is_none() {
            self.model_digest = Some(match self.digesting.take().map(JoinHandle::join) {
                Some(Ok(digest)) => digest?,
                Some(Err(panic)) => std::panic::resume_unwind(panic),
                None => self.source.digest(self.config.model.init == Init::Pretrained)?,
            });
            self.startup_phase("digest of the model");
        }
        Ok(self.model_digest.as_ref().expect("just made"))
    }

    /// The identity of the training documents.
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

    /// The run in words: what is trained, and how far it is.
    pub fn summary(&self) -> String {
        let trained = match &self.plan.compile.adapter {
            Some(adapter) => format!("an adapter of rank {}", adapter.rank),
            None => "all weights".to_owned(),
        };
        let total = self.total_steps().map(|total| format!(" of {total}")).unwrap_or_default();
        let (family, dtype) = (self.source.model_type(), self.plan.compile.weights);
        let (optimizer, done) = (self.config.optimizer.optimizer, self.progress.step);
        format!("{}: {family} in {dtype}, {trained} by {optimizer}, {done}{total} steps done", self.name)
    }

    /// The shapes of the run's batches; `None` without data.
    pub(crate) fn shapes(&mut self) -> Result<Option<Shapes>> {
        if let (None, Some(feed)) = (&self.shapes, &self.feed) {
            self.shapes = Some(Shapes::of_feed(&self.config, &self.plan, feed)?);
        }
        Ok(self.shapes.clone())
    }

    /// The place in the training data; `None` without data.
    pub fn position(&self) -> Option<Position> {
        self.feed.as_ref().map(|feed| feed.train.position())
    }

    /// From now on every instruction is timed; the bits stay the same.
    pub(crate) fn begin_timing(&mut self) -> Result<()> {
        self.engine()?.begin_timing();
        Ok(())
    }

    /// Ends timing, and returns the times of each class of work since its begin.
    pub(crate) fn end_timing(&mut self) -> Result<Vec<ClassTime>> {
        let seen = self.shapes()?.map(|shapes| shapes.seen).unwrap_or_default();
        let engine = self.engine()?;
        let timed = engine.end_timing();
        Ok(by_class(engine.program(), &timed, seen))
    }

    /// The times of a micro-step by instruction, for the shape that ran last: see [`time_breakdown`].
    pub fn time_breakdown(&mut self) -> Result<serde_json::Value> {
        let engine = self.engine()?;
        let variant = *engine.options().variants.last().expect("an engine has at least one shape");
        time_breakdown(engine, variant)
    }

    /// The compiled model; made when there is none yet: for the shapes of the data, or without data
    /// for these batches, one for each rank.
    pub(crate) fn engine_for(&mut self, round: &[Batch], one_per_row: bool) -> Result<&mut Engine> {
        self.take_back()?;
        if self.engine.is_none() {
            let variants = match &self.feed {
                Some(feed) => feed.variants(),
                None if let Some(of) = &self.rollouts => of.variants(),
                None => vec![variant_of(round, one_per_row)],
            };
            self.startup_phase("folders");
            let engine = self.start(variants, None)?;
            if let Some(startup) = &mut self.startup {
                startup.split(engine.load_times(), "weights");
            }
            self.engine = Some(engine);
        }
        Ok(self.engine.as_mut().expect("just made"))
    }

    /// The answers to `sample_prompts`, with the weights as they are; none where there are no prompts.
    pub(crate) fn samples(&mut self) -> Result<Vec<Sample>> {
        let Some(samples) = self.plan.samples.clone() else { return Ok(Vec::new()) };
        samples.answers(self.engine()?)
    }

    /// Choices that the backend made by timing for the compiled model.
    pub(crate) fn choices(&mut self) -> Result<Choices> {
        Ok(self.engine()?.session().choices())
    }

    /// The compiled model, for reading parameters.
    pub(crate) fn engine(&mut self) -> Result<&mut Engine> {
        let batch = Batch::from_labels(1, LENGTH, vec![0; LENGTH], &[0; LENGTH], None, None);
        self.engine_for(&[batch.expect("a small batch")], true)
    }

    /// Replaces the weights of the model or of the adapter by those of a folder.
    pub(crate) fn load_weights(&mut self, part: WeightSet, folder: &Path) -> Result<()> {
        let source = self.source.clone();
        let engine = self.engine()?;
        load(engine, &source, part, folder)?;
        engine.weights_written()
    }

    /// Compiles and loads, with the weights of the options, or those of a checkpoint.
    fn start(&self, variants: Vec<Variant>, from: Option<&Checkpoint>) -> Result<Engine> {
        let none = Choices::new();
        let choices = from.map_or(&none, |checkpoint| &checkpoint.state.choices);
        let shapes = variants.iter().map(ShapeRecord::from).collect();
        let part = Part::Load { shapes, choices: choices.clone(), resumed: from.is_some() };
        let mut engine = self.device.together(&part, || self.open(variants, choices, from.is_some()))?;
        if let Some(checkpoint) = from {
            let part = if self.plan.compile.adapter.is_some() { WeightSet::Adapter } else { WeightSet::Base };
            load(&mut engine, &self.source, part, &checkpoint.folder)?;
        }
        engine.weights_written()?;
        if from.is_none() && self.config.lora.adapter.is_none() {
            let program = engine.program().clone();
            weights::take_prepared(engine.session(), &program)?;
        }
        Ok(engine)
    }

    /// Compiles and loads what node 0 said, as it does itself.
    pub(crate) fn load(&mut self, variants: Vec<Variant>, choices: &Choices, resumed: bool) -> Result<()> {
        self.engine = Some(self.open(variants, choices, resumed)?);
        Ok(())
    }

    /// Compiles, and loads the weights of the options; where the run is `resumed`, those that a checkpoint holds are left
    /// out: what is trained.
    fn open(&self, variants: Vec<Variant>, choices: &Choices, resumed: bool) -> Result<Engine> {
        let options = CompileOptions { variants, ..self.plan.compile.clone() };
        let machine = &self.device.machine;
        let options = reference::reserved(options, &self.config, self.plan.others(), &self.source, machine)?;
        let data = self.feed.as_ref().map(|feed| &feed.encoded);
        let advise = |error| with_advice(error, &self.config, &self.source, &self.device.machine, data);
        let mut engine = Engine::new(self.device.clone(), self.source.clone(), options, choices)
            .map_err(|error| advise(self.config.located(error)))?;
        self.device.agree_on_program(&engine)?;
        let seed = self.config.data.train_seed;
        let adapted = self.plan.compile.adapter.is_some();
        if adapted || !resumed {
            match self.config.model.init {
                Init::Pretrained if self.config.task == Task::Reward => {
                    let folder = &self.source.folder;
                    let files = self.source.weights(folder)?;
                    weights::load_and_draw(&mut engine, files, &folder.display().to_string(), SCORE, seed)?;
                }
                Init::Pretrained => load(&mut engine, &self.source, WeightSet::Base, &self.source.folder)?,
                Init::Random => weights::draw(&mut engine, WeightSet::Base, seed)?,
            }
        }
        match self.config.lora.adapter.as_deref().map(Path::new).filter(|_| adapted) {
            _ if resumed => {}
            Some(folder) => load(&mut engine, &self.source, WeightSet::Adapter, folder)?,
            None => weights::draw(&mut engine, WeightSet::Adapter, seed)?,
        }
        if engine.scales_loss() {
            engine.set_f32(scalar::LOSS_SCALE, LOSS_SCALE)?;
        }
        Ok(engine)
    }
}

/// Digests the files of a model on threads of their own: those of the pool load the weights meanwhile.
fn digest_on_own_threads(source: Arc<ModelSource>, weights: bool) -> impl FnOnce() -> Result<ModelDigest> + Send {
    move || {
        let threads = thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(2));
        match rayon::ThreadPoolBuilder::new().num_threads(threads).build() {
            Ok(pool) => pool.install(|| source.digest(weights)),
            Err(_) => source.digest(weights),
        }
    }
}

/// Reads the weights of a folder.
fn load(engine: &mut Engine, source: &ModelSource, part: WeightSet, folder: &Path) -> Result<()> {
    let files = match part {
        WeightSet::Base => source.weights(folder)?,
        WeightSet::Adapter => other_parts::weights(folder, &source.model.files)?,
    };
    weights::load(engine, part, files, &folder.display().to_string())
}

/// An id that no other run has: the name, the time and the process, hashed.
fn new_run_id(name: &str) -> String {
    let now = jiff::Timestamp::now().as_nanosecond();
    crate::files::digest::of_bytes(format!("{name} {now} {}", std::process::id()).as_bytes())[..RUN_ID].to_owned()
}

/// Hexadecimal digits of a run's id.
const RUN_ID: usize = 16;

/// Returns true if a text can be a run's id. It becomes part of the names of files.
pub fn is_run_id(text: &str) -> bool {
    text.len() == RUN_ID && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// Bytes of a token in a batch: ids, positions, targets, weights, starts of documents.
const BYTES_PER_TOKEN: usize = 5 * size_of::<i32>();

/// Refuses micro-batches that do not fit by themselves, before the loader makes any. What does fit is
/// judged by the memory plan.
fn check_batch_size(config: &Config, sequence_len: usize, memory: usize) -> Result<()> {
    let rows = config.micro_rows() as usize;
    let bytes = rows.saturating_mul(sequence_len).saturating_mul(BYTES_PER_TOKEN * (1 + crate::input::feed::PREFETCH));
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
    // A folder of a cache is named by digests.
    let given = crate::artifacts::card::base_name(&config.model.model);
    let model = || {
        let name = Path::new(&given).file_name().or(source.folder.file_name());
        name.map_or("run".into(), |name| name.to_string_lossy().into_owned())
    };
    let named = || format!("{}-{}", model(), jiff::Zoned::now().strftime("%Y%m%d-%H%M%S"));
    config.run.run_name.clone().unwrap_or_else(named)
}

/// Row length of the program that is compiled when parameters are wanted before any batch.
const LENGTH: usize = 16;

impl Trainer {
    /// The steps of a run of `total` steps after which something is done; none without data.
    pub(crate) fn milestones_of(&self, total: u64) -> Result<Option<Milestones>> {
        let of_feed = self.feed.as_ref().map(|feed| Milestones::new(&self.config, feed, total));
        let of_prompts = || self.rollouts.as_ref().map(|of| Milestones::new(&self.config, of, total));
        of_feed.or_else(of_prompts).transpose()
    }

    /// Returns what a caller without a terminal should hear of: data that are left out, what differs from a checkpoint, and
    /// what of the model is not applied.
    pub fn warnings(&self) -> Vec<String> {
        let of_data =
            self.feed.iter().flat_map(|feed| feed.encoded.summary.datasets.iter().filter_map(|of| of.warning()));
        let of_model = formats::note_on_attention_dropout(&self.source);
        self.differences.iter().cloned().chain(of_data).chain(of_model).collect()
    }

    /// Returns true if the options want the validation data evaluated after the steps that are done.
    pub fn is_evaluation_due(&mut self) -> Result<bool> {
        let Some(total) = self.total_steps() else { return Ok(false) };
        let known = match self.milestones.take() {
            Some(known) => Some(known),
            None => self.milestones_of(total)?,
        };
        let Some(of) = known else { return Ok(false) };
        let done = self.progress.step;
        let is_due = of.evaluates(done) || of.ever_evaluates() && done == total;
        self.milestones = Some(of);
        Ok(is_due)
    }
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
        let error = check_batch_size(&config(1 << 20), 1000, 1 << 30).unwrap_err();
        assert!(error.exit_code() == 3 && error.to_string().contains("gradient_accumulation_steps"), "{error}");
    }
}
