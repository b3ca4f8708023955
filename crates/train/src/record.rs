//! What stands beside a run's results: its folders, the manifest, and the choices for options that
//! were left open.

use std::path::{Path, PathBuf};

use jiff::Zoned;
use serde_json::{Value, json};
use tensor::DType;

use crate::checkpoint;
use crate::config::{Config, Reason, Reasons};
use crate::error::{Result, TrainError};
use crate::feed;
use crate::staged::{occupant, write_synced};
use crate::trainer::Trainer;

/// What stands in every folder that a run wrote to.
pub const MANIFEST: &str = "manifest.json";

/// The options with every value, beside it.
pub const RESOLVED: &str = "resolved.yaml";

/// Folders and files of a run.
pub struct Place {
    pub output: PathBuf,
    pub checkpoints: PathBuf,
    pub log: PathBuf,
}

impl Place {
    /// Decides them and checks that they are free and can be written to.
    pub fn new(config: &Config, name: &str) -> Result<Place> {
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

    /// Checks before the first step that nothing stands where the run will write: options, checkpoints
    /// and `result`.
    pub fn check_free(&self, config: &Config, result: &Path) -> Result<()> {
        let entries = std::fs::read_dir(&self.checkpoints).map_err(|e| TrainError::io("read", &self.checkpoints, e))?;
        let mut checkpoints: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        checkpoints.retain(|path| checkpoint::step_of(path).is_some());
        checkpoints.sort_unstable();
        let option = if config.run.checkpoint_dir.value().is_some() { "checkpoint_dir" } else { "output_dir" };
        let own = [("output_dir", self.output.join(RESOLVED)), ("output_dir", result.to_owned())];
        let mut problems = Vec::new();
        for (option, path) in own.into_iter().chain(checkpoints.into_iter().map(|path| (option, path))) {
            if let Some(found) = occupant(&path)? {
                let message = format!("`{}` is {found} that this run did not write, expected nothing", path.display());
                let hint = format!("choose another `{option}`, or move away what is there");
                problems.push(config.mistake(option, message, Some(hint)));
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(TrainError::Config(problems)) }
    }
}

/// A trial before the first step: a full or read-only disk is told now.
fn try_writing(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|e| TrainError::io("create", folder, e))?;
    let trial = folder.join(format!(".trial-{}", std::process::id()));
    write_synced(&trial, &[0; 4096])?;
    std::fs::remove_file(&trial).map_err(|e| TrainError::io("remove", &trial, e))
}

/// The run as one JSON object: `choices` are what the backend chose by timing, `written` the folders that
/// the run wrote and that are still as they were. Compiles the program if that has not been done.
pub fn manifest(place: &Place, trainer: &mut Trainer) -> Result<Value> {
    let total_steps = trainer.total_steps();
    let machine = trainer.device.machine.clone();
    let (model, folder) = (trainer.config.model.model.clone(), trainer.source.folder.clone());
    let task = trainer.config.task.name();
    let program = trainer.engine()?.program().clone();
    let choices = trainer.choices()?;
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
        "choices": choices,
        "written": trainer.written.paths(),
    }))
}

/// Options that only the memory planner moves: every value is kept, so all of them are off.
const KEPT: &[&str] = &[
    "recompute_swiglu",
    "recompute_rmsnorm",
    "recompute_ffn",
    "recompute_qkv",
    "recompute_att",
    "recompute_block",
    "recompute_lora",
    "offload_residual",
    "offload_master",
    "offload_quants",
    "offload_optimizer",
    "offload_grads",
];

/// What was chosen for options that were left open.
pub fn reasons(place: &Place, trainer: &Trainer) -> Reasons {
    let config = &trainer.config;
    let given = config.to_json();
    let mut reasons = trainer.plan.reasons.clone();
    let mut choose = |name: &str, value: Value, because: &str| {
        if given[name] == "auto" {
            reasons.insert(name.to_owned(), Reason { value, because: because.to_owned() });
        }
    };
    choose("run_name", json!(trainer.name), "the model and the time");
    choose("checkpoint_dir", json!(place.checkpoints), "`output_dir`");
    choose("log_file", json!(place.log), "in `output_dir`");
    choose("device", json!(trainer.device.backend.name()), &trainer.device.because);
    choose("model_type", json!(trainer.source.model_type()), "the model's configuration");
    if let Some(positions) = trainer.source.max_positions() {
        choose("max_model_len", json!(positions), "the model's configuration");
    }
    choose("dataloader_num_workers", json!(feed::workers(config)), "the cores of this machine");
    choose("master_dtype", json!(config_word(trainer)), "the weights' own type: no further copy is kept");
    choose("lmhead_chunks", json!(1), "the logits are computed at once");
    choose("attn_bwd_chunks", json!(1), "the attention's gradient is computed at once");
    for name in KEPT {
        choose(name, json!(false), "every value is kept where it is");
    }
    if let Some(total) = trainer.total_steps() {
        let (warmup, cooldown) = (config.optimizer.warmup(total), config.optimizer.cooldown(total));
        choose("warmup_steps", json!(warmup), "`warmup_ratio` of all steps");
        choose("cooldown_steps", json!(cooldown), "the schedule");
    }
    reasons
}

/// The element type of the weights as the options spell it.
fn config_word(trainer: &Trainer) -> &'static str {
    match trainer.plan.compile.weights {
        DType::BF16 => "bfloat16",
        _ => "float32",
    }
}
