//! The tensors of a result, and how each is made and written.
//!
//! Knows layouts and places; not which method chose the codes, nor where activations were measured.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

use data::Stop;
use data::quantised::Layout;
use data::safetensors::{PlacedWriter, RawTensor, Weights, header_name};
use rayon::prelude::*;
use tensor::compressed::{Codes, Range, global_scale};
use tensor::{DType, HostTensor};

use super::compared::Compared;
use super::encode::{Decided, Encoded, encode, range, scales, values};
use super::moments::Moments;
use super::refine::{self, Refined, Solved, Wanted};
use super::scaling::Scaling;
use super::solver::Scaled;
use crate::error::{Result, TrainError, go_on};
use crate::model::compression::chosen::FUSED;
use crate::model::compression::chosen::{Chosen, Matrix};
use crate::model::compression::observer::{RangeObserver, narrowed};
use crate::model::compression::scheme::Scheme;

/// Digests of the values that were written, to be compared with those that are read.
pub struct Digests<'a> {
    pub progress: Progress<'a>,
    pub done: usize,
    pub all: usize,
    /// Digest of each tensor's values as readers decode them.
    pub of: BTreeMap<String, blake3::Hash>,
}

impl Digests<'_> {
    fn add(&mut self, name: String, hash: blake3::Hash, read: usize) {
        self.of.insert(name, hash);
        self.done += read;
        (self.progress)(self.done, self.all);
    }
}

/// Numbers of matrices that are in memory at a time, if there is more than one.
const AT_ONCE: usize = 1 << 27;

/// The ranges of matrices that share a scale, by module: each is known once.
pub type Ranges = Mutex<BTreeMap<String, Range>>;

/// A matrix that is written: with the codes that were decided, or the nearest.
pub struct Job<'m> {
    pub of: &'m Matrix,
    pub decided: Decided,
    /// The range of what it is multiplied with, where the scheme has a scale of it.
    pub activations: Option<Range>,
}

/// Takes the values of a matrix as the model has them, in a type.
pub type Keep<'a> = (DType, &'a mut dyn FnMut(&Matrix, HostTensor));

/// A matrix as it is written.
struct Made<'m> {
    of: &'m Matrix,
    parts: Vec<Vec<u8>>,
    values: Option<HostTensor>,
    hash: blake3::Hash,
    /// Bytes that were read for it.
    read: usize,
}

/// Takes in the bytes of weights that were read so far, and all.
pub type Progress<'a> = &'a dyn Fn(usize, usize);

/// The result of [`crate::compress`].
#[derive(Clone, Debug, PartialEq)]
pub struct Compressed {
    /// The number of matrices that became codes.
    pub matrices: usize,
    /// Bytes of all weights, before and now.
    pub bytes: (usize, usize),
    /// Elements of a row that share a scale; 0 where it is not groups of a row that do.
    pub group_size: usize,
    /// Tokens that activations were measured on.
    pub measured: usize,
    /// The result against the model, where there were data.
    pub compared: Option<Compared>,
    /// Notes for the user, a sentence each.
    pub notes: Vec<String>,
}

/// The tensors of a result and their formats.
pub struct Plan<'a> {
    pub own: &'a Weights,
    pub scheme: Scheme,
    /// The type of what the model's files have in codes.
    pub saved: DType,
    pub chosen: &'a Chosen,
    pub scaling: Scaling,
    pub observer: RangeObserver,
}

impl Plan<'_> {
    /// Returns the type that a tensor has in the result.
    fn dtype_of(&self, tensor: &str) -> Result<DType> {
        let view = self.own.get(tensor).map_err(TrainError::model_file)?;
        Ok(match view.dtype {
            _ if view.is_dequantised() => self.scheme.dtype(self.saved),
            dtype @ (DType::F32 | DType::F16) if dtype == self.saved => self.scheme.dtype(dtype),
            // Tables of another type than the model, such as biases of routers, keep theirs.
            dtype => dtype,
        })
    }

    /// The type of the scales of a matrix, which its numbers are rounded to first.
    fn dtype_of_matrix(&self, of: &Matrix) -> Result<DType> {
        Ok(self.scheme.dtype(self.dtype_of(&of.parameter)?))
    }

    /// The type that most of the model is in.
    pub fn dtype(&self) -> Result<DType> {
        let all = &self.chosen.matrices;
        let first = all.iter().find(|of| of.part.is_none()).or(all.first());
        self.dtype_of_matrix(first.expect("there is a matrix"))
    }

    fn layout(&self, of: &Matrix) -> Result<Layout> {
        Ok(Layout { form: self.scheme.form, packed: self.scheme.packed, dtype: self.dtype_of_matrix(of)? })
    }

    /// The tensors of the files; those of a matrix stand together.
    pub fn groups(&self) -> Result<Vec<Vec<RawTensor>>> {
        let mut groups = Vec::new();
        for of in &self.chosen.kept {
            let dtype = self.dtype_of(&of.tensor)?;
            let bytes = of.shape.iter().product::<usize>() * dtype.size();
            let (name, shape) = (of.name.clone(), of.shape.clone());
            groups.push(vec![RawTensor { name, dtype: header_name(dtype), shape, bytes }]);
        }
        for of in &self.chosen.matrices {
            groups.push(self.tensors(of)?);
        }
        groups.sort_by(|a, b| a[0].name.cmp(&b[0].name));
        Ok(groups)
    }

    pub fn write_kept(&self, writer: &mut PlacedWriter, digests: &mut Digests<'_>, stop: Stop<'_>) -> Result<()> {
        for of in &self.chosen.kept {
            go_on(stop)?;
            let tensor = self.read(&of.tensor)?;
            let read = tensor.bytes.len();
            let tensor = self.scaling.kept(&of.tensor, tensor.into_type(self.dtype_of(&of.tensor)?));
            writer.put(&of.name, &tensor.bytes).map_err(|e| TrainError::Failed(e.to_string()))?;
            digests.add(of.name.clone(), blake3::Hasher::new().update_rayon(&tensor.bytes).finalize(), read);
        }
        Ok(())
    }

    /// Writes matrices, some of them at a time.
    pub fn write_matrices(
        &self,
        mut jobs: Vec<Job<'_>>,
        writer: &mut PlacedWriter,
        digests: &mut Digests<'_>,
        ranges: &Ranges,
        stop: Stop<'_>,
        mut keep: Option<Keep<'_>>,
    ) -> Result<()> {
        while !jobs.is_empty() {
            go_on(stop)?;
            let mut elements = 0;
            let is_next = |job: &&Job<'_>| {
                elements += job.of.shape[0] * job.of.shape[1];
                elements <= AT_ONCE
            };
            let count = jobs.iter().take_while(is_next).count().max(1);
            let rest = jobs.split_off(count);
            let kept = keep.as_ref().map(|(dtype, _)| *dtype);
            let made: Vec<Made<'_>> =
                jobs.into_par_iter().map(|job| self.made(job, ranges, kept)).collect::<Result<_>>()?;
            for Made { of, parts, values, hash, read } in made {
                for (tensor, bytes) in self.tensors(of)?.iter().zip(&parts) {
                    writer.put(&tensor.name, bytes).map_err(|e| TrainError::Failed(e.to_string()))?;
                }
                digests.add(format!("{}.weight", of.module), hash, read);
                if let (Some((_, take)), Some(values)) = (&mut keep, values) {
                    take(of, values);
                }
            }
            jobs = rest;
        }
        Ok(())
    }

    fn made<'m>(&self, job: Job<'m>, ranges: &Ranges, kept: Option<DType>) -> Result<Made<'m>> {
        let Job { of, decided, activations } = job;
        let layout = self.layout(of)?;
        let (x, read) = self.numbers(of)?;
        let whole = self.range_of_scale(of, &x, ranges)?;
        let Encoded { mut parts, values } = encode(layout, &x, of.shape, whole, decided, self.observer);
        drop(x);
        if self.scheme.measures_activations() {
            let range = activations.expect("activations of every matrix are measured");
            parts.push(self.scheme.scale_of_activations(range, layout.dtype));
        }
        let values = as_the_model_has(of, values);
        let hash = blake3::hash(&values.bytes);
        let values = kept.map(|dtype| values.into_type(dtype));
        Ok(Made { of, parts, values, hash, read })
    }

    /// The numbers of the matrices of parameters, and the scales of their codes.
    pub fn scaled(&self, parameters: &[String]) -> Result<Vec<Scaled>> {
        let of = |parameter: &String| -> Result<Scaled> {
            let of = self.matrix(parameter).expect("it becomes codes");
            let (x, _) = self.numbers(of)?;
            let whole = self.range_of_scale(of, &x, &Ranges::default())?;
            let scales = scales(self.layout(of)?, &x, of.shape, whole, self.observer);
            Ok(Scaled { x, scales })
        };
        parameters.par_iter().map(of).collect()
    }

    /// Codes and scales with which a matrix of these numbers [outputs, inputs] gives most nearly what it is wanted to: `wanted` has for
    /// each output the moments of what it lacks with what the matrix is multiplied with.
    pub fn refined(
        &self,
        of: &Matrix,
        moments: &Moments,
        solved: &Solved,
        wanted: Option<Vec<f64>>,
    ) -> Result<Refined> {
        let layout = self.layout(of)?;
        let (x, _) = self.numbers(of)?;
        let whole = self.range_of_scale(of, &x, &Ranges::default())?;
        let x = match wanted {
            Some(wanted) => refine::moved(&x, solved, wanted),
            None => x,
        };
        let wanted = Wanted { form: layout.form, dtype: layout.dtype, whole, x: &x, moments };
        Ok(refine::refined(&wanted, solved))
    }

    /// The values of refined codes, as the model has them.
    pub fn values_of(&self, of: &Matrix, refined: &Refined) -> Result<HostTensor> {
        let layout = self.layout(of)?;
        let (x, _) = self.numbers(of)?;
        let whole = self.range_of_scale(of, &x, &Ranges::default())?;
        let global = global_scale(whole.magnitude(), layout.dtype);
        let values = values(&layout.form, &refined.codes, of.shape, &refined.scales, global);
        Ok(as_the_model_has(of, values))
    }

    /// The values of the nearest codes of other numbers in the place of a matrix's; `whole`: the range of all that shares a scale.
    pub fn values(&self, of: &Matrix, x: &[f32], whole: Range) -> Result<Vec<f32>> {
        Ok(encode(self.layout(of)?, x, of.shape, whole, Decided::default(), self.observer).values)
    }

    /// The range of what shares the largest scale of a matrix. An error where its numbers are not finite.
    fn range_of_scale(&self, of: &Matrix, x: &[f32], ranges: &Ranges) -> Result<Range> {
        let own = range(x);
        if !(own.least.is_finite() && own.most.is_finite()) || x.par_iter().any(|x| x.is_nan()) {
            return Err(not_finite(of, x));
        }
        let own = self.observed(of, x)?;
        match self.scheme.form.codes {
            Codes::Nvfp4 => self.range_of_fused(of, own, ranges),
            _ => Ok(own),
        }
    }

    /// The range that a scale of a whole matrix follows from.
    pub fn observed(&self, of: &Matrix, x: &[f32]) -> Result<Range> {
        Ok(match self.observer {
            RangeObserver::MinMax => range(x),
            RangeObserver::Mse => {
                narrowed(self.layout(of)?, x, of.shape).into_iter().fold(Range::default(), Range::with)
            }
        })
    }

    /// Returns the tensors that a matrix is in the files.
    fn tensors(&self, of: &Matrix) -> Result<Vec<RawTensor>> {
        let layout = self.layout(of)?;
        let mut tensors = layout.tensors(&of.module, of.shape);
        if let Some((ending, dtype)) = self.scheme.tensor_of_activations(layout.dtype) {
            let (name, dtype, bytes) = (format!("{}.{ending}", of.module), header_name(dtype), dtype.size());
            tensors.push(RawTensor { name, dtype, shape: vec![1], bytes });
        }
        Ok(tensors)
    }

    /// The numbers of a matrix, [outputs, inputs], rounded to the type of its scales; and the bytes that were read.
    pub fn numbers(&self, of: &Matrix) -> Result<(Vec<f32>, usize)> {
        let dtype = self.dtype_of_matrix(of)?;
        let tensor = self.read(&of.parameter)?;
        let read = tensor.bytes.len();
        let x = tensor.into_type(dtype).to_f32();
        let mut x = if of.transposed { transpose(&x, of.shape[0]) } else { x };
        self.scaling.matrix(&of.parameter, &mut x, of.shape[1], dtype);
        Ok((x, read))
    }

    /// The matrix of a parameter, if it becomes codes.
    pub fn matrix(&self, parameter: &str) -> Option<&Matrix> {
        self.chosen.matrices.iter().find(|of| of.parameter == parameter)
    }

    /// The columns of the matrix of a parameter that becomes codes.
    pub fn width_of(&self, parameter: &str) -> usize {
        self.matrix(parameter).expect("it becomes codes").shape[1]
    }

    /// True if a parameter is a tensor of its own in the files, so that its numbers can be scaled.
    pub fn can_scale(&self, parameter: &str) -> bool {
        self.matrix(parameter).is_some() || self.chosen.kept.iter().any(|of| of.tensor == parameter)
    }

    fn read(&self, tensor: &str) -> Result<HostTensor> {
        self.own.get(tensor).map_err(TrainError::model_file)?.to_host().map_err(TrainError::unreadable)
    }

    /// The range of a matrix and of those that it is computed with.
    fn range_of_fused(&self, of: &Matrix, own: Range, known: &Ranges) -> Result<Range> {
        let (parent, last) = of.module.rsplit_once('.').unwrap_or(("", &of.module));
        let Some(together) = FUSED.iter().find(|names| names.contains(&last)) else { return Ok(own) };
        let mut whole = own;
        for name in together.iter().filter(|name| **name != last) {
            let module = format!("{parent}.{name}");
            let Some(other) = self.chosen.matrices.iter().find(|of| of.module == module) else { continue };
            let found = locked(known).get(&module).copied();
            let range = match found {
                Some(range) => range,
                None => self.observed(other, &self.numbers(other)?.0)?,
            };
            locked(known).insert(module, range);
            whole = whole.with(range);
        }
        locked(known).insert(of.module.clone(), own);
        Ok(whole)
    }
}

fn locked(ranges: &Ranges) -> MutexGuard<'_, BTreeMap<String, Range>> {
    ranges.lock().expect("nothing fails while ranges are locked")
}

/// Values [outputs, inputs] in the shape that the model has them in.
fn as_the_model_has(of: &Matrix, values: Vec<f32>) -> HostTensor {
    match of.transposed {
        true => HostTensor::from_f32([of.shape[1], of.shape[0]], &transpose(&values, of.shape[1])),
        false => HostTensor::from_f32(of.shape, &values),
    }
}

/// The first number of a matrix that is none, with its place.
fn not_finite(of: &Matrix, x: &[f32]) -> TrainError {
    let place = x.iter().position(|x| !x.is_finite()).unwrap_or(0);
    let at = [place / of.shape[1], place % of.shape[1]];
    TrainError::Usage(format!(
        "`{}.weight` is {} at {at:?}, expected finite numbers\n  hint: the model is damaged, or diverged in training",
        of.module, x[place]
    ))
}

/// [rows, columns] → [columns, rows].
pub fn transpose(values: &[f32], columns: usize) -> Vec<f32> {
    let rows = values.len() / columns;
    (0..values.len()).map(|i| values[i % rows * columns + i / rows]).collect()
}
