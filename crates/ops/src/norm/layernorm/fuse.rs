//! Layer normalisation joined with the residual addition beside it: `add` then `layernorm` forward,
//! `layernorm_backward` then `add` backward. A value between the two is rounded as it would have been
//! stored, so that fusing never changes bits.

use graph::{Element, ValueType};
use rayon::prelude::*;
use tensor::Attrs;

use super::cpu::{backward_row, forward_row};
use super::{ATTRIBUTES, backward_inputs, check_backward, check_eps, check_weight, kernel, normal, row_shape};
use crate::call::Call;
use crate::elementwise::round_to;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, Fusion, Keeps, Op};
use crate::real::Real;

/// sum, y, mean, r = add_layernorm(a, b, w, bias)
pub struct AddLayerNorm;

fn add_forward<T: Real>(call: &mut Call<'_, T>) {
    let eps = T::from_f64(call.attrs.float("eps").expect("checked by the shape rule"));
    let [a, b, w, bias] = call.inputs else { unreachable!("the shape rule requires four inputs") };
    let (a, b, w, bias) = (a.real(), b.real(), w.real(), bias.real());
    let columns = w.len();
    let [sum, y, mean, r] = call.outputs_mut();
    let storage = sum.storage();
    let results = sum.real().par_chunks_mut(columns).zip(y.real().par_chunks_mut(columns));
    let rows = results.zip(mean.real().par_iter_mut().zip(r.real()));
    rows.zip(a.par_chunks(columns)).zip(b.par_chunks(columns)).for_each(|((((sum, y), (mean, r)), a), b)| {
        for (sum, (a, b)) in sum.iter_mut().zip(a.iter().zip(b)) {
            *sum = round_to(storage, *a + *b);
        }
        (*mean, *r) = forward_row(sum, w, bias, eps, y);
    });
}

impl Op for AddLayerNorm {
    fn name(&self) -> &'static str {
        "add_layernorm"
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "`add`, then `layernorm` of the sum as it is stored. a, b […, H], w, bias [H] → sum, y […, H], mean f32 […], r \
         f32 […]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [a, b, weight, bias] = inputs else { return Err("takes a, b, the weight and the bias".into()) };
        check_weight(a, weight)?;
        if a.shape != b.shape || bias.shape != weight.shape {
            return Err("a and b must have the same shape, and the bias that of the weight".into());
        }
        check_eps(attrs)?;
        let statistic = ValueType::new(Element::F32, row_shape(a));
        Ok(vec![a.clone(), a.clone(), statistic.clone(), statistic])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("operations are fused after differentiation")
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let ([a, b, w, bias], [sum, y, ..]) = (call.inputs, call.outputs) else {
            unreachable!("the shape rule requires four inputs and gives four results")
        };
        let tensors = [("A", a), ("B", b), ("W", w), ("BIAS", bias), ("X", sum), ("Y", y)];
        kernel("add_layernorm", call, &tensors)
    }

    crate::reference!(add_forward);

    fn examples(&self) -> Vec<Example> {
        let example = |rows: &[usize], columns: usize| {
            let shape = [rows, &[columns]].concat();
            let inputs = vec![normal(&shape), normal(&shape), normal(&[columns]), normal(&[columns])];
            Example::new(inputs, Attrs::new().with("eps", 1e-5))
        };
        vec![example(&[2, 3], 64), example(&[5], 1000)]
    }

    fn fusions(&self) -> Vec<Fusion> {
        vec![Fusion { first: "add", first_inputs: 2, second: "layernorm", operand: 0, keeps: Keeps::All }]
    }
}

/// dx = layernorm_backward(x, w, mean, r, dy) + residual_gradient
pub struct LayerNormBackwardAdd;

fn backward_add<T: Real>(call: &mut Call<'_, T>) {
    let [x, w, mean, r, dy, residual] = call.inputs else { unreachable!("the shape rule requires six inputs") };
    let (x, w, mean, r, dy, residual) = (x.real(), w.real(), mean.real(), r.real(), dy.real(), residual.real());
    let columns = w.len();
    let [dx] = call.outputs_mut();
    let storage = dx.storage();
    let rows = dx.real().par_chunks_mut(columns).zip(x.par_chunks(columns)).zip(dy.par_chunks(columns));
    rows.zip(mean.par_iter().zip(r)).zip(residual.par_chunks(columns)).for_each(
        |((((dx, x), dy), (mean, r)), residual)| {
            backward_row(x, w, (*mean, *r), dy, dx);
            for (dx, residual) in dx.iter_mut().zip(residual) {
                *dx = round_to(storage, *dx) + *residual;
            }
        },
    );
}

impl Op for LayerNormBackwardAdd {
    fn name(&self) -> &'static str {
        "layernorm_backward_add"
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "`layernorm_backward`, rounded as it would be stored, plus the gradient of the residual stream. x […, H], w \
         [H], mean, r f32 […], dy, residual_gradient […, H] → like x."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        check_backward(inputs)?;
        if inputs.len() != 6 || inputs[5].shape != inputs[0].shape {
            return Err("takes x, the weight, mean, r, dy and the residual gradient, shaped like x".into());
        }
        Ok(vec![inputs[0].clone()])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let [x, w, _, _, dy, residual] = call.inputs else { unreachable!("the shape rule requires six inputs") };
        let tensors = [("X", x), ("W", w), ("DY", dy), ("RESIDUAL", residual), ("DX", &call.outputs[0])];
        kernel("layernorm_backward_add", call, &tensors)
    }

    crate::reference!(backward_add);

    fn examples(&self) -> Vec<Example> {
        let example = |rows: usize, columns: usize| {
            let mut inputs = backward_inputs(rows, columns);
            inputs.push(normal(&[rows, columns]));
            Example::new(inputs, Attrs::new())
        };
        vec![example(6, 64), example(3, 1000)]
    }

    fn fusions(&self) -> Vec<Fusion> {
        let onto = |operand| Fusion {
            first: "layernorm_backward",
            first_inputs: 5,
            second: "add",
            operand,
            keeps: Keeps::Nothing,
        };
        vec![onto(0), onto(1)]
    }
}
