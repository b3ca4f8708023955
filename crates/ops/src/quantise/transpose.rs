//! Transposed codes of eight bits, for products that sum over their rows. For codes that the kernel of their tensor
//! wrote; `quantise` gives both by itself.

use graph::{OpId, ValueType};
use program::Arg;
use tensor::{Attrs, DType};

use super::numbers::is_codes;
use super::{HEADERS, TILE, TILE_THREADS, TRANSPOSE_HEADER, matrix, padded_rows};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::op::{Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("transpose.cu");

/// Neighbours that a thread moves at once.
const WIDTH: usize = 16;

/// transposed = transpose_codes(codes)
pub struct TransposeCodes;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let (rows, columns) = (call.inputs[0].rows(), call.inputs[0].columns());
    let codes = call.inputs[0].real();
    let [transposed] = call.outputs_mut();
    let transposed = transposed.real();
    transposed.fill(T::default());
    for (row, line) in codes.chunks(columns.max(1)).enumerate() {
        for (column, code) in line.iter().enumerate() {
            transposed[column * padded_rows(rows) + row] = *code;
        }
    }
}

impl Op for TransposeCodes {
    fn id(&self) -> OpId {
        id::TRANSPOSE_CODES
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "Codes of eight bits with all axes but the last folded, transposed. codes […, K] → codes [K, rows up to a multiple \
         of 16], zeros after."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [codes] = inputs else { return Err("takes one input".into()) };
        let (true, Some(shape)) = (is_codes(codes), codes.extents().filter(|shape| shape.len() >= 2)) else {
            return Err("takes codes of eight bits, a matrix or more, of known extents".into());
        };
        let (rows, columns) = matrix(&shape);
        if !columns.is_multiple_of(WIDTH) {
            return Err(format!("codes must have a multiple of {WIDTH} columns, not {columns}"));
        }
        Ok(vec![ValueType::new(codes.dtype, [columns.into(), padded_rows(rows).into()])])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of a precision recipe, after differentiation")
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (codes, transposed) = (&call.inputs[0], &call.outputs[0]);
        assert!(codes.is_dense() && transposed.is_dense(), "codes lie densely: {codes}, {transposed}");
        let (rows, columns) = matrix(&codes.shape);
        let numbers =
            [("COLUMNS", columns), ("ROWS", rows), ("PADDED", padded_rows(rows)), ("THREADS", TILE_THREADS as usize)];
        Lowered::Kernels(vec![KernelSpec {
            entry: "transpose_codes",
            source: SOURCE.to_owned(),
            headers: vec![HEADERS[0], TRANSPOSE_HEADER],
            defines: numbers.iter().map(|(name, n)| ((*name).to_owned(), n.to_string())).collect(),
            grid: [columns.div_ceil(TILE) as u32, padded_rows(rows).div_ceil(TILE).max(1) as u32, 1],
            block: [TILE_THREADS, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Output(0)],
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |dtype: DType, shape: &[usize]| {
            let codes = ExampleInput::Codes { dtype, shape: shape.to_vec(), scale: 20.0 };
            Example::new(vec![codes], Attrs::new())
        };
        vec![
            example(DType::E4M3, &[2, 37, 80]),
            example(DType::E5M2, &[128, 64]),
            example(DType::E5M2, &[3, 16]),
            example(DType::E4M3, &[300, 272]),
        ]
    }
}

#[cfg(test)]
mod tests {
    use graph::Element;

    use super::*;

    #[test]
    fn only_codes_are_transposed() {
        let of = |element: Element| ValueType::new(element, [4.into(), 32.into()]);
        assert!(TransposeCodes.infer(&[of(Element::Fixed(DType::E4M3))], &Attrs::new()).is_ok());
        assert!(TransposeCodes.infer(&[of(Element::Fixed(DType::BF16))], &Attrs::new()).is_err());
    }
}
