//! The compiler's decisions about memory, as values: subject, choice and reason. Knows neither the words shown to
//! people, nor the options that request it, nor how a decision is carried out.

use tensor::DType;

use crate::instruction::Layer;
use crate::variant::{EntryKind, Variant};

/// A part of a layer whose results are kept for the backward pass or recomputed in it. In the order in which a plan
/// reaches for them: bytes freed for the time that they cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LayerPart {
    /// Norms of the residual stream.
    Norms,
    /// Element-wise work of the feed-forward part.
    Activation,
    /// Norms of heads and rotation.
    Rotation,
    /// Products of the feed-forward part.
    FeedForward,
    /// Projections to queries, keys and values.
    Projections,
    /// The attention itself and what follows it inside its region.
    Attention,
    /// Everything else of the layer: sums of the residual stream.
    Residual,
}

impl LayerPart {
    pub const ALL: [LayerPart; 7] = [
        LayerPart::Norms,
        LayerPart::Activation,
        LayerPart::Rotation,
        LayerPart::FeedForward,
        LayerPart::Projections,
        LayerPart::Attention,
        LayerPart::Residual,
    ];
}

/// The subject of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Subject {
    Layer(LayerPart),
    /// The inputs of the layers: everything else of a layer can be recomputed from them.
    ResidualStream,
    /// Logits, loss, and the gradients of both.
    OutputHead,
    AttentionBackward,
    OptimizerStates,
    /// f32 master copies of weights.
    MasterCopies,
    Gradients,
    /// Frozen weights that are kept quantized.
    FrozenCodes,
    /// Tensors that are sharded over the ranks.
    Sharding,
    /// The ranks over which sharded tensors are divided.
    Scope,
    /// Gradients in transfer between the ranks.
    Exchange,
}

impl Subject {
    /// The subject's name for scripts.
    pub const fn name(self) -> &'static str {
        match self {
            Subject::Layer(LayerPart::Norms) => "norms",
            Subject::Layer(LayerPart::Activation) => "activation",
            Subject::Layer(LayerPart::Rotation) => "rotation",
            Subject::Layer(LayerPart::FeedForward) => "feed_forward",
            Subject::Layer(LayerPart::Projections) => "projections",
            Subject::Layer(LayerPart::Attention) => "attention",
            Subject::Layer(LayerPart::Residual) => "residual",
            Subject::ResidualStream => "residual_stream",
            Subject::OutputHead => "output_head",
            Subject::AttentionBackward => "attention_backward",
            Subject::OptimizerStates => "optimizer_states",
            Subject::MasterCopies => "master_copies",
            Subject::Gradients => "gradients",
            Subject::FrozenCodes => "frozen_codes",
            Subject::Sharding => "sharding",
            Subject::Scope => "scope",
            Subject::Exchange => "exchange",
        }
    }
}

/// The question that was decided, and the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Choice {
    /// Recomputed in the backward pass, or kept.
    Recompute(bool),
    /// In host memory, or on the device.
    Offload(bool),
    /// Done in this number of parts; 1: whole.
    Chunks(usize),
    /// ZeRO level: 1 optimizer states, 2 gradients, too, 3 weights, too.
    Level(usize),
    /// By the ranks of all nodes, or by those of each.
    AllNodes(bool),
    /// Rounded to this type before it is stored or sent.
    Rounded(DType),
    /// Compressed between nodes, to the format of this name.
    Compressed(&'static str),
}

impl Choice {
    /// True if the choice saves memory at a cost.
    pub const fn saves(self) -> bool {
        match self {
            Choice::Recompute(yes) | Choice::Offload(yes) | Choice::AllNodes(yes) => yes,
            Choice::Chunks(parts) => parts > 1,
            Choice::Level(level) => level > 1,
            Choice::Rounded(_) | Choice::Compressed(_) => false,
        }
    }

    /// The question, as scripts read it.
    pub const fn kind(self) -> &'static str {
        match self {
            Choice::Recompute(_) => "recompute",
            Choice::Offload(_) => "offload",
            Choice::Chunks(_) => "chunks",
            Choice::Level(_) => "level",
            Choice::AllNodes(_) => "all_nodes",
            Choice::Rounded(_) => "rounded",
            Choice::Compressed(_) => "compressed",
        }
    }
}

/// The reason for a choice.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The user's options say so.
    Requested,
    /// Nothing cheaper makes the plan fit.
    NeededToFit,
    /// It is needed for the layers up to this one; for the rest it is [`Reason::Negligible`].
    NeededUpTo(Layer),
    /// It costs less than the share of a step that a smaller plan is worth.
    Negligible,
    /// It costs nothing, in time or memory.
    Free,
    /// It fits, and everything else takes longer.
    Fastest,
    /// Everything that is recomputed is computed from it.
    RecomputeSource,
    /// The link takes less time than recomputing what would else have to be recomputed.
    FasterThanRecompute,
    /// There is no other way.
    Impossible(Obstacle),
}

impl Reason {
    /// True if the plan would not fit without the choice.
    pub const fn is_need(&self) -> bool {
        match self {
            Reason::NeededToFit | Reason::NeededUpTo(_) => true,
            Reason::Requested
            | Reason::Negligible
            | Reason::Free
            | Reason::Fastest
            | Reason::RecomputeSource
            | Reason::FasterThanRecompute
            | Reason::Impossible(_) => false,
        }
    }

    /// The reason's name for scripts.
    pub const fn name(&self) -> &'static str {
        match self {
            Reason::Requested => "requested",
            Reason::NeededToFit | Reason::NeededUpTo(_) => "needed_to_fit",
            Reason::Negligible => "negligible",
            Reason::Free => "free",
            Reason::Fastest => "fastest",
            Reason::RecomputeSource => "recompute_source",
            Reason::FasterThanRecompute => "faster_than_recompute",
            Reason::Impossible(_) => "impossible",
        }
    }
}

/// The obstacle to the other choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Obstacle {
    /// Something other than the loss reads the logits as a whole.
    LogitsAreRead,
    /// There is one row only.
    Indivisible,
}

impl Obstacle {
    /// The obstacle's name for scripts.
    pub const fn name(self) -> &'static str {
        match self {
            Obstacle::LogitsAreRead => "logits_are_read",
            Obstacle::Indivisible => "indivisible",
        }
    }
}

/// One decision of the plan, with its reason.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanDecision {
    /// The entry and the shape of its batches that the decision is for.
    pub entry: EntryKind,
    pub variant: Variant,
    pub subject: Subject,
    /// Layers in order; empty for a subject outside of the layers.
    pub layers: Vec<Layer>,
    pub choice: Choice,
    pub reason: Reason,
    /// Bytes that are kept for the backward pass or, where they are recomputed or offloaded, need not be.
    pub bytes: usize,
    /// Expected seconds of giving them up.
    pub seconds: f64,
}
