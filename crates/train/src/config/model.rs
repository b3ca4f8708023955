//! Options of the model: which one, how long its sequences are, where its weights come from.

use options::{Fault, Kind, Node, OptionValue, Reader, Setting, Tree, choices, options};
use serde_json::{Map, Value};

use super::dtype::Dtype;

options! {
    /// The model to train.
    pub struct Model: "Model" {
        /// Folder of a Hugging Face model, or its name on the Hub such as `Qwen/Qwen3-0.6B`. Also spelled `model_name`.
        model: String = required, path;
        /// Model family. `auto` reads it from the model's configuration; an explicit name is checked against that.
        model_type: Setting<String> = auto;
        /// Tokens per training row. `auto` is `max_model_len` if that is set, else enough for the longest document: a
        /// power of two from 2048 to 8192, and no more than the model has positions for.
        sequence_len: Setting<u32> = auto, min = 1;
        /// Maximum sequence length of the model. `auto` reads it from the model's configuration.
        max_model_len: Setting<u32> = auto, min = 1;
        /// RoPE scaling for longer contexts: the name of a method (together with `max_model_len`), or a mapping as in
        /// the model's configuration, which it replaces.
        rope_scaling: Option<RopeScaling> = null;
        /// Coefficient of the load-balancing loss of a mixture of experts. `auto` is that of the model, if its
        /// configuration has `output_router_logits: true`; 0 disables it.
        router_aux_loss_coef: Setting<f64> = auto, min = 0;
        /// Special tokens to add to the model before training, such as `<|note|>`: tokenizer, embedding and head grow
        /// as with `surogate extend`. The extended model is stored in the cache; an adapter names the model itself and
        /// carries the new rows. With `lora: true`, `modules_to_save` must name the embedding, and the LM head where that is
        /// another table: their new rows would otherwise not be trained.
        new_tokens: Vec<String> = [];
        /// Element type of the weights in training. `auto` is that of the model, and bfloat16 for a model that was
        /// saved in float16. With float16, the loss is scaled dynamically and master weights are float32.
        torch_dtype: Setting<Dtype> = auto;
        /// Source of the initial weights.
        init: Init = "pretrained";
        /// Initialize down and output projections to zero. Needs `init: random`.
        init_projections_to_zero: bool = false;
    }
}

choices! {
    /// Source of the initial weights.
    pub enum Init {
        /// Load from the model's folder.
        Pretrained = "pretrained",
        /// Initialize from the seed; a folder with only `config.json` is enough.
        Random = "random",
    }
}

choices! {
    /// A method of RoPE scaling that needs no further parameters.
    pub enum RopeMethod {
        /// Divide all positions by one factor.
        Linear = "linear",
        /// Increase the base with the longest position of the batch.
        Dynamic = "dynamic",
        /// Scale low frequencies, keep high ones.
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
