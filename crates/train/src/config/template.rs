//! Options of chat templates and of turning conversations into tokens.

use std::collections::BTreeMap;

use options::{Fault, Kind, Node, OptionValue, Reader, Setting, Tree, choices, options};
use serde_json::{Value, json};

options! {
    /// Formatting and tokenization of conversations.
    pub struct ChatTemplate: "Chat template" {
        /// Format conversations and instructions with the model's chat template.
        use_chat_template: bool = true;
        /// Chat template: the name of a model family or format, or a file `*.jinja`. `auto` is the model's own
        /// template; the name of the model's own family means the same if it has one.
        template: Setting<String> = auto, path;
        /// System prompt that replaces the template's own.
        system: Option<String> = null;
        /// Maximum tokens of a conversation. Null is `sequence_len`.
        max_length: Option<u32> = null, min = 1;
        /// Treatment of conversations longer than `max_length`.
        truncation_strategy: Truncation = "delete";
        /// Part of a preference that is kept if a prompt with an answer has more than `max_length` tokens. Reward
        /// models drop such rows.
        truncation_mode: TruncationMode = "keep_start";
        /// Current time for templates that print a date, as `2026-11-20` or `2026-11-20T12:00:00`. `auto` is the start
        /// of the run.
        clock: Setting<Clock> = auto;
        /// Side on which rows are padded.
        padding_side: Side = "right";
        /// Concatenate the documents of a micro-batch into one row without padding between them. Only without
        /// `sample_packing`, which has no padding either.
        padding_free: bool = false;
        /// Weights of tokens in the loss: a rule, or a mapping of roles or patterns to weights.
        loss_scale: LossScale = "default";
        /// Sequence parallelism: this many GPUs share one micro-batch, each with an equal part of its tokens and of the
        /// attention heads. A divisor of `gpus` and of the numbers of heads. Divides the number of rows in a step.
        sequence_parallel_size: u32 = 1, min = 1, resumable;
        /// Text between the generation prompt and the answer. It is not trained.
        response_prefix: Option<String> = null;
        /// Images: largest area in pixels, in place of that of the model's processor. Only for models whose processor goes by
        /// areas (Qwen).
        max_pixels: Option<u64> = null, min = 1;
        /// Images: smallest area in pixels, as `max_pixels`.
        min_pixels: Option<u64> = null, min = 1;
        /// Images: numbers of the boxes that the column `objects` brings. Unset: those of the model's family, which are pixels for
        /// Qwen2.5-VL and thousandths for others.
        norm_bbox: Option<NormBbox> = null;
        /// Format of tools and tool calls if the model's template does not support them: `hermes` or `react`.
        agent_template: Option<String> = null;
    }
}

choices! {
    /// Treatment of conversations longer than allowed.
    pub enum Truncation {
        /// Drop them.
        Delete = "delete",
        /// Cut the beginning, but keep the system prompt.
        Left = "left",
        /// Cut the end.
        Right = "right",
        /// Split into several rows.
        Split = "split",
    }
}

choices! {
    /// Part that is kept of a prompt with an answer.
    pub enum TruncationMode {
        /// Its beginning. A row whose prompt alone is too long is dropped.
        KeepStart = "keep_start",
        /// Its end, be it without the whole prompt.
        KeepEnd = "keep_end",
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
    /// Numbers of bounding boxes.
    pub enum NormBbox {
        /// Thousandths of the sides of the image.
        Norm1000 = "norm1000",
        /// Pixels of the image as the model reads it.
        None = "none",
    }
}

/// A point in time, as `2026-11-20` or `2026-11-20T12:00:00`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Clock(pub String);

impl Clock {
    /// Reads a moment; None if the signs or the ranges of its parts are not those of one.
    pub fn parse(text: &str) -> Option<Clock> {
        let shape = "0000-00-00T00:00:00";
        let is_shaped = (text.len() == 10 || text.len() == shape.len())
            && text
                .chars()
                .zip(shape.chars())
                .all(|(c, sign)| if sign == '0' { c.is_ascii_digit() } else { c == sign });
        let part = |at: usize| text.get(at..at + 2).map_or(0, |digits| digits.parse::<u32>().unwrap_or(u32::MAX));
        let is_moment = || {
            let leap = text[..4].parse::<u32>().is_ok_and(|y| (y % 4 == 0 && y % 100 != 0) || y % 400 == 0);
            let days = match part(5) {
                2 => 28 + u32::from(leap),
                4 | 6 | 9 | 11 => 30,
                1..=12 => 31,
                _ => 0,
            };
            (1..=days).contains(&part(8)) && part(11) < 24 && part(14) < 60 && part(17) < 60
        };
        (is_shaped && is_moment()).then(|| Clock(text.to_string()))
    }
}

impl OptionValue for Clock {
    const KIND: Kind = Kind::Form("a moment such as `2026-11-20` or `2026-11-20T12:00:00`");

    fn read(node: &Node, _: &mut Reader) -> Result<Self, Fault> {
        Clock::parse(node.word()?).ok_or(Fault::MISMATCH)
    }

    fn write(&self) -> Value {
        json!(self.0)
    }

    fn placeholder() -> Self {
        Clock(String::new())
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

/// True if a template is given as a file and not by name.
pub fn is_template_file(template: &str) -> bool {
    template.ends_with(".jinja") || template.ends_with(".jinja2")
}

/// The rule for the trained parts of conversations. Errors: the name of a weight, and what is wrong with it.
pub fn loss_rule(of: &LossScale) -> std::result::Result<data::LossRule, (String, String)> {
    Ok(match of {
        LossScale::Default => data::LossRule::Answers,
        LossScale::LastRound => data::LossRule::LastRound,
        LossScale::All => data::LossRule::Everything,
        LossScale::Weights(weights) => {
            return data::LossRule::by_name(weights.iter().map(|(name, weight)| (name.as_str(), *weight)));
        }
    })
}
