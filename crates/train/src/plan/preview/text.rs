//! A preview as text for people and as JSON for programs.

use std::fmt::Display;

use program::{Arch, ArenaKind, Cause, Choice, EntryKind, MemoryClass, MemoryLine, Variant};
use serde_json::{Value, json};

use super::{Across, HostEstimate, Preview, Sampling, Stages};
use crate::plan::decisions;
use crate::plan::memory::lines_json;
use crate::words::{size, time};

/// The line that the uses of the activation arena explain.
const ACTIVATIONS: MemoryClass = MemoryClass::Arena(ArenaKind::Activations);

/// Width of the column of figures.
const FIGURES: usize = 12;

fn line<C: Display>(of: &MemoryLine<C>, indent: usize) -> String {
    let blank = " ".repeat(indent);
    format!("{blank}{:>FIGURES$}  {:<14} {}", size(of.bytes), of.class, of.note).trim_end().to_owned()
}

/// A figure and what it is of.
fn figure(value: &str, what: &str) -> String {
    format!("{value:>FIGURES$}  {what}\n")
}

impl Preview {
    /// The memory plan, line by line: classes, what the activations are at their fullest, and how much
    /// of the whole is in use in each phase.
    pub fn memory_text(&self) -> String {
        let program = &self.program;
        let mut lines = Vec::new();
        for of in &program.memory {
            lines.push(line(of, 0));
            if of.class == ACTIVATIONS {
                lines.extend(program.activations.iter().map(|part| line(part, 4)));
            }
        }
        lines.push(format!("{:>FIGURES$}  in all", size(self.memory_bytes())));
        let host = program.host_memory();
        if !host.is_empty() {
            let of = if program.cluster.ranks > 1 { ", of each rank" } else { "" };
            lines.push(format!("On the host{of}:"));
            lines.extend(host.iter().map(|part| line(part, 0)));
        }
        let activations = program.memory.iter().find(|of| of.class == ACTIVATIONS).map_or(0, |of| of.bytes);
        let fixed = self.memory_bytes() - activations;
        let phases = program.phases.iter().map(|of| format!("{} {}", of.class, size(fixed + of.bytes)));
        lines.push(format!("Peak use by phase: {}", phases.collect::<Vec<_>>().join(", ")));
        lines.into_iter().map(|line| line + "\n").collect()
    }

    /// Memory, decisions and time for people.
    pub fn plan_text(&self) -> String {
        let machine = &self.program.machine;
        let share = 100.0 * self.memory_bytes() as f64 / machine.memory as f64;
        let of = match machine.arch {
            Arch::Cpu => {
                format!("of {}, with headroom for the system; the process itself comes on top", size(machine.memory))
            }
            _ => format!("of the machine's {}", size(machine.memory)),
        };
        let share = figure(&format!("{share:.1} %"), &of);
        format!(
            "{}\n{}{share}\n{}Expected, {}:\n{}{}{}{}",
            self.head_text(),
            self.memory_text(),
            self.decisions_text(),
            machine.origin.words(),
            self.time_text(),
            self.stages.as_ref().map(Stages::text).unwrap_or_default(),
            self.notes_text(),
            self.across.as_ref().map(Across::text).unwrap_or_default(),
        )
    }

    /// The head of the plan: the machine, the rows and the share that the data determine.
    fn head_text(&self) -> String {
        let machine = &self.program.machine;
        let rows = match self.shapes.variants.as_slice() {
            [one] => format!("{} × {} tokens", one.batch, one.seq_len),
            several => {
                let mut lengths: Vec<String> = several.iter().map(|of| of.seq_len.to_string()).collect();
                lengths.dedup();
                format!("{} × {} tokens", several[0].batch, lengths.join(", "))
            }
        };
        let ranks = match self.program.cluster.ranks * self.program.cluster.stages {
            1 => String::new(),
            several => format!("{several} × "),
        };
        let name = format!("{} on {ranks}{} ({})", self.program.name, machine.name, machine.arch);
        let steps = self.shapes.steps.map_or(String::new(), |steps| format!(", {steps} steps"));
        let micro_steps = match self.accumulation {
            1 => "1 micro-step per step".to_owned(),
            several => format!("{several} micro-steps per step"),
        };
        let assumed = self.shapes.assumed.as_ref().map(|assumed| {
            let why = self.unavailable.as_deref().map_or(String::new(), |why| format!(": {why}"));
            format!("The tokens of the data are not known{why}. Assumed: {assumed}\n")
        });
        format!("{name}: {rows}, {micro_steps}{steps}\n{}", assumed.unwrap_or_default())
    }

    fn time_text(&self) -> String {
        let machine = &self.program.machine;
        let of = self.estimate();
        let tokens = format!("per step, {:.0} tokens per second", of.tokens_per_second);
        let mut text =
            figure(&time(of.micro_step_seconds), "a micro-step") + &figure(&time(of.update_seconds), "the update");
        if of.passes_seconds > 0.0 {
            text += &figure(&time(of.passes_seconds), "forward passes of reference and policy before a micro-step");
        }
        text += &figure(&time(of.step_seconds), &tokens);
        let sampling = self.sampling.iter().flat_map(Sampling::lines);
        text += &sampling.map(|(value, what)| figure(&value, &what)).collect::<String>();
        if machine.origin.has_ceilings() {
            text += &figure(&time(of.ceiling_seconds), "per step at the machine's ceilings, a lower bound");
        }
        let moved = format!("TFLOP and {:.3} TB of memory traffic per step", of.step_bytes / 1e12);
        text += &figure(&format!("{:.3}", of.step_flops / 1e12), &moved);
        text += &self.exchange_text();
        if let (Some(seconds), Some(steps)) = (of.run_seconds, self.shapes.steps) {
            let evaluations = match of.evaluation_seconds > 0.0 {
                true => format!(", {} of it evaluation", time(of.evaluation_seconds)),
                false => String::new(),
            };
            let sampling = if self.sampling.is_some() { " and the sampling of their answers" } else { "" };
            let what =
                format!("all {steps} steps{sampling}{evaluations}; without loading weights and writing checkpoints");
            text += &figure(&time(seconds + of.evaluation_seconds), &what);
        }
        text + &of.host.as_ref().map(host_text).unwrap_or_default()
    }

    /// Bytes that several ranks exchange. All other figures are those of one rank, but for the rate.
    fn exchange_text(&self) -> String {
        if self.program.cluster.ranks == 1 {
            return String::new();
        }
        let of = self.estimate();
        let between = match self.program.cluster.nodes {
            1 => String::new(),
            _ => format!(", {} of it from other nodes", size(of.between as usize)),
        };
        let waits = format!("the computation waits {} for it", time(of.waiting));
        let what = format!("for each rank from the others per step{between}; {waits}");
        figure(&size(of.exchanged as usize), &what)
    }

    fn notes_text(&self) -> String {
        let far_above = self.expected().far_above();
        let notes = self.notes.iter().chain(&far_above).map(|note| format!("Note: {note}\n"));
        let warnings = self.warnings.iter().map(|warning| format!("Warning: {warning}\n"));
        self.recommendations.iter().map(|line| format!("{line}\n")).chain(notes).chain(warnings).collect()
    }

    /// Tensors that are kept, recomputed, offloaded or processed in parts, and why. Tensors that are processed whole
    /// are not listed.
    fn decisions_text(&self) -> String {
        let mut text = String::new();
        let mut last = None;
        for of in self.program.plan.iter().filter(|of| of.choice != Choice::Chunks(1)) {
            if last != Some(of.entry) {
                text += match of.entry {
                    EntryKind::FirstMicroStep | EntryKind::NextMicroStep => "For the backward pass of a micro-step:\n",
                    EntryKind::Update => "For the update:\n",
                    EntryKind::Evaluate => "For the evaluation:\n",
                    EntryKind::Forward => "For the forward pass:\n",
                    EntryKind::Prepare => "For the codes and norms of the weights:\n",
                };
                last = Some(of.entry);
            }
            text += &figure(&size(of.bytes), &decisions::priced(of));
        }
        if text.is_empty() { text } else { text + "\n" }
    }

    /// Everything for programs. Bytes and seconds throughout.
    pub fn to_json(&self) -> Value {
        let program = &self.program;
        let machine = &program.machine;
        let of = self.estimate();
        json!({
            "architecture": program.name,
            "machine": {"name": machine.name, "arch": machine.arch.to_string(), "memory": machine.memory},
            "batch": self.rows,
            "sequence_len": self.sequence_len,
            "micro_steps": self.accumulation,
            "shapes": self.shapes.variants.iter().zip(&self.shapes.shares).map(shape).collect::<Vec<Value>>(),
            "assumed": self.shapes.assumed,
            "data_away": self.unavailable,
            "steps": self.shapes.steps,
            "memory": lines_json(&program.memory),
            "activations": lines_json(&program.activations),
            "activations_by_phase": lines_json(&program.phases),
            "memory_bytes": self.memory_bytes(),
            "host_memory": lines_json(&program.host_memory()),
            "decisions": program.plan.iter().map(decisions::to_json).collect::<Vec<Value>>(),
            "estimate": {
                "meaning": format!("expected, {}; ceiling_seconds at the machine's ceilings", machine.origin.words()),
                "borrowed": machine.origin.borrowed(),
                "above": Cause::ALL.iter().zip(of.above).map(above).collect::<Vec<Value>>(),
                "micro_step_seconds": of.micro_step_seconds,
                "update_seconds": of.update_seconds,
                "passes_seconds": of.passes_seconds,
                "step_seconds": of.step_seconds,
                "ceiling_seconds": of.ceiling_seconds,
                "tokens_per_second": of.tokens_per_second,
                "step_flops": of.step_flops,
                "step_bytes": of.step_bytes,
                "run_seconds": of.run_seconds,
                "evaluation_seconds": of.evaluation_seconds,
                "host": of.host.map(|host| json!({
                    "micro_step_bytes": host.micro_step_bytes,
                    "update_bytes": host.update_bytes,
                    "micro_step_seconds": host.micro_step_seconds,
                    "update_seconds": host.update_seconds,
                    "free_tokens": host.free_tokens,
                })),
            },
            "nodes": self.across.as_ref().map(Across::to_json),
            "sampling": self.sampling.as_ref().map(Sampling::to_json),
            "stages": self.stages.as_ref().map(Stages::to_json),
            "recommended": self.recommended,
            "notes": self.notes,
            "warnings": self.warnings,
            "far_above": self.expected().far_above(),
        })
    }
}

fn above((cause, seconds): (&Cause, f64)) -> Value {
    json!({"cause": cause.words(), "seconds": seconds})
}

fn shape((of, share): (&Variant, &f64)) -> Value {
    let mut all = json!({"rows": of.batch, "tokens": of.seq_len, "share": share});
    if of.patches > 0 {
        all["patches"] = of.patches.into();
    }
    all
}

fn host_text(of: &HostEstimate) -> String {
    let free = match of.free_tokens {
        Some(tokens) => format!("negligible (under 1.5 %) from {tokens} tokens per step"),
        None => "not negligible with any number of micro-batches of this size".to_owned(),
    };
    let what = format!(
        "per micro-step and {} per update between device and host, waiting {} and {}: {free}",
        size(of.update_bytes as usize),
        time(of.micro_step_seconds),
        time(of.update_seconds)
    );
    figure(&size(of.micro_step_bytes as usize), &what)
}
