//! Where the time of a micro-step goes, instruction by instruction, against the machine's ceilings.

use program::{EntryKind, Variant, kind_of, seconds};
use serde_json::{Value, json};

use crate::engine::Engine;
use crate::error::Result;

/// Runs one micro-step with the clock around every instruction and gives a row for each: kind,
/// phase, layer, seconds, seconds at the ceiling, FLOPs, bytes. The gradients are overwritten.
pub fn time_breakdown(engine: &mut Engine, variant: Variant) -> Result<Value> {
    let program = engine.program().clone();
    let entry = program.entry(EntryKind::FirstMicroStep, Some(variant)).expect("the variant was run before");
    let times = engine.session().profile(entry)?;
    let rows: Vec<Value> = program.entries[entry]
        .steps
        .iter()
        .zip(times)
        .map(|(step, time)| {
            json!({
                "kind": kind_of(step),
                "op": step.provenance.op,
                "phase": step.provenance.phase,
                "layer": step.provenance.layer,
                "seconds": time,
                "ceiling": seconds(step, &program.machine),
                "flops": step.cost.flops,
                "bytes": step.cost.bytes,
                "text": step.to_string(),
            })
        })
        .collect();
    Ok(Value::Array(rows))
}
