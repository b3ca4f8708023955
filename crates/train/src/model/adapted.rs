//! The matrices of one weight's adapter: both as they are, or, of a weight that lies in a parameter of three axes, those of
//! its group and its part. Knows the layout that PEFT gives them: A [groups·rank, inputs], B [outputs, rank·groups] with the
//! group last.

use compiler::{AdapterOf, Stacked};
use rayon::prelude::*;
use tensor::{DType, HostTensor};

use crate::error::Result;
use crate::model::merged::merged;
use crate::model::rounding::Rounding;

/// The two matrices of an adapter, in f32.
pub(crate) struct Pair {
    a: HostTensor,
    b: HostTensor,
}

/// The low-rank addition to one matrix: A [rank, inputs] and B [outputs, rank].
pub(crate) struct Factors {
    pub a: HostTensor,
    pub b: HostTensor,
}

/// Pairs that were read last: the weights of experts, which files keep one by one, share them.
#[derive(Default)]
pub(crate) struct Pairs(Vec<(String, Pair)>);

impl Pairs {
    /// Pairs that are kept: what the products of one layer's experts read.
    const KEPT: usize = 3;

    /// The pair of a module; read where it is not there.
    pub fn of(&mut self, module: &str, read: impl FnMut(&str) -> Result<HostTensor>) -> Result<&Pair> {
        if let Some(index) = self.0.iter().position(|(name, _)| name == module) {
            return Ok(&self.0[index].1);
        }
        if self.0.len() == Self::KEPT {
            self.0.remove(0);
        }
        self.0.push((module.to_owned(), Pair::read(read)?));
        Ok(&self.0.last().expect("one was added").1)
    }
}

impl Pair {
    /// Reads both, by `lora_A` and `lora_B`.
    pub fn read(mut read: impl FnMut(&str) -> Result<HostTensor>) -> Result<Pair> {
        Ok(Pair { a: read("lora_A")?.cast(DType::F32), b: read("lora_B")?.cast(DType::F32) })
    }

    /// The reason why the factors do not fit a weight; None if they do.
    pub fn fits(&self, of: &AdapterOf, shape: &[usize], transposed: bool) -> bool {
        fits([&self.a.shape, &self.b.shape], of, shape, transposed)
    }

    /// The factors for matrix `number` of a weight with this shape.
    ///
    /// # Panics
    /// If the shapes do not belong together.
    pub fn factors(&self, of: &AdapterOf, shape: &[usize], number: usize) -> Factors {
        let Some(stack) = of.stack else { return Factors { a: self.a.clone(), b: self.b.clone() } };
        let group = stack.member.map_or(number, |[group, _]| group);
        let outputs = self.b.shape[0] / stack.parts;
        let part = stack.member.map_or(0, |[_, part]| part);
        assert!(self.fits(of, shape, false), "an adapter has its weight's sizes");
        self.of_group(of.rank, group, part * outputs, outputs)
    }

    fn of_group(&self, rank: usize, group: usize, first: usize, outputs: usize) -> Factors {
        let (inputs, groups) = (self.a.shape[1], self.a.shape[0] / rank);
        let rows = self.a.shape[1] * 4 * rank;
        let a = HostTensor {
            dtype: DType::F32,
            shape: vec![rank, inputs],
            bytes: self.a.bytes[group * rows..][..rows].to_vec(),
        };
        let mut b = vec![0u8; outputs * rank * 4];
        b.par_chunks_mut(4).enumerate().for_each(|(index, to)| {
            let (output, j) = (first + index / rank, index % rank);
            let from = ((output * rank + j) * groups + group) * 4;
            to.copy_from_slice(&self.b.bytes[from..from + 4]);
        });
        Factors { a, b: HostTensor { dtype: DType::F32, shape: vec![outputs, rank], bytes: b } }
    }
}

/// True if A and B of these shapes belong to a weight.
pub(crate) fn fits([a, b]: [&[usize]; 2], of: &AdapterOf, shape: &[usize], transposed: bool) -> bool {
    let ([ranks, inputs], [outputs, others]) = (a, b) else { return false };
    let sizes =
        |rows: usize, columns: usize, transposed: bool| if transposed { (columns, rows) } else { (rows, columns) };
    match (of.stack, shape) {
        (None, [rows, columns]) => {
            ranks == others && (*outputs, *inputs) == sizes(*rows, *columns, transposed) && *ranks == of.rank
        }
        (Some(Stacked { parts, member: Some([group, _]), .. }), [rows, columns]) => {
            ranks == others
                && ranks.is_multiple_of(of.rank)
                && group < ranks / of.rank
                && (*outputs, *inputs) == (rows * parts, *columns)
        }
        (Some(Stacked { member: None, transposed, .. }), [groups, rows, columns]) => {
            ranks == others && *ranks == groups * of.rank && (*outputs, *inputs) == sizes(*rows, *columns, transposed)
        }
        _ => false,
    }
}

/// The matrices of a weight: how many, and the shape of each.
pub(crate) fn matrices(shape: &[usize]) -> (usize, [usize; 2]) {
    match *shape {
        [rows, columns] => (1, [rows, columns]),
        [count, rows, columns] => (count, [rows, columns]),
        _ => unreachable!("a weight with an adapter has two or three axes"),
    }
}

/// True if the matrices of a weight are [inputs, outputs].
pub(crate) fn is_transposed(of: &AdapterOf, transposed: bool) -> bool {
    of.stack.map_or(transposed, |stack| stack.transposed)
}

/// A weight with its adapter added, in the weight's type; what that rounds is added to `rounding`.
pub(crate) fn added(
    weight: &HostTensor,
    of: &AdapterOf,
    pair: &Pair,
    magnitude: Option<&HostTensor>,
    transposed: bool,
    rounding: &mut Rounding,
) -> HostTensor {
    let (count, shape) = matrices(&weight.shape);
    let transposed = is_transposed(of, transposed);
    let mut sum = |number: usize, matrix: &HostTensor| {
        let Factors { a, b } = pair.factors(of, &weight.shape, number);
        merged(matrix, [&a, &b], magnitude, of.scale, transposed, rounding)
    };
    if count == 1 && weight.shape.len() == 2 {
        return sum(0, weight);
    }
    let size = weight.bytes.len() / count;
    let matrix = |bytes: &[u8]| HostTensor { dtype: weight.dtype, shape: shape.to_vec(), bytes: bytes.to_vec() };
    let sums = weight.bytes.chunks(size).enumerate().flat_map(|(number, bytes)| sum(number, &matrix(bytes)).bytes);
    HostTensor { dtype: weight.dtype, shape: weight.shape.clone(), bytes: sums.collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(member: Option<[usize; 2]>, parts: usize, transposed: bool) -> AdapterOf {
        let stack = Some(Stacked { parts, member, transposed });
        AdapterOf { module: "experts".into(), rank: 2, scale: 0.5, by_parameter: true, stack }
    }

    /// Two groups, rank 2, three inputs, four outputs; numbers that tell their places.
    fn pair() -> Pair {
        let a: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let b: Vec<f32> = (0..16).map(|i| 100.0 + i as f32).collect();
        Pair { a: HostTensor::from_f32([4, 3], &a), b: HostTensor::from_f32([4, 4], &b) }
    }

    /// scale·Σ over j of B[output, j, group]·A[group, j, input]
    fn product(group: usize, output: usize, input: usize) -> f32 {
        let (a, b) =
            (|j: usize| ((group * 2 + j) * 3 + input) as f32, |j: usize| 100.0 + (output * 4 + j * 2 + group) as f32);
        0.5 * (0..2).map(|j| b(j) * a(j)).sum::<f32>()
    }

    #[test]
    fn a_weight_of_a_group_gets_that_group_s_product_and_its_own_outputs() {
        let one = of(Some([1, 1]), 2, false);
        let zero = HostTensor::from_f32([2, 3], &[0.0; 6]);
        let found = added(&zero, &one, &pair(), None, false, &mut Rounding::default()).to_f32();
        let expected: Vec<f32> = (0..6).map(|i| product(1, 2 + i / 3, i % 3)).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn a_parameter_of_three_axes_gets_all_products_either_way_round() {
        let found = added(
            &HostTensor::from_f32([2, 4, 3], &[0.0; 24]),
            &of(None, 1, false),
            &pair(),
            None,
            false,
            &mut Rounding::default(),
        );
        let expected: Vec<f32> = (0..24).map(|i| product(i / 12, i / 3 % 4, i % 3)).collect();
        assert_eq!(found.to_f32(), expected);
        let found = added(
            &HostTensor::from_f32([2, 3, 4], &[0.0; 24]),
            &of(None, 1, true),
            &pair(),
            None,
            false,
            &mut Rounding::default(),
        );
        let expected: Vec<f32> = (0..24).map(|i| product(i / 12, i % 4, i / 4 % 3)).collect();
        assert_eq!(found.to_f32(), expected);
    }

    #[test]
    fn shapes_are_held_against_the_weight() {
        let fits = |of: &AdapterOf, shape: &[usize]| pair().fits(of, shape, false);
        assert!(fits(&of(None, 1, false), &[2, 4, 3]) && fits(&of(None, 1, true), &[2, 3, 4]));
        assert!(fits(&of(Some([1, 0]), 2, false), &[2, 3]) && fits(&of(Some([0, 0]), 1, false), &[4, 3]));
        assert!(!fits(&of(Some([2, 0]), 2, false), &[2, 3]), "there is no third group");
        assert!(!fits(&of(None, 1, false), &[3, 4, 3]) && !fits(&of(None, 1, false), &[2, 3, 4]));
    }
}
