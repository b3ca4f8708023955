//! The sum of two products as one product: the input gradient of an adapted linear, from the base weight and from the
//! adapter.

use graph::{Dim, OpId, ValueType};
use program::{Cost, Gemm, LowRank, TensorRef};
use tensor::Attrs;

use super::cpu;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Class, Example, ExampleInput, Op};
use crate::registry::id;

/// y = a·b + t·c, with few columns in t
pub struct MatmulSum;

impl Op for MatmulSum {
    fn id(&self) -> OpId {
        id::MATMUL_SUM
    }

    fn class(&self) -> Class {
        Class::Matmul
    }

    fn doc(&self) -> &'static str {
        "y = a·b + t·c; all axes but the last count as rows. a […, K], b [K, N], t […, r], c [r, N] → […, N]."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [a, b, t, c] = inputs else { return Err("takes a, b, t and c".into()) };
        let matrix = |x: &ValueType| match x.shape.as_slice() {
            [Dim::Fixed(rows), Dim::Fixed(columns)] => Some((*rows, *columns)),
            _ => None,
        };
        let fits = |x: &ValueType, factor: &ValueType| matrix(factor).is_some_and(|(rows, _)| x.last() == Some(rows));
        if !fits(a, b) || !fits(t, c) || matrix(b).map(|m| m.1) != matrix(c).map(|m| m.1) {
            return Err("the factors must be matrices with equal columns, and rows as a and t have columns".into());
        }
        if a.shape.split_last().map(|s| s.1) != t.shape.split_last().map(|s| s.1) {
            return Err("a and t must have the same rows".into());
        }
        let mut result = a.clone();
        *result.shape.last_mut().expect("checked to have columns") = b.shape[1].clone();
        Ok(vec![result])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("built by fusion after differentiation")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let n = inputs[1].shape[1] as f64;
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        Cost { flops: 2.0 * n * (inputs[0].len() + inputs[2].len()) as f64, bytes }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let [a, b, t, c] = call.inputs else { unreachable!("the shape rule requires four inputs") };
        let (k, n) = (b.shape[0], b.shape[1]);
        let low_rank = LowRank { t: t.clone(), b: c.clone(), transpose_b: false, scale: 1.0, columns: (0, n) };
        Lowered::Gemm(Box::new(Gemm {
            batch: 1,
            m: a.len() / k,
            n,
            k,
            a: a.clone(),
            b: b.clone(),
            d: call.outputs[0].clone(),
            transpose_a: false,
            transpose_b: false,
            scale: 1.0,
            scales: None,
            bias: None,
            accumulate: false,
            batch_invariant: false,
            low_rank: vec![low_rank],
        }))
    }

    crate::reference!(cpu::matmul_sum);

    fn examples(&self) -> Vec<Example> {
        let normal = |shape: &[usize]| ExampleInput::Normal { shape: shape.to_vec(), scale: 0.5 };
        let example = |rows: &[usize], k: usize, r: usize, n: usize| {
            let with = |columns: usize| [rows, &[columns]].concat();
            Example::new(vec![normal(&with(k)), normal(&[k, n]), normal(&with(r)), normal(&[r, n])], Attrs::new())
        };
        vec![example(&[2, 5], 24, 4, 16), example(&[64], 96, 16, 40)]
    }
}
