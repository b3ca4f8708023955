//! A run in progress: its steps, evaluations, and what is said of them.

use std::time::Instant;

use program::{EntryKind, PlanDecision};
use serde_json::{Value, json};

use super::{Observer, Outcome, Run};
use crate::engine::instruments::Instruments;
use crate::engine::time;
use crate::error::{Result, TrainError};
use crate::files::staged::{Staged, replace_file};
use crate::plan::decisions;
use crate::run::folder::RunFolder;
use crate::run::folder::{MANIFEST, RESOLVED};
use crate::run::opening::opening;
use crate::run::record::{DIGESTS, MODEL, Measured, manifest, reasons};
use crate::run::rendezvous;
use crate::run::room;
use crate::trainer::Trainer;
use crate::trainer::checkpoint;
use crate::trainer::command::Part;
use crate::trainer::memory;
use crate::trainer::metrics::StepMetrics;
use crate::trainer::saving::Saving;
use crate::trainer::state::Overflow;
use crate::trainer::step::{Advance, Evaluation};
use crate::words;

/// Steps of a process before the one that is timed: kernels are loaded and buffers touched by then.
const TIMED: u64 = 2;

impl Run {
    /// Logs the decisions, and reports them to the observer.
    pub(super) fn start(mut place: RunFolder, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<Run> {
        let of_data = trainer.feed.iter().flat_map(|feed| &feed.encoded.notes);
        for note in trainer.plan.notes.iter().chain(of_data) {
            observer.line(&format!("Note: {note}"));
        }
        trainer.config.recommendations().iter().for_each(|line| observer.line(line));
        observer.line(&format!("Run {} on {} ({})", trainer.name, trainer.device.machine.name, trainer.device.because));
        if let Some(feed) = &trainer.feed {
            for line in feed.check_table(&trainer.config).lines() {
                observer.line(line);
            }
        }
        if let Some(rollouts) = &trainer.rollouts {
            observer.line(&rollouts.summary(&trainer.config));
        }
        observer.line("Compiling the model and loading its weights");
        let manifest = manifest(&place, trainer)?;
        let (config, steps) =
            (trainer.config.clone(), trainer.total_steps().expect("a run with data knows its length"));
        let when = trainer.milestones_of(steps)?.expect("a run has data");
        room::check(trainer, &place, &when)?;
        if let Some(grace) = config.run.save_grace_seconds {
            let (bytes, seconds) = room::checkpoint_seconds(trainer, &place)?;
            let rate = bytes as f64 / 1e9 / seconds.max(1e-9);
            let (size, late) =
                (words::size(bytes), if seconds > grace as f64 { ", more than `save_grace_seconds`" } else { "" });
            observer.line(&format!(
                "A checkpoint of {size} takes about {seconds:.1} s at {rate:.2} GB/s of this disk{late}"
            ));
        }
        let total = &manifest["parameters"];
        let memory = words::size(manifest["memory_bytes"].as_u64().unwrap_or(0) as usize);
        observer.line(&format!(
            "{} parameters, {} trained; {memory} planned; {}",
            total["total"],
            total["trained"],
            words::count(steps, "step")
        ));
        rendezvous::headline(&config, trainer.plan.sequence_len, steps).iter().for_each(|line| observer.line(line));
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
        if let Some(note) = trainer.engine()?.rounded() {
            observer.line(&format!("Note: {note}"));
        }
        // In this order: from here on a signal finds either that the run has begun or that it stops.
        observer.begun();
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
            has_digest: false,
            saved,
            sampled: None,
            saving: None,
            reported_waiting: false,
            reported_grace: false,
            measured,
            instruments,
            when,
            began: Instant::now(),
        })
    }

    /// Writes an event to the log, and reports it to the observer.
    pub(super) fn emit(&mut self, event: Value, observer: &mut dyn Observer) -> Result<()> {
        observer.event(&self.log.write(event)?);
        Ok(())
    }

    /// Brings up to date what the manifest says about choices (a batch of a new shape brings new ones) and
    /// about folders, with one that is about to appear.
    pub(super) fn record(&mut self, trainer: &mut Trainer, staged: Option<&Staged>) -> Result<()> {
        let mut written = trainer.written.records();
        written.extend(staged.map(Staged::record).transpose()?);
        self.manifest[DIGESTS][MODEL] = json!(trainer.model_digest()?);
        self.manifest["choices"] = json!(trainer.choices()?);
        self.manifest["written"] = json!(written);
        self.manifest["measured"] = self.measured.to_json(trainer)?;
        write_manifest(&self.place, &trainer.written.owner, &self.manifest)
    }

    /// Completes a manifest that was written before all of the model's files were read, once they are.
    pub(super) fn complete(&mut self, trainer: &mut Trainer) -> Result<()> {
        if self.has_digest || trainer.is_digesting() {
            return Ok(());
        }
        self.has_digest = true;
        let is_new = self.manifest[DIGESTS][MODEL] != json!(trainer.model_digest()?);
        if is_new { self.record(trainer, None) } else { Ok(()) }
    }

    pub(super) fn steps(&mut self, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<Outcome> {
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
        if trainer.startup.is_some() && trainer.steps_done() < total {
            observer.line(&format!("Starting step {}, which takes longer than the others", trainer.steps_done()));
        }
        let timed =
            trainer.config.logging.debug_time_breakdown.then_some((trainer.steps_done() + TIMED).min(total - 1));
        while trainer.steps_done() < total && trainer.stalled().is_none() {
            let is_timed = timed == Some(trainer.steps_done());
            if is_timed {
                self.catch_up(trainer, observer)?;
                trainer.begin_timing()?;
            }
            // There is nothing to save before the first step.
            if trainer.steps_done() > 0 && !trainer.wait_for_data(&mut || observer.interrupted()) {
                self.catch_up(trainer, observer)?;
                return self.stop(trainer, observer);
            }
            let device = trainer.device.clone();
            let (started, known) = match device.together(&Part::Step, || trainer.advance())? {
                Advance::Started(known) => (true, known),
                Advance::Diverged(metrics) => (true, Some(metrics)),
                Advance::Ended(known) => (false, known),
            };
            if let Some(metrics) = known {
                self.report(metrics, trainer, observer)?;
                self.complete(trainer)?;
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
                if done < total && observer.ends_at_checkpoint() {
                    return self.stop(trainer, observer);
                }
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

    /// Waits for the step in flight, and reports its results.
    fn catch_up(&mut self, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<()> {
        match trainer.settle()? {
            Some(metrics) => self.report(metrics, trainer, observer),
            None => Ok(()),
        }
    }

    /// Reports the results of a step; an error if the run cannot go on after them.
    fn report(&mut self, mut metrics: StepMetrics, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<()> {
        let total = trainer.total_steps();
        trainer.add_flushed(&mut metrics)?;
        if let Some(mut startup) = trainer.startup.take() {
            startup.done("first step");
            observer.line(&startup.line());
            self.emit(startup.to_json(), observer)?;
        }
        if let Overflow::Unreported(note) = trainer.overflow {
            trainer.overflow = Overflow::Reported;
            observer.line(&format!("Note: {note}"));
        }
        let done = metrics.step + 1;
        if done.is_multiple_of(trainer.config.logging.logging_steps) || Some(done) == total || !metrics.applied {
            observer.line(&metrics.line(total));
        }
        if let Some(event) = trainer.take_samples(done) {
            self.emit(event, observer)?;
        }
        metrics.fp8_flushed.iter().for_each(|flushed| observer.line(&flushed.line()));
        observer.progress(metrics.step + 1, total.unwrap_or_default());
        self.emit(metrics.to_json(), observer)?;
        self.measured.add(&metrics);
        match self.instruments.look(metrics.step + 1, &trainer.device) {
            Some(Ok(event)) => self.emit(event, observer)?,
            Some(Err(why)) => observer.line(&format!("Note: {why}")),
            None => {}
        }
        trainer.check_convergence(&metrics)
    }

    fn report_time(&mut self, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<()> {
        let (step, classes) = (trainer.steps_done() - 1, trainer.end_timing()?);
        time::table(step, &classes).iter().for_each(|line| observer.line(line));
        let rows: Vec<Value> = classes.iter().map(time::ClassTime::to_json).collect();
        self.emit(json!({"event": "time_breakdown", "step": step, "classes": rows}), observer)
    }

    /// Evaluates, unless that was done at this step. False: a user requested to stop, and it was aborted; a later
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
        let is_first = self.sampled.is_none();
        if self.sampled.replace(step) == Some(step) {
            return Ok(());
        }
        let samples = trainer.samples()?;
        for sample in &samples {
            observer.prose(&format!("Sample after {}: {}", words::count(step, "step"), sample.line()));
        }
        if !samples.is_empty() {
            let samples: Vec<Value> = samples.iter().map(|sample| sample.to_json(is_first)).collect();
            self.emit(json!({"event": "samples", "step": step, "samples": samples}), observer)?;
        }
        Ok(())
    }
}

/// True if the current weights have the best evaluation, and the result is to be the best.
fn is_to_keep(trainer: &Trainer) -> bool {
    trainer.config.run.load_best_model_at_end && trainer.progress.best_tracker.is_best(trainer.steps_done())
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
