//! A whole run: folders, the loop, evaluation, checkpoints, the result.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use net::Nodes;
use program::{EntryKind, PlanDecision};
use serde_json::{Value, json};

use crate::checkpoint;
use crate::config::Config;
use crate::decisions;
use crate::device::Device;
use crate::disk;
use crate::ending;
use crate::error::{Result, TrainError};
use crate::follow::{self, Part, follow};
use crate::generate::Sample;
use crate::instruments::Instruments;
use crate::log::Log;
use crate::metrics::StepMetrics;
use crate::milestones::Milestones;
use crate::model_folder::handed_on;
use crate::nodes;
use crate::opening::opening;
use crate::record::{MANIFEST, Measured, RESOLVED, manifest, reasons};
use crate::resume::{self, Start};
use crate::run_folder::RunFolder;
use crate::saving::{Begun, Saving};
use crate::source::ModelSource;
use crate::staged::{Staged, replace_file};
use crate::step::{Advance, Evaluation};
use crate::trainer::Trainer;
use crate::{memory, time, words};

/// Folder of the model with the adapter added, where that is requested.
const MERGED: &str = "merged";

/// Steps of a process before the one that is timed: kernels are loaded and buffers touched by then.
const TIMED: u64 = 2;

/// What a run tells while it goes on, and asks.
pub trait Observer {
    /// One line for people.
    fn line(&mut self, text: &str);

    /// What was just written to the log.
    fn event(&mut self, _event: &Value) {}

    /// Steps that are done, of all.
    fn progress(&mut self, _done: u64, _total: u64) {}

    /// Asked after every step and by what takes long besides the steps: by the reading of data and between the stages
    /// before the first step, where nothing is kept; before every batch of an evaluation and every tensor of a result,
    /// which are given up. True ends the run, after a checkpoint if a step was done.
    fn interrupted(&mut self) -> bool;
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The result lies in this folder.
    Finished(PathBuf),
    /// Stopped on request; the checkpoint lies in this folder.
    Interrupted(PathBuf),
    /// Stopped on request before the first step: nothing was written.
    NotBegun,
    /// This process was one of several, of which node 0 has finished the run.
    Followed,
}

/// Asks all nodes whether somebody wants the end.
struct OfAll<'a> {
    observer: &'a mut dyn Observer,
    nodes: Arc<Nodes>,
}

impl Observer for OfAll<'_> {
    fn line(&mut self, text: &str) {
        self.observer.line(text);
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
    let root = |error| follow::root(nodes.as_deref(), error);
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
    let event = match &outcome {
        Ok(Outcome::Finished(folder)) => json!({"event": "finished", "result": folder}),
        Ok(Outcome::Interrupted(folder)) => json!({"event": "interrupted", "checkpoint": folder}),
        Ok(Outcome::NotBegun | Outcome::Followed) => unreachable!("a run that does steps has begun"),
        Err(error) => json!({"event": "failed", "error": error.to_string(), "exit_code": error.exit_code()}),
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
    for note in place.notes.iter().chain(&start.notes) {
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
        trainer.restore(checkpoint)?;
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

/// Whether the weights as they are have the best evaluation, and the result is to be the best.
fn is_to_keep(trainer: &Trainer) -> bool {
    trainer.config.run.load_best_model_at_end && trainer.progress.judged.is_best(trainer.steps_done())
}

/// Where the checkpoint of the best evaluation is not in this folder, the best is looked for from here on.
fn forget_lost_best(place: &RunFolder, trainer: &mut Trainer) -> Option<String> {
    let best = trainer.progress.judged.best.filter(|_| trainer.config.run.load_best_model_at_end)?;
    let folder = checkpoint::folder_of(&place.checkpoints, best.step);
    if trainer.written.holds(&folder) {
        return None;
    }
    trainer.progress.judged.best = None;
    Some(format!(
        "the best evaluation so far was after {}, but there is no {}: `load_best_model_at_end` searches for the best from here on",
        words::count(best.step, "step"),
        folder.display()
    ))
}

/// Where the result will lie.
fn result_folder(place: &RunFolder, trainer: &Trainer) -> PathBuf {
    place.output.join(if trainer.plan.compile.adapter.is_some() { "adapter" } else { "model" })
}

/// A decision of the plan that is not the obvious one, for people.
fn planned(of: &PlanDecision) -> Option<String> {
    let reported = of.entry == EntryKind::FirstMicroStep && of.choice.saves();
    reported.then(|| format!("Recommended: {}", decisions::sentence(of)))
}

fn write_manifest(place: &RunFolder, run_id: &str, manifest: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(manifest).expect("a manifest is always representable as JSON");
    replace_file(&place.output.join(MANIFEST), run_id, (text + "\n").as_bytes())
}

/// A run in progress.
struct Run {
    place: RunFolder,
    log: Log,
    manifest: Value,
    /// Step count of the last checkpoint, in the making or there.
    saved: Option<u64>,
    /// The step of the last answers to `sample_prompts`.
    sampled: Option<u64>,
    /// The checkpoint whose files are being written.
    saving: Option<Saving>,
    /// Why checkpoints are written at once has been reported.
    reported_waiting: bool,
    /// Steps of this process.
    measured: Measured,
    instruments: Instruments,
    when: Milestones,
    began: Instant,
}

impl Run {
    /// Writes what is decided and tells it.
    fn start(mut place: RunFolder, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<Run> {
        let of_data = trainer.feed.iter().flat_map(|feed| &feed.encoded.notes);
        for note in trainer.plan.notes.iter().chain(of_data) {
            observer.line(&format!("Note: {note}"));
        }
        trainer.config.recommendations().iter().for_each(|line| observer.line(line));
        observer.line(&format!("Run {} on {} ({})", trainer.name, trainer.device.machine.name, trainer.device.because));
        if let Some(feed) = &trainer.feed {
            for line in feed.check_table().lines() {
                observer.line(line);
            }
        }
        let manifest = manifest(&place, trainer)?;
        let (config, steps) =
            (trainer.config.clone(), trainer.total_steps().expect("a run with data knows its length"));
        let when = Milestones::new(&config, trainer.feed.as_ref().expect("a run has data"), steps)?;
        disk::check(trainer, &place, &when)?;
        let total = &manifest["parameters"];
        let memory = words::size(manifest["memory_bytes"].as_u64().unwrap_or(0) as usize);
        observer.line(&format!(
            "{} parameters, {} trained; {memory} planned; {}",
            total["total"],
            total["trained"],
            words::count(steps, "step")
        ));
        nodes::headline(&config, trainer.plan.sequence_len, steps).iter().for_each(|line| observer.line(line));
        trainer.far_above()?.iter().for_each(|note| observer.line(&format!("Note: {note}")));
        if trainer.config.run.apply_recommended_values {
            trainer.engine()?.program().plan.iter().filter_map(planned).for_each(|line| observer.line(&line));
        }
        let resolved = trainer.config.resolved_yaml(&reasons(&place, trainer));
        for note in decisions::moved_unasked(&trainer.engine()?.program().plan) {
            observer.line(&format!("Note: {note}"));
        }
        for note in trainer.engine()?.session().notes() {
            observer.line(&format!("Note: {note}"));
        }
        if observer.interrupted() {
            return Err(TrainError::Stopped);
        }
        let run_id = trainer.written.owner.clone();
        // What keeps the log from being written is reported before the folder is the run's own. Nothing lies between
        // the two: a later process knows the log by the manifest.
        let mut log = place.open_log()?;
        place.keep_folders();
        // The manifest first: it makes the folder the run's own.
        if let Err(error) = write_manifest(&place, &run_id, &manifest) {
            log.withdraw();
            return Err(error);
        }
        replace_file(&place.output.join(RESOLVED), &run_id, resolved.as_bytes())?;
        let step = trainer.steps_done();
        observer.event(&log.write(opening(&place, trainer, &manifest, step)?)?);
        if trainer.config.logging.debug_memory_breakdown {
            let (classes, in_use) = trainer.memory_breakdown()?;
            memory::table(&classes, in_use).iter().for_each(|line| observer.line(line));
            let event = json!({"event": "memory_breakdown", "memory": memory::to_json(&classes, in_use)});
            observer.event(&log.write(event)?);
        }
        let saved = (step > 0).then_some(step);
        let instruments = Instruments::new(Instruments::interval(&trainer.config, trainer.total_steps()));
        let measured = Measured::default();
        Ok(Run {
            place,
            log,
            manifest,
            saved,
            sampled: None,
            saving: None,
            reported_waiting: false,
            measured,
            instruments,
            when,
            began: Instant::now(),
        })
    }

    /// Writes an event to the log and tells it.
    fn emit(&mut self, event: Value, observer: &mut dyn Observer) -> Result<()> {
        observer.event(&self.log.write(event)?);
        Ok(())
    }

    /// Brings up to date what the manifest says about choices (a batch of a new shape brings new ones) and
    /// about folders, with one that is about to appear.
    fn record(&mut self, trainer: &mut Trainer, staged: Option<&Staged>) -> Result<()> {
        let mut written = trainer.written.records();
        written.extend(staged.map(Staged::record).transpose()?);
        self.manifest["choices"] = json!(trainer.choices()?);
        self.manifest["written"] = json!(written);
        self.manifest["measured"] = self.measured.to_json(trainer)?;
        write_manifest(&self.place, &trainer.written.owner, &self.manifest)
    }

    fn steps(&mut self, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<Outcome> {
        let total = trainer.total_steps().expect("a run with data knows its length");
        if trainer.steps_done() > 0 && self.when.evaluates(trainer.steps_done()) {
            // The process ended between a checkpoint and its evaluation, or within that.
            if !self.evaluate(trainer, observer)? {
                return self.stop(trainer, observer);
            }
            // A run that began at a checkpoint of another one has none here yet.
            let here = trainer.written.holds(&checkpoint::folder_of(&self.place.checkpoints, trainer.steps_done()));
            if is_to_keep(trainer) && !here {
                self.saved = None;
                self.save(trainer, observer)?;
            }
        }
        let timed =
            trainer.config.logging.debug_time_breakdown.then_some((trainer.steps_done() + TIMED).min(total - 1));
        while trainer.steps_done() < total && trainer.stalled().is_none() {
            let is_timed = timed == Some(trainer.steps_done());
            if is_timed {
                self.catch_up(trainer, observer)?;
                trainer.begin_timing()?;
            }
            let device = trainer.device.clone();
            let (started, known) = match device.together(&Part::Step, || trainer.advance())? {
                Advance::Started(known) => (true, known),
                Advance::Diverged(metrics) => (true, Some(metrics)),
                Advance::Ended(known) => (false, known),
            };
            if let Some(metrics) = known {
                self.report(&metrics, trainer, observer)?;
            }
            if !started {
                break;
            }
            if self.saving.as_ref().is_some_and(Saving::is_done) {
                self.publish_checkpoint(trainer, observer)?;
            }
            let done = trainer.steps_done();
            let stop = observer.interrupted();
            if !stop && !is_timed && !self.when.evaluates(done) && !self.when.saves(done) && done < total {
                continue;
            }
            self.catch_up(trainer, observer)?;
            if is_timed {
                self.report_time(trainer, observer)?;
            }
            if stop || (self.when.evaluates(done) && !self.evaluate(trainer, observer)?) {
                return self.stop(trainer, observer);
            }
            if is_to_keep(trainer) || self.when.saves(done) {
                self.save(trainer, observer)?;
            }
        }
        if let Some(why) = trainer.stalled().filter(|_| trainer.steps_done() < total) {
            observer.line(&why);
            self.emit(json!({"event": "stopped_early", "step": trainer.steps_done(), "because": why}), observer)?;
        }
        if self.when.ever_evaluates() && !self.evaluate(trainer, observer)? {
            return self.stop(trainer, observer);
        }
        self.save(trainer, observer)?;
        self.publish_checkpoint(trainer, observer)?;
        self.finish(trainer, observer)
    }

    /// Ends the run on request, after a checkpoint of the present step in the run's own place.
    fn stop(&mut self, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<Outcome> {
        let folder = checkpoint::folder_of(&self.place.checkpoints, trainer.steps_done());
        self.publish_checkpoint(trainer, observer)?;
        if !trainer.written.holds(&folder) {
            observer.line("Stopping: saving a checkpoint");
            // A run that began at a checkpoint of another one has none here yet.
            self.saved = None;
            self.save(trainer, observer)?;
            self.publish_checkpoint(trainer, observer)?;
        }
        observer.line("To resume this run, use the same command with --resume-from-checkpoint true");
        Ok(Outcome::Interrupted(folder))
    }

    /// Writes the result.
    fn finish(&mut self, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<Outcome> {
        let result = result_folder(&self.place, trainer);
        let (steps, judged) = (trainer.steps_done(), trainer.progress.judged.clone());
        let best = judged.best.filter(|best| trainer.config.run.load_best_model_at_end && best.step != steps);
        if let Some(best) = best {
            trainer.take_weights(&checkpoint::folder_of(&self.place.checkpoints, best.step))?;
            let after = words::count(best.step, "step");
            observer.line(&format!("The result has the weights after {after}, with the lowest loss: {:.4}", best.loss));
        }
        if !self.publish(trainer, &result, false, observer)? {
            return self.stop(trainer, observer);
        }
        if trainer.config.lora.merge_adapter {
            let merged = self.place.output.join(MERGED);
            if !self.publish(trainer, &merged, true, observer)? {
                return self.stop(trainer, observer);
            }
            observer.line(&format!("Merged: {} (read back and compared with the model in memory)", merged.display()));
        }
        observer.line(&format!("Result: {} (read back and compared with the model in memory)", result.display()));
        observer.line(&ending::summary(steps, self.began.elapsed().as_secs_f64(), &judged));
        Ok(Outcome::Finished(result))
    }

    /// Waits for the step that is under way, and tells its results.
    fn catch_up(&mut self, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<()> {
        match trainer.settle()? {
            Some(metrics) => self.report(&metrics, trainer, observer),
            None => Ok(()),
        }
    }

    /// Tells the results of a step; an error if the run cannot go on after them.
    fn report(&mut self, metrics: &StepMetrics, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<()> {
        let total = trainer.total_steps();
        if let Some(mut startup) = trainer.startup.take() {
            startup.done("first step");
            observer.line(&startup.line());
            self.emit(startup.to_json(), observer)?;
        }
        let done = metrics.step + 1;
        if done.is_multiple_of(trainer.config.logging.logging_steps) || Some(done) == total || !metrics.applied {
            observer.line(&metrics.line(total));
        }
        observer.progress(metrics.step + 1, total.unwrap_or_default());
        self.emit(metrics.to_json(), observer)?;
        self.measured.add(metrics);
        match self.instruments.look(metrics.step + 1, &trainer.device) {
            Some(Ok(event)) => self.emit(event, observer)?,
            Some(Err(why)) => observer.line(&format!("Note: {why}")),
            None => {}
        }
        trainer.check_convergence(metrics)
    }

    fn report_time(&mut self, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<()> {
        let (step, classes) = (trainer.steps_done() - 1, trainer.end_timing()?);
        time::table(step, &classes).iter().for_each(|line| observer.line(line));
        let rows: Vec<Value> = classes.iter().map(time::ClassTime::to_json).collect();
        self.emit(json!({"event": "time_breakdown", "step": step, "classes": rows}), observer)
    }

    /// Writes a result: a process that is killed meanwhile knows it as its own afterwards. False: somebody asked to stop,
    /// and it was given up; a later process writes it then.
    fn publish(
        &mut self,
        trainer: &mut Trainer,
        folder: &Path,
        merged: bool,
        observer: &mut dyn Observer,
    ) -> Result<bool> {
        let asked = RefCell::new(&mut *observer);
        let stop = || asked.borrow_mut().interrupted();
        let staged = if merged { trainer.stage_merged(folder, &stop) } else { trainer.stage_export(folder, &stop) };
        let staged = match staged {
            Err(TrainError::Stopped) => {
                observer.line(&format!("Stopping: the export to {} is aborted", folder.display()));
                return Ok(false);
            }
            staged => staged?,
        };
        self.record(trainer, Some(&staged))?;
        staged.commit(&mut trainer.written)?;
        self.record(trainer, None)?;
        Ok(true)
    }

    /// Evaluates, unless that was done at this step. False: somebody asked to stop, and it was given up; a later
    /// process does it then.
    fn evaluate(&mut self, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<bool> {
        if trainer.progress.evaluated == Some(trainer.steps_done()) {
            return Ok(true);
        }
        let device = trainer.device.clone();
        // Nodes cannot give up at the same batch.
        let alone = device.nodes.is_none();
        let mut stops = || alone && observer.interrupted();
        match device.together(&Part::Evaluate, || trainer.evaluate_unless(&mut stops))? {
            Evaluation::NoData => {
                self.show_samples(trainer, observer)?;
                Ok(true)
            }
            Evaluation::Aborted => {
                observer.line("Stopping: the evaluation is aborted");
                Ok(false)
            }
            Evaluation::Done(metrics) => {
                observer.line(&metrics.line());
                self.emit(metrics.to_json(), observer)?;
                self.show_samples(trainer, observer)?;
                Ok(true)
            }
        }
    }

    /// The answers to `sample_prompts`, unless they were given at this step.
    fn show_samples(&mut self, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<()> {
        let step = trainer.steps_done();
        if self.sampled.replace(step) == Some(step) {
            return Ok(());
        }
        let samples = trainer.samples()?;
        for sample in &samples {
            observer.line(&format!("Sample after {}: {}", words::count(step, "step"), sample.line()));
        }
        if !samples.is_empty() {
            let samples: Vec<Value> = samples.iter().map(Sample::to_json).collect();
            self.emit(json!({"event": "samples", "step": step, "samples": samples}), observer)?;
        }
        Ok(())
    }

    /// Begins a checkpoint of the present step: it appears when its files are written. One at a time.
    fn save(&mut self, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<()> {
        let step = trainer.steps_done();
        if self.saved == Some(step) {
            return Ok(());
        }
        self.publish_checkpoint(trainer, observer)?;
        self.place.check_present()?;
        let folder = checkpoint::folder_of(&self.place.checkpoints, step);
        let begin = Instant::now();
        let outline = trainer.outline()?;
        match Saving::begin(trainer, outline, folder.clone())? {
            Begun::InTheMaking(saving) => self.saving = Some(saving),
            Begun::Written(staged) => {
                if !std::mem::replace(&mut self.reported_waiting, true) {
                    observer.line(
                        "Note: not enough host memory for a copy of the checkpoint: training waits until it is written",
                    );
                }
                self.publish_staged(trainer, staged, (step, &folder), observer)?;
            }
        }
        self.saved = Some(step);
        let held = begin.elapsed().as_secs_f64();
        self.emit(json!({"event": "saving", "step": step, "held_seconds": held}), observer)
    }

    /// Waits for the checkpoint in the making, if there is one, and lets it appear.
    fn publish_checkpoint(&mut self, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<()> {
        let Some(saving) = self.saving.take() else { return Ok(()) };
        let (step, folder) = (saving.step, saving.folder.clone());
        let staged = saving.finish();
        // A folder that is gone is the reason for what the writing says.
        self.place.check_present()?;
        self.publish_staged(trainer, staged?, (step, &folder), observer)
    }

    /// Lets a checkpoint appear, and removes those that are too many.
    fn publish_staged(
        &mut self,
        trainer: &mut Trainer,
        staged: Staged,
        (step, folder): (u64, &Path),
        observer: &mut dyn Observer,
    ) -> Result<()> {
        self.record(trainer, Some(&staged))?;
        staged.commit(&mut trainer.written)?;
        let of = &trainer.config.run;
        let spared = trainer.progress.judged.best.filter(|_| of.load_best_model_at_end).map(|best| best.step);
        checkpoint::rotate(&self.place.checkpoints, &trainer.written, of.save_total_limit, spared)?;
        self.record(trainer, None)?;
        observer.line(&format!("Saved {}", folder.display()));
        self.emit(json!({"event": "checkpoint", "step": step, "path": folder}), observer)
    }
}
