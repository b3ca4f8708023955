//! Merging of adapters into weights: W + scale·B·A in f32, rounded once to the type of W.
//!
//! [`merge`] goes from folder to folder, tensor by tensor, and compiles nothing. Knows tensor names; no model.

use std::collections::BTreeMap;
use std::path::Path;

use compiler::AdapterRules;
use data::Stop;
use data::safetensors::{TensorInfo, TensorView, Weights};
use program::PackedWeight;
use rayon::prelude::*;
use tensor::{DType, HostTensor};

use crate::card::{self, Form};
use crate::error::{Result, TrainError, go_on};
use crate::hf_config::HfConfig;
use crate::model_folder::{handed_on, write_companions_of_adapter, write_files, write_weights};
use crate::peft;
use crate::prequantised;
use crate::quantise;
use crate::quantised_base::{self, QuantisedBase};
use crate::staged::Staged;
use crate::weights::read_as_f32;
use crate::written::Written;

/// A weight with its adapter added, in the weight's type. A is [r, in], B is [out, r]; the weight is [out, in], or
/// [in, out] if `transposed`.
///
/// # Panics
/// If the shapes do not belong together.
pub fn merged(weight: &HostTensor, a: &HostTensor, b: &HostTensor, scale: f64, transposed: bool) -> HostTensor {
    let (rank, inputs, outputs) = (a.shape[0], a.shape[1], b.shape[0]);
    let shape = if transposed { [inputs, outputs] } else { [outputs, inputs] };
    assert_eq!((weight.shape.as_slice(), b.shape[1]), (shape.as_slice(), rank), "an adapter has its weight's sizes");
    let (left, right) = match transposed {
        false => (b.to_f32(), a.to_f32()),
        true => (transpose(&a.to_f32(), rank), transpose(&b.to_f32(), outputs)),
    };
    let columns = shape[1];
    let mut sum = weight.to_f32();
    sum.par_chunks_mut(columns).zip(left.par_chunks(rank)).for_each(|(row, factors)| {
        let mut delta = vec![0.0f32; columns];
        for (factor, values) in factors.iter().zip(right.chunks(columns)) {
            delta.iter_mut().zip(values).for_each(|(delta, value)| *delta += factor * value);
        }
        row.iter_mut().zip(&delta).for_each(|(x, delta)| *x += scale as f32 * delta);
    });
    HostTensor::from_f32(shape, &sum).cast(weight.dtype)
}

/// [rows, columns] → [columns, rows].
fn transpose(values: &[f32], rows: usize) -> Vec<f32> {
    let columns = values.len() / rows;
    (0..values.len()).map(|i| values[i % rows * columns + i / rows]).collect()
}

/// What [`merge`] did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Merged {
    /// Weights that an adapter was added to.
    pub adapted: usize,
    /// Tensors in all.
    pub tensors: usize,
    /// Bytes of the weights that were written.
    pub bytes: usize,
    /// The form of the quantised weights that the adapter was trained on, if these were made again.
    pub quantised: Option<String>,
}

/// Writes a model with an adapter in PEFT's form added to its weights. Every weight keeps its type. One tensor is in
/// memory at a time. The folder appears whole; asked to stop, there is nothing. What a killed merge left is removed first.
///
/// An adapter that was trained on quantised weights is added to their values, which are made again from the model's
/// weights and have the type that products read. `as_is`: it is added to the weights as they are all the same.
///
/// `renamed` are beginnings of names: as the model's files may have them, and as modules are called.
///
/// Errors: an adapter of a variant that is not computed, one whose matrices do not fit the model's weights, and
/// anything that stands at `output` already.
pub fn merge(
    model: &Path,
    adapter: &Path,
    output: &Path,
    renamed: &[[String; 2]],
    as_is: bool,
    stop: Stop<'_>,
) -> Result<Merged> {
    let options = peft::read_options(adapter, DType::F32)?;
    let rules = AdapterRules::new(&options)?;
    let config = HfConfig::read(model)?;
    handed_on(model)?;
    handed_on(adapter)?;
    let base = prequantised::weights(model)?;
    let adapters = Weights::open(adapter).map_err(TrainError::model_file)?;
    let transposed = peft::says_transposed(adapter)?;
    let targets = targets(&base, &adapters, renamed, transposed).map_err(|problems| {
        let place = adapter.display();
        TrainError::Usage(format!("{place}: the adapter does not fit the model:\n  {}", problems.join("\n  ")))
    })?;
    let trained_on = if as_is { None } else { quantised_base::read(adapter)? };
    let packed =
        trained_on.as_ref().map(|of| packed_weights(&base, of, renamed, adapter)).transpose()?.unwrap_or_default();
    // What was quantised is written in the type of the rest.
    let saved = config.dtype().unwrap_or(DType::BF16);
    let info = |name: &&str| {
        let view = base.get(name).map_err(TrainError::model_file)?;
        let dtype = if view.is_dequantised() { saved } else { view.dtype };
        let dtype = packed.get(*name).map_or(dtype, |of| of.dtype);
        Ok(TensorInfo { name: (*name).to_owned(), dtype, shape: view.shape.to_vec() })
    };
    let tensors = base.names().iter().map(info).collect::<Result<Vec<_>>>()?;
    let floats = tensors.iter().filter(|t| t.dtype.is_float());
    let dtype = floats.max_by_key(|t| t.bytes()).map_or(DType::F32, |t| t.dtype);
    let done = Merged {
        adapted: targets.len(),
        tensors: tensors.len(),
        bytes: tensors.iter().map(TensorInfo::bytes).sum(),
        quantised: trained_on.map(|of| quantised_base::text(of.made)),
    };
    let mut written = Written::by("merge");
    Staged::clear_abandoned(&written.owner, output)?;
    let staged = Staged::begin(&written, output)?;
    write_weights(staged.path(), tensors, |tensor| {
        go_on(stop)?;
        let weight = base.get(&tensor.name).map_err(TrainError::model_file)?;
        let weight = match packed.get(&tensor.name) {
            Some(of) => values(of, &weight)?,
            None => weight.to_host().map_err(TrainError::unreadable)?,
        };
        let weight = if weight.dtype == tensor.dtype { weight } else { weight.cast(tensor.dtype) };
        let Some(module) = targets.get(&tensor.name) else { return Ok(weight.bytes) };
        let matrix = |which: &str| {
            let name = format!("{}{module}.{which}.weight", peft::PREFIX);
            adapters.get(&name).map_err(TrainError::model_file)?.to_host().map_err(TrainError::unreadable)
        };
        let (a, b) = (matrix("lora_A")?, matrix("lora_B")?);
        Ok(merged(&weight, &a, &b, rules.scale(module)?, transposed).bytes)
    })?;
    write_files(&config, dtype, model, None, staged.path())?;
    write_companions_of_adapter(adapter, staged.path())?;
    card::hand_on(adapter, Form::Merged, staged.path())?;
    staged.commit(&mut written)?;
    Ok(done)
}

/// The weights of a model that were in codes when its adapter was trained.
fn packed_weights(
    base: &Weights,
    of: &QuantisedBase,
    renamed: &[[String; 2]],
    adapter: &Path,
) -> Result<BTreeMap<String, PackedWeight>> {
    let mut packed = BTreeMap::new();
    for whole in &of.weights {
        let Some(name) = name_in_files(base, whole, renamed) else {
            let place = adapter.display();
            return Err(TrainError::Usage(format!(
                "{place}: it was trained on `{whole}`, which the model does not have"
            )));
        };
        let view = base.get(&name).map_err(TrainError::model_file)?;
        if !of.made.fits(view.shape) || !view.dtype.is_float() {
            let text = format!(
                "`{name}` is {} {:?}, which is not kept as {}",
                view.dtype,
                view.shape,
                quantised_base::text(of.made)
            );
            return Err(TrainError::Usage(text));
        }
        let (packing, shape) = (of.made.packing(), view.shape.to_vec());
        packed.insert(name, PackedWeight { packing, shape, dtype: of.dtype, made: Some(of.made) });
    }
    Ok(packed)
}

/// A weight's numbers as its codes give them.
fn values(of: &PackedWeight, weight: &TensorView<'_>) -> Result<HostTensor> {
    let bytes = quantise::bytes(of, &|start, numbers| read_as_f32(weight, start, numbers))?;
    Ok(quantise::values(of, &bytes))
}

/// Name of each adapted weight and the module by which the adapter calls it; or what does not fit.
fn targets(
    base: &Weights,
    adapters: &Weights,
    renamed: &[[String; 2]],
    transposed: bool,
) -> std::result::Result<BTreeMap<String, String>, Vec<String>> {
    let mut problems = Vec::new();
    let mut found = BTreeMap::new();
    for name in adapters.names() {
        let module = name.strip_prefix(peft::PREFIX).and_then(|name| name.strip_suffix(".lora_A.weight"));
        let Some(module) = module else {
            // PEFT writes the whole head beside an adapted one: its values are the model's own.
            let known = name.ends_with(".lora_B.weight") || name.contains(".base_layer.");
            if !known {
                problems.push(format!("`{name}` is not a matrix of a LoRA adapter on a linear layer"));
            }
            continue;
        };
        match check(base, adapters, module, renamed, transposed) {
            Ok(weight) => drop(found.insert(weight, module.to_owned())),
            Err(problem) => problems.push(problem),
        }
    }
    if found.is_empty() && problems.is_empty() {
        problems.push("it has no matrices".to_owned());
    }
    if problems.is_empty() { Ok(found) } else { Err(problems) }
}

/// How the files call a module's weight. Old files of some models leave out the first component of their names, and some
/// architectures have other names for their parts there.
fn name_in_files(base: &Weights, whole: &str, renamed: &[[String; 2]]) -> Option<String> {
    let short = whole.split_once('.').map(|(_, rest)| rest.to_owned());
    let other = |[there, here]: &[String; 2]| Some(format!("{there}{}", whole.strip_prefix(here.as_str())?));
    let names = std::iter::once(whole.to_owned()).chain(renamed.iter().filter_map(other)).chain(short);
    names.into_iter().find(|name| base.contains(name))
}

/// The weight of an adapted module.
fn check(
    base: &Weights,
    adapters: &Weights,
    module: &str,
    renamed: &[[String; 2]],
    transposed: bool,
) -> std::result::Result<String, String> {
    let whole = format!("{module}.weight");
    let name = name_in_files(base, &whole, renamed);
    let name = name.ok_or_else(|| format!("the model has no `{whole}`, which the adapter is for"))?;
    let shape = |which: &str| {
        let name = format!("{}{module}.{which}.weight", peft::PREFIX);
        adapters.get(&name).map(|view| view.shape.to_vec()).map_err(|e| e.to_string())
    };
    let (a, b) = (shape("lora_A")?, shape("lora_B")?);
    let weight = base.get(&name).map_err(|e| e.to_string())?;
    let fits = match (a.as_slice(), b.as_slice(), weight.shape) {
        ([rank, inputs], [outputs, other], [rows, columns]) => {
            let sizes = if transposed { (columns, rows) } else { (rows, columns) };
            rank == other && (outputs, inputs) == sizes
        }
        _ => false,
    };
    if !fits {
        return Err(format!("`{name}` is {:?}; A {a:?} and B {b:?} do not fit it", weight.shape));
    }
    if !weight.dtype.is_float() {
        return Err(format!("`{name}` holds {}: an adapter cannot be added to it", weight.dtype));
    }
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_product_is_added_in_f32_and_rounded_once() {
        let weight = HostTensor::from_f32([2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let a = HostTensor::from_f32([2, 3], &[1.0, 0.0, -1.0, 0.5, 2.0, 0.25]);
        let b = HostTensor::from_f32([2, 2], &[2.0, 1.0, -1.0, 4.0]);
        let expected = [1.0 + 1.25, 2.0 + 1.0, 3.0 - 0.875, 4.0 + 0.5, 5.0 + 4.0, 6.0 + 1.0];
        assert_eq!(merged(&weight, &a, &b, 0.5, false).to_f32(), expected);
        let flipped = HostTensor::from_f32([3, 2], &transpose(&weight.to_f32(), 2));
        assert_eq!(transpose(&merged(&flipped, &a, &b, 0.5, true).to_f32(), 3), expected);

        // 1 + 2⁻⁸ + 2⁻⁸ is a bf16 number; rounded after each term it would stay 1.
        let small = 2f32.powi(-8);
        let one = HostTensor::from_f32([1, 1], &[1.0]).cast(DType::BF16);
        let (a, b) = (HostTensor::from_f32([2, 1], &[small; 2]), HostTensor::from_f32([1, 2], &[1.0; 2]));
        assert_eq!(merged(&one, &a, &b, 1.0, false).to_f32(), [1.0 + 2.0 * small]);
    }
}
