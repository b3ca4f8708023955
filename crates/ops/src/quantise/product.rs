//! A matrix product of two tensors of codes: that of the numbers that they stand for, with bias and adapters. Codes of
//! four bits come as operands of the units that have them, with scales of blocks, or as code times scale of the block, numbers
//! of the compute type. What is left is a factor of the tensor.

use graph::{Dim, Element, OpId, ValueType};
use program::{Cost, Gemm, LowRank, Scales, TensorRef};
use rayon::prelude::*;
use tensor::packed::operand;
use tensor::{Attrs, DType};

use super::matrix;
use super::numbers::is_codes;
use crate::call::{Call, Input};
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

/// y = sa·sb·op(a)·op(b) (+ bias), then y[…, columnsᵢ] += scale·tᵢ·op(cᵢ) for each adapter
pub struct MatmulCodes;

/// The attributes of a call, read.
struct Reading {
    transpose_a: bool,
    transpose_b: bool,
    f32: bool,
    fast_sum: bool,
    accumulate: bool,
    blocks: bool,
    bias: bool,
    scale: f64,
    columns: Vec<(usize, usize)>,
    across: bool,
}

impl Reading {
    fn of(attrs: &Attrs) -> Result<Reading, String> {
        let flag = |name: &str| attrs.flag(name).map_err(|e| e.0);
        let columns = match attrs.get("columns") {
            Some(_) => attrs.sizes("columns").map_err(|e| e.0)?,
            None => Vec::new(),
        };
        Ok(Reading {
            transpose_a: flag("transpose_a")?,
            transpose_b: flag("transpose_b")?,
            f32: flag("f32")?,
            fast_sum: flag("fast_sum")?,
            accumulate: flag("accumulate")?,
            blocks: flag("blocks")?,
            bias: flag("bias")?,
            scale: attrs.optional_float("scale").map_err(|e| e.0)?.unwrap_or(1.0),
            columns: columns.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect(),
            across: flag("across")?,
        })
    }

    fn checked(attrs: &Attrs) -> Reading {
        Self::of(attrs).expect("checked by the shape rule")
    }

    fn bias_at(&self) -> usize {
        if self.blocks { 6 } else { 4 }
    }

    fn first_adapter(&self) -> usize {
        self.bias_at() + usize::from(self.bias)
    }

    /// m, n, k of operands whose axes but the last are folded.
    fn extents(&self, a: &[usize], b: &[usize]) -> (usize, usize, usize) {
        let fold = |shape: &[usize]| (shape[..shape.len() - 1].iter().product::<usize>(), shape[shape.len() - 1]);
        let ((a_rows, a_columns), (b_rows, b_columns)) = (fold(a), fold(b));
        if self.blocks {
            return (a_rows, b_rows, 2 * a_columns);
        }
        let (m, k) = if self.transpose_a { (a_columns, a_rows) } else { (a_rows, a_columns) };
        (m, if self.transpose_b { b_rows } else { b_columns }, k)
    }
}

/// The numbers of an operand with scales of blocks.
fn numbers<T: Real>(codes: &Input<'_, T>, scales: &Input<'_, T>) -> Vec<T> {
    let ((rows, bytes), scales) = (matrix(codes.shape), scales.byte());
    let mut values = vec![0.0; 2 * rows * bytes];
    let lines = values.chunks_mut((2 * bytes).max(1)).zip(codes.byte().chunks(bytes.max(1)));
    lines.enumerate().for_each(|(row, (values, codes))| operand::row_values(codes, scales, row, values));
    values.into_iter().map(T::from_f32).collect()
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let reading = Reading::checked(call.attrs);
    let inputs = call.inputs;
    let (m, n, k) = reading.extents(inputs[0].shape, inputs[1].shape);
    let of_blocks = reading.blocks.then(|| [0, 1].map(|of| numbers(&inputs[of], &inputs[4 + of])));
    let (a, b) = match &of_blocks {
        Some([a, b]) => (a.as_slice(), b.as_slice()),
        None => (inputs[0].real(), inputs[1].real()),
    };
    let scale = inputs[2].real()[0] * inputs[3].real()[0];
    let factor = T::from_f64(reading.scale);
    let [y] = call.outputs_mut();
    y.real().par_chunks_mut(n).enumerate().for_each(|(row, y)| {
        let of_row = |i: usize| if reading.transpose_a { a[i * m + row] } else { a[row * k + i] };
        for (column, y) in y.iter_mut().enumerate() {
            let of_column = |i: usize| if reading.transpose_b { b[column * k + i] } else { b[i * n + column] };
            let sum = scale * (0..k).map(|i| of_row(i) * of_column(i)).sum::<T>();
            *y = if reading.accumulate { *y + sum } else { sum };
        }
        if reading.bias {
            y.iter_mut().zip(inputs[reading.bias_at()].real()).for_each(|(y, bias)| *y += *bias);
        }
        for (adapter, (first, count)) in inputs[reading.first_adapter()..].chunks(2).zip(&reading.columns) {
            let rank = adapter[0].columns();
            let (t, c) = (&adapter[0].real()[row * rank..(row + 1) * rank], adapter[1].real());
            for (column, y) in y[*first..first + count].iter_mut().enumerate() {
                let of = |r: usize| if reading.across { c[r * count + column] } else { c[column * rank + r] };
                *y += factor * t.iter().enumerate().map(|(r, t)| *t * of(r)).sum::<T>();
            }
        }
    });
}

impl Op for MatmulCodes {
    fn id(&self) -> OpId {
        id::MATMUL_CODES
    }

    fn class(&self) -> Class {
        Class::Matmul
    }

    fn doc(&self) -> &'static str {
        "y = sa·sb·op(a)·op(b) (+ bias), then y[…, start:start+len] += scale·t·op(c) for each adapter; of a and b all axes \
         but the last count as rows. a and b codes of eight bits, or numbers, sa and sb f32 [1]; with `blocks` codes of four \
         bits along the sum, u8 […, K/2] and [N, K/2], and after sa and sb the E4M3 scales of their blocks, u8 [bytes]; bias \
         [N] if `bias`, then for each adapter t […, r] and c [len, r], or [r, len] if `across` → […, N], or [M, N] if `transpose_a`."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "transpose_a", kind: "bool?", doc: "a is transposed" },
            Attribute { name: "transpose_b", kind: "bool?", doc: "b is transposed" },
            Attribute { name: "f32", kind: "bool?", doc: "the result is f32" },
            Attribute { name: "fast_sum", kind: "bool?", doc: "the sum may keep fewer bits than f32 has" },
            Attribute { name: "accumulate", kind: "bool?", doc: "add to what is there" },
            Attribute { name: "blocks", kind: "bool?", doc: "a and b are operands of units of four bits" },
            Attribute { name: "bias", kind: "bool?", doc: "there is a bias before the adapters" },
            Attribute { name: "scale", kind: "float?", doc: "factor of the adapters, 1 if absent" },
            Attribute {
                name: "columns",
                kind: "list of int?",
                doc: "first column and number of columns of each adapter; they may not overlap; absent for none",
            },
            Attribute { name: "across", kind: "bool?", doc: "the second matrix of an adapter is [r, len]" },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let reading = Reading::of(attrs)?;
        let expected = reading.first_adapter() + 2 * reading.columns.len();
        if inputs.len() != expected {
            return Err(format!("takes {expected} inputs with these attributes, not {}", inputs.len()));
        }
        let (a, b) = (&inputs[0], &inputs[1]);
        let bytes = |of: &ValueType| of.dtype == Element::Fixed(DType::U8);
        let alike = match reading.blocks {
            true => bytes(a) && bytes(b) && reading.transpose_b && !reading.transpose_a,
            false => is_codes(a) && is_codes(b) || a.dtype.is_float() && a.dtype == b.dtype,
        };
        let (true, Some(a_shape), Some(b_shape)) = (alike, a.extents(), b.extents()) else {
            return Err(
                "a and b must be codes, or numbers of one type, of known extents; with `blocks` along the sum".into()
            );
        };
        let (m, n, k) = reading.extents(&a_shape, &b_shape);
        let elements = if reading.blocks { 2 } else { 1 } * b_shape.iter().product::<usize>();
        if elements != n * k {
            return Err("the inner extents of the operands do not agree".into());
        }
        if reading.blocks {
            let scales = [m, n].map(|rows| operand::scale_bytes(rows, k / operand::BLOCK));
            let wanted = scales.map(|bytes| ValueType::new(Element::Fixed(DType::U8), [bytes.into()]));
            if !k.is_multiple_of(operand::WIDTH) || inputs[4..6] != wanted {
                return Err(format!(
                    "a product of {m} by {n} by {k} needs rows of {} and scales u8 {scales:?}",
                    operand::WIDTH
                ));
            }
        }
        if inputs[2..4].iter().any(|of| of.dtype != Element::F32) {
            return Err("the scales must be f32 [1]".into());
        }
        for (adapter, (first, count)) in inputs[reading.first_adapter()..].chunks(2).zip(&reading.columns) {
            let (t, c) = (&adapter[0], &adapter[1]);
            let rank = t.last().unwrap_or(0);
            let shape = if reading.across { [rank, *count] } else { [*count, rank] };
            if first + count > n || c.extents() != Some(shape.to_vec()) {
                return Err(format!(
                    "the adapter on columns {first}..{} of {n} needs t […, r] and c of r and {count}",
                    first + count
                ));
            }
        }
        let element = if reading.f32 { Element::F32 } else { Element::Float };
        let shape: Vec<Dim> = match reading.transpose_a {
            true => vec![m.into(), n.into()],
            false => a.shape[..a.shape.len() - 1].iter().cloned().chain([n.into()]).collect(),
        };
        Ok(vec![ValueType::new(element, shape)])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of a precision recipe, after differentiation")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], attrs: &Attrs) -> Cost {
        let reading = Reading::checked(attrs);
        let (m, n, k) = reading.extents(&inputs[0].shape, &inputs[1].shape);
        let adapters: usize = inputs[reading.first_adapter()..].chunks(2).map(|pair| 2 * m * pair[1].len()).sum();
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        Cost { flops: 2.0 * m as f64 * n as f64 * k as f64 + adapters as f64, bytes }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let reading = Reading::checked(call.attrs);
        let (a, b, y) = (&call.inputs[0], &call.inputs[1], &call.outputs[0]);
        let (m, n, k) = reading.extents(&a.shape, &b.shape);
        let adapters = call.inputs[reading.first_adapter()..].chunks(2).zip(&reading.columns);
        let low_rank = adapters.map(|(adapter, columns)| LowRank {
            t: adapter[0].clone(),
            b: adapter[1].clone(),
            transpose_b: !reading.across,
            scale: reading.scale as f32,
            columns: *columns,
        });
        Lowered::Gemm(Box::new(Gemm {
            batch: 1,
            m,
            n,
            k,
            a: a.clone(),
            b: b.clone(),
            d: y.clone(),
            transpose_a: reading.transpose_a,
            transpose_b: reading.transpose_b,
            scale: 1.0,
            scales: Some(Scales {
                of: [call.inputs[2].clone(), call.inputs[3].clone()],
                blocks: reading.blocks.then(|| [call.inputs[4].clone(), call.inputs[5].clone()]),
                fast_sum: reading.fast_sum,
            }),
            bias: reading.bias.then(|| call.inputs[reading.bias_at()].clone()),
            accumulate: reading.accumulate,
            batch_invariant: false,
            low_rank: low_rank.collect(),
        }))
    }

    crate::reference!(reference);

    /// All transposed as GPUs take them: both operands along the sum.
    fn examples(&self) -> Vec<Example> {
        let codes = |dtype: DType, shape: &[usize]| ExampleInput::Codes { dtype, shape: shape.to_vec(), scale: 40.0 };
        let scale = |value: f32| ExampleInput::F32 { shape: vec![1], values: vec![value] };
        let normal = |shape: &[usize]| ExampleInput::Normal { shape: shape.to_vec(), scale: 0.5 };
        let operands = |a: DType, rows: &[usize], n: usize, k: usize| {
            let a = codes(a, &[rows, &[k]].concat());
            vec![a, codes(DType::E4M3, &[n, k]), scale(1.0 / 64.0), scale(0.125)]
        };
        let turned = Attrs::new().with("transpose_b", true);
        let adapters = turned.clone().with("scale", 2.0).with("columns", vec![0, 16, 16, 16]);
        let with = |mut inputs: Vec<ExampleInput>, more: Vec<ExampleInput>| {
            inputs.extend(more);
            inputs
        };
        let [t, b] = [normal(&[2, 24, 8]), normal(&[16, 8])];
        let mut examples = vec![
            Example::new(operands(DType::E4M3, &[2, 24], 32, 64), turned.clone()),
            Example::new(operands(DType::E5M2, &[48], 80, 32), turned.clone().with("f32", true)),
            Example::new(
                with(operands(DType::E4M3, &[2, 24], 32, 48), vec![normal(&[32])]),
                turned.clone().with("bias", true),
            ),
            Example::new(with(operands(DType::E4M3, &[2, 24], 32, 64), vec![t.clone(), b.clone(), t, b]), adapters),
            Example::new(
                with(operands(DType::E5M2, &[48], 80, 32), vec![normal(&[48, 8]), normal(&[8, 80])]),
                turned.clone().with("columns", vec![0, 80]).with("across", true),
            ),
            Example::new(operands(DType::E4M3, &[300], 272, 1040), turned.clone().with("fast_sum", true)),
            Example::new(operands(DType::E5M2, &[300], 272, 1040), turned.clone()),
            Example::new(operands(DType::E5M2, &[48], 80, 32), turned.with("f32", true).with("accumulate", true))
                .with_state(vec![ExampleInput::NormalF32 { shape: vec![48, 80], scale: 1.0 }]),
        ];
        examples.extend(of_numbers());
        examples.extend(of_blocks());
        examples
    }
}

/// Factors of four bits with scales of blocks: codes of all values, and more than one tile of scales.
fn of_blocks() -> Vec<Example> {
    let bytes = |shape: &[usize], of: fn(usize) -> u8| ExampleInput::Bytes {
        shape: shape.to_vec(),
        values: (0..shape.iter().product()).map(of).collect(),
    };
    let scale = |value: f32| ExampleInput::F32 { shape: vec![1], values: vec![value] };
    let normal = |shape: &[usize]| ExampleInput::Normal { shape: shape.to_vec(), scale: 0.5 };
    let operands = |rows: &[usize], n: usize, k: usize| {
        let m: usize = rows.iter().product();
        let blocks = k / operand::BLOCK;
        // E4M3 from 0.5 to 3.75, other ones for each operand.
        let tiles = |rows: usize, step: usize| {
            let mut values = vec![0; operand::scale_bytes(rows, blocks)];
            for (row, block) in (0..rows).flat_map(|row| (0..blocks).map(move |block| (row, block))) {
                values[operand::scale_at(row, block, blocks)] = 0x30 + ((row * 7 + block) * step % 23) as u8;
            }
            ExampleInput::Bytes { shape: vec![values.len()], values }
        };
        let a = bytes(&[rows, &[k / 2]].concat(), |i| (i * i + 7 * i + i / 19) as u8);
        let b = bytes(&[n, k / 2], |i| (i * 11 + i / 13) as u8);
        vec![a, b, scale(0.37), scale(3e-3), tiles(m, 5), tiles(n, 9)]
    };
    let with = |more: Vec<ExampleInput>| [operands(&[2, 24], 32, 64), more].concat();
    let attrs = Attrs::new().with("transpose_b", true).with("blocks", true);
    let state = ExampleInput::NormalF32 { shape: vec![48, 80], scale: 1.0 };
    vec![
        Example::new(operands(&[2, 24], 32, 96), attrs.clone()),
        Example::new(operands(&[300], 272, 1056), attrs.clone()),
        Example::new(with(vec![normal(&[32])]), attrs.clone().with("bias", true)),
        Example::new(
            with(vec![normal(&[2, 24, 8]), normal(&[32, 8])]),
            attrs.clone().with("scale", 2.0).with("columns", vec![0, 32]),
        ),
        Example::new(operands(&[48], 80, 32), attrs.clone().with("f32", true)),
        Example::new(operands(&[48], 80, 32), attrs.with("f32", true).with("accumulate", true)).with_state(vec![state]),
    ]
}

/// Factors that are numbers, in every place that they may have.
fn of_numbers() -> Vec<Example> {
    let normal = |shape: &[usize]| ExampleInput::Normal { shape: shape.to_vec(), scale: 0.5 };
    let scale = |value: f32| ExampleInput::F32 { shape: vec![1], values: vec![value] };
    let operands = |a: &[usize], b: &[usize]| vec![normal(a), normal(b), scale(0.37), scale(3e-3)];
    let turned = Attrs::new().with("transpose_b", true);
    let state = ExampleInput::NormalF32 { shape: vec![48, 80], scale: 1.0 };
    let adapters = [normal(&[2, 24, 8]), normal(&[32, 8])];
    vec![
        Example::new(operands(&[2, 24, 64], &[64, 32]), Attrs::new()),
        Example::new(
            [operands(&[2, 24, 48], &[32, 48]), vec![normal(&[32])]].concat(),
            turned.clone().with("bias", true),
        ),
        Example::new(
            [operands(&[2, 24, 64], &[32, 64]), adapters.to_vec()].concat(),
            turned.clone().with("scale", 2.0).with("columns", vec![0, 32]),
        ),
        Example::new(operands(&[48, 32], &[80, 32]), turned.clone().with("f32", true)),
        Example::new(operands(&[48, 32], &[80, 32]), turned.with("f32", true).with("accumulate", true))
            .with_state(vec![state]),
    ]
}
