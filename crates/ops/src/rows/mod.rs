//! Views along the first axis: `stack` puts matrices with equal columns under one another, `unstack`
//! takes them apart. Merged linears see the weights of one group as one matrix through them.

use graph::{Dim, ValueType};
use program::TensorRef;
use tensor::Attrs;

use crate::call::{Call, Data, Output};
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;

fn first_axis(t: &ValueType) -> Result<usize, String> {
    t.shape.first().and_then(Dim::fixed).ok_or_else(|| "the first axis must be known".into())
}

fn normal(shape: &[usize]) -> ExampleInput {
    ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 }
}

/// The rows of `whole` cut at `sizes`.
fn row_parts(whole: &TensorRef, sizes: &[usize]) -> Vec<TensorRef> {
    let mut start = 0;
    sizes
        .iter()
        .map(|n| {
            let mut part = whole.clone();
            part.offset += start * whole.strides[0] * whole.dtype.size();
            part.shape[0] = *n;
            start += n;
            part
        })
        .collect()
}

/// y = the inputs under one another
pub struct Stack;

impl Op for Stack {
    fn name(&self) -> &'static str {
        "stack"
    }

    fn class(&self) -> Class {
        Class::View
    }

    fn doc(&self) -> &'static str {
        "The inputs [nᵢ, …] under one another → [Σ nᵢ, …]. A view: the inputs lie inside the result."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [first, rest @ ..] = inputs else { return Err("takes at least one input".into()) };
        if first.shape.is_empty()
            || rest.iter().any(|t| t.shape.get(1..) != first.shape.get(1..) || t.dtype != first.dtype)
        {
            return Err("the inputs must agree in all axes but the first".into());
        }
        let rows = inputs.iter().map(first_axis).sum::<Result<usize, _>>()?;
        let mut result = first.clone();
        result.shape[0] = Dim::Fixed(rows);
        Ok(vec![result])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let sizes: Vec<usize> = call.node.inputs.iter().map(|id| call.emit.value(*id).shape[0]).collect();
        let dy = call.dy();
        let parts = call.emit.emit("unstack", &[dy], Attrs::new().with("sizes", sizes));
        Gradients::Inputs(parts.into_iter().zip(call.wanted).map(|(part, wanted)| wanted.then_some(part)).collect())
    }

    fn parts(&self, output: &TensorRef, inputs: &[Vec<usize>], _attrs: &Attrs) -> Vec<TensorRef> {
        row_parts(output, &inputs.iter().map(|shape| shape[0]).collect::<Vec<_>>())
    }

    fn lower(&self, _call: &LowerCall<'_>) -> Lowered {
        unreachable!("views are not lowered")
    }

    crate::reference!(stack);

    fn examples(&self) -> Vec<Example> {
        vec![Example::new(vec![normal(&[2, 5]), normal(&[3, 5])], Attrs::new()).differentiate(&[0, 1])]
    }
}

fn stack<T: Real>(call: &mut Call<'_, T>) {
    let mut start = 0;
    for input in call.inputs {
        let len = input.shape.iter().product::<usize>();
        match (&mut call.outputs[0], input.data) {
            (Output::Real { data, .. }, Data::Real(x)) => data[start..start + len].copy_from_slice(x),
            (Output::Int { data, .. }, Data::Int(x)) => data[start..start + len].copy_from_slice(x),
            (Output::Byte { data, .. }, Data::Byte(x)) => data[start..start + len].copy_from_slice(x),
            _ => panic!("the shape rule keeps element types"),
        }
        start += len;
    }
}

/// The rows of the input in parts
pub struct Unstack;

impl Op for Unstack {
    fn name(&self) -> &'static str {
        "unstack"
    }

    fn class(&self) -> Class {
        Class::View
    }

    fn doc(&self) -> &'static str {
        "The rows of x [Σ nᵢ, …] in parts [nᵢ, …]. A view."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[Attribute { name: "sizes", kind: "list of int", doc: "rows of each part; their sum is the input's" }]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x] = inputs else { return Err("takes one input".into()) };
        let sizes = attrs.sizes("sizes").map_err(|e| e.0)?;
        if first_axis(x)? != sizes.iter().sum::<usize>() {
            return Err(format!("the parts {sizes:?} must sum to the rows of the input"));
        }
        let part = |n: &usize| {
            let mut part = x.clone();
            part.shape[0] = Dim::Fixed(*n);
            part
        };
        Ok(sizes.iter().map(part).collect())
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("takes weight gradients apart; second derivatives are not taken")
    }

    fn alias(&self, inputs: &[TensorRef], attrs: &Attrs) -> Vec<TensorRef> {
        row_parts(&inputs[0], &attrs.sizes("sizes").expect("checked by the shape rule"))
    }

    fn lower(&self, _call: &LowerCall<'_>) -> Lowered {
        unreachable!("views are not lowered")
    }

    crate::reference!(unstack);

    fn examples(&self) -> Vec<Example> {
        vec![Example::new(vec![normal(&[5, 4])], Attrs::new().with("sizes", vec![2, 3]))]
    }
}

fn unstack<T: Real>(call: &mut Call<'_, T>) {
    let mut start = 0;
    for output in call.outputs.iter_mut() {
        let len = output.shape().iter().product::<usize>();
        match (output, call.inputs[0].data) {
            (Output::Real { data, .. }, Data::Real(x)) => data.copy_from_slice(&x[start..start + len]),
            (Output::Int { data, .. }, Data::Int(x)) => data.copy_from_slice(&x[start..start + len]),
            (Output::Byte { data, .. }, Data::Byte(x)) => data.copy_from_slice(&x[start..start + len]),
            _ => panic!("the shape rule keeps element types"),
        }
        start += len;
    }
}
