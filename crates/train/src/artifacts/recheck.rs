//! Compares a result read back from its files with the live model, tensor by tensor: copied weights bit for bit, merged
//! weights by their product with a vector. Only blocks of a few MiB are in memory, and no second model, so a result can
//! be checked wherever the run itself fits.
//!
//! Knows files and parameters; `trainer/export.rs` knows what a result is written from.

use std::path::Path;

use compiler::{AdapterOf, AdapterRules};
use data::Stop;
use data::safetensors::TensorView;
use program::{ParameterSlot, Program, TensorRef};
use rayon::prelude::*;
use tensor::{DType, HostTensor, convert};

use crate::engine::Engine;
use crate::engine::weights;
use crate::error::{Result, TrainError, go_on};
use crate::model::adapted::{self, Factors, Pair, Pairs};
use crate::model::hf_config::HfConfig;
use crate::model::other_parts;
use crate::model::peft;
use crate::model::source::ModelSource;
use crate::model::weight_set::WeightSet;

/// Elements that are compared at a time, about.
const BLOCK: usize = 1 << 20;

/// Fewer result elements than this are not worth a thread.
const ROWS_PER_THREAD: usize = 64;

/// The live weights that a result is compared with.
pub(crate) struct Live<'a> {
    pub engine: &'a mut Engine,
    pub program: &'a Program,
    /// The scales of the adapter that is trained, if there is one.
    pub rules: Option<&'a AdapterRules>,
    /// Polled before every tensor.
    pub stop: Stop<'a>,
}

/// An error where a part that is only taken over is not as in the model's own folder.
fn compare_carried(source: &ModelSource, folder: &Path) -> Result<()> {
    let (own, found) = (source.carried(&source.folder)?, source.carried(folder)?);
    if own.names() != found.names() {
        return Err(differs("a part that is copied is incomplete".to_owned()));
    }
    for name in own.names() {
        let (one, other) =
            (own.get(name).map_err(TrainError::model_file)?, found.get(name).map_err(TrainError::model_file)?);
        if one.shape != other.shape || !one.has_bytes_of(&other).map_err(TrainError::unreadable)? {
            return Err(differs(format!("`{name}` is not as in the model's own files")));
        }
    }
    Ok(())
}

impl Live<'_> {
    /// An error where a folder in Hugging Face's form is not the live model, its adapter added.
    pub fn compare_model(&mut self, source: &ModelSource, dtype: DType, folder: &Path) -> Result<()> {
        // Which token ends answers is the run's.
        let (found, expected) = (HfConfig::read(folder)?, source.config.with_dtype(dtype));
        if found.without_end_tokens() != expected.without_end_tokens() {
            return Err(differs("`config.json` is not what was written".to_owned()));
        }
        compare_carried(source, folder)?;
        let files = source.weights(folder)?;
        self.compare_names(WeightSet::Base, files.names())?;
        let mut pairs = Pairs::default();
        for slot in WeightSet::Base.of(self.program) {
            go_on(self.stop)?;
            let view = files.get(&slot.name).map_err(TrainError::model_file)?;
            match self.rules.map(|rules| peft::adapter_of(self.program, rules, slot)).transpose()?.flatten() {
                None => self.compare_bits(slot, &view)?,
                Some(of) => {
                    let [a, b] = peft::matrices_of(self.program, &of);
                    let engine = &mut *self.engine;
                    let pair =
                        pairs.of(&of.module, |which| weights::read(engine, if which == "lora_A" { a } else { b }))?;
                    self.compare_sum(slot, &view, &of, pair)?;
                }
            }
        }
        Ok(())
    }

    /// An error where a folder in PEFT's form is not the live adapter: its matrices, what they are scaled with, and the copy of
    /// the embedding that is the head, too.
    pub fn compare_adapter(&mut self, folder: &Path, source: &ModelSource) -> Result<()> {
        let embedding = compiler::tied(&source.model);
        let read = AdapterRules::new(&peft::read_options(folder, DType::F32, &source.model.adapters)?)?;
        let files = other_parts::weights(folder, &source.model.files)?;
        let is_tied = |slot: &&ParameterSlot| slot.saved && Some(slot.name.as_str()) == embedding;
        let tied = WeightSet::Adapter.of(self.program).find(is_tied);
        let copy = tied.map(|_| peft::TIED_HEAD);
        self.compare_names(WeightSet::Adapter, files.names().into_iter().filter(|name| Some(*name) != copy))?;
        if let Some(slot) = tied {
            self.compare_bits(slot, &files.get(peft::TIED_HEAD).map_err(TrainError::model_file)?)?;
        }
        for slot in WeightSet::Adapter.of(self.program) {
            go_on(self.stop)?;
            let view = files.get(&WeightSet::Adapter.name(slot)).map_err(TrainError::model_file)?;
            self.compare_bits(slot, &view)?;
        }
        let Some(rules) = self.rules else { return Ok(()) };
        for slot in WeightSet::Base.of(self.program) {
            let (found, live) =
                (peft::adapter_of(self.program, &read, slot)?, peft::adapter_of(self.program, rules, slot)?);
            if found != live {
                let text = format!("the adapter of `{}` is {found:?}, in the live model {live:?}", slot.name);
                return Err(differs(text));
            }
        }
        Ok(())
    }

    fn compare_names<'n>(&self, part: WeightSet, names: impl IntoIterator<Item = &'n str>) -> Result<()> {
        let wanted: Vec<String> = part.of(self.program).map(|slot| part.name(slot)).collect();
        match names.into_iter().find(|name| !wanted.iter().any(|wanted| wanted == name)) {
            Some(name) => Err(differs(format!("`{name}` is not a weight of the live model"))),
            None => Ok(()),
        }
    }

    /// Bytes of a live weight's values from one on.
    fn live_bytes(
        &mut self,
        slot: &ParameterSlot,
        values: Option<&HostTensor>,
        begin: usize,
        bytes: &mut [u8],
    ) -> Result<()> {
        match values {
            Some(values) => bytes.copy_from_slice(&values.bytes[begin..begin + bytes.len()]),
            None => {
                let (at, count) = (&slot.weight, bytes.len() / slot.weight.dtype.size());
                self.engine.session().read(&TensorRef::dense(at.arena, at.offset + begin, at.dtype, [count]), bytes)?;
            }
        }
        Ok(())
    }

    /// The values of a weight, where they are not in memory to be read in parts: of which there are codes alone.
    fn values(&mut self, slot: &ParameterSlot) -> Result<Option<HostTensor>> {
        let in_memory = slot.packed.is_none() && slot.load_group.is_none();
        (!in_memory).then(|| weights::read(self.engine, slot)).transpose()
    }

    /// The same type, shape, bits; and of what is trained, numbers throughout.
    fn compare_bits(&mut self, slot: &ParameterSlot, view: &TensorView<'_>) -> Result<()> {
        check_form(slot, view)?;
        let values = self.values(slot)?;
        let (size, mut bytes, mut found) = (slot.dtype().size(), Vec::new(), Vec::new());
        for begin in (0..view.length()).step_by(BLOCK * size) {
            let count = (BLOCK * size).min(view.length() - begin);
            bytes.resize(count, 0);
            found.resize(count, 0);
            view.read(begin, &mut found).map_err(TrainError::unreadable)?;
            self.live_bytes(slot, values.as_ref(), begin, &mut bytes)?;
            if bytes != found {
                return Err(differs(format!("`{}` has other bits in the file than in the live model", slot.name)));
            }
            // What is not trained may be a bound that bounds nothing.
            if slot.trainable {
                check_finite(&slot.name, &floats(slot.dtype(), &found))?;
            }
        }
        Ok(())
    }

    /// The factors by which DoRA scales the outputs of an adapted weight: magnitudes over norms.
    fn factors(&mut self, slot: &ParameterSlot) -> Result<Option<Vec<f64>>> {
        let Some(magnitude) = peft::magnitude_of(self.program, &slot.name) else { return Ok(None) };
        let entry = self.program.preparation(None).expect("magnitudes come with norms");
        let output = self.program.entries[entry].outputs.iter().find(|(name, _)| *name == magnitude.name);
        let (_, at) = output.expect("magnitudes come with norms");
        let mut norms = HostTensor::zeros(at.dtype, at.shape.clone());
        self.engine.session().read(at, &mut norms.bytes)?;
        let magnitudes = weights::read(self.engine, magnitude)?.to_f64();
        Ok(Some(magnitudes.iter().zip(norms.to_f64()).map(|(magnitude, norm)| magnitude / norm).collect()))
    }

    /// The weight in the file against W + scale·B·A, both multiplied with one vector in f64: the file holds the sum
    /// rounded once, so each of its elements is off by at most a relative rounding.
    fn compare_sum(&mut self, slot: &ParameterSlot, view: &TensorView<'_>, of: &AdapterOf, pair: &Pair) -> Result<()> {
        check_form(slot, view)?;
        let (values, dtype) = (self.values(slot)?, slot.dtype());
        let (count, [rows, columns]) = adapted::matrices(slot.shape());
        let transposed = adapted::is_transposed(of, slot.transposed);
        let x: Vec<f64> = (0..columns).map(sign).collect();
        let factors = self.factors(slot)?;
        // Outputs are rows, or columns where the weight is kept as [in, out].
        let (of_rows, of_live) = match (factors, transposed) {
            (None, _) => (vec![1.0; rows], x.clone()),
            (Some(factors), false) => (factors, x.clone()),
            (Some(factors), true) => (vec![1.0; rows], x.iter().zip(&factors).map(|(x, factor)| x * factor).collect()),
        };
        let rows_at_once = (BLOCK / columns).max(1);
        let row_bytes = columns * dtype.size();
        let (mut bytes, mut found, mut off, mut all) = (Vec::new(), Vec::new(), 0.0, 0.0);
        for number in 0..count {
            let added = product(&pair.factors(of, slot.shape(), number), of.scale, transposed, &of_live);
            assert_eq!(added.len(), rows, "an adapter has its weight's sizes");
            for first in (0..rows).step_by(rows_at_once) {
                let part = rows_at_once.min(rows - first);
                bytes.resize(part * row_bytes, 0);
                found.resize(part * row_bytes, 0);
                let begin = (number * rows + first) * row_bytes;
                view.read(begin, &mut found).map_err(TrainError::unreadable)?;
                self.live_bytes(slot, values.as_ref(), begin, &mut bytes)?;
                let found = floats(dtype, &found);
                check_finite(&slot.name, &found)?;
                let (found_sums, live_sums) = (products(&found, &x), products(&floats(dtype, &bytes), &of_live));
                for (row, (found, live)) in found_sums.iter().zip(&live_sums).enumerate() {
                    off += (found - of_rows[first + row] * (live + added[first + row])).powi(2);
                }
                all += found.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
            }
        }
        // With independent signs the squares of the sums are, in the mean, the squares of the elements: `off` against
        // `all` is the relative error of the elements.
        let (difference, allowed) = ((off / all.max(f64::MIN_POSITIVE)).sqrt(), allowed(dtype));
        if difference <= allowed {
            return Ok(());
        }
        Err(differs(format!(
            "`{}` is not its weight with the adapter added: relative difference {difference:.1e}, allowed {allowed:.0e}",
            slot.name
        )))
    }
}

/// scale·B·A·x in f64, or scale·Aᵀ·Bᵀ·x where the weight is kept as [in, out].
fn product(of: &Factors, scale: f64, transposed: bool, x: &[f64]) -> Vec<f64> {
    let rank = of.a.shape[0];
    let (a, b) = (of.a.to_f32(), of.b.to_f32());
    let (inner, left) = match transposed {
        false => (products(&a, x), b),
        true => (products_of_transposed(&b, rank, x), self::transposed(&a, rank)),
    };
    products(&left, &inner).into_iter().map(|sum| scale * sum).collect()
}

/// Relative error of one rounding to a type, with room for the sums being made in f32.
fn allowed(dtype: DType) -> f64 {
    if dtype == DType::F32 { 1e-5 } else { 8e-3 }
}

fn differs(what: String) -> TrainError {
    TrainError::Failed(format!("the exported result was read back and differs from the model in memory: {what}"))
}

fn check_form(slot: &ParameterSlot, view: &TensorView<'_>) -> Result<()> {
    if (view.dtype, view.shape) == (slot.dtype(), slot.shape().as_slice()) {
        return Ok(());
    }
    Err(differs(format!(
        "`{}` is {} {:?}, in the live model {} {:?}",
        slot.name,
        view.dtype,
        view.shape,
        slot.dtype(),
        slot.shape()
    )))
}

fn check_finite(name: &str, values: &[f32]) -> Result<()> {
    if values.iter().all(|value| value.is_finite()) {
        return Ok(());
    }
    let what = format!("`{name}` of the trained model holds values that are not finite: nothing is exported");
    Err(TrainError::Diverged { what })
}

fn floats(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0u8; bytes.len() / dtype.size() * 4];
    convert(dtype, bytes, DType::F32, &mut values);
    values.chunks_exact(4).map(|part| f32::from_le_bytes(part.try_into().expect("four bytes"))).collect()
}

/// 1 or -1 for an index: the last bit of a mixed number.
fn sign(index: usize) -> f64 {
    let mixed = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    if (mixed ^ (mixed >> 29)).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 }
}

/// A matrix times a vector, in f64.
fn products(matrix: &[f32], x: &[f64]) -> Vec<f64> {
    let rows = matrix.par_chunks(x.len()).with_min_len(ROWS_PER_THREAD);
    rows.map(|row| row.iter().zip(x).map(|(value, x)| f64::from(*value) * x).sum()).collect()
}

/// The transpose of a matrix of `columns` columns times a vector, in f64.
fn products_of_transposed(matrix: &[f32], columns: usize, x: &[f64]) -> Vec<f64> {
    let mut sums = vec![0.0; columns];
    for (row, x) in matrix.chunks(columns).zip(x) {
        sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value) * x);
    }
    sums
}

/// [rows, columns] → [columns, rows].
fn transposed(values: &[f32], rows: usize) -> Vec<f32> {
    let columns = values.len() / rows;
    (0..values.len()).map(|i| values[i % rows * columns + i / rows]).collect()
}
