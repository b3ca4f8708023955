//! The description of a GGUF file as the caller writes it: metadata, and the source of every tensor.

use data::gguf::GgufValue;
use data::safetensors::Weights;
use serde::Deserialize;
use serde_json::Value;

use super::array::{Array, Step};
use crate::error::{Result, TrainError};

/// The metadata and tensors of a GGUF file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// Key, type (`u32`, `f32`, `bool`, `text`, `texts`, `bools`, `i32s`, `f32s`, `f32s_of`), value. That of `f32s_of` are
    /// names of tensors of the model, whose elements are the numbers.
    pub metadata: Vec<(String, String, Value)>,
    pub tensors: Vec<Source>,
    /// Tensors of the model that the file has no place for, because they repeat others.
    #[serde(default)]
    pub repeated: Vec<String>,
    /// Factors of the rotary frequencies, where they are not the plain ones.
    #[serde(default)]
    pub frequencies: Option<Frequencies>,
    /// Vectors of the file that no tensor of the model is.
    #[serde(default)]
    pub constants: Vec<Constant>,
    /// The graph of the model as JSON: then tensors of the model have the names of its parameters, however its files name
    /// and stack them, and parts that are not computed are left out. Without it they have the names of the files.
    #[serde(default)]
    pub model: Option<String>,
    /// Beginnings of names of the tensors that belong into the file; without them all do.
    #[serde(default)]
    pub parts: Vec<String>,
}

/// A tensor of the file and what it is made of.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    pub name: String,
    pub from: Parts,
    /// Several parts follow each other on their outermost axis; else each is an element of a new one.
    #[serde(default)]
    join: bool,
    /// Heads whose rotated pairs lie apart in the model, half a head from each other, and next to each other in the
    /// file.
    #[serde(default)]
    interleave_heads: Option<usize>,
    /// [in, out] in the model, [out, in] in the file.
    #[serde(default)]
    transpose: bool,
    /// Kept in f32 under every encoding.
    #[serde(default)]
    pub exact: bool,
    /// w in the model, 1 + w in the file: norms whose weight acts as that.
    #[serde(default)]
    plus_one: bool,
    /// Further changes of each part, in their order.
    #[serde(default)]
    steps: Vec<Step>,
}

/// One tensor of the model, or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum Parts {
    One(String),
    Several(Vec<Part>),
}

/// A tensor of the model, perhaps with changes of its own before those of all parts.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum Part {
    Name(String),
    Changed { from: String, steps: Vec<Step> },
}

/// A vector with given values.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Constant {
    pub name: String,
    pub values: Vec<f32>,
}

/// The stretching of Llama 3.1: long waves by the whole factor, short ones not, between them gradually.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Frequencies {
    name: String,
    head_dim: usize,
    theta: f64,
    factor: f64,
    low_freq_factor: f64,
    high_freq_factor: f64,
    original_max_position_embeddings: f64,
}

impl Description {
    /// True if a tensor of the model belongs into the file.
    pub fn expects(&self, name: &str) -> bool {
        self.parts.is_empty() || self.parts.iter().any(|beginning| name.starts_with(beginning.as_str()))
    }

    /// Names of the tensors of the model that the file is made of, each as often as it is used.
    pub fn used(&self) -> Vec<&str> {
        let of_metadata = self.metadata.iter().filter(|(_, kind, _)| kind == "f32s_of");
        let of_metadata = of_metadata.flat_map(|(_, _, names)| list(names)).map(text);
        self.tensors.iter().flat_map(Source::names).chain(of_metadata).collect()
    }

    /// The value of an entry of the metadata.
    ///
    /// Errors: numbers of a configuration that the type of the entry cannot hold.
    pub fn value(&self, key: &str, kind: &str, value: &Value, files: &Weights) -> Result<GgufValue> {
        let too_large = |value: &Value, kind: &str| {
            TrainError::Usage(format!(
                "the GGUF entry `{key}` would be {value}, expected a whole number that {kind} holds"
            ))
        };
        let whole = |value: &Value| i32::try_from(value.as_i64()?).ok();
        let number = |value: &Value| value.as_f64().expect("a number of the description");
        let truth = |value: &Value| value.as_bool().expect("a truth value of the description");
        Ok(match kind {
            "u32" => {
                let found = value.as_u64().and_then(|value| u32::try_from(value).ok());
                GgufValue::U32(found.ok_or_else(|| too_large(value, kind))?)
            }
            "f32" => GgufValue::F32(number(value) as f32),
            "bool" => GgufValue::Bool(truth(value)),
            "text" => GgufValue::Text(text(value).to_owned()),
            "texts" => GgufValue::Texts(list(value).iter().map(|of| text(of).to_owned()).collect()),
            "bools" => GgufValue::Bools(list(value).iter().map(truth).collect()),
            "i32s" => {
                let values = list(value).iter().map(|value| whole(value).ok_or_else(|| too_large(value, "i32")));
                GgufValue::I32s(values.collect::<Result<_>>()?)
            }
            "f32s" => GgufValue::F32s(list(value).iter().map(|value| number(value) as f32).collect()),
            "f32s_of" => {
                let values = list(value).iter().map(|name| Ok(read(files, text(name))?.values));
                GgufValue::F32s(values.collect::<Result<Vec<_>>>()?.concat())
            }
            other => panic!("the description has a value of the unknown type `{other}`"),
        })
    }

    /// The vectors that follow from the description alone.
    pub fn vectors(&self) -> Vec<Constant> {
        let table = self.frequencies.iter().map(|of| Constant { name: of.name.clone(), values: of.values() });
        table.chain(self.constants.iter().cloned()).collect()
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().expect("a list of the description")
}

fn text(value: &Value) -> &str {
    value.as_str().expect("a text of the description")
}

/// A tensor of the model in f32.
fn read(files: &Weights, name: &str) -> Result<Array> {
    let tensor = files.get(name).map_err(TrainError::model_file)?.to_host().map_err(TrainError::unreadable)?;
    Ok(Array { shape: tensor.shape.to_vec(), values: tensor.to_f32() })
}

impl Part {
    fn name(&self) -> &str {
        match self {
            Part::Name(name) | Part::Changed { from: name, .. } => name,
        }
    }

    fn steps(&self) -> &[Step] {
        match self {
            Part::Name(_) => &[],
            Part::Changed { steps, .. } => steps,
        }
    }
}

impl Source {
    fn parts(&self) -> Vec<Part> {
        match &self.from {
            Parts::One(name) => vec![Part::Name(name.clone())],
            Parts::Several(parts) => parts.clone(),
        }
    }

    fn names(&self) -> Vec<&str> {
        match &self.from {
            Parts::One(name) => vec![name],
            Parts::Several(parts) => parts.iter().map(Part::name).collect(),
        }
    }

    /// The number of pieces that the tensor is written in.
    pub fn pieces(&self) -> usize {
        self.names().len()
    }

    /// The shape of the tensor. Errors: elements that are no floating-point numbers, parts that do not fit each other, and
    /// changes that do not fit.
    pub fn shape(&self, files: &Weights) -> Result<Vec<usize>> {
        let mut shapes = Vec::new();
        for part in self.parts() {
            shapes.push(self.shape_of(&part, files)?);
        }
        let (first, count) = (shapes[0].clone(), shapes.len());
        let inner = |shape: &[usize]| shape.get(1..).map(<[usize]>::to_vec);
        if self.join {
            let rows = shapes.iter().map(|shape| shape.first().copied().unwrap_or(0)).sum();
            if shapes.iter().all(|shape| inner(shape).is_some() && inner(shape) == inner(&first)) {
                return Ok([rows].into_iter().chain(inner(&first).into_iter().flatten()).collect());
            }
        } else if shapes.iter().all(|shape| *shape == first) {
            let outer = matches!(self.from, Parts::Several(_)).then_some(count);
            return Ok(outer.into_iter().chain(first).collect());
        }
        Err(TrainError::Usage(format!("the parts of `{}` have the shapes {shapes:?}, which do not fit", self.name)))
    }

    fn shape_of(&self, part: &Part, files: &Weights) -> Result<Vec<usize>> {
        let view = files.get(part.name()).map_err(TrainError::model_file)?;
        if !view.dtype.is_float() {
            let text = format!("`{}` holds {}, expected floating point", part.name(), view.dtype);
            return Err(TrainError::Usage(text));
        }
        let wrong = |problem: String| TrainError::Usage(format!("`{}`: {problem}", part.name()));
        let mut shape = view.shape.to_vec();
        if let Some(heads) = self.interleave_heads {
            let rows = shape.first().copied().unwrap_or(0);
            if rows == 0 || !rows.is_multiple_of(2 * heads) {
                return Err(wrong(format!("{rows} rows are not pairs in each of {heads} heads")));
            }
        }
        if self.transpose {
            shape = Step::Permute(vec![1, 0]).shape(&shape).map_err(wrong)?;
        }
        for step in part.steps().iter().chain(&self.steps) {
            shape = step.shape(&shape).map_err(wrong)?;
        }
        Ok(shape)
    }

    /// The values of a piece of the tensor: in the file, each follows the one before.
    pub fn piece(&self, files: &Weights, number: usize) -> Result<Vec<f32>> {
        let part = &self.parts()[number];
        let mut array = read(files, part.name())?;
        if self.plus_one {
            array = Step::Add(1.0).apply(array);
        }
        if self.transpose {
            array = array.transposed();
        }
        if let Some(heads) = self.interleave_heads {
            array = array.interleaved(heads);
        }
        Ok(part.steps().iter().chain(&self.steps).fold(array, |array, step| step.apply(array)).values)
    }
}

impl Frequencies {
    fn values(&self) -> Vec<f32> {
        let (low, high) = (self.low_freq_factor, self.high_freq_factor);
        let factor = |pair: usize| {
            let frequency = self.theta.powf(-2.0 * pair as f64 / self.head_dim as f64);
            let waves = self.original_max_position_embeddings * frequency / (2.0 * std::f64::consts::PI);
            let share = ((waves - low) / (high - low)).clamp(0.0, 1.0);
            (1.0 / ((1.0 - share) / self.factor + share)) as f32
        };
        (0..self.head_dim / 2).map(factor).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_waves_are_stretched_and_short_ones_are_not() {
        let of = Frequencies {
            name: "f".into(),
            head_dim: 64,
            theta: 500_000.0,
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192.0,
        };
        let values = of.values();
        assert_eq!((values[0], values[31], values.len()), (1.0, 8.0, 32));
        assert!(values.windows(2).all(|pair| pair[0] <= pair[1]) && values.iter().any(|x| *x > 1.0 && *x < 8.0));
    }
}
