//! The first event of a run's log: everything that a reader of the log needs to know about the run.
//!
//! Collects; decides nothing.

use serde_json::{Map, Value, json};

use crate::config::rows;
use crate::error::Result;
use crate::plan::decisions;
use crate::plan::memory::lines_json;
use crate::run::folder::RunFolder;
use crate::run::record::reasons;
use crate::trainer::Trainer;

/// The event `start`, or `resume` where steps were done before: the manifest, the options with the reasons for what
/// was left open, the plan, the data check.
pub fn opening(place: &RunFolder, trainer: &mut Trainer, manifest: &Value, step: u64) -> Result<Value> {
    let reasons = reasons(place, trainer);
    let recommended = trainer.config.recommended.clone().unwrap_or_default();
    let because: Map<String, Value> = reasons
        .iter()
        .chain(&recommended)
        .map(|(name, reason)| (name.clone(), reason.because.clone().into()))
        .collect();
    let given: Vec<&str> = rows().map(|row| row.name).filter(|name| trainer.config.is_written(name)).collect();
    Ok(json!({
        "event": if step == 0 { "start" } else { "resume" },
        "step": step,
        "manifest": manifest,
        "options": trainer.config.resolved_json(&reasons),
        "given": given,
        "because": because,
        "plan": plan(trainer)?,
        "data": trainer.feed.as_ref().map(|feed| feed.check_json()),
    }))
}

fn plan(trainer: &mut Trainer) -> Result<Value> {
    let program = trainer.engine()?.program().clone();
    Ok(json!({
        "memory": lines_json(&program.memory),
        "activations": lines_json(&program.activations),
        "phases": lines_json(&program.phases),
        "decisions": program.plan.iter().map(decisions::to_json).collect::<Vec<Value>>(),
        "machine_memory": program.machine.memory,
    }))
}
