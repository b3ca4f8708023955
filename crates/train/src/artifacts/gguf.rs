//! A model folder as one GGUF file. The caller describes the names of architecture and vocabulary; this file handles
//! the order of elements, the encoding, and the verification of the result.
//!
//! Knows no architecture.

use std::collections::BTreeMap;
use std::path::Path;

use data::Stop;
use data::gguf::{Encoding, GgufFile, GgufTensor, GgufValue, GgufWriter, Mix};
use data::safetensors::Weights;
use rayon::prelude::*;
use serde::Deserialize;
use serde_json::Value;
use tensor::{DType, HostTensor};

use crate::engine::weights::is_computed;
use crate::error::{Result, TrainError, go_on};
use crate::model::quantized_checkpoint;
use crate::model::rounding::Rounding;

/// The metadata and tensors of a GGUF file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    /// Key, type (`u32`, `f32`, `bool`, `text`, `texts`, `i32s`, `f32s`), value.
    metadata: Vec<(String, String, Value)>,
    tensors: Vec<Source>,
    /// Tensors of the model that the file has no place for, because they repeat others.
    #[serde(default)]
    repeated: Vec<String>,
    /// Factors of the rotary frequencies, where they are not the plain ones.
    #[serde(default)]
    frequencies: Option<Frequencies>,
}

/// A tensor of the file and the tensor of the model that it is.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Source {
    name: String,
    from: String,
    /// Heads whose rotated pairs lie apart in the model, half a head from each other, and next to each other in the
    /// file.
    #[serde(default)]
    interleave_heads: Option<usize>,
    /// [in, out] in the model, [out, in] in the file.
    #[serde(default)]
    transpose: bool,
    /// Kept in f32 under every encoding.
    #[serde(default)]
    exact: bool,
    /// w in the model, 1 + w in the file: norms whose weight acts as that.
    #[serde(default)]
    plus_one: bool,
}

/// The stretching of Llama 3.1: long waves by the whole factor, short ones not, between them gradually.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Frequencies {
    name: String,
    head_dim: usize,
    theta: f64,
    factor: f64,
    low_freq_factor: f64,
    high_freq_factor: f64,
    original_max_position_embeddings: f64,
}

/// The result of [`write_gguf`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufDone {
    pub tensors: usize,
    pub bytes: u64,
    /// Matrices whose rows are no whole blocks of the encoding, with the one that they have instead.
    pub otherwise: Vec<(String, &'static str)>,
    /// A sentence on what was rounded, if anything was.
    pub rounded: Option<String>,
}

/// Elements that one thread encodes at a time: whole blocks of every encoding.
const PART: usize = 1 << 16;

/// Writes the weights of a model folder to one file, matrices encoded as `encoding` says (a name of [`Mix::ALL`]) and vectors as f32, reads it again and compares every tensor with the model's. `description` is JSON. Asked to stop while it
/// writes, it leaves nothing.
///
/// Errors: a tensor that the description does not speak of or that is missing, a place that is taken, and a file that
/// is not what was written.
pub fn write_gguf(model: &Path, description: &str, encoding: &str, output: &Path, stop: Stop<'_>) -> Result<GgufDone> {
    let mix = Mix::named(encoding).ok_or_else(|| {
        let known = Mix::ALL.map(Mix::name).join(", ");
        TrainError::Usage(format!("`{encoding}` is not a supported GGUF encoding, expected one of {known}"))
    })?;
    if output.symlink_metadata().is_ok() {
        let text = format!("{} already exists: nothing is overwritten", output.display());
        return Err(TrainError::Usage(text));
    }
    let of: Description = serde_json::from_str(description).expect("a description is made by this package");
    let files = quantized_checkpoint::weights(model)?;
    check_complete(&files, &of, model)?;
    let mut metadata =
        of.metadata.iter().map(|(key, kind, value)| (key.clone(), value_of(kind, value))).collect::<Vec<_>>();
    metadata.push(("general.file_type".to_owned(), GgufValue::U32(mix.file_type())));
    if mix.is_quantised() {
        metadata.push(("general.quantization_version".to_owned(), GgufValue::U32(2)));
    }
    let mut otherwise = Vec::new();
    let has_head = of.tensors.iter().any(|source| source.name == "output.weight");
    let layers =
        of.tensors.iter().filter_map(|source| source.name.strip_prefix("blk.")?.split('.').next()?.parse().ok());
    let layers = layers.max().map_or(0, |last: usize| last + 1);
    let mut table = Vec::new();
    if let Some(factors) = &of.frequencies {
        let shape = vec![factors.head_dim / 2];
        table.push(GgufTensor { name: factors.name.clone(), shape, encoding: Encoding::F32 });
    }
    for source in &of.tensors {
        let wanted = mix.wanted(&source.name, layers, has_head);
        let tensor = entry(&files, source, wanted)?;
        if tensor.encoding != wanted && tensor.encoding != Encoding::F32 {
            otherwise.push((tensor.name.clone(), tensor.encoding.name()));
        }
        table.push(tensor);
    }
    let failed = |e: data::DataError| TrainError::Failed(e.to_string());
    let mut writer = GgufWriter::create(output, &metadata, table.clone()).map_err(failed)?;
    for tensor in &table {
        go_on(stop)?;
        let values = contents(&files, &of, &tensor.name)?;
        let parts: Vec<Vec<u8>> = values.par_chunks(PART).map(|part| tensor.encoding.encode(part)).collect();
        writer.put(&parts.concat()).map_err(failed)?;
    }
    writer.finish().map_err(failed)?;
    let rounded = verify(&files, &of, &table, output)?.text(encoding);
    let bytes = std::fs::metadata(output).map_err(|e| TrainError::io("read", output, e))?.len();
    Ok(GgufDone { tensors: table.len(), bytes, otherwise, rounded })
}

/// Returns the encoding that keeps most of a model's weights: `f16` where the largest part of them is in it, else `bf16`.
pub fn default_encoding(model: &Path) -> Result<&'static str> {
    let files = quantized_checkpoint::weights(model)?;
    let mut bytes: BTreeMap<&'static str, usize> = BTreeMap::new();
    for name in files.names() {
        let view = files.get(name).map_err(TrainError::model_file)?;
        *bytes.entry(view.dtype.name()).or_default() += view.length();
    }
    let most = bytes.into_iter().max_by_key(|(_, bytes)| *bytes).map(|(name, _)| name);
    Ok(if most == Some(DType::F16.name()) { "f16" } else { "bf16" })
}

fn value_of(kind: &str, value: &Value) -> GgufValue {
    let list = || value.as_array().expect("a list of the description");
    let number = |value: &Value| value.as_f64().expect("a number of the description");
    let text = |value: &Value| value.as_str().expect("a text of the description").to_owned();
    match kind {
        "u32" => GgufValue::U32(number(value) as u32),
        "f32" => GgufValue::F32(number(value) as f32),
        "bool" => GgufValue::Bool(value.as_bool().expect("a truth value of the description")),
        "text" => GgufValue::Text(text(value)),
        "texts" => GgufValue::Texts(list().iter().map(text).collect()),
        "i32s" => GgufValue::I32s(list().iter().map(|value| number(value) as i32).collect()),
        "f32s" => GgufValue::F32s(list().iter().map(|value| number(value) as f32).collect()),
        other => panic!("the description has a value of the unknown type `{other}`"),
    }
}

fn check_complete(files: &Weights, of: &Description, model: &Path) -> Result<()> {
    let mut problems = Vec::new();
    for source in of.tensors.iter().filter(|source| !files.contains(&source.from)) {
        problems.push(format!("`{}` is missing", source.from));
    }
    for name in files.names() {
        let used = of.tensors.iter().any(|source| source.from == name) || of.repeated.iter().any(|known| known == name);
        if !used && !is_computed(name) {
            problems.push(format!("`{name}` has no place in the file"));
        }
    }
    if problems.is_empty() {
        return Ok(());
    }
    problems.truncate(20);
    let list = problems.join("\n  ");
    Err(TrainError::Usage(format!("{}: the weights do not fit the architecture:\n  {list}", model.display())))
}

fn entry(files: &Weights, source: &Source, encoding: Encoding) -> Result<GgufTensor> {
    let view = files.get(&source.from).map_err(TrainError::model_file)?;
    if !view.dtype.is_float() {
        let text = format!("`{}` holds {}, expected floating point", source.from, view.dtype);
        return Err(TrainError::Usage(text));
    }
    let mut shape = view.shape.to_vec();
    if source.transpose {
        shape.reverse();
    }
    let row = shape.last().copied().unwrap_or(1);
    let encoding = match shape.len() {
        0 | 1 => Encoding::F32,
        _ if source.exact => Encoding::F32,
        _ => Mix::fitting(encoding, row),
    };
    Ok(GgufTensor { name: source.name.clone(), shape, encoding })
}

/// The values of a tensor of the file, in its order.
fn contents(files: &Weights, of: &Description, name: &str) -> Result<Vec<f32>> {
    if let Some(factors) = of.frequencies.as_ref().filter(|factors| factors.name == name) {
        return Ok(factors.values());
    }
    let source = of.tensors.iter().find(|source| source.name == name).expect("the table is made of the sources");
    let tensor = files.get(&source.from).map_err(TrainError::model_file)?.to_host().map_err(TrainError::unreadable)?;
    let mut values = tensor.to_f32();
    if source.plus_one {
        values.iter_mut().for_each(|value| *value += 1.0);
    }
    Ok(match source.interleave_heads {
        _ if source.transpose => transpose(&values, tensor.shape[0]),
        Some(heads) => interleave(&tensor, &values, heads),
        None => values,
    })
}

/// [rows, columns] → [columns, rows].
fn transpose(values: &[f32], rows: usize) -> Vec<f32> {
    let columns = values.len() / rows;
    (0..values.len()).map(|i| values[i % rows * columns + i / rows]).collect()
}

/// Row h·d + j + half·d/2 of the model becomes row h·d + 2j + half of the file, for heads of d rows.
fn interleave(tensor: &HostTensor, values: &[f32], heads: usize) -> Vec<f32> {
    let rows = tensor.shape[0];
    let (size, width) = (rows / heads, values.len() / rows);
    let row = |to: usize| to / size * size + to % size % 2 * (size / 2) + to % size / 2;
    (0..rows).flat_map(|to| values[row(to) * width..(row(to) + 1) * width].iter().copied()).collect()
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

/// Reads the file as another program would and holds every element against the model's. Gives what was rounded.
fn verify(files: &Weights, of: &Description, table: &[GgufTensor], output: &Path) -> Result<Rounding> {
    let wrong = |what: String| TrainError::Failed(format!("{}: written and read back, {what}", output.display()));
    let file = GgufFile::open(output).map_err(|e| TrainError::Failed(e.to_string()))?;
    if !file.tensors().eq(table) {
        return Err(wrong("the table of tensors is another".to_owned()));
    }
    let mut rounding = Rounding::default();
    for tensor in table {
        let bytes = file.bytes(&tensor.name).map_err(TrainError::unreadable)?;
        let found = tensor.encoding.decode(&bytes);
        let expected = contents(files, of, &tensor.name)?;
        let block = tensor.encoding.block();
        for (found, expected) in found.chunks(block).zip(expected.chunks(block)) {
            let largest = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            let near = |(f, e): (&f32, &f32)| (f - e).abs() <= tensor.encoding.error(*e, largest);
            if !found.iter().zip(expected).all(near) {
                return Err(wrong(format!("`{}` holds other values", tensor.name)));
            }
        }
        rounding.add(&expected, &found);
    }
    Ok(rounding)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotated_pairs_come_to_lie_beside_each_other() {
        let tensor = HostTensor::from_f32([8, 1], &[0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]);
        let found = interleave(&tensor, &tensor.to_f32(), 2);
        assert_eq!(found, [0.0, 2.0, 1.0, 3.0, 10.0, 12.0, 11.0, 13.0]);
        assert_eq!(transpose(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    }

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
