//! The program: everything that is decided before anything runs.

use tensor::HostTensor;

use crate::cluster::Cluster;
use crate::decision::PlanDecision;
use crate::instruction::{Kernel, Step};
use crate::layout::Layout;
use crate::machine::Machine;
use crate::memory::{Arena, ArenaId, ArenaKind, MemoryClass, MemoryLine, MemorySpace, TensorRef};
use crate::parameter::ParameterSlot;
use crate::stages::Stage;
use crate::variant::{EntryKind, Variant};

/// Names of the step scalars. The host writes the first group before an entry runs; the program
/// writes the second.
pub mod scalar {
    /// f32: learning rate of this update.
    pub const LEARNING_RATE: &str = "learning_rate";
    /// f32: Adam's bias correction 1 − β₁ᵗ.
    pub const BIAS_CORRECTION_1: &str = "bias_correction_1";
    /// f32: Adam's bias correction 1 − β₂ᵗ.
    pub const BIAS_CORRECTION_2: &str = "bias_correction_2";
    /// i32: number of the optimizer step, from 0. Part of every random counter.
    pub const STEP: &str = "step";
    /// i32: running number of the micro-step over the whole run. Part of dropout's counter.
    pub const MICRO_STEP: &str = "micro_step";

    /// f32: the factor of the loss of micro-steps, where gradients are stored in f16. State: an update decides that of
    /// the next step.
    pub const LOSS_SCALE: &str = "loss_scale";
    /// i32: steps in a row, up to the last, that kept the loss scale. State.
    pub const LOSS_SCALE_COUNT: &str = "loss_scale_count";
    /// f32: the loss scale of the step whose update ran last.
    pub const LOSS_SCALE_USED: &str = "loss_scale_used";

    /// f32: Σ weight · loss over the micro-steps of this step.
    pub const LOSS_SUM: &str = "loss_sum";
    /// f32: Σ weight over the micro-steps of this step.
    pub const WEIGHT_SUM: &str = "weight_sum";
    /// f32 [ranks, n]: the residual that compression leaves of each rank's gradients, where they are compressed. State.
    pub const GRADIENT_ERRORS: &str = "gradient_errors";
    /// f32 [experts + 3], of mixtures of experts alone: over the micro-steps of this step, the choices of each expert, the
    /// number of routings, the sum of their entropies, and that of the losses of uneven loads, each times its routings.
    pub const ROUTER_REPORT: &str = "router_report";
    /// f32 [2 · metrics], of tasks with metrics alone: over the micro-steps of this step, the numerator and the denominator
    /// of each. An evaluation has its own.
    pub const TASK_REPORT: &str = "task_report";
    /// Vectors of sums that follow the step scalars, in this order, as far as a program has them.
    pub const REPORTS: [&str; 2] = [ROUTER_REPORT, TASK_REPORT];
    /// f32: norm of the averaged gradient, before clipping.
    pub const GRADIENT_NORM: &str = "gradient_norm";
    /// f32: the factor of gradients in the update: clip coefficient ÷ weight sum; 0 when the norm is not finite.
    pub const GRADIENT_SCALE: &str = "gradient_scale";
    /// f32: 1 when the update was applied, 0 when it was suppressed.
    pub const UPDATE_APPLIED: &str = "update_applied";
    /// f32: number of quantizers whose largest magnitude of the step did not fit.
    pub const FP8_CLIPPED: &str = "fp8_clipped";
}

/// Names of the inputs of an entry that continues sequences, besides those of the model, and of its results.
pub mod generation {
    /// i32 [B, T]: positions in their sequences; below 0 for padding.
    pub const POSITIONS: &str = "cache_positions";
    /// i32 [B, T]: of images whose tokens see each other both ways the position of the last token, of other tokens their own;
    /// below 0 for padding.
    pub const LAST_KEYS: &str = "cache_last_keys";
    /// The input of a model whose place [`LAST_KEYS`] takes, where a batch has images.
    pub const IMAGE_LAST: &str = "image_last";
    /// i32 [B, pages of the longest sequence]: the pages of each sequence, in order.
    pub const TABLE: &str = "page_table";
    /// i32 \[B\]: the slot of each sequence, where state of a size independent of its length is kept.
    pub const SLOTS: &str = "sequence_slots";
    /// i32 \[B\]: the token of each row whose logits are wanted, where rows have several.
    pub const LAST_TOKEN: &str = "last_token";
    /// i32 \[1\]: the largest position of the sequences, where rotations depend on it.
    pub const LARGEST_POSITION: &str = "largest_position";
    /// f32 [B, 1, 5]: how the token that follows each row is drawn, as the operation `sample_token` reads it.
    pub const SAMPLING: &str = "sampling";
    /// f32 [B, 1]: the factor of the logits of each row before the log-probability of its next token, where that is computed
    /// as the loss computes it.
    pub const LOGIT_FACTORS: &str = "logit_factors";
    /// A result, i32 [B, 1]: the token that follows each row.
    pub const NEXT_TOKEN: &str = "next_token";
    /// A result, f32 [B, 1]: the log-probability of that token among all.
    pub const NEXT_LOGP: &str = "next_logp";
}

/// The name of a micro-step that ends its step on several ranks: they exchange the gradients while it computes them.
/// Where every micro-step exchanges its own, there is no entry of this name.
pub const LAST: &str = "last";

/// The name of an update whose sums between nodes are compressed, where the first steps of a run have another one:
/// after the warm-up of 1-bit Adam. Elsewhere there is no entry of this name.
pub const COMPRESSED: &str = "compressed";

/// One entry point: a flat list of instructions.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub kind: EntryKind,
    /// A name that distinguishes it from others of its kind; empty for the usual one.
    pub name: String,
    /// `None` where there is no batch: the update, the preparation.
    pub variant: Option<Variant>,
    pub steps: Vec<Step>,
    /// Tensors of the batch by name.
    pub inputs: Vec<(String, TensorRef)>,
    /// Results by name; valid until another entry runs.
    pub outputs: Vec<(String, TensorRef)>,
    /// The stage of a pipeline that runs it, and the tensors that it passes on.
    pub stage: Stage,
}

/// A tensor whose contents the compiler computed.
#[derive(Clone, Debug, PartialEq)]
pub struct Constant {
    pub at: TensorRef,
    pub value: HostTensor,
}

/// A compiled step for one machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    pub name: String,
    /// The machine of every rank.
    pub machine: Machine,
    pub cluster: Cluster,
    pub arenas: Vec<Arena>,
    /// The state that lives from step to step.
    pub layout: Layout,
    pub constants: Vec<Constant>,
    /// Step scalars by name, one element each.
    pub scalars: Vec<(String, TensorRef)>,
    pub kernels: Vec<Kernel>,
    pub entries: Vec<Entry>,
    /// The memory plan, line by line; the sum is what the run will use.
    pub memory: Vec<MemoryLine>,
    /// The contents of the activation arena at its fullest; the sum is the arena.
    pub activations: Vec<MemoryLine<&'static str>>,
    /// Most bytes of the activation arena in use, by phase.
    pub phases: Vec<MemoryLine<&'static str>>,
    /// The decisions about memory, with their reasons.
    pub plan: Vec<PlanDecision>,
    /// Key of the run's random numbers.
    pub seed: u64,
}

impl Program {
    /// The usual entry of a kind, for a variant where the kind has one.
    pub fn entry(&self, kind: EntryKind, variant: Option<Variant>) -> Option<usize> {
        self.named(kind, "", variant)
    }

    /// The usual micro-step that begins a step, ends it, both or neither.
    pub fn micro_step(&self, first: bool, last: bool, variant: Option<Variant>) -> Option<usize> {
        let kind = if first { EntryKind::FirstMicroStep } else { EntryKind::NextMicroStep };
        let ending = self.named(kind, LAST, variant).filter(|_| last);
        ending.or_else(|| self.entry(kind, variant))
    }

    /// Returns the update; after a warm-up that with compressed sums, where there is one.
    pub fn update(&self, warm: bool) -> Option<usize> {
        let compressed = self.named(EntryKind::Update, COMPRESSED, None).filter(|_| warm);
        compressed.or_else(|| self.entry(EntryKind::Update, None))
    }

    /// The entry of a kind and a name.
    pub fn named(&self, kind: EntryKind, name: &str, variant: Option<Variant>) -> Option<usize> {
        let is_it = |e: &Entry| e.kind == kind && e.name == name && (variant.is_none() || e.variant == variant);
        self.entries.iter().position(is_it)
    }

    /// Returns the entry that computes states from parameters that stay, or from those of a group that stay no longer.
    pub fn preparation(&self, group: Option<u32>) -> Option<usize> {
        let name = group.map(|number| number.to_string()).unwrap_or_default();
        self.named(EntryKind::Prepare, &name, None)
    }

    pub fn scalar(&self, name: &str) -> Option<&TensorRef> {
        self.scalars.iter().find(|(n, _)| n == name).map(|(_, at)| at)
    }

    pub fn parameter(&self, name: &str) -> Option<&ParameterSlot> {
        self.layout.parameter(name)
    }

    pub fn arena(&self, kind: ArenaKind) -> Option<ArenaId> {
        self.arenas.iter().position(|a| a.kind == kind).map(|i| ArenaId(i as u32))
    }

    /// True if the state that lives from step to step is at the same places: then entries of the other may run on it.
    pub fn has_layout_of(&self, other: &Program) -> bool {
        let persistent = |program: &Program| {
            let arenas = program.arenas.iter().enumerate().filter(|(_, of)| of.kind.is_persistent() && of.bytes > 0);
            arenas.map(|(index, arena)| (index, arena.clone())).collect::<Vec<_>>()
        };
        self.cluster == other.cluster
            && self.layout == other.layout
            && self.scalars == other.scalars
            && persistent(self) == persistent(other)
    }

    /// Bytes of all arenas together.
    pub fn arena_bytes(&self) -> usize {
        self.arenas.iter().map(|a| a.bytes).sum()
    }

    /// The contents of host memory, line by line: no part of [`Program::memory`], which is the device's.
    pub fn host_memory(&self) -> Vec<MemoryLine> {
        let on_host = self.arenas.iter().filter(|arena| arena.is_on_host() && arena.bytes > 0);
        let line = |arena: &Arena| {
            let write_combined = arena.place == MemorySpace::Host { write_combined: true };
            let note = if write_combined { "page-locked, write-combined" } else { "page-locked" };
            MemoryLine { class: MemoryClass::Arena(arena.kind), bytes: arena.bytes, note }
        };
        on_host.map(line).collect()
    }
}
