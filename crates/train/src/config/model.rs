//! Options of the model: which one, how long its sequences are, where its weights come from.

use super::dtype::Dtype;
use options::{Fault, Kind, Node, OptionValue, Reader, Setting, Tree, choices, options};
use serde_json::{Map, Value};

options! {
    /// The model to train.
    pub struct Model: "Model" {
        /// Folder of a Hugging Face model, or its name on the hub such as `Qwen/Qwen3-0.6B`. Also spelled `model_name`.
        model: String = required;
        /// Family of the model. `auto` reads it from the model's own configuration; a name given here is checked
        /// against that.
        model_type: Setting<String> = auto;
        /// Tokens of a training row. `auto` is `max_model_len` if given, else as many as the longest document of the data
        /// needs: a power of two from 2048 to 8192, and no more than the model has positions for.
        sequence_len: Setting<u32> = auto, min = 1;
        /// Longest sequence of the model. `auto` reads it from the model's own configuration.
        max_model_len: Setting<u32> = auto, min = 1;
        /// How rotary positions are stretched: the name of a method (together with `max_model_len`), or a mapping as
        /// in the model's own configuration, which it replaces.
        rope_scaling: Option<RopeScaling> = null;
        /// Element type of the weights in training. `auto` takes the model's own.
        torch_dtype: Setting<Dtype> = auto, pending_words = &["float16"];
        /// Where the first weights come from.
        init: Init = "pretrained";
        /// Begin with down and output projections at zero. Needs `init: random`.
        init_projections_to_zero: bool = false;
    }
}

choices! {
    /// Where the first weights come from.
    pub enum Init {
        /// Read from the model's folder.
        Pretrained = "pretrained",
        /// Drawn from the seed; a folder with only `config.json` is enough.
        Random = "random",
    }
}

choices! {
    /// A method of stretching rotary positions that needs no further numbers.
    pub enum RopeMethod {
        /// All positions divided by one factor.
        Linear = "linear",
        /// The base grows with the longest position of the batch.
        Dynamic = "dynamic",
        /// Slow frequencies are stretched, fast ones kept.
        Yarn = "yarn",
    }
}

/// The stretching of rotary positions.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// By name; the factor follows from `max_model_len`.
    Method(RopeMethod),
    /// The `rope_scaling` object of a Hugging Face configuration.
    Fields(Map<String, Value>),
}

impl OptionValue for RopeScaling {
    const KIND: Kind = Kind::Either(&[RopeMethod::KIND, Kind::Map(&Kind::Text)]);

    fn read(node: &Node, reader: &mut Reader) -> Result<Self, Fault> {
        let json = match &node.tree {
            Tree::Scalar { text, .. } if text.trim_start().starts_with('{') => serde_json::from_str(text)
                .map_err(|error| Fault::Mismatch { hint: Some(format!("the JSON in it is broken: {error}")) })?,
            Tree::Map(_) => node.to_json(),
            _ => return RopeMethod::read(node, reader).map(RopeScaling::Method),
        };
        match json {
            Value::Object(fields) => Ok(RopeScaling::Fields(fields)),
            _ => Err(Fault::MISMATCH),
        }
    }

    fn write(&self) -> Value {
        match self {
            RopeScaling::Method(method) => method.write(),
            RopeScaling::Fields(fields) => Value::Object(fields.clone()),
        }
    }

    fn placeholder() -> Self {
        RopeScaling::Method(RopeMethod::Linear)
    }
}
