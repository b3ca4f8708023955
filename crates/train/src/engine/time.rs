//! The time of a step: by instruction and by class of instructions, relative to the machine's ceilings if they were
//! measured.

use std::collections::BTreeMap;

use program::Layer;
use program::{EntryKind, Program, Seen, Variant, ceiling, kind_of, seconds};
use serde_json::{Value, json};

use crate::engine::Engine;
use crate::error::Result;

/// Runs one micro-step timing every instruction and gives a row for each: kind,
/// phase, layer, seconds, seconds as planned and at the ceiling, FLOPs, bytes. The gradients are overwritten.
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
                "phase": step.provenance.phase.name(),
                "layer": step.provenance.layer.as_ref().map(number),
                "seconds": time,
                "planned": seconds(step, &program, Seen::default()),
                "ceiling": ceiling(step, &program, Seen::default()),
                "flops": step.cost.flops,
                "bytes": step.cost.bytes,
                "text": step.to_string(),
            })
        })
        .collect();
    Ok(Value::Array(rows))
}

/// One class of instructions in one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClassTime {
    /// `gemm`, `attention`, or the operation's name; with the phase after it.
    pub name: String,
    pub count: usize,
    pub seconds: f64,
    /// Seconds at the machine's ceilings; none where these are no measurements.
    pub ceiling: Option<f64>,
    /// Seconds as the plan expects them; none as above.
    pub planned: Option<f64>,
    pub flops: f64,
    pub bytes: f64,
}

/// The timed entries of a step by classes, the longest first.
pub fn by_class(program: &Program, timed: &[(usize, Vec<f64>)], seen: Seen) -> Vec<ClassTime> {
    let measured = program.machine.origin.has_ceilings();
    let mut classes: BTreeMap<String, ClassTime> = BTreeMap::new();
    for (entry, times) in timed {
        for (step, time) in program.entries[*entry].steps.iter().zip(times) {
            let name = format!("{}, {}", kind_of(step), step.provenance.phase.name());
            let class = classes.entry(name.clone()).or_insert_with(|| ClassTime { name, ..ClassTime::default() });
            class.count += 1;
            class.seconds += time;
            class.flops += step.cost.flops;
            class.bytes += step.cost.bytes;
            if measured {
                *class.ceiling.get_or_insert(0.0) += ceiling(step, program, seen);
                *class.planned.get_or_insert(0.0) += seconds(step, program, seen);
            }
        }
    }
    let mut classes: Vec<ClassTime> = classes.into_values().collect();
    classes.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    classes
}

impl ClassTime {
    pub fn to_json(&self) -> Value {
        json!({
            "class": self.name, "instructions": self.count, "seconds": self.seconds, "ceiling_seconds": self.ceiling,
            "planned_seconds": self.planned, "flops": self.flops, "bytes": self.bytes,
        })
    }
}

/// The classes as a table.
pub fn table(step: u64, classes: &[ClassTime]) -> Vec<String> {
    let all: f64 = classes.iter().map(|class| class.seconds).sum();
    let mut lines = vec![format!("Time of step {step}, instruction by instruction: {:.3} ms in all", all * 1e3)];
    lines.push(format!(
        "{:>12} {:>7} {:>6} {:>12} {:>10} {:>9} {:>9}  class",
        "ms", "share", "count", "GFLOP/s", "GB/s", "ceiling", "planned"
    ));
    for of in classes {
        let rate = |amount: f64| amount / of.seconds.max(1e-12) / 1e9;
        let share = |part: Option<f64>| {
            part.map_or("–".to_owned(), |part| format!("{:.0} %", 100.0 * part / of.seconds.max(1e-12)))
        };
        lines.push(format!(
            "{:>12.3} {:>5.1} % {:>6} {:>12.1} {:>10.1} {:>9} {:>9}  {}",
            of.seconds * 1e3,
            100.0 * of.seconds / all.max(1e-12),
            of.count,
            rate(of.flops),
            rate(of.bytes),
            share(of.ceiling),
            share(of.planned),
            of.name
        ));
    }
    lines
}

/// A layer for scripts: its number, or its name where there are several stacks.
pub(crate) fn number(of: &Layer) -> Value {
    if of.stack.is_empty() { json!(of.index) } else { json!(of.to_string()) }
}
