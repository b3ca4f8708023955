//! Files that accompany a run's results: the manifest, and the choices for `auto` options.

use jiff::Zoned;
use program::{Arch, ParameterSlot, Program};
use serde_json::{Value, json};

use crate::config::Reasons;
use crate::error::Result;
use crate::files::digest;
use crate::plan::decisions;
use crate::plan::memory::lines_json;
use crate::plan::preview::Expected;
use crate::plan::resolved::{Known, chooser};
use crate::run::folder::RunFolder;
use crate::trainer::Trainer;
use crate::trainer::metrics::StepMetrics;

/// The place in the manifest of the digest of the model's files.
pub const DIGESTS: &str = "digests";
pub const MODEL: &str = "model";

/// The run as one JSON object: what it is made of, so that it can be made again, and what it wrote. `choices` are
/// what the backend chose by timing, `written` the folders that the run wrote and that are still as they were.
/// Compiles the program if that has not been done. While the model's files are still being read their
/// digest is that of an earlier process, or null.
pub fn manifest(place: &RunFolder, trainer: &mut Trainer) -> Result<Value> {
    let total_steps = trainer.total_steps();
    let machine = trainer.device.machine.clone();
    let (model, folder) = (trainer.config.model.model.clone(), trainer.source.folder.clone());
    let options = trainer.config.resolved_json(&trainer.reasons());
    let (data, name, run_id) = (trainer.data_digest(), trainer.name.clone(), trainer.written.owner.clone());
    let written = trainer.written.records();
    let (task, because) = (trainer.config.task.name(), trainer.device.because.clone());
    let backend = trainer.device.backend.name();
    let program = trainer.engine()?.program().clone();
    let choices = trainer.choices()?;
    let model_digest = trainer.known_digest()?.cloned();
    let model_digest = match (model_digest, &place.earlier) {
        (None, Some(earlier)) => earlier.manifest[DIGESTS][MODEL].clone(),
        (known, _) => json!(known),
    };
    let count = |trained: bool| -> usize {
        let slots = program.layout.parameters.iter().filter(|slot| !trained || slot.trainable);
        slots.map(ParameterSlot::elements).sum()
    };
    let memory = lines_json(&program.memory);
    let plan: Vec<Value> = program.plan.iter().map(decisions::to_json).collect();
    let bytes: usize = program.memory.iter().map(|line| line.bytes).sum();
    let seconds = planned_seconds(trainer, &program)?;
    let earlier = place.earlier.as_ref().map(|earlier| &earlier.manifest);
    let started = earlier.map_or_else(
        || json!(Zoned::now().strftime("%Y-%m-%dT%H:%M:%S%:z").to_string()),
        |manifest| manifest["started"].clone(),
    );
    Ok(json!({
        "run": name,
        "run_id": run_id,
        "surogate": env!("CARGO_PKG_VERSION"),
        "started": started,
        "task": task,
        "model": model,
        "folder": folder,
        "architecture": program.name,
        DIGESTS: {
            "options": digest::of_bytes(options.to_string().as_bytes()),
            MODEL: model_digest,
            "data": data,
        },
        "machine": {
            "name": machine.name, "arch": machine.arch.to_string(), "memory": machine.memory, "units": machine.units,
            "backend": backend, "because": because,
        },
        "parameters": {"total": count(false), "trained": count(true)},
        "steps": total_steps,
        "plan": plan,
        "memory": memory,
        "memory_bytes": bytes,
        "planned_seconds_per_step": seconds,
        "output": place.output.canonicalize().unwrap_or_else(|_| place.output.clone()),
        "log": place.log,
        "choices": choices,
        "written": written,
    }))
}

/// Seconds of an optimizer step as the plan reckons them; none where the machine's rates are those of another.
fn planned_seconds(trainer: &mut Trainer, program: &Program) -> Result<Option<f64>> {
    let Some(shapes) = trainer.shapes()? else { return Ok(None) };
    let accumulation = trainer.config.micro_steps() as usize;
    let expected = Expected { program, shapes: &shapes, accumulation };
    Ok(program.machine.origin.has_ceilings().then(|| expected.estimate().step_seconds))
}

/// Measured times of a process's steps, compared with the plan's estimates.
#[derive(Debug, Default)]
pub struct Measured {
    steps: u64,
    tokens: u64,
    seconds: f64,
    /// Seconds of the slowest step.
    pub longest: f64,
    /// The most that was in use, bytes.
    memory: Option<usize>,
}

impl Measured {
    pub fn add(&mut self, step: &StepMetrics) {
        self.steps += 1;
        self.tokens += step.tokens;
        self.seconds += step.seconds;
        self.longest = self.longest.max(step.seconds);
        self.memory = self.memory.max(step.memory);
    }

    /// `planned_seconds_per_step` rests on measured rates, and is absent where the machine has none.
    pub fn to_json(&self, trainer: &mut Trainer) -> Result<Value> {
        let program = trainer.engine()?.program().clone();
        let planned = planned_seconds(trainer, &program)?;
        Ok(json!({
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens as f64 / self.seconds.max(1e-9),
            "seconds_per_step": self.seconds / self.steps.max(1) as f64,
            "planned_seconds_per_step": planned,
            "memory": self.memory,
            "planned_memory": program.memory.iter().map(|line| line.bytes).sum::<usize>(),
        }))
    }
}

impl Trainer {
    /// A word on steps that are expected far above their bound, and on rates that are not this device's.
    pub(crate) fn far_above(&mut self) -> Result<Vec<String>> {
        let program = self.engine()?.program().clone();
        let Some(shapes) = self.shapes()? else { return Ok(Vec::new()) };
        let accumulation = self.config.micro_steps() as usize;
        let found = Expected { program: &program, shapes: &shapes, accumulation }.far_above();
        let borrowed = program.machine.origin.borrowed().filter(|_| program.machine.arch != Arch::Cpu);
        let borrowed = borrowed.map(|what| format!("{what}; `surogate doctor --calibrate` measures this one"));
        Ok(found.into_iter().chain(borrowed).collect())
    }

    /// The choices for options that were left open, as far as they concern the computation.
    pub(crate) fn reasons(&self) -> Reasons {
        let known = Known {
            config: &self.config,
            source: &self.source,
            plan: &self.plan,
            device: self.device.backend.name(),
            because: &self.device.because,
            steps: self.total_steps(),
        };
        known.reasons()
    }
}

/// The choices for options that were left open, names of files included.
pub fn reasons(place: &RunFolder, trainer: &Trainer) -> Reasons {
    let mut reasons = trainer.reasons();
    let mut choose = chooser(&trainer.config, &mut reasons);
    choose("run_name", json!(trainer.name), "the model and the time");
    choose("checkpoint_dir", json!(place.checkpoints), "`output_dir`");
    choose("log_file", json!(place.log), "in `output_dir`");
    for name in ["wandb_name", "aim_name"] {
        choose(name, json!(trainer.name), "`run_name`");
    }
    let plan = trainer.engine.as_ref().map(|engine| engine.program().plan.clone()).unwrap_or_default();
    for answer in decisions::answers(&plan) {
        choose(answer.option, answer.value, &answer.because);
    }
    drop(choose);
    reasons
}
