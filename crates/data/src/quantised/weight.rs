//! A tensor of files that may be the codes of a weight, and the tensors next to it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::linear::{Linear, Number, Part};
use crate::safetensors::{Raw, SafeTensors};

/// Tensors by their names, of any type.
pub(crate) struct Tensors<'f> {
    pub folder: &'f str,
    pub files: &'f [SafeTensors],
    pub place: &'f HashMap<String, (usize, String)>,
}

/// The quantized weights in the files.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// By the name of the weight.
    pub linears: BTreeMap<String, Linear>,
    /// Names of the tensors that they consist of, and of those that say nothing of weights.
    pub parts: BTreeSet<String>,
}

/// The name of a weight and the weight, where a tensor is one; or what is wrong with it.
pub(super) type Parsed = Result<Option<(String, Linear)>, String>;

/// A tensor that may be the codes of a weight.
pub(super) struct Weight<'a, 'f> {
    pub tensors: &'a Tensors<'f>,
    pub name: &'a str,
    pub found: &'a mut Found,
}

impl Weight<'_, '_> {
    pub(super) fn raw(&self, name: &str) -> Option<(Raw<'_>, Part)> {
        let (file, there) = self.tensors.place.get(name)?;
        let raw = self.tensors.files[*file].raw(there)?;
        Some((raw, Part { file: *file, begin: raw.begin, length: raw.length }))
    }

    /// The elements of a tensor of this type; `None` where it is another or there is none.
    pub(super) fn of_type(&self, name: &str, dtype: &str) -> Option<(Vec<usize>, Part)> {
        let (raw, part) = self.raw(name).filter(|(raw, _)| raw.dtype == dtype)?;
        Some((raw.shape.to_vec(), part))
    }

    /// A part of the weight: it is no tensor of its own from now on.
    pub(super) fn take(&mut self, name: &str) -> Result<(Part, String, Vec<usize>), String> {
        let (raw, part) =
            self.raw(name).ok_or_else(|| format!("`{}` is quantised, but there is no `{name}`", self.name))?;
        let (dtype, shape) = (raw.dtype.to_owned(), raw.shape.to_vec());
        self.found.parts.insert(name.to_owned());
        Ok((part, dtype, shape))
    }

    /// A tensor of numbers, of this many.
    pub(super) fn numbers(&mut self, name: &str, count: usize) -> Result<(Part, Number), String> {
        let (part, dtype, shape) = self.take(name)?;
        let number = Number::ALL.iter().find(|(known, _)| *known == dtype).map(|(_, number)| *number);
        let number = number.ok_or_else(|| format!("`{name}` holds {dtype}, expected numbers of up to 32 bits"))?;
        let elements = product(&shape);
        if elements != Some(count) || count.checked_mul(number.size()) != Some(part.length) {
            return Err(format!("`{name}` has the shape {shape:?}, expected {count} numbers"));
        }
        Ok((part, number))
    }

    /// The numbers of a tensor, of which there are few.
    pub(super) fn values(&mut self, name: &str, count: usize) -> Result<Vec<f32>, String> {
        let (part, number) = self.numbers(name, count)?;
        let mut bytes = vec![0; part.length];
        self.tensors.files[part.file].read(part.begin, &mut bytes).map_err(|e| e.to_string())?;
        Ok(number.values(&bytes))
    }

    /// One number of its own.
    pub(super) fn value(&mut self, name: &str) -> Result<f32, String> {
        let value = self.values(name, 1)?[0];
        if value.is_finite() && value != 0.0 {
            Ok(value)
        } else {
            Err(format!("`{name}` is {value}, which is not a scale"))
        }
    }
}

pub(super) fn product(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |n, extent| n.checked_mul(*extent))
}
