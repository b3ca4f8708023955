//! Heads in a number of parts equal to the ranks that share a sequence, one part after another, and back in the order
//! of the tokens. Copies.

use graph::{Dim, OpId, ValueType};
use program::TensorRef;
use rayon::prelude::*;
use tensor::Attrs;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;
use crate::sequence::rows_of;

/// y[s, t, h, d] = x[0, t, s·H/S + h, d]
pub struct DealHeads;

/// y[0, t, s·H + h, d] = x[s, t, h, d]
pub struct CollectHeads;

impl Op for DealHeads {
    fn id(&self) -> OpId {
        id::DEAL_HEADS
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "Heads in S parts, one after another: y[s, t, h, d] = x[0, t, s·H/S + h, d]. x [1, T, H, D] → y [S, T, H/S, D]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[Attribute { name: "parts", kind: "int", doc: "S" }]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x] = inputs else { return Err("takes one input".into()) };
        let parts = attrs.size("parts")?;
        let [rows, tokens, Dim::Fixed(heads), Dim::Fixed(columns)] = x.shape.as_slice() else {
            return Err("x must be [1, T, H, D], H and D known".into());
        };
        if !x.dtype.is_float() || rows.fixed() != Some(1) || parts == 0 || !heads.is_multiple_of(parts) {
            return Err(format!("x must be floating point, of one row, with heads in {parts} equal parts"));
        }
        let shape = [Dim::Fixed(parts), tokens.clone(), Dim::Fixed(heads / parts), Dim::Fixed(*columns)];
        Ok(vec![ValueType::new(x.dtype, shape)])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let dy = call.dy();
        Gradients::Inputs(vec![call.wanted(0, id::COLLECT_HEADS, &[dy], Attrs::new())])
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (x, y) = (&call.inputs[0], &call.outputs[0]);
        Lowered::Copy { from: dealt(x, y.shape[0]), to: y.clone() }
    }

    crate::reference!(deal);

    fn examples(&self) -> Vec<Example> {
        let example = |shape: [usize; 4], parts: usize| {
            let x = ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 };
            Example::new(vec![x], Attrs::new().with("parts", parts)).differentiate(&[0])
        };
        vec![example([1, 6, 4, 16], 2), example([1, 3, 3, 5], 3), example([1, 5, 2, 24], 1)]
    }
}

impl Op for CollectHeads {
    fn id(&self) -> OpId {
        id::COLLECT_HEADS
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "The parts of `deal_heads` as heads again: y[0, t, s·H + h, d] = x[s, t, h, d]. x [S, T, H, D] → y [1, T, S·H, D]."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x] = inputs else { return Err("takes one input".into()) };
        let [Dim::Fixed(parts), tokens, Dim::Fixed(heads), Dim::Fixed(columns)] = x.shape.as_slice() else {
            return Err("x must be [S, T, H, D], S, H and D known".into());
        };
        if !x.dtype.is_float() {
            return Err("x must be floating point".into());
        }
        let shape = [rows_of(tokens, 1), tokens.clone(), Dim::Fixed(parts * heads), Dim::Fixed(*columns)];
        Ok(vec![ValueType::new(x.dtype, shape)])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let parts = call.emit.value(call.input(0)).shape[0];
        let dy = call.dy();
        Gradients::Inputs(vec![call.wanted(0, id::DEAL_HEADS, &[dy], Attrs::new().with("parts", parts))])
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (x, y) = (&call.inputs[0], &call.outputs[0]);
        Lowered::Copy { from: x.clone(), to: dealt(y, x.shape[0]) }
    }

    crate::reference!(collect);

    fn examples(&self) -> Vec<Example> {
        let example = |shape: [usize; 4]| {
            let x = ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 };
            Example::new(vec![x], Attrs::new()).differentiate(&[0])
        };
        vec![example([2, 6, 2, 16]), example([3, 3, 1, 5]), example([1, 5, 2, 24])]
    }
}

/// Returns [1, T, H, D] as a view [S, T, H/S, D].
fn dealt(whole: &TensorRef, parts: usize) -> TensorRef {
    let ([_, tokens, heads, columns], [_, token, head, column]) = (&whole.shape[..], &whole.strides[..]) else {
        panic!("the shape rule requires four axes: {whole}");
    };
    let shape = vec![parts, *tokens, heads / parts, *columns];
    TensorRef { shape, strides: vec![heads / parts * head, *token, *head, *column], ..whole.clone() }
}

fn deal<T: Real>(call: &mut Call<'_, T>) {
    let x = call.inputs[0];
    let [_, tokens, heads, columns] = x.shape[..] else { unreachable!("the shape rule requires four axes") };
    let part = heads / call.attrs.size("parts").expect("checked by the shape rule") * columns;
    let x = x.real();
    let [y] = call.outputs_mut();
    y.real().par_chunks_mut(tokens * part).enumerate().for_each(|(number, y)| {
        for (y, x) in y.chunks_mut(part).zip(x.chunks(heads * columns)) {
            y.copy_from_slice(&x[number * part..][..part]);
        }
    });
}

fn collect<T: Real>(call: &mut Call<'_, T>) {
    let x = call.inputs[0];
    let [_, tokens, heads, columns] = x.shape[..] else { unreachable!("the shape rule requires four axes") };
    let part = heads * columns;
    let (x, parts) = (x.real(), x.shape[0]);
    let [y] = call.outputs_mut();
    y.real().par_chunks_mut(parts * part).enumerate().for_each(|(token, y)| {
        for (number, y) in y.chunks_mut(part).enumerate() {
            y.copy_from_slice(&x[(number * tokens + token) * part..][..part]);
        }
    });
}
