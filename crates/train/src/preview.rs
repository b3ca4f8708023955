//! What a run would be, without running it: its graph, its program, its memory and its time, for
//! any machine. Reads no data and no weights.

use graph::Graph;
use program::{Arch, Documents, EntryKind, Machine, Program, Step, Variant};
use serde_json::{Value, json};
use tensor::DType;

use crate::config::Config;
use crate::error::Result;
use crate::plan::Plan;
use crate::source::ModelSource;

/// Documents of a packed row that a preview reckons with; the data decides in the run.
const DOCUMENTS_PER_ROW: usize = 16;

/// The run's program and what follows from it.
pub struct Preview {
    pub program: Program,
    /// What the user should know, a sentence each.
    pub notes: Vec<String>,
    batch: usize,
    sequence_len: usize,
    accumulation: usize,
}

/// Time at the machine's measured ceilings: what no run can beat.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// One micro-step, forward and backward.
    pub micro_step_seconds: f64,
    pub update_seconds: f64,
    /// All micro-steps of an optimizer step, and the update.
    pub step_seconds: f64,
    pub tokens_per_second: f64,
    /// Floating-point operations of an optimizer step.
    pub step_flops: f64,
}

fn variant(config: &Config, plan: &Plan, machine: &Machine) -> Variant {
    let (batch, seq_len) = (config.training.per_device_train_batch_size as usize, plan.sequence_len);
    let tokens = batch * seq_len;
    let documents = match (config.data.sample_packing, &machine.arch) {
        (false, _) => Documents::Rows,
        (true, Arch::Cpu) => Documents::Packed { count: tokens, longest: seq_len },
        (true, _) => Documents::Packed { count: (batch * DOCUMENTS_PER_ROW).min(tokens), longest: seq_len },
    };
    Variant { batch, seq_len, documents }
}

/// The model as a flat graph, in the shape of the run's batches.
pub fn graph(config: &Config, source: &ModelSource, machine: &Machine) -> Result<Graph> {
    let plan = Plan::new(config, source)?;
    Ok(compiler::expand(&source.model, &plan.compile, variant(config, &plan, machine))?)
}

impl Preview {
    /// Compiles for a machine, which need not be this one.
    pub fn new(config: &Config, source: &ModelSource, machine: &Machine) -> Result<Preview> {
        let plan = Plan::new(config, source)?;
        let mut options = plan.compile.clone();
        let variant = variant(config, &plan, machine);
        options.variants = vec![variant];
        let program = compiler::compile(&source.model, &options, machine)?;
        Ok(Preview {
            program,
            notes: plan.notes,
            batch: variant.batch,
            sequence_len: variant.seq_len,
            accumulation: config.training.gradient_accumulation_steps as usize,
        })
    }

    /// Bytes of everything that the plan holds.
    pub fn memory_bytes(&self) -> usize {
        self.program.memory.iter().map(|line| line.bytes).sum()
    }

    /// Every instruction at the higher of its two bounds: operations at the machine's matrix rate,
    /// bytes at its bandwidth.
    pub fn estimate(&self) -> Estimate {
        let machine = &self.program.machine;
        let entry = |kind: EntryKind| self.program.entries.iter().filter(move |entry| entry.kind == kind);
        let seconds = |kind| entry(kind).flat_map(|entry| &entry.steps).map(|step| bound(step, machine)).sum::<f64>();
        let flops = |kind| entry(kind).flat_map(|entry| &entry.steps).map(|step| step.cost.flops).sum::<f64>();
        let (first, update) = (seconds(EntryKind::FirstMicroStep), seconds(EntryKind::Update));
        let next = seconds(EntryKind::NextMicroStep);
        let more = (self.accumulation - 1) as f64;
        let step_seconds = first + next * more + update;
        let tokens = (self.batch * self.sequence_len * self.accumulation) as f64;
        Estimate {
            micro_step_seconds: first,
            update_seconds: update,
            step_seconds,
            tokens_per_second: tokens / step_seconds,
            step_flops: flops(EntryKind::FirstMicroStep) + flops(EntryKind::NextMicroStep) * more,
        }
    }

    /// The memory plan, line by line.
    pub fn memory_text(&self) -> String {
        let mib = |bytes: usize| bytes as f64 / (1u64 << 20) as f64;
        let lines = self.program.memory.iter().map(|line| {
            let text = format!("{:>12.2} MiB  {:<14} {}", mib(line.bytes), line.class, line.note);
            text.trim_end().to_owned()
        });
        let sum = format!("{:>12.2} MiB  in all", mib(self.memory_bytes()));
        lines.chain([sum]).map(|line| line + "\n").collect()
    }

    /// Memory and time for people.
    pub fn plan_text(&self) -> String {
        let machine = &self.program.machine;
        let of = self.estimate();
        let share = 100.0 * self.memory_bytes() as f64 / machine.memory as f64;
        let gib = machine.memory as f64 / (1u64 << 30) as f64;
        let notes: String = self.notes.iter().map(|note| format!("Note: {note}\n")).collect();
        format!(
            "{} on {} ({}): {} × {} tokens, {} micro-steps a step\n\n{}{:>16}  of the machine's {gib:.0} GiB\n\n\
             At the machine's measured ceilings, which no run beats:\n\
             {:>12.2} ms  a micro-step\n{:>12.2} ms  the update\n{:>12.2} ms  a step, {:.0} tokens a second\n{notes}",
            self.program.name,
            machine.name,
            machine.arch,
            self.batch,
            self.sequence_len,
            self.accumulation,
            self.memory_text(),
            format!("{share:.1} %"),
            of.micro_step_seconds * 1e3,
            of.update_seconds * 1e3,
            of.step_seconds * 1e3,
            of.tokens_per_second,
        )
    }

    /// Memory and time for programs.
    pub fn to_json(&self) -> Value {
        let machine = &self.program.machine;
        let of = self.estimate();
        let memory: Vec<Value> = self
            .program
            .memory
            .iter()
            .map(|line| json!({"class": line.class, "bytes": line.bytes, "note": line.note}))
            .collect();
        json!({
            "architecture": self.program.name,
            "machine": {"name": machine.name, "arch": machine.arch.to_string(), "memory": machine.memory},
            "batch": self.batch,
            "sequence_len": self.sequence_len,
            "gradient_accumulation_steps": self.accumulation,
            "memory": memory,
            "memory_bytes": self.memory_bytes(),
            "estimate": {
                "meaning": "at the machine's measured ceilings",
                "micro_step_seconds": of.micro_step_seconds,
                "update_seconds": of.update_seconds,
                "step_seconds": of.step_seconds,
                "tokens_per_second": of.tokens_per_second,
                "step_flops": of.step_flops,
            },
            "notes": self.notes,
        })
    }
}

/// Seconds that one instruction takes at least.
fn bound(step: &Step, machine: &Machine) -> f64 {
    let rate = match step.instruction.compute_dtype() {
        Some(DType::BF16 | DType::F16) => machine.bf16_flops,
        _ => machine.f32_flops,
    };
    (step.cost.flops / rate).max(step.cost.bytes / machine.bandwidth)
}
