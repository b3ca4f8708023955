//! A whole run: folders, the loop, evaluation, checkpoints, the result.

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::checkpoint;
use crate::config::Config;
use crate::device::Device;
use crate::error::{Result, TrainError};
use crate::log::Log;
use crate::metrics::StepMetrics;
use crate::record::{MANIFEST, Place, RESOLVED, manifest, reasons};
use crate::source::ModelSource;
use crate::staged::{replace_file, write_synced};
use crate::trainer::{Trainer, run_name};

/// Folder of the model with the adapter added, where that is asked for.
const MERGED: &str = "merged";

/// Suppressed updates in a row after which a run is given up.
const MAX_SUPPRESSED: u64 = 5;

/// What a run tells while it goes on, and asks.
pub trait Observer {
    /// One line for people.
    fn line(&mut self, text: &str);

    /// Asked after every step: true ends the run after a checkpoint.
    fn interrupted(&mut self) -> bool;
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The result lies in this folder.
    Finished(PathBuf),
    /// Stopped on request; the checkpoint lies in this folder.
    Interrupted(PathBuf),
}

/// Trains from the first step to the result.
pub fn run(
    config: Arc<Config>,
    source: Arc<ModelSource>,
    device: Arc<Device>,
    observer: &mut dyn Observer,
) -> Result<Outcome> {
    let problems = config.check_datasets();
    if !problems.is_empty() {
        return Err(TrainError::Config(problems));
    }
    let name = run_name(&config, &source);
    let place = Place::new(&config, &name)?;
    let mut trainer = Trainer::new(config, source, device)?;
    trainer.name = name;
    place.check_free(&trainer.config, &result_folder(&place, &trainer))?;
    if trainer.config.lora.merge_adapter {
        place.check_free(&trainer.config, &place.output.join(MERGED))?;
    }
    let mut run = Run::start(place, &mut trainer, observer)?;
    let outcome = run.steps(&mut trainer, observer);
    let event = match &outcome {
        Ok(Outcome::Finished(folder)) => json!({"event": "finished", "result": folder}),
        Ok(Outcome::Interrupted(folder)) => json!({"event": "interrupted", "checkpoint": folder}),
        Err(error) => json!({"event": "failed", "error": error.to_string(), "exit_code": error.exit_code()}),
    };
    run.log.write(&event)?;
    outcome
}

/// Where the result will lie.
fn result_folder(place: &Place, trainer: &Trainer) -> PathBuf {
    place.output.join(if trainer.plan.compile.adapter.is_some() { "adapter" } else { "model" })
}

fn write_manifest(place: &Place, manifest: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(manifest).expect("a manifest is always representable as JSON");
    replace_file(&place.output.join(MANIFEST), (text + "\n").as_bytes())
}

/// A run in progress.
struct Run {
    place: Place,
    log: Log,
    manifest: Value,
    /// Step count of the last checkpoint and the last evaluation.
    saved: Option<u64>,
    evaluated: Option<u64>,
    /// Steps in a row whose update was suppressed.
    suppressed: u64,
}

impl Run {
    /// Writes what is decided and tells it.
    fn start(place: Place, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<Run> {
        let mut log = Log::open(&place.log)?;
        for note in &trainer.plan.notes {
            observer.line(&format!("Note: {note}"));
        }
        observer.line(&format!("Run {} on {} ({})", trainer.name, trainer.device.machine.name, trainer.device.because));
        if let Some(feed) = &trainer.feed {
            for line in feed.summary.to_string().lines() {
                observer.line(line);
            }
        }
        let manifest = manifest(&place, trainer)?;
        let total = &manifest["parameters"];
        let memory = manifest["memory_bytes"].as_f64().unwrap_or(0.0) / (1u64 << 20) as f64;
        observer.line(&format!(
            "{} parameters, {} trained; {memory:.0} MiB planned; {} steps",
            total["total"], total["trained"], manifest["steps"]
        ));
        let resolved = trainer.config.resolved_yaml(&reasons(&place, trainer));
        write_synced(&place.output.join(RESOLVED), resolved.as_bytes())?;
        write_manifest(&place, &manifest)?;
        log.write(&json!({"event": "start", "manifest": manifest}))?;
        Ok(Run { place, log, manifest, saved: None, evaluated: None, suppressed: 0 })
    }

    /// Brings up to date what the manifest says about folders and choices: a batch of a new shape brings
    /// new ones.
    fn record(&mut self, trainer: &mut Trainer) -> Result<()> {
        self.manifest["choices"] = json!(trainer.choices()?);
        self.manifest["written"] = json!(trainer.written.paths());
        write_manifest(&self.place, &self.manifest)
    }

    fn steps(&mut self, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<Outcome> {
        let total = trainer.total_steps().expect("a run with data knows its length");
        let (save_steps, eval_steps) = (trainer.config.run.save_steps, trainer.config.training.eval_steps);
        while trainer.steps_done() < total {
            let Some(metrics) = trainer.next_step(None)? else { break };
            observer.line(&metrics.line(Some(total)));
            self.log.write(&metrics.to_json())?;
            self.check_convergence(&metrics)?;
            let done = trainer.steps_done();
            if observer.interrupted() {
                observer.line("Stopping: saving a checkpoint");
                return self.save(trainer, observer).map(Outcome::Interrupted);
            }
            if done % eval_steps == 0 {
                self.evaluate(trainer, observer)?;
            }
            if done % save_steps == 0 {
                self.save(trainer, observer)?;
            }
        }
        self.evaluate(trainer, observer)?;
        self.save(trainer, observer)?;
        let result = result_folder(&self.place, trainer);
        trainer.export(&result)?;
        if trainer.config.lora.merge_adapter {
            let merged = self.place.output.join(MERGED);
            trainer.export_merged(&merged)?;
            observer.line(&format!("Merged: {} (loaded again and compared with the live model)", merged.display()));
        }
        self.record(trainer)?;
        observer.line(&format!("Result: {} (loaded again and compared with the live model)", result.display()));
        Ok(Outcome::Finished(result))
    }

    /// A loss that is no number, or gradients that stay none: their updates are suppressed, so
    /// nothing can change any more.
    fn check_convergence(&mut self, metrics: &StepMetrics) -> Result<()> {
        self.suppressed = if metrics.applied { 0 } else { self.suppressed + 1 };
        if !metrics.loss.is_finite() {
            let what = format!("the loss of step {} is {}", metrics.step, metrics.loss);
            return Err(TrainError::Diverged { what });
        }
        if self.suppressed == MAX_SUPPRESSED {
            let what = format!("the gradients of {MAX_SUPPRESSED} steps up to {} are not finite", metrics.step);
            return Err(TrainError::Diverged { what });
        }
        Ok(())
    }

    fn evaluate(&mut self, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<()> {
        if self.evaluated == Some(trainer.steps_done()) {
            return Ok(());
        }
        self.evaluated = Some(trainer.steps_done());
        if let Some(metrics) = trainer.evaluate()? {
            observer.line(&metrics.line());
            self.log.write(&metrics.to_json())?;
        }
        Ok(())
    }

    fn save(&mut self, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<PathBuf> {
        let step = trainer.steps_done();
        let folder = checkpoint::folder_of(&self.place.checkpoints, step);
        if self.saved == Some(step) {
            return Ok(folder);
        }
        trainer.save(&folder)?;
        self.saved = Some(step);
        checkpoint::rotate(&self.place.checkpoints, &trainer.written, trainer.config.run.save_total_limit)?;
        self.record(trainer)?;
        observer.line(&format!("Saved {}", folder.display()));
        self.log.write(&json!({"event": "checkpoint", "step": step, "path": folder}))?;
        Ok(folder)
    }
}
