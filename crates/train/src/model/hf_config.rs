//! A model's configuration as Hugging Face writes it, `config.json`: the only file that knows its keys, in the spellings of
//! transformers 4 and 5 and of older architectures. Knows neither options nor what a value computes.

use std::path::Path;

use serde_json::{Map, Value, json};
use tensor::DType;

use crate::error::{Result, TrainError};

/// The name of the file.
pub const FILE: &str = "config.json";

/// The field in which models of several parts keep the fields of their language model.
const TEXT: &str = "text_config";

const POSITIONS: &str = "max_position_embeddings";
const ORIGINAL_POSITIONS: &str = "original_max_position_embeddings";
const THETA: &str = "rope_theta";

/// The fields of rotary scaling in transformers 4 and 5.
const SCALING: [&str; 2] = ["rope_scaling", "rope_parameters"];

/// The fields of the element type in transformers 5 and 4.
const DTYPE: [&str; 2] = ["dtype", "torch_dtype"];

/// The tokens that end answers: one or a list.
const END: &str = "eos_token_id";

/// Returns true if the head is the embedding.
const TIE: &str = "tie_word_embeddings";

/// The end of the names of architectures that give scores in the place of logits.
const CLASSIFIER: &str = "ForSequenceClassification";

/// The fields that describe quantized weights.
const QUANTISED: [&str; 2] = ["quantization_config", "compression_config"];

/// The content of `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct HfConfig(pub Value);

impl HfConfig {
    /// Reads the configuration of a model's folder.
    pub fn read(folder: &Path) -> Result<HfConfig> {
        let path = folder.join(FILE);
        let text = data::small_file::read_text(&path).map_err(|e| TrainError::io("read", &path, e))?;
        let value = serde_json::from_str(&text)
            .map_err(|e| TrainError::Usage(format!("{}: this is not valid JSON: {e}", path.display())))?;
        Ok(HfConfig(value))
    }

    /// The fields of the language model.
    fn text(&self) -> &Value {
        self.0.get(TEXT).filter(|part| part.is_object()).unwrap_or(&self.0)
    }

    fn size(&self, name: &str) -> Option<usize> {
        self.text().get(name).and_then(Value::as_u64).map(|n| n as usize)
    }

    /// The first of the sizes by which models of an architecture differ that another has otherwise: its name, and both.
    pub fn other_size(&self, other: &HfConfig) -> Option<(&'static str, [usize; 2])> {
        let sizes = ["hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size"];
        let both = |name: &'static str| Some((name, [self.size(name)?, other.size(name)?]));
        sizes.into_iter().filter_map(both).find(|(_, [its, ours])| its != ours)
    }

    /// Rows of the embedding table.
    pub fn vocab_size(&self) -> Option<usize> {
        self.size("vocab_size")
    }

    pub fn model_type(&self) -> &str {
        self.0.get("model_type").and_then(Value::as_str).unwrap_or_default()
    }

    /// Positions that the model was made for.
    pub fn max_positions(&self) -> Option<usize> {
        self.size(POSITIONS)
    }

    /// The element type that the weights were saved in.
    pub fn dtype(&self) -> Option<DType> {
        let name = DTYPE.iter().find_map(|key| self.0.get(key).or_else(|| self.text().get(key)));
        name.and_then(Value::as_str).and_then(|name| name.parse().ok())
    }

    /// The configuration of a reward model over the same layers: one score in the place of logits, as transformers'
    /// `AutoModelForSequenceClassification` reads it. The last token before padding is scored, so that there is a padding
    /// token.
    pub fn as_reward_model(&self) -> HfConfig {
        let mut fields = self.0.clone();
        let name = fields["architectures"][0].as_str().unwrap_or_default().to_owned();
        let stem = ["ForCausalLM", "LMHeadModel"].iter().find_map(|end| name.strip_suffix(end));
        if let Some(stem) = stem {
            fields["architectures"] = json!([format!("{stem}{CLASSIFIER}")]);
        }
        fields["id2label"] = json!({"0": "LABEL_0"});
        fields["label2id"] = json!({"LABEL_0": 0});
        if fields["pad_token_id"].is_null() {
            let end = &fields["eos_token_id"];
            fields["pad_token_id"] = end.get(0).unwrap_or(end).clone();
        }
        HfConfig(fields)
    }

    /// True for a model that gives scores in the place of logits.
    pub fn is_classifier(&self) -> bool {
        self.0["architectures"][0].as_str().is_some_and(|name| name.ends_with(CLASSIFIER))
    }

    /// The same with another element type of the weights, under the key that is there, and plain weights.
    pub fn with_dtype(&self, dtype: DType) -> HfConfig {
        let mut changed = self.clone();
        if let Some(fields) = changed.0.as_object_mut() {
            QUANTISED.iter().for_each(|key| drop(fields.remove(*key)));
        }
        let name = match dtype {
            DType::BF16 => "bfloat16",
            DType::F16 => "float16",
            DType::F32 | DType::F64 | DType::I64 | DType::I32 | DType::U8 | DType::E4M3 | DType::E5M2 => "float32",
        };
        let [new, old] = DTYPE;
        changed.0[if self.0.get(old).is_some() { old } else { new }] = json!(name);
        for key in DTYPE {
            if let Some(inner) = changed.0.get_mut(TEXT).and_then(|part| part.get_mut(key)) {
                *inner = json!(name);
            }
        }
        changed
    }

    /// The same without the tokens that end answers.
    pub fn without_end_tokens(&self) -> HfConfig {
        let mut changed = self.clone();
        if let Some(part) = changed.0.get_mut(TEXT).and_then(Value::as_object_mut) {
            part.remove(END);
        }
        if let Some(fields) = changed.0.as_object_mut() {
            fields.remove(END);
        }
        changed
    }

    /// The same with another token that ends answers, in the place of one, before those of a list.
    pub fn with_end_token(&self, id: u32) -> HfConfig {
        let mut changed = self.clone();
        let name = |fields: &mut Value| match fields.get_mut(END) {
            Some(Value::Array(known)) => known.insert(0, json!(id)),
            _ => fields[END] = json!(id),
        };
        match changed.0.get_mut(TEXT).filter(|part| part.get(END).is_some()) {
            Some(part) => name(part),
            None => name(&mut changed.0),
        }
        if self.0.get(END).is_some() && self.0.get(TEXT).is_some_and(|part| part.get(END).is_some()) {
            name(&mut changed.0);
        }
        changed
    }

    /// True if the fields say that the head is not the embedding.
    pub fn is_untied(&self) -> bool {
        self.0.get(TIE).or_else(|| self.text().get(TIE)) == Some(&Value::Bool(false))
    }

    /// The same with a head of its own, which the files have although the fields say that it is the embedding.
    pub fn untied(&self) -> HfConfig {
        let mut changed = self.clone();
        if let Some(part) = changed.0.get_mut(TEXT).filter(|part| part.get(TIE).is_some()) {
            part[TIE] = json!(false);
        }
        changed.0[TIE] = json!(false);
        changed
    }

    /// The same with another number of rows of the embedding table, and of a table for the layers that has as many.
    pub fn with_vocab_size(&self, rows: usize) -> HfConfig {
        const OF_LAYERS: &str = "vocab_size_per_layer_input";
        let mut changed = self.clone();
        let is_part = self.0.get(TEXT).is_some_and(Value::is_object);
        let fields = if is_part { &mut changed.0[TEXT] } else { &mut changed.0 };
        if fields.get(OF_LAYERS).is_some_and(|of| Some(of) == fields.get("vocab_size")) {
            fields[OF_LAYERS] = json!(rows);
        }
        fields["vocab_size"] = json!(rows);
        if changed.0.get("vocab_size").is_some() {
            changed.0["vocab_size"] = json!(rows);
        }
        changed
    }

    /// True if the language model has a field.
    pub fn has(&self, name: &str) -> bool {
        self.text().get(name).is_some_and(|value| !value.is_null())
    }

    /// The same with another value of a field of the language model.
    pub fn with(&self, name: &str, value: Value) -> HfConfig {
        let mut changed = self.clone();
        let is_part = self.0.get(TEXT).is_some_and(Value::is_object);
        let fields = if is_part { &mut changed.0[TEXT] } else { &mut changed.0 };
        fields[name] = value;
        changed
    }

    /// The same with some of its layers: lists with a value for each layer keep those.
    pub fn with_layers(&self, count: usize, kept: &[usize]) -> HfConfig {
        let mut changed = self.clone();
        let is_part = self.0.get(TEXT).is_some_and(Value::is_object);
        let fields = if is_part { &mut changed.0[TEXT] } else { &mut changed.0 };
        let lists = fields.as_object_mut().into_iter().flat_map(|fields| fields.iter_mut());
        for (_, value) in lists.filter(|(name, _)| name.contains("layer")) {
            let Some(list) = value.as_array_mut().filter(|list| list.len() == count) else { continue };
            *list = kept.iter().map(|index| list[*index].clone()).collect();
        }
        changed
    }

    /// The same with another coefficient of the loss of uneven loads of experts; 0 is none.
    pub fn with_router_loss(&self, coefficient: f64) -> HfConfig {
        let mut changed = self.clone();
        let is_part = self.0.get(TEXT).is_some_and(Value::is_object);
        let fields = if is_part { &mut changed.0[TEXT] } else { &mut changed.0 };
        fields["output_router_logits"] = json!(coefficient > 0.0);
        if coefficient > 0.0 {
            fields["router_aux_loss_coef"] = json!(coefficient);
        }
        changed
    }

    /// The same with another scaling of rotary positions, under the key that is there. The base of the frequencies stays.
    pub fn with_scaling(&self, mut scaling: Map<String, Value>) -> HfConfig {
        let mut changed = self.clone();
        let [old, new] = SCALING;
        if let Some(part) = self.0.get(TEXT).filter(|part| part.is_object()) {
            changed.0[TEXT] = HfConfig(part.clone()).with_scaling(scaling).0;
            return changed;
        }
        if let Some(parameters) = self.0.get(new).filter(|value| value.is_object()) {
            if let Some(theta) = parameters.get(THETA) {
                scaling.entry(THETA).or_insert(theta.clone());
            }
            changed.0[new] = Value::Object(scaling);
            changed.0.as_object_mut().and_then(|fields| fields.remove(old));
        } else {
            changed.0[old] = Value::Object(scaling);
        }
        changed
    }

    /// True if layers of several kinds have a rotation each.
    pub fn rotates_by_kind(&self) -> bool {
        let parameters = SCALING.iter().filter_map(|key| self.text().get(key)?.as_object());
        parameters.into_iter().any(|of| of.values().any(Value::is_object))
    }

    /// A rotary scaling of the trained positions by `factor`.
    pub fn scaling(method: &str, factor: f64, positions: usize) -> Map<String, Value> {
        let mut scaling = Map::new();
        scaling.insert("rope_type".into(), json!(method));
        scaling.insert("factor".into(), json!(factor));
        if method == "yarn" {
            scaling.insert(ORIGINAL_POSITIONS.into(), json!(positions));
        }
        scaling
    }

    /// The longest row whose positions are rotated by the first of two tables, where longer ones have the second.
    pub fn turning(&self) -> Option<usize> {
        let (kind, original) = self.original_positions()?;
        (kind == "longrope").then_some(original)?
    }

    /// The longest row that is rotated as shorter ones are, where the rotation follows from the longest row of a batch.
    pub fn shares_rotation_to(&self) -> Option<usize> {
        let (kind, original) = self.original_positions()?;
        ["longrope", "dynamic"].contains(&kind).then(|| original.or(self.max_positions()))?
    }

    /// The kind of the scaling, and the positions before it.
    fn original_positions(&self) -> Option<(&str, Option<usize>)> {
        let scaling = SCALING.iter().rev().find_map(|key| self.text().get(key).filter(|value| value.is_object()))?;
        let kind = scaling.get("rope_type").or_else(|| scaling.get("type")).and_then(Value::as_str)?;
        let of_scaling = scaling.get(ORIGINAL_POSITIONS).and_then(Value::as_u64).map(|n| n as usize);
        Some((kind, of_scaling.or_else(|| self.size(ORIGINAL_POSITIONS))))
    }

    /// The longest row that the configuration allows: its positions, or those to which it stretches them.
    pub fn stretched_positions(&self) -> Option<usize> {
        let own = self.max_positions()? as f64;
        let [old, new] = SCALING.map(|key| self.text().get(key));
        let scaling = new.filter(|value| value.is_object()).or(old);
        let number = |name: &str| scaling.and_then(|s| s.get(name)).and_then(Value::as_f64);
        let kind = scaling.and_then(|s| s.get("rope_type").or_else(|| s.get("type"))).and_then(Value::as_str);
        let factor = number("factor").unwrap_or(1.0);
        let stretched = match kind {
            Some("linear" | "dynamic") => own * factor,
            Some("yarn" | "llama3" | "longrope") => number(ORIGINAL_POSITIONS).unwrap_or(own) * factor,
            _ => own,
        };
        Some(stretched.max(own).floor() as usize)
    }
}
