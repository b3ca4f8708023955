//! A whole run: folders, the loop, evaluation, checkpoints, the result.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use jiff::Zoned;
use serde_json::{Value, json};

use crate::checkpoint;
use crate::config::{Config, Reason, Reasons};
use crate::device::Device;
use crate::error::{Result, TrainError};
use crate::log::Log;
use crate::metrics::StepMetrics;
use crate::source::ModelSource;
use crate::staged::write_synced;
use crate::trainer::{Trainer, run_name};

/// What stands in every folder that a run wrote to.
const MANIFEST: &str = "manifest.json";

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

/// Folders of a run.
struct Place {
    output: PathBuf,
    checkpoints: PathBuf,
    log: PathBuf,
}

impl Place {
    /// Decides them and checks that they are free and can be written to.
    fn new(config: &Config, name: &str) -> Result<Place> {
        let output = PathBuf::from(&config.run.output_dir);
        if output.join(MANIFEST).exists() {
            let message = format!("`{}` holds another run", output.display());
            let hint = Some("choose another `output_dir`, or remove that folder".to_owned());
            return Err(TrainError::Config(vec![config.mistake("output_dir", message, hint)]));
        }
        let checkpoints = config.run.checkpoint_dir.value().map_or_else(|| output.clone(), PathBuf::from);
        for folder in [&output, &checkpoints] {
            try_writing(folder)?;
        }
        let time = Zoned::now().strftime("%Y%m%d-%H%M%S");
        let file = format!("log-{}-{time}.json", name.replace(['/', '\\'], "-"));
        let log = config.logging.log_file.value().map_or_else(|| output.join(file), PathBuf::from);
        Ok(Place { output, checkpoints, log })
    }
}

/// A trial before the first step: a full or read-only disk is told now.
fn try_writing(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|e| TrainError::io("create", folder, e))?;
    let trial = folder.join(format!(".trial-{}", std::process::id()));
    write_synced(&trial, &[0; 4096])?;
    std::fs::remove_file(&trial).map_err(|e| TrainError::io("remove", &trial, e))
}

/// A run in progress.
struct Run {
    place: Place,
    log: Log,
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
        write_synced(&place.output.join("resolved.yaml"), resolved.as_bytes())?;
        let text = serde_json::to_string_pretty(&manifest).expect("a manifest is always representable as JSON");
        write_synced(&place.output.join(MANIFEST), (text + "\n").as_bytes())?;
        log.write(&json!({"event": "start", "manifest": manifest}))?;
        Ok(Run { place, log, saved: None, evaluated: None, suppressed: 0 })
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
        let name = if trainer.plan.compile.adapter.is_some() { "adapter" } else { "model" };
        let result = self.place.output.join(name);
        trainer.export(&result)?;
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
        checkpoint::rotate(&self.place.checkpoints, &trainer.name, trainer.config.run.save_total_limit)?;
        observer.line(&format!("Saved {}", folder.display()));
        self.log.write(&json!({"event": "checkpoint", "step": step, "path": folder}))?;
        Ok(folder)
    }
}

fn manifest(place: &Place, trainer: &mut Trainer) -> Result<Value> {
    let total_steps = trainer.total_steps();
    let machine = trainer.device.machine.clone();
    let (model, folder) = (trainer.config.model.model.clone(), trainer.source.folder.clone());
    let task = trainer.config.task.name();
    let program = trainer.engine()?.program().clone();
    let count = |trained: bool| -> usize {
        let slots = program.parameters.iter().filter(|slot| !trained || slot.trainable);
        slots.map(|slot| slot.weight.len()).sum()
    };
    let memory: Vec<Value> = program
        .memory
        .iter()
        .map(|line| json!({"class": line.class, "bytes": line.bytes, "note": line.note}))
        .collect();
    let bytes: usize = program.memory.iter().map(|line| line.bytes).sum();
    Ok(json!({
        "run": trainer.name,
        "surogate": env!("CARGO_PKG_VERSION"),
        "started": Zoned::now().to_string(),
        "task": task,
        "model": model,
        "folder": folder,
        "architecture": program.name,
        "machine": {"name": machine.name, "arch": machine.arch.to_string(), "memory": machine.memory, "units": machine.units},
        "parameters": {"total": count(false), "trained": count(true)},
        "steps": total_steps,
        "memory": memory,
        "memory_bytes": bytes,
        "log": place.log,
    }))
}

/// What was chosen for options that were left open.
fn reasons(place: &Place, trainer: &Trainer) -> Reasons {
    let config = &trainer.config;
    let mut reasons = trainer.plan.reasons.clone();
    let mut choose = |name: &str, open: bool, value: Value, because: &str| {
        if open {
            reasons.insert(name.to_owned(), Reason { value, because: because.to_owned() });
        }
    };
    choose("run_name", config.run.run_name.is_auto(), json!(trainer.name), "the model and the time");
    choose("checkpoint_dir", config.run.checkpoint_dir.is_auto(), json!(place.checkpoints), "`output_dir`");
    choose("log_file", config.logging.log_file.is_auto(), json!(place.log), "in `output_dir`");
    let device = trainer.device.backend.name();
    choose("device", config.hardware.device.is_auto(), json!(device), &trainer.device.because);
    choose(
        "model_type",
        config.model.model_type.is_auto(),
        json!(trainer.source.model_type()),
        "the model's configuration",
    );
    if let Some(total) = trainer.total_steps() {
        let (warmup, cooldown) = (config.optimizer.warmup(total), config.optimizer.cooldown(total));
        choose("warmup_steps", config.optimizer.warmup_steps.is_auto(), json!(warmup), "`warmup_ratio` of all steps");
        choose("cooldown_steps", config.optimizer.cooldown_steps.is_auto(), json!(cooldown), "the schedule");
    }
    reasons
}
