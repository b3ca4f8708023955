//! Options of chat templates and of turning conversations into tokens.

use options::{Fault, Kind, Node, OptionValue, Reader, Setting, Tree, choices, options};
use serde_json::{Value, json};
use std::collections::BTreeMap;

options! {
    /// How conversations become tokens.
    pub struct ChatTemplate: "Chat template" {
        /// Write conversations and instructions with the model's chat template.
        use_chat_template: bool = true;
        /// Template by the name of its family. `auto` is the model's own.
        template: Setting<String> = auto, pending;
        /// System prompt in place of the template's own.
        system: Option<String> = null;
        /// Most tokens of a conversation. Null is `sequence_len`.
        max_length: Option<u32> = null, min = 1;
        /// What happens to a conversation that is longer.
        truncation_strategy: Truncation = "delete";
        /// The side of a row that is filled up.
        padding_side: Side = "right", pending;
        /// Rows of their real length, without filling up.
        padding_free: bool = false, pending;
        /// Weights of the trained tokens: a rule, or a mapping of roles or patterns to weights.
        loss_scale: LossScale = "default", pending;
        /// GPUs that share one sequence.
        sequence_parallel_size: u32 = 1, min = 1, pending;
        /// Text between the generation prompt and the answer. It is not trained.
        response_prefix: Option<String> = null, pending;
        /// Images: most pixels of one. Only for models that see.
        max_pixels: Option<u64> = null, min = 1, pending;
        /// Images: how coordinates of boxes are written. Only for models that see.
        norm_bbox: Option<NormBbox> = null, pending;
        /// How tools and their calls are written where the model's template has no place for them.
        agent_template: Option<String> = null, pending;
    }
}

choices! {
    /// What happens to a conversation that is longer than allowed.
    pub enum Truncation {
        /// Left out.
        Delete = "delete",
        /// Loses its beginning, but for the system prompt.
        Left = "left",
        /// Loses its end.
        Right = "right",
        /// Becomes several rows.
        Split = "split",
    }
}

choices! {
    /// A side of a row.
    pub enum Side {
        /// Before the first token.
        Left = "left",
        /// After the last token.
        Right = "right",
    }
}

choices! {
    /// How coordinates of boxes are written.
    pub enum NormBbox {
        /// As thousandths of the image.
        Norm1000 = "norm1000",
        /// As in the data.
        None = "none",
    }
}

/// Weights of trained tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum LossScale {
    /// Every answer of the assistant, weight 1.
    Default,
    /// Only the last answer.
    LastRound,
    /// Prompts too.
    All,
    /// Weights by role or pattern.
    Weights(BTreeMap<String, f64>),
}

choices! {
    /// The rules of [`LossScale`] that have a name.
    enum LossRule {
        /// Every answer of the assistant.
        Default = "default",
        /// Only the last answer.
        LastRound = "last_round",
        /// Prompts too.
        All = "all",
    }
}

impl OptionValue for LossScale {
    const KIND: Kind = Kind::Either(&[LossRule::KIND, Kind::Map(&Kind::Number)]);

    fn read(node: &Node, reader: &mut Reader) -> Result<Self, Fault> {
        if let Tree::Map(_) = node.tree {
            return BTreeMap::read(node, reader).map(LossScale::Weights);
        }
        Ok(match LossRule::read(node, reader)? {
            LossRule::Default => LossScale::Default,
            LossRule::LastRound => LossScale::LastRound,
            LossRule::All => LossScale::All,
        })
    }

    fn write(&self) -> Value {
        match self {
            LossScale::Default => json!("default"),
            LossScale::LastRound => json!("last_round"),
            LossScale::All => json!("all"),
            LossScale::Weights(weights) => weights.write(),
        }
    }

    fn placeholder() -> Self {
        LossScale::Default
    }
}
