//! Columns of a tensor one after another, 16 neighbors of each rotated by a fixed matrix: this spreads an outlier over
//! its block before a tensor is quantized along its rows. The matrix is diag(σ)·H16/4, which a product of two tensors
//! that are rotated alike does not notice. No 16 neighbours are of two groups of rows, as experts have them.

use graph::{Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use super::{HEADERS, matrix, padded_rows};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, device_type, row_offset};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("rotate.cu");

const BLOCK: usize = 16;
/// Columns of a kernel's block; its rows are four times 16.
const COLUMNS: usize = 64;
const ROWS: usize = 64;
const THREADS: u32 = 256;

/// The places where σ is −1, as bits.
const NEGATIVE: u32 = 1 << 3 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 9 | 1 << 10 | 1 << 12 | 1 << 14 | 1 << 15;

/// y = rotate(x), or y, padded = rotate(x, offsets)
pub struct Rotate;

/// Groups of rows that begin at multiples of 16 each; none where all rows follow one another.
fn groups_of(attrs: &Attrs) -> Result<Option<usize>, String> {
    match attrs.get("groups") {
        Some(_) => attrs.size("groups").map(Some).map_err(|e| e.0),
        None => Ok(None),
    }
}

/// Columns of the result. The sizes of groups are not known: room for the largest sum of those that are filled up.
fn width(rows: usize, groups: Option<usize>) -> usize {
    let filled = groups.map_or(0, |groups| (BLOCK - 1) * groups.min(rows));
    padded_rows(rows + filled)
}

/// Returns the beginnings of groups that are filled up.
fn padded_offsets(offsets: &[i32]) -> Vec<i32> {
    let mut at = 0;
    let ends = offsets.windows(2).map(|ends| {
        at += padded_rows((ends[1] - ends[0]) as usize) as i32;
        at
    });
    [0].into_iter().chain(ends).collect()
}

/// Sixteen values times diag(σ)·H16/4, in this order of sums.
fn rotated<T: Real>(mut x: [T; BLOCK]) -> [T; BLOCK] {
    for (_, x) in x.iter_mut().enumerate().filter(|(i, _)| NEGATIVE >> i & 1 == 1) {
        *x = -*x;
    }
    let mut apart = 1;
    while apart < BLOCK {
        for i in (0..BLOCK).filter(|i| i & apart == 0) {
            (x[i], x[i + apart]) = (x[i] + x[i + apart], x[i] - x[i + apart]);
        }
        apart *= 2;
    }
    x.map(|x| x * T::from_f32(0.25))
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let (x, rows, columns) = (call.inputs[0].real(), call.inputs[0].rows(), call.inputs[0].columns());
    let offsets = match call.inputs.get(1) {
        Some(offsets) => offsets.int().to_vec(),
        None => vec![0, rows as i32],
    };
    let padded = padded_offsets(&offsets);
    // The rows of x that 16 neighbours have; none after the last group.
    let source = |first: usize| {
        let group = padded.partition_point(|start| *start as usize <= first) - 1;
        let end = *offsets.get(group + 1)? as usize;
        let from = offsets[group] as usize + first - padded[group] as usize;
        Some(from..end.min(from + BLOCK))
    };
    let (y, rest) = call.outputs.split_first_mut().expect("there is a result");
    let width = y.shape()[1];
    y.real().par_chunks_mut(width.max(1)).enumerate().for_each(|(column, y)| {
        for (block, y) in y.chunks_mut(BLOCK).enumerate() {
            let mut values = [T::default(); BLOCK];
            let own = source(block * BLOCK).unwrap_or_default();
            values.iter_mut().zip(own).for_each(|(value, row)| *value = x[row * columns + column]);
            y.copy_from_slice(&rotated(values));
        }
    });
    if let Some(starts) = rest.first_mut() {
        starts.int().copy_from_slice(&padded);
    }
}

impl Op for Rotate {
    fn id(&self) -> OpId {
        id::ROTATE
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "The transpose of x, 16 neighbours of its rows times diag(σ)·H/4 with the Hadamard matrix H and fixed signs σ; \
         rows of x are filled up with zeros. x […, K] → [K, rows up to a multiple of 16]. With `groups` rows of x are those of \
         G groups, by offsets i32 [G + 1], each filled up with zeros: → [K, P] and where groups begin among the P, \
         i32 [G + 1]. P is a bound: zeros are after the last group, too."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[Attribute { name: "groups", kind: "int?", doc: "G, groups of rows that begin at multiples of 16 each" }]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let groups = groups_of(attrs)?;
        let offsets = groups.map(|groups| ValueType::new(Element::I32, [(groups + 1).into()]));
        let [x, given @ ..] = inputs else { return Err("takes x".into()) };
        if !given.iter().eq(&offsets) {
            return Err("takes x and, with `groups`, offsets i32 [G + 1]".into());
        }
        let Some(shape) = x.extents().filter(|shape| shape.len() >= 2 && x.dtype.is_float()) else {
            return Err("x must be floating point, a matrix or more, of known extents".into());
        };
        let (rows, columns) = matrix(&shape);
        let y = ValueType::new(x.dtype, [columns.into(), width(rows, groups).into()]);
        Ok([y].into_iter().chain(offsets).collect())
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of a precision recipe, after differentiation")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        Cost { flops: 5.0 * outputs[0].len() as f64, bytes: (inputs[0].bytes() + outputs[0].bytes()) as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (x, y) = (&call.inputs[0], &call.outputs[0]);
        let (rows, columns) = matrix(&x.shape);
        let groups = groups_of(call.attrs).expect("checked by the shape rule");
        let padded = width(rows, groups);
        assert!(x.strides.last().is_none_or(|s| *s == 1) && y.is_dense(), "rows without gaps: {x}, {y}");
        let mut defines = vec![
            ("X_T".to_owned(), device_type(x.dtype).to_owned()),
            ("Y_T".to_owned(), device_type(y.dtype).to_owned()),
            ("X_AT(row)".to_owned(), row_offset(x)),
            ("COLUMNS".to_owned(), columns.to_string()),
            ("ROWS".to_owned(), rows.to_string()),
            ("PADDED".to_owned(), padded.to_string()),
            ("NEGATIVE".to_owned(), format!("{NEGATIVE}u")),
            ("THREADS".to_owned(), THREADS.to_string()),
            ("FORMAT".to_owned(), "0".to_owned()),
        ];
        defines.extend(groups.map(|groups| ("GROUPS".to_owned(), groups.to_string())));
        let kernel = |entry: &'static str, grid: [usize; 3], threads: u32, args: &[Arg]| KernelSpec {
            entry,
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines: defines.clone(),
            grid: grid.map(|n| n as u32),
            block: [threads, 1, 1],
            shared_bytes: 0,
            args: args.to_vec(),
        };
        let grid = [columns.div_ceil(COLUMNS), padded.div_ceil(ROWS).max(1), 1];
        let (x, y) = (Arg::Input(0), Arg::Output(0));
        Lowered::Kernels(match groups {
            None => vec![kernel("rotate", grid, THREADS, &[x, y])],
            Some(_) => {
                let (offsets, starts) = (Arg::Input(1), Arg::Output(1));
                let first = kernel("pad_groups", [1, 1, 1], 32, &[offsets.clone(), starts.clone()]);
                vec![first, kernel("rotate", grid, THREADS, &[x, y, offsets, starts])]
            }
        })
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |shape: &[usize]| {
            Example::new(vec![ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 }], Attrs::new())
        };
        // Groups without rows, of some and of more than 16, more than a warp reads at once; rows after the last one.
        let grouped = |shape: &[usize], sizes: &[i32]| {
            let mut of = example(shape);
            let ends = sizes.iter().scan(0, |at, size| {
                *at += size;
                Some(*at)
            });
            let values: Vec<i32> = [0].into_iter().chain(ends).collect();
            of.inputs.push(ExampleInput::Ints { shape: vec![values.len()], values });
            of.attrs = of.attrs.with("groups", sizes.len());
            of
        };
        let many: Vec<i32> = (0..70).map(|group| group * 5 % 7).collect();
        vec![
            example(&[2, 24, 32]),
            example(&[7, 80]),
            example(&[3, 67, 48]),
            grouped(&[2, 24, 32], &[0, 5, 16, 0, 17, 10, 0]),
            grouped(&[3, 70, 80], &many),
            grouped(&[1, 3, 16], &[0, 1, 0, 2]),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rotation_is_orthogonal_and_spreads_one_value() {
        let mut x = [0f64; BLOCK];
        x[3] = 2.0;
        assert!(rotated(x).iter().all(|y| y.abs() == 0.5) && rotated(x)[0] == -0.5);
        let draw = |seed: usize| std::array::from_fn(|i| ((i * 7 + seed) * 37 % 101) as f64 / 50.0 - 1.0);
        let dot = |a: [f64; BLOCK], b: [f64; BLOCK]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let (a, b) = (draw(1), draw(9));
        assert!((dot(rotated(a), rotated(b)) - dot(a, b)).abs() < 1e-12);
    }
}
