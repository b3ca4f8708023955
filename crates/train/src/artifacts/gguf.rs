//! A model folder as one GGUF file. The caller describes the names of architecture and vocabulary; this file handles
//! the order of elements, the encoding, and the verification of the result.
//!
//! Knows no architecture.

mod array;
mod description;

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use data::Stop;
use data::gguf::{Encoding, GgufFile, GgufTensor, GgufValue, GgufWriter, Mix, Rules};
use data::safetensors::Weights;
use rayon::prelude::*;
use tensor::DType;

use self::description::{Constant, Description};
use crate::engine::weights::is_computed;
use crate::error::{Result, TrainError, go_on};
use crate::model::quantized_checkpoint;
use crate::model::rounding::Rounding;
use crate::model::source::ModelSource;

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

const LARGEST_F16: f32 = 65504.0;

/// Elements that one thread encodes at a time: whole blocks of every encoding.
const PART: usize = 1 << 16;

/// Writes the weights of a model folder to one file, matrices encoded as `encoding` says (a name of [`Mix::ALL`]) and
/// vectors as f32, reads it again and compares every tensor with the model's. `description` is JSON. Asked to stop while
/// it writes, it leaves nothing.
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
    let files = weights(model, &of)?;
    let mut metadata = Vec::new();
    for (key, kind, value) in &of.metadata {
        metadata.push((key.clone(), of.value(key, kind, value, &files)?));
    }
    metadata.push(("general.file_type".to_owned(), GgufValue::U32(mix.file_type())));
    if mix.is_quantised() {
        metadata.push(("general.quantization_version".to_owned(), GgufValue::U32(2)));
    }
    let (table, otherwise) = table(&files, &of, mix)?;
    let failed = |e: data::DataError| TrainError::Failed(e.to_string());
    let mut writer = GgufWriter::create(output, &metadata, table.clone()).map_err(failed)?;
    for tensor in &table {
        let mut bytes = Vec::with_capacity(tensor.bytes());
        contents(&files, &of, &tensor.name, &mut |values| {
            go_on(stop)?;
            let parts: Vec<Vec<u8>> = values.par_chunks(PART).map(|part| tensor.encoding.encode(part)).collect();
            parts.iter().for_each(|part| bytes.extend(part));
            Ok(())
        })?;
        writer.put(&bytes).map_err(failed)?;
    }
    let rounded = verify(&files, &of, &table, writer.complete().map_err(failed)?, output)?.text(encoding);
    writer.finish().map_err(failed)?;
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

/// Returns the number of tensors in a model's folder that belong to parts which its graph, as JSON, does not compute.
pub fn carried_tensors(model: &Path, ir: &str) -> Result<usize> {
    Ok(ModelSource::open(model, ir)?.carried(model)?.names().len())
}

/// The weights of a folder under the names that the description uses. Errors: tensors that are missing, have another
/// shape than the model's, or have no place in the file.
fn weights(model: &Path, of: &Description) -> Result<Weights> {
    let (files, source) = match &of.model {
        None => (quantized_checkpoint::weights(model)?, None),
        Some(ir) => {
            let source = ModelSource::open(model, ir)?;
            (source.weights(model)?, Some(source))
        }
    };
    let mut problems = Vec::new();
    let used: HashSet<&str> = of.used().into_iter().collect();
    for name in &used {
        if !files.contains(name) {
            problems.push(format!("`{name}` is missing"));
        } else if let Some(source) = &source {
            let found = files.get(name).map_err(TrainError::model_file)?.shape;
            let mut known =
                source.model.weights().filter(|spec| spec.is_named(name)).map(|spec| &spec.shape).peekable();
            if let Some(expected) = known.peek().copied()
                && !known.any(|shape| shape == found)
            {
                problems.push(format!("`{name}` has shape {found:?}, the model needs {expected:?}"));
            }
        }
    }
    for name in files.names() {
        if of.expects(name)
            && !used.contains(name)
            && !of.repeated.iter().any(|known| known == name)
            && !is_computed(name)
        {
            problems.push(format!("`{name}` has no place in the file"));
        }
    }
    if problems.is_empty() {
        return Ok(files);
    }
    problems.sort_unstable();
    let more = problems.len().saturating_sub(20);
    problems.truncate(20);
    let rest = if more > 0 { format!("\n  … and {more} more") } else { String::new() };
    let list = problems.join("\n  ");
    Err(TrainError::Usage(format!("{}: the weights do not fit the architecture:\n  {list}{rest}", model.display())))
}

/// The tensors of the file with their encodings: the vectors of the description first.
fn table(files: &Weights, of: &Description, mix: Mix) -> Result<(Vec<GgufTensor>, Vec<(String, &'static str)>)> {
    let vector = |of: &Constant| {
        let shape = vec![of.values.len()];
        GgufTensor { name: of.name.clone(), shape, encoding: Encoding::F32 }
    };
    let mut table: Vec<GgufTensor> = of.vectors().iter().map(vector).collect();
    let mut shapes = Vec::new();
    for source in &of.tensors {
        shapes.push(source.shape(files)?);
    }
    let named = of.tensors.iter().zip(&shapes).map(|(source, shape)| (source.name.as_str(), shape.as_slice()));
    let rules = Rules::of(named);
    let mut otherwise = Vec::new();
    for (source, shape) in of.tensors.iter().zip(shapes) {
        let row = shape.last().copied().unwrap_or(1);
        let encoding = match shape.len() {
            0 | 1 => Encoding::F32,
            _ if source.exact => Encoding::F32,
            _ => {
                let wanted = mix.wanted(&source.name, &rules);
                let fitting = Mix::fitting(wanted, row);
                if fitting != wanted {
                    otherwise.push((source.name.clone(), fitting.name()));
                }
                fitting
            }
        };
        table.push(GgufTensor { name: source.name.clone(), shape, encoding });
    }
    Ok((table, otherwise))
}

/// Calls `visit` with the values of each piece of a tensor of the file, in its order.
fn contents(
    files: &Weights,
    of: &Description,
    name: &str,
    visit: &mut dyn FnMut(Vec<f32>) -> Result<()>,
) -> Result<()> {
    if let Some(vector) = of.vectors().into_iter().find(|vector| vector.name == name) {
        return visit(vector.values);
    }
    let source = of.tensors.iter().find(|source| source.name == name).expect("the table is made of the sources");
    (0..source.pieces()).try_for_each(|number| visit(source.piece(files, number)?))
}

/// Reads the file as another program would and holds every element against the model's. Gives what was rounded.
fn verify(files: &Weights, of: &Description, table: &[GgufTensor], written: &Path, output: &Path) -> Result<Rounding> {
    let wrong = |what: String| TrainError::Failed(format!("{}: written and read back, {what}", output.display()));
    let file = GgufFile::open(written).map_err(|e| TrainError::Failed(e.to_string()))?;
    if !file.tensors().eq(table) {
        return Err(wrong("the table of tensors is another".to_owned()));
    }
    let mut rounding = Rounding::default();
    for tensor in table {
        let bytes = file.bytes(&tensor.name).map_err(TrainError::unreadable)?;
        let (block, mut at) = (tensor.encoding.block(), 0);
        contents(files, of, &tensor.name, &mut |expected| {
            let length = tensor.encoding.bytes(expected.len());
            let found = tensor.encoding.decode(&bytes[at..at + length]);
            at += length;
            for (found, expected) in found.chunks(block).zip(expected.chunks(block)) {
                let largest = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                if tensor.encoding == Encoding::F16 && largest.is_finite() && largest > LARGEST_F16 {
                    let text = format!("`{}` holds {largest:e}, and f16 ends at {LARGEST_F16}", tensor.name);
                    return Err(TrainError::Usage(text + "\n  hint: `--encoding f32` keeps all numbers"));
                }
                let near = |(f, e): (&f32, &f32)| (f - e).abs() <= tensor.encoding.error(*e, largest);
                if !found.iter().zip(expected).all(near) {
                    return Err(wrong(format!("`{}` holds other values", tensor.name)));
                }
            }
            rounding.add(&expected, &found);
            Ok(())
        })?;
    }
    Ok(rounding)
}
