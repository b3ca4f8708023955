//! A preview as text for people and as JSON for programs.

use program::{Arch, MemoryLine, PlanLine};
use serde_json::{Value, json};

use super::{HostEstimate, Preview};

const MIB: f64 = (1u64 << 20) as f64;

fn mib(bytes: usize) -> String {
    format!("{:>12.2} MiB", bytes as f64 / MIB)
}

fn line(of: &MemoryLine, indent: usize) -> String {
    let blank = " ".repeat(indent);
    format!("{blank}{}  {:<14} {}", mib(of.bytes), of.class, of.note).trim_end().to_owned()
}

impl Preview {
    /// The memory plan, line by line: classes, what the activations are at their fullest, and how much
    /// of the whole is in use in each phase.
    pub fn memory_text(&self) -> String {
        let program = &self.program;
        let mut lines = Vec::new();
        for of in &program.memory {
            lines.push(line(of, 0));
            if of.class == "activations" {
                lines.extend(program.activations.iter().map(|part| line(part, 4)));
            }
        }
        lines.push(format!("{}  in all", mib(self.memory_bytes())));
        let host = program.host_memory();
        if !host.is_empty() {
            lines.push("On the host:".to_owned());
            lines.extend(host.iter().map(|part| line(part, 0)));
        }
        let activations = program.memory.iter().find(|of| of.class == "activations").map_or(0, |of| of.bytes);
        let fixed = self.memory_bytes() - activations;
        let phases = program.phases.iter().map(|of| format!("{} {}", of.class, mib(fixed + of.bytes).trim_start()));
        lines.push(format!("In use at most: {}", phases.collect::<Vec<_>>().join(", ")));
        lines.into_iter().map(|line| line + "\n").collect()
    }

    /// Memory, decisions and time for people.
    pub fn plan_text(&self) -> String {
        let machine = &self.program.machine;
        let of = self.estimate();
        let share = 100.0 * self.memory_bytes() as f64 / machine.memory as f64;
        let gib = machine.memory as f64 / (1u64 << 30) as f64;
        // The rates of a CPU are those of one that was measured: no ceilings of this one.
        let on_cpu = machine.arch == Arch::Cpu;
        let line =
            || format!("{:>12.2} ms  a step at the machine's ceilings, which no run beats\n", of.ceiling_seconds * 1e3);
        let ceiling = if on_cpu { String::new() } else { line() };
        let notes = self.notes.iter().map(|note| format!("Note: {note}\n"));
        let notes: String = self.recommendations.iter().map(|line| format!("{line}\n")).chain(notes).collect();
        format!(
            "{} on {} ({}): {} × {} tokens, {} micro-steps a step\n\n{}{:>16}  of the machine's {gib:.0} GiB\n\n{}\
             {}:\n\
             {:>12.2} ms  a micro-step\n{:>12.2} ms  the update\n{:>12.2} ms  a step, {:.0} tokens a second\n{}\
             {:>12.3} TFLOP and {:.3} TB moved in a step\n{}{notes}",
            self.program.name,
            machine.name,
            machine.arch,
            self.batch,
            self.sequence_len,
            self.accumulation,
            self.memory_text(),
            format!("{share:.1} %"),
            self.decisions_text(),
            if on_cpu { "Expected, by the rates of another CPU" } else { "Expected, from rates measured in steps" },
            of.micro_step_seconds * 1e3,
            of.update_seconds * 1e3,
            of.step_seconds * 1e3,
            of.tokens_per_second,
            ceiling,
            of.step_flops / 1e12,
            of.step_bytes / 1e12,
            of.host.as_ref().map(host_text).unwrap_or_default(),
        )
    }

    /// What is kept, computed again or done in parts, and why.
    fn decisions_text(&self) -> String {
        let mut text = String::new();
        let mut last = None;
        for of in &self.program.plan {
            if last != Some(of.kind) {
                text += match of.kind {
                    program::EntryKind::FirstMicroStep => "For the backward pass of a micro-step:\n",
                    program::EntryKind::Update => "For the update:\n",
                    program::EntryKind::Evaluate => "For the evaluation:\n",
                    _ => "For the forward pass:\n",
                };
                last = Some(of.kind);
            }
            text += &decision_text(of);
        }
        if text.is_empty() { text } else { text + "\n" }
    }

    /// Everything for programs. Bytes and seconds throughout.
    pub fn to_json(&self) -> Value {
        let program = &self.program;
        let machine = &program.machine;
        let of = self.estimate();
        let lines = |of: &[MemoryLine]| -> Vec<Value> {
            of.iter().map(|line| json!({"class": line.class, "bytes": line.bytes, "note": line.note})).collect()
        };
        let decision = |of: &PlanLine| {
            json!({
                "entry": of.kind.name(),
                "part": of.part,
                "layers": of.layers,
                "decision": of.decision,
                "bytes": of.bytes,
                "seconds": of.seconds,
                "reason": of.reason,
            })
        };
        json!({
            "architecture": program.name,
            "machine": {"name": machine.name, "arch": machine.arch.to_string(), "memory": machine.memory},
            "batch": self.batch,
            "sequence_len": self.sequence_len,
            "gradient_accumulation_steps": self.accumulation,
            "memory": lines(&program.memory),
            "activations": lines(&program.activations),
            "activations_by_phase": lines(&program.phases),
            "memory_bytes": self.memory_bytes(),
            "host_memory": lines(&program.host_memory()),
            "decisions": program.plan.iter().map(decision).collect::<Vec<Value>>(),
            "estimate": {
                "meaning": "expected, from rates measured in steps; ceiling_seconds at the machine's ceilings",
                "micro_step_seconds": of.micro_step_seconds,
                "update_seconds": of.update_seconds,
                "step_seconds": of.step_seconds,
                "ceiling_seconds": of.ceiling_seconds,
                "tokens_per_second": of.tokens_per_second,
                "step_flops": of.step_flops,
                "step_bytes": of.step_bytes,
                "host": of.host.map(|host| json!({
                    "micro_step_bytes": host.micro_step_bytes,
                    "update_bytes": host.update_bytes,
                    "micro_step_seconds": host.micro_step_seconds,
                    "update_seconds": host.update_seconds,
                    "free_tokens": host.free_tokens,
                })),
            },
            "recommended": self.recommended,
            "notes": self.notes,
        })
    }
}

fn host_text(of: &HostEstimate) -> String {
    let gib = |bytes: f64| bytes / (1u64 << 30) as f64;
    let free = match of.free_tokens {
        Some(tokens) => format!("free (under 1.5 %) from {tokens} tokens a step"),
        None => "free with no number of micro-batches of this size".to_owned(),
    };
    format!(
        "{:>12.3} GiB a micro-step and {:.3} GiB in the update between device and host, waiting {:.2} and {:.2} ms: {free}\n",
        gib(of.micro_step_bytes),
        gib(of.update_bytes),
        of.micro_step_seconds * 1e3,
        of.update_seconds * 1e3,
    )
}

fn decision_text(of: &PlanLine) -> String {
    let layers = match of.layers.as_str() {
        "" => String::new(),
        one if one.parse::<usize>().is_ok() => format!(", layer {one}"),
        several => format!(", layers {several}"),
    };
    let cost = if of.seconds > 0.0 { format!(" in {:.3} ms", of.seconds * 1e3) } else { String::new() };
    format!("{}  {}{cost}: {}{layers} ({})\n", mib(of.bytes), of.decision, of.part, of.reason)
}
