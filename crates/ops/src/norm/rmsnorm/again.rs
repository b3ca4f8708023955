//! RMS normalisation computed again beside its gradient, joined with the addition of the residual stream's gradient:
//! `rmsnorm` and `rmsnorm_backward_add` at once.

use graph::{Element, ValueType};
use program::{Arg, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use super::cpu::{backward_row, forward_row};
use super::{ATTRIBUTES, check_weight, row_shape, rows_of, spec};
use crate::call::Call;
use crate::elementwise::round_to;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op, Rows};
use crate::real::Real;

const SOURCE: &str = include_str!("again.cu");

/// y, r, dx = rmsnorm(x, w), rmsnorm_backward(x, w, r, dy) + residual_gradient
pub struct RmsNormAndBackwardAdd;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let eps = T::from_f64(call.attrs.float("eps").expect("checked by the shape rule"));
    let offset = call.attrs.flag("offset").expect("checked by the shape rule");
    let [x, w, dy, residual] = call.inputs else { unreachable!("the shape rule requires four inputs") };
    let (x, w, dy, residual) = (x.real(), w.real(), dy.real(), residual.real());
    let columns = w.len();
    let [y, r, dx] = call.outputs_mut();
    let storage = dx.storage();
    let results = y.real().par_chunks_mut(columns).zip(r.real()).zip(dx.real().par_chunks_mut(columns));
    let rows = x.par_chunks(columns).zip(dy.par_chunks(columns)).zip(residual.par_chunks(columns));
    results.zip(rows).for_each(|(((y, r), dx), ((x, dy), residual))| {
        *r = forward_row(x, w, eps, offset, y);
        backward_row(x, w, *r, dy, offset, dx);
        for (dx, residual) in dx.iter_mut().zip(residual) {
            *dx = round_to(storage, *dx) + *residual;
        }
    });
}

impl Op for RmsNormAndBackwardAdd {
    fn name(&self) -> &'static str {
        "rmsnorm_and_backward_add"
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "`rmsnorm` and `rmsnorm_backward_add` in one. x […, H], w [H], dy, residual_gradient […, H] → y […, H], r f32 \
         […], dx like x."
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, weight, dy, residual] = inputs else {
            return Err("takes x, the weight, dy and the residual gradient".into());
        };
        check_weight(x, weight)?;
        if dy.shape != x.shape || residual.shape != x.shape {
            return Err("gradients must be shaped like x".into());
        }
        attrs.float("eps").map_err(|e| e.0)?;
        attrs.flag("offset").map_err(|e| e.0)?;
        Ok(vec![x.clone(), ValueType::new(Element::F32, row_shape(x)), x.clone()])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("made after differentiation")
    }

    fn row_by_row(&self, inputs: &[TensorRef]) -> Option<Rows> {
        Some(Rows { axes: inputs[0].shape.len().checked_sub(1)?, whole: &[1] })
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let ([x, w, dy, residual], [y, _, dx]) = (call.inputs, call.outputs) else {
            unreachable!("the shape rule requires four inputs and gives three results")
        };
        let tensors = [("X", x), ("W", w), ("DY", dy), ("RESIDUAL", residual), ("Y", y), ("DX", dx)];
        let mut kernel = spec("rmsnorm_and_backward_add", call, &tensors, rows_of(x));
        kernel.source = SOURCE.to_owned();
        kernel.args = (0..4).map(Arg::Input).chain((0..3).map(Arg::Output)).collect();
        Lowered::Kernels(vec![kernel])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |rows: &[usize], columns: usize, attrs: Attrs| {
            let normal = |shape: Vec<usize>| ExampleInput::Normal { shape, scale: 1.0 };
            let matrix = || normal([rows, &[columns]].concat());
            Example::new(vec![matrix(), normal(vec![columns]), matrix(), matrix()], attrs)
        };
        vec![
            example(&[2, 3], 64, Attrs::new().with("eps", 1e-6)),
            example(&[5], 1000, Attrs::new().with("eps", 1e-5).with("offset", true)),
            example(&[3], 4096, Attrs::new().with("eps", 1e-6)),
        ]
    }
}
