//! A whole run: from folders, model and data to the result. Its steps are in `lifecycle/steps.rs`, what it
//! writes in `lifecycle/files.rs`.

mod files;
mod steps;

use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use net::Nodes;
use serde_json::{Value, json};

use crate::config::Config;
use crate::engine::device::Device;
use crate::engine::instruments::Instruments;
use crate::error::{Result, TrainError};
use crate::files::log::Log;
use crate::model::folder::handed_on;
use crate::model::source::ModelSource;
use crate::model::tokenizer_class;
use crate::nodes::exchange::root;
use crate::plan::milestones::Milestones;
use crate::run::folder::RunFolder;
use crate::run::follow::follow;
use crate::run::observer::{Observer, Outcome};
use crate::run::record::Measured;
use crate::run::resume::{self, Start};
use crate::trainer::Trainer;
use crate::trainer::checkpoint;
use crate::trainer::command::Part;
use crate::trainer::saving::Saving;
use crate::words;

/// Folder of the model with the adapter added, where that is requested.
const MERGED: &str = "merged";

/// True if a user of any node requested the end.
struct OfAll<'a> {
    observer: &'a mut dyn Observer,
    nodes: Arc<Nodes>,
}

impl Observer for OfAll<'_> {
    fn line(&mut self, text: &str) {
        self.observer.line(text);
    }

    fn prose(&mut self, text: &str) {
        self.observer.prose(text);
    }

    fn begun(&mut self) {
        self.observer.begun();
    }

    fn event(&mut self, event: &Value) {
        self.observer.event(event);
    }

    fn progress(&mut self, done: u64, total: u64) {
        self.observer.progress(done, total);
    }

    fn interrupted(&mut self) -> bool {
        self.nodes.wished() || self.observer.interrupted()
    }

    fn ends_at_checkpoint(&mut self) -> bool {
        self.observer.ends_at_checkpoint()
    }
}

/// Trains from the first step to the result.
pub fn run(
    config: Arc<Config>,
    source: Arc<ModelSource>,
    device: Arc<Device>,
    observer: &mut dyn Observer,
) -> Result<Outcome> {
    let Some(nodes) = device.nodes.clone() else { return lead(config, source, device, observer) };
    if nodes.node != 0 {
        return follow(config, source, device, observer);
    }
    let outcome = lead(config, source, device.clone(), &mut OfAll { observer, nodes: nodes.clone() });
    match &outcome {
        Ok(outcome) => {
            // What is written is written, even if a node is lost now.
            let _ = device.tell(&Part::End { interrupted: !matches!(outcome, Outcome::Finished(_)) });
            nodes.leave();
        }
        Err(error) => nodes.abort(&error.to_string(), error.exit_code()),
    }
    outcome
}

/// The run of the process that writes its files.
fn lead(
    config: Arc<Config>,
    source: Arc<ModelSource>,
    device: Arc<Device>,
    observer: &mut dyn Observer,
) -> Result<Outcome> {
    let nodes = device.nodes.clone();
    let root = |error| root(nodes.as_deref(), error);
    let (mut trainer, mut run) = match begin(config, source, device, observer).map_err(root) {
        Err(TrainError::Stopped) => {
            observer.line("Stopping: no step was started, nothing was saved");
            return Ok(Outcome::NotBegun);
        }
        begun => begun?,
    };
    let mut outcome = run.steps(&mut trainer, observer).map_err(|error| root(error).with_way_on());
    if let Err(error) = run.publish_checkpoint(&mut trainer, observer)
        && outcome.is_ok()
    {
        outcome = Err(error.with_way_on());
    }
    if outcome.is_err() {
        // What ended the run is reported, whatever comes of this.
        let _ = run.complete(&mut trainer);
    }
    let event = match &outcome {
        Ok(Outcome::Finished(folder)) => json!({"event": "finished", "result": folder}),
        Ok(Outcome::Interrupted(folder)) => json!({"event": "interrupted", "checkpoint": folder}),
        Ok(Outcome::NotBegun | Outcome::Followed) => unreachable!("a run that does steps has begun"),
        Err(error) => {
            let text = error.to_string();
            json!({"event": "failed", "error": options::without_userinfo(&text), "exit_code": error.exit_code()})
        }
    };
    let logged = run.emit(event, observer);
    // What ended the run is reported, not that the log could not be written after it.
    if outcome.is_ok() {
        logged?;
    }
    outcome
}

/// Everything before the first step. Errors: [`TrainError::Stopped`] on request, before anything is written.
fn begin(
    config: Arc<Config>,
    source: Arc<ModelSource>,
    device: Arc<Device>,
    observer: &mut dyn Observer,
) -> Result<(Trainer, Run)> {
    let config = Arc::new(config.with_visible_gpus(device.gpus).map_err(TrainError::Config)?);
    let problems = config.check_datasets();
    if !problems.is_empty() {
        return Err(TrainError::Config(problems));
    }
    // Reported now, not when the result is written.
    handed_on(&source.folder)?;
    let place = RunFolder::open(&config, &source)?;
    let mut start = Start::find(&config, &place)?;
    let config = start.checkpoint.as_ref().map_or(config.clone(), |from| resume::as_begun(&config, from));
    let from = start.checkpoint.as_ref().map(|checkpoint| Box::new(checkpoint.state.clone()));
    device.tell(&Part::Begin { from })?;
    let asked = RefCell::new(&mut *observer);
    let mut trainer = Trainer::unless_stopped(config, source, device, &|| asked.borrow_mut().interrupted())?;
    trainer.name = place.name.clone();
    trainer.begin_digest();
    prepare(&place, &mut start, &mut trainer, observer)?;
    trainer.compare_nodes()?;
    let class = tokenizer_class::note(&trainer.source.folder, &trainer.source.folder);
    for note in place.notes.iter().chain(&start.notes).chain(&class) {
        observer.line(&format!("Note: {note}"));
    }
    let run = Run::start(place, &mut trainer, observer)?;
    Ok((trainer, run))
}

/// Takes up what an earlier process left, and checks that nothing of others stands in the way.
fn prepare(place: &RunFolder, start: &mut Start, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<()> {
    if let Some(run_id) = &start.run_id {
        trainer.written.owner = run_id.clone();
        trainer.written.take_back(&start.written)?;
        trainer.written.clear_unfinished(&place.output)?;
        trainer.written.clear_unfinished(&place.checkpoints)?;
    }
    let from = start.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.step());
    let mut results = vec![result_folder(place, trainer)];
    if trainer.config.lora.merge_adapter {
        results.push(place.output.join(MERGED));
    }
    place.check_free(&trainer.config, &trainer.written, &results, from)?;
    if let Some(checkpoint) = &start.checkpoint {
        start.notes.extend(resume::check(trainer, checkpoint)?);
        start.notes.extend(trainer.restore(checkpoint)?);
        if trainer.is_digesting() {
            observer.line("Comparing the model's weights with those that the run started with");
        }
        resume::check_weights(trainer, checkpoint)?;
        start.notes.push(format!(
            "resuming after {}, from {}",
            words::count(from, "step"),
            checkpoint.folder.display()
        ));
        start.notes.extend(forget_lost_best(place, trainer));
    }
    Ok(())
}

/// Forgets the best evaluation if its checkpoint is not in this folder: the best is searched from here on.
fn forget_lost_best(place: &RunFolder, trainer: &mut Trainer) -> Option<String> {
    let best = trainer.progress.best_tracker.best.filter(|_| trainer.config.run.load_best_model_at_end)?;
    let folder = checkpoint::folder_of(&place.checkpoints, best.step);
    if trainer.written.holds(&folder) {
        return None;
    }
    trainer.progress.best_tracker.best = None;
    Some(format!(
        "the best evaluation so far was after {}, but there is no {}: `load_best_model_at_end` searches for the best from here on",
        words::count(best.step, "step"),
        folder.display()
    ))
}

/// The folder that the result will be in.
fn result_folder(place: &RunFolder, trainer: &Trainer) -> PathBuf {
    place.output.join(if trainer.plan.compile.adapter.is_some() { "adapter" } else { "model" })
}

/// A run in progress with its open files.
struct Run {
    place: RunFolder,
    log: Log,
    manifest: Value,
    /// True once the manifest is known to have the digest of the model.
    has_digest: bool,
    /// Step count of the last checkpoint, in the making or there.
    saved: Option<u64>,
    /// The step of the last answers to `sample_prompts`.
    sampled: Option<u64>,
    /// The checkpoint whose files are being written.
    saving: Option<Saving>,
    /// True once the reason why checkpoints are written synchronously was reported.
    reported_waiting: bool,
    /// True once the note on the grace period was shown.
    reported_grace: bool,
    /// Measured steps of this process.
    measured: Measured,
    instruments: Instruments,
    when: Milestones,
    began: Instant,
}
