//! Factors of channels that were moved from values into the weights around them, and weights with them.
//!
//! Knows parameters by their names; not how factors are chosen.

use std::collections::BTreeMap;

use tensor::compressed::round_to;
use tensor::{DType, HostTensor};

use super::mapping::{Made, Mapping};
use super::part::Place;

/// The division of a weight's rows, or of a norm's weight.
#[derive(Clone, Debug, PartialEq)]
struct Divided {
    first: usize,
    by: Vec<f32>,
    /// The weight counts from 1.
    offset: bool,
}

/// The changes of weights, by the names of their parameters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scaling {
    /// Factors of a matrix's columns.
    columns: BTreeMap<String, Vec<f32>>,
    divided: BTreeMap<String, Divided>,
}

impl Scaling {
    /// Takes in the factors of a mapping of a layer.
    pub fn add(&mut self, mapping: &Mapping, place: Place, factors: &[f32]) {
        for name in mapping.balanced.iter().chain(&mapping.others) {
            self.columns.insert(place.numbered(name), factors.to_vec());
        }
        let (weight, bias, first, offset) = match &mapping.made {
            Made::Norm { weight, bias, offset } => (weight, bias, 0, *offset),
            Made::Rows { weight, bias, first } => (weight, bias, *first, false),
        };
        let mut divide = |name: &String, offset| {
            self.divided.insert(place.numbered(name), Divided { first, by: factors.to_vec(), offset });
        };
        divide(weight, offset);
        bias.iter().for_each(|name| divide(name, false));
    }

    /// The factors of the columns of a matrix: what it is multiplied with is divided by them.
    pub fn of_columns(&self, parameter: &str) -> Option<&[f32]> {
        self.columns.get(parameter).map(Vec::as_slice)
    }

    /// Scales a matrix [outputs, inputs] in place, rounded to a type at each step.
    pub fn matrix(&self, parameter: &str, x: &mut [f32], columns: usize, dtype: DType) {
        if let Some(factors) = self.columns.get(parameter) {
            for row in x.chunks_mut(columns) {
                row.iter_mut().zip(factors).for_each(|(x, factor)| *x = round_to(dtype, *x * factor));
            }
        }
        if let Some(Divided { first, by, .. }) = self.divided.get(parameter) {
            for (row, by) in x.chunks_mut(columns).skip(*first).zip(by) {
                row.iter_mut().for_each(|x| *x = round_to(dtype, *x / by));
            }
        }
    }

    /// Scales a tensor that is written as it is: a norm's weight, a bias, or a matrix.
    pub fn kept(&self, name: &str, tensor: HostTensor) -> HostTensor {
        if !self.columns.contains_key(name) && !self.divided.contains_key(name) {
            return tensor;
        }
        let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
        let mut x = tensor.to_f32();
        match (shape.as_slice(), self.divided.get(name)) {
            ([_, columns], _) => self.matrix(name, &mut x, *columns, dtype),
            (_, Some(Divided { first, by, offset })) => {
                let one = f32::from(u8::from(*offset));
                x[*first..].iter_mut().zip(by).for_each(|(x, by)| *x = (*x + one) / by - one);
            }
            _ => unreachable!("only matrices have columns"),
        }
        HostTensor::from_f32(shape, &x).cast(dtype)
    }
}
