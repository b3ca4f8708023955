//! Batched GEMM: products of many matrices of equal size as one instruction, used by the update of matrices.

use graph::{Dim, Element, OpId, ValueType};
use program::{Cost, Gemm, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;
use crate::vector::add_scaled;

/// y = op(a)·op(b) for each pair
pub struct BatchedMatmul;

struct Flags {
    transpose_a: bool,
    transpose_b: bool,
    f32: bool,
}

impl Flags {
    fn of(attrs: &Attrs) -> Result<Flags, String> {
        let flag = |name: &str| attrs.flag(name).map_err(|e| e.0);
        Ok(Flags { transpose_a: flag("transpose_a")?, transpose_b: flag("transpose_b")?, f32: flag("f32")? })
    }

    fn checked(attrs: &Attrs) -> Flags {
        Flags::of(attrs).expect("checked by the shape rule")
    }

    /// m, n and k; `None` when the factors do not fit.
    fn extents(&self, a: &[usize], b: &[usize]) -> Option<[usize; 3]> {
        let turned = |x: &[usize], on: bool| if on { (x[2], x[1]) } else { (x[1], x[2]) };
        let ((m, k), (rows, n)) = (turned(a, self.transpose_a), turned(b, self.transpose_b));
        (a[0] == b[0] && rows == k).then_some([m, n, k])
    }
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let (flags, a, b) = (Flags::checked(call.attrs), &call.inputs[0], &call.inputs[1]);
    let [m, n, k] = flags.extents(a.shape, b.shape).expect("checked by the shape rule");
    let (a, b) = (a.real(), b.real());
    let [y] = call.outputs_mut();
    y.real().par_chunks_mut(n).enumerate().for_each(|(index, y)| {
        let (a, b) = (&a[index / m * m * k..][..m * k], &b[index / m * n * k..][..n * k]);
        let row = index % m;
        y.fill(T::default());
        for p in 0..k {
            let factor = if flags.transpose_a { a[p * m + row] } else { a[row * k + p] };
            match flags.transpose_b {
                true => y.iter_mut().zip(b.chunks(k)).for_each(|(y, b)| *y += factor * b[p]),
                false => add_scaled(y, factor, &b[p * n..][..n]),
            }
        }
    });
}

impl Op for BatchedMatmul {
    fn id(&self) -> OpId {
        id::BATCHED_MATMUL
    }

    fn class(&self) -> Class {
        Class::Matmul
    }

    fn doc(&self) -> &'static str {
        "y = op(a)·op(b) for each pair, op(x) is x or its transpose. a [count, m, k], b [count, k, n] → [count, m, n]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "transpose_a", kind: "bool?", doc: "use the transposes of the first operands" },
            Attribute { name: "transpose_b", kind: "bool?", doc: "use the transposes of the second operands" },
            Attribute { name: "f32", kind: "bool?", doc: "the result is f32 whatever the operands are" },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [a, b] = inputs else { return Err("takes two operands".into()) };
        let flags = Flags::of(attrs)?;
        if !a.dtype.is_float() || !b.dtype.is_float() {
            return Err("both operands must be floating point".into());
        }
        let known = |x: &ValueType| x.shape.iter().map(Dim::fixed).collect::<Option<Vec<usize>>>();
        let (Some(x), Some(y)) = (known(a), known(b)) else { return Err("all axes must be known".into()) };
        if x.len() != 3 || y.len() != 3 {
            return Err("the operands must be [count, rows, columns]".into());
        }
        let Some([m, n, _]) = flags.extents(&x, &y) else { return Err("the operands do not fit one another".into()) };
        let dtype = if flags.f32 { Element::F32 } else { a.dtype };
        Ok(vec![ValueType::new(dtype, [x[0].into(), m.into(), n.into()])])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of the update")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], attrs: &Attrs) -> Cost {
        let extents = Flags::checked(attrs).extents(&inputs[0].shape, &inputs[1].shape);
        let [m, n, k] = extents.expect("checked by the shape rule").map(|n| n as f64);
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        Cost { flops: 2.0 * inputs[0].shape[0] as f64 * m * n * k, bytes }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let flags = Flags::checked(call.attrs);
        let (a, b, d) = (&call.inputs[0], &call.inputs[1], &call.outputs[0]);
        let [m, n, k] = flags.extents(&a.shape, &b.shape).expect("checked by the shape rule");
        // A batch of one is a plain product, for which the leading axis of 1 says nothing.
        Lowered::Gemm(Box::new(Gemm {
            batch: a.shape[0],
            m,
            n,
            k,
            a: a.clone(),
            b: b.clone(),
            d: d.clone(),
            transpose_a: flags.transpose_a,
            transpose_b: flags.transpose_b,
            scale: 1.0,
            scales: None,
            bias: None,
            accumulate: false,
            batch_invariant: false,
            low_rank: Vec::new(),
        }))
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |a: [usize; 3], b: [usize; 3], flags: &[&str]| {
            let input = |shape: [usize; 3]| ExampleInput::Normal { shape: shape.to_vec(), scale: 0.5 };
            let attrs = flags.iter().fold(Attrs::new(), |attrs, flag| attrs.with(flag, true));
            Example::new(vec![input(a), input(b)], attrs)
        };
        vec![
            example([3, 16, 24], [3, 24, 40], &[]),
            example([2, 16, 40], [2, 16, 40], &["transpose_b"]),
            example([4, 40, 16], [4, 40, 16], &["transpose_a", "f32"]),
            example([1, 16, 8], [1, 24, 16], &["transpose_a", "transpose_b"]),
        ]
    }
}
