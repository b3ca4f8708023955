//! The text form of a program, for people and for golden tests.

use std::fmt;

use crate::instruction::{Instruction, Step};
use crate::memory::TensorRef;
use crate::program::{Entry, Program};

impl fmt::Display for TensorRef {
    /// `a3+4096 bf16[2, 8, 64]`, with strides where there are gaps.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a{}+{} {}{:?}", self.arena.0, self.offset, self.dtype, self.shape)?;
        if !self.is_dense() {
            write!(f, "/{:?}", self.strides)?;
        }
        if self.per_rank != 0 {
            write!(f, " +{} a rank", self.per_rank)?;
        }
        Ok(())
    }
}

fn list(tensors: &[&TensorRef]) -> String {
    tensors.iter().map(|t| t.to_string()).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, detail) = match &self.instruction {
            Instruction::Launch(l) => (format!("launch {}", l.op), l.attrs.to_string()),
            Instruction::Gemm(g) => {
                let letter = |t: bool| if t { "t" } else { "n" };
                let flags = [
                    (g.batch != 1, format!(" ×{}", g.batch)),
                    (g.has_blocks(), " nvfp4".to_owned()),
                    (g.accumulate, " accumulate".to_owned()),
                    (g.bias.is_some(), " bias".to_owned()),
                    (!g.low_rank.is_empty(), format!(" low_rank×{}", g.low_rank.len())),
                ];
                let flags: String = flags.into_iter().filter(|(on, _)| *on).map(|(_, text)| text).collect();
                let order = format!("{}{}", letter(g.transpose_a), letter(g.transpose_b));
                (format!("gemm {order} {}×{}×{}{flags}", g.m, g.n, g.k), String::new())
            }
            Instruction::AttentionForward(_) => ("attention forward".into(), String::new()),
            Instruction::Copy { .. } => ("copy".into(), String::new()),
            Instruction::Zero { .. } => ("zero".into(), String::new()),
            Instruction::Transfer { stream, .. } => (format!("transfer {}", stream.name()), String::new()),
            Instruction::Collective(of) => (format!("{} of {}", of.movement.name(), of.group), String::new()),
            Instruction::Record { event, stream } => return write!(f, "record e{} on {}", event.0, stream.name()),
            Instruction::Wait { event, stream } => return write!(f, "wait for e{} on {}", event.0, stream.name()),
        };
        let (writes, reads) = (list(&self.instruction.writes()), list(&self.instruction.reads()));
        write!(f, "{kind}{detail}: {writes} <- {reads}")
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let separator = if self.name.is_empty() { "" } else { " " };
        write!(f, "entry {}{separator}{}", self.kind.name(), self.name)?;
        if let Some(v) = self.variant {
            let patches = if v.patches == 0 { String::new() } else { format!(", {} patches", v.patches) };
            let logits = if v.logits == 0 { String::new() } else { format!(", {} logits", v.logits) };
            write!(f, " [{} × {}, {:?}{patches}{logits}]", v.batch, v.seq_len, v.documents)?;
        }
        let has_blocks = |step: &&Step| matches!(&step.instruction, Instruction::Gemm(gemm) if gemm.has_blocks());
        match self.steps.iter().filter(has_blocks).count() {
            0 => {}
            products => write!(f, ", {products} products of four bits")?,
        }
        match self.crosses() || self.stage.number > 0 {
            true => writeln!(f, ", stage {}", self.stage.number)?,
            false => writeln!(f)?,
        }
        for step in &self.steps {
            let layer = step.provenance.layer.as_ref().map_or_else(|| "    ".into(), |layer| format!("{layer:>3} "));
            writeln!(f, "  {layer}{step}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "program {} for {} ({})", self.name, self.machine.name, self.machine.arch)?;
        match self.cluster.ranks {
            1 if self.cluster.stages > 1 => writeln!(f, ", {} stages", self.cluster.stages)?,
            1 => writeln!(f)?,
            ranks => writeln!(f, ", {ranks} ranks")?,
        }
        for (index, arena) in self.arenas.iter().enumerate() {
            let host = if arena.is_on_host() { ", on the host" } else { "" };
            let cut = if arena.shards.is_empty() { "" } else { ", sharded" };
            writeln!(f, "  arena a{index} {}: {} bytes{host}{cut}", arena.kind.name(), arena.bytes)?;
        }
        for entry in &self.entries {
            write!(f, "{entry}")?;
        }
        Ok(())
    }
}
