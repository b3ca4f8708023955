//! RMS normalisation joined with the residual addition beside it: `add` then `rmsnorm` forward,
//! `rmsnorm_backward` then `add` backward. A value between the two is rounded as it would have been
//! stored, so that fusing never changes bits.

use graph::{Element, ValueType};
use program::{Arg, TensorRef};
use rayon::prelude::*;
use tensor::{Attrs, DType};

use super::cpu::{backward_row, forward_row};
use super::{ATTRIBUTES, check_weight, row_shape, rows_of, spec};
use crate::call::Call;
use crate::elementwise::round_to;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Fusion, Keeps, Op, Rows};
use crate::real::Real;
use crate::vector::{Loop, vectorised};

const SOURCE: &str = include_str!("fused.cu");

fn kernel(entry: &'static str, call: &LowerCall<'_>, tensors: &[(&str, &TensorRef)]) -> Lowered {
    let mut kernel = spec(entry, call, tensors, rows_of(&call.inputs[0]));
    kernel.source = SOURCE.to_owned();
    let args = (0..call.inputs.len()).map(Arg::Input).chain((0..call.outputs.len()).map(Arg::Output));
    Lowered::Kernels(vec![KernelSpec { args: args.collect(), ..kernel }])
}

fn normal(shape: &[usize]) -> ExampleInput {
    ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 }
}

/// sum, y, r = add_rmsnorm(a, b, w)
pub struct AddRmsNorm;

fn add_forward<T: Real>(call: &mut Call<'_, T>) {
    let eps = T::from_f64(call.attrs.float("eps").expect("checked by the shape rule"));
    let offset = call.attrs.flag("offset").expect("checked by the shape rule");
    let [a, b, w] = call.inputs else { unreachable!("the shape rule requires three inputs") };
    let (a, b, w) = (a.real(), b.real(), w.real());
    let columns = w.len();
    let [sum, y, r] = call.outputs_mut();
    let storage = sum.storage();
    let results = sum.real().par_chunks_mut(columns).zip(y.real().par_chunks_mut(columns)).zip(r.real());
    results.zip(a.par_chunks(columns)).zip(b.par_chunks(columns)).for_each(|((((sum, y), r), a), b)| {
        vectorised(AddRow, (storage, a, b, &mut *sum));
        *r = forward_row(sum, w, eps, offset, y);
    });
}

/// The sum as it is stored.
struct AddRow;

impl<'a, T: Real> Loop<(DType, &'a [T], &'a [T], &'a mut [T])> for AddRow {
    type Output = ();

    #[inline(always)]
    fn run((storage, a, b, sum): (DType, &'a [T], &'a [T], &'a mut [T])) {
        for (sum, (a, b)) in sum.iter_mut().zip(a.iter().zip(b)) {
            *sum = round_to(storage, *a + *b);
        }
    }
}

impl Op for AddRmsNorm {
    fn name(&self) -> &'static str {
        "add_rmsnorm"
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "`add`, then `rmsnorm` of the sum as it is stored. a, b […, H], w [H] → sum, y […, H], r f32 […]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [a, b, weight] = inputs else { return Err("takes a, b and the weight".into()) };
        check_weight(a, weight)?;
        if a.shape != b.shape {
            return Err("a and b must have the same shape".into());
        }
        attrs.float("eps").map_err(|e| e.0)?;
        attrs.flag("offset").map_err(|e| e.0)?;
        Ok(vec![a.clone(), a.clone(), ValueType::new(Element::F32, row_shape(a))])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("operations are fused after differentiation")
    }

    fn row_by_row(&self, inputs: &[TensorRef]) -> Option<Rows> {
        Some(Rows { axes: inputs[0].shape.len().checked_sub(1)?, whole: &[2] })
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let ([a, b, w], [sum, y, _]) = (call.inputs, call.outputs) else {
            unreachable!("the shape rule requires three inputs and gives three results")
        };
        kernel("add_rmsnorm", call, &[("A", a), ("B", b), ("W", w), ("SUM", sum), ("Y", y)])
    }

    crate::reference!(add_forward);

    fn examples(&self) -> Vec<Example> {
        let example = |rows: &[usize], columns: usize, attrs: Attrs| {
            let shape = [rows, &[columns]].concat();
            Example::new(vec![normal(&shape), normal(&shape), normal(&[columns])], attrs)
        };
        vec![
            example(&[2, 3], 64, Attrs::new().with("eps", 1e-6)),
            example(&[5], 1000, Attrs::new().with("eps", 1e-5).with("offset", true)),
        ]
    }

    fn fusions(&self) -> Vec<Fusion> {
        vec![Fusion { first: "add", first_inputs: 2, second: "rmsnorm", operand: 0, keeps: Keeps::All }]
    }
}

/// dx = rmsnorm_backward(x, w, r, dy) + residual_gradient
pub struct RmsNormBackwardAdd;

fn backward_add<T: Real>(call: &mut Call<'_, T>) {
    let offset = call.attrs.flag("offset").expect("checked by the shape rule");
    let [x, w, r, dy, residual] = call.inputs else { unreachable!("the shape rule requires five inputs") };
    let (x, w, r, dy, residual) = (x.real(), w.real(), r.real(), dy.real(), residual.real());
    let columns = w.len();
    let [dx] = call.outputs_mut();
    let storage = dx.storage();
    let rows = dx.real().par_chunks_mut(columns).zip(x.par_chunks(columns)).zip(dy.par_chunks(columns));
    rows.zip(r).zip(residual.par_chunks(columns)).for_each(|((((dx, x), dy), r), residual)| {
        backward_row(x, w, *r, dy, offset, dx);
        for (dx, residual) in dx.iter_mut().zip(residual) {
            *dx = round_to(storage, *dx) + *residual;
        }
    });
}

impl Op for RmsNormBackwardAdd {
    fn name(&self) -> &'static str {
        "rmsnorm_backward_add"
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "`rmsnorm_backward`, rounded as it would be stored, plus the gradient of the residual stream. x […, H], w [H], \
         r f32 […], dy, residual_gradient […, H] → like x."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &ATTRIBUTES[1..]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, weight, r, dy, residual] = inputs else {
            return Err("takes x, the weight, r, dy and the residual gradient".into());
        };
        check_weight(x, weight)?;
        if dy.shape != x.shape || residual.shape != x.shape || r.shape != row_shape(x) {
            return Err("dy and the residual gradient must be shaped like x, r like its rows".into());
        }
        attrs.flag("offset").map_err(|e| e.0)?;
        Ok(vec![x.clone()])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn row_by_row(&self, inputs: &[TensorRef]) -> Option<Rows> {
        Some(Rows { axes: inputs[0].shape.len().checked_sub(1)?, whole: &[1] })
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let [x, w, _, dy, residual] = call.inputs else { unreachable!("the shape rule requires five inputs") };
        let tensors = [("X", x), ("W", w), ("DY", dy), ("RESIDUAL", residual), ("DX", &call.outputs[0])];
        kernel("rmsnorm_backward_add", call, &tensors)
    }

    crate::reference!(backward_add);

    fn examples(&self) -> Vec<Example> {
        let example = |rows: usize, columns: usize, offset: bool| {
            let matrix = || normal(&[rows, columns]);
            let r = ExampleInput::UniformF32 { shape: vec![rows], low: 0.5, high: 1.5 };
            let inputs = vec![matrix(), normal(&[columns]), r, matrix(), matrix()];
            Example::new(inputs, Attrs::new().with("offset", offset))
        };
        vec![example(6, 64, false), example(3, 1000, true)]
    }

    fn fusions(&self) -> Vec<Fusion> {
        let onto = |operand| Fusion {
            first: "rmsnorm_backward",
            first_inputs: 4,
            second: "add",
            operand,
            keeps: Keeps::Nothing,
        };
        vec![onto(0), onto(1)]
    }
}
