//! Views along an axis other than the last: `stack` concatenates tensors along it, `unstack` takes them apart. Merged
//! linears see the weights of one group as one matrix through them, and work that is done in parts sees its rows or
//! heads.

mod likeliest;
mod pick;
mod sample;
mod take;

use graph::{OpId, ValueType};
use program::TensorRef;
use tensor::Attrs;

use crate::call::{Call, Data, Output};
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

pub use likeliest::Likeliest;
pub use pick::PickToken;
pub use sample::{SampleToken, sampling};
pub use take::TakeRows;

const AXIS: Attribute =
    Attribute { name: "axis", kind: "int?", doc: "the axis along which the parts lie; 0 where it is left out" };

/// The axis of the attributes, inside a tensor of `rank` axes.
fn axis(attrs: &Attrs, rank: usize) -> Result<usize, String> {
    let axis = attrs.optional_int("axis")?.unwrap_or(0);
    usize::try_from(axis).ok().filter(|axis| *axis < rank).ok_or_else(|| format!("there is no axis {axis} of {rank}"))
}

fn checked_axis(attrs: &Attrs) -> usize {
    attrs.optional_int("axis").ok().flatten().unwrap_or(0) as usize
}

fn extent(t: &ValueType, axis: usize) -> Result<usize, String> {
    t.shape[axis].fixed().ok_or_else(|| format!("axis {axis} must be known"))
}

fn normal(shape: &[usize]) -> ExampleInput {
    ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 }
}

/// The parts of `whole` along an axis cut at `sizes`.
fn parts_along(axis: usize, whole: &TensorRef, sizes: &[usize]) -> Vec<TensorRef> {
    let mut start = 0;
    sizes
        .iter()
        .map(|n| {
            let mut part = whole.clone();
            part.offset += start * whole.strides[axis] * whole.dtype.size();
            part.shape[axis] = *n;
            start += n;
            part
        })
        .collect()
}

/// The operation y = the inputs one after another.
pub struct Stack;

impl Op for Stack {
    fn id(&self) -> OpId {
        id::STACK
    }

    fn class(&self) -> Class {
        Class::View
    }

    fn doc(&self) -> &'static str {
        "The inputs […, nᵢ, …] one after another along an axis → […, Σ nᵢ, …]. A view: the inputs lie inside the \
         result."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[AXIS]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [first, rest @ ..] = inputs else { return Err("takes at least one input".into()) };
        let axis = axis(attrs, first.shape.len())?;
        let others = |t: &ValueType| {
            let mut shape = t.shape.clone();
            (axis < shape.len()).then(|| shape.remove(axis));
            shape
        };
        if rest
            .iter()
            .any(|t| t.shape.len() != first.shape.len() || others(t) != others(first) || t.dtype != first.dtype)
        {
            return Err(format!("the inputs must agree in all axes but {axis}"));
        }
        let rows = inputs.iter().map(|t| extent(t, axis)).sum::<Result<usize, _>>()?;
        let mut result = first.clone();
        result.shape[axis] = first.shape[axis].with_extent(rows);
        Ok(vec![result])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let axis = checked_axis(&call.node.attrs);
        let sizes: Vec<usize> = call.node.inputs.iter().map(|id| call.emit.value(*id).shape[axis]).collect();
        let dy = call.dy();
        let attrs = call.node.attrs.clone().with("sizes", sizes);
        let parts = call.emit.emit(id::UNSTACK, &[dy], attrs);
        Gradients::Inputs(parts.into_iter().zip(call.wanted).map(|(part, wanted)| wanted.then_some(part)).collect())
    }

    fn parts(&self, output: &TensorRef, inputs: &[Vec<usize>], attrs: &Attrs) -> Vec<TensorRef> {
        let axis = checked_axis(attrs);
        parts_along(axis, output, &inputs.iter().map(|shape| shape[axis]).collect::<Vec<_>>())
    }

    fn lower(&self, _call: &LowerCall<'_>) -> Lowered {
        unreachable!("views are not lowered")
    }

    crate::reference!(stack);

    fn examples(&self) -> Vec<Example> {
        vec![
            Example::new(vec![normal(&[2, 5]), normal(&[3, 5])], Attrs::new()).differentiate(&[0, 1]),
            Example::new(vec![normal(&[2, 4, 3]), normal(&[2, 1, 3])], Attrs::new().with("axis", 1))
                .differentiate(&[0, 1]),
        ]
    }
}

fn stack<T: Real>(call: &mut Call<'_, T>) {
    let axis = checked_axis(call.attrs);
    let whole = call.outputs[0].shape().to_vec();
    let blocks = Blocks::new(&whole, axis);
    let mut start = 0;
    for input in call.inputs {
        let n = input.shape[axis];
        let moves = blocks.of(start, n).zip(0usize..).map(|(to, i)| (to, i * n * blocks.inner));
        for (to, from) in moves {
            let (to, from) = (to.clone(), from..from + to.len());
            match (&mut call.outputs[0], input.data) {
                (Output::Real { data, .. }, Data::Real(x)) => data[to].copy_from_slice(&x[from]),
                (Output::Int { data, .. }, Data::Int(x)) => data[to].copy_from_slice(&x[from]),
                (Output::Byte { data, .. }, Data::Byte(x)) => data[to].copy_from_slice(&x[from]),
                _ => panic!("the shape rule keeps element types"),
            }
        }
        start += n;
    }
}

/// The place of a part along an axis in a dense tensor: one block for each index of the axes before.
struct Blocks {
    outer: usize,
    extent: usize,
    inner: usize,
}

impl Blocks {
    fn new(whole: &[usize], axis: usize) -> Blocks {
        let inner = whole[axis + 1..].iter().product();
        Blocks { outer: whole[..axis].iter().product(), extent: whole[axis], inner }
    }

    /// Element ranges of the part that begins at `start` and has `n` of the axis.
    fn of(&self, start: usize, n: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
        let (outer, extent, inner) = (self.outer, self.extent, self.inner);
        (0..outer).map(move |o| {
            let first = (o * extent + start) * inner;
            first..first + n * inner
        })
    }
}

/// The input in parts along an axis
pub struct Unstack;

impl Op for Unstack {
    fn id(&self) -> OpId {
        id::UNSTACK
    }

    fn class(&self) -> Class {
        Class::View
    }

    fn doc(&self) -> &'static str {
        "x […, Σ nᵢ, …] in parts […, nᵢ, …] along an axis. A view."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[AXIS, Attribute { name: "sizes", kind: "list of int", doc: "extent of each part; their sum is the input's" }]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x] = inputs else { return Err("takes one input".into()) };
        let sizes = attrs.sizes("sizes")?;
        let axis = axis(attrs, x.shape.len())?;
        if extent(x, axis)? != sizes.iter().sum::<usize>() {
            return Err(format!("the parts {sizes:?} must sum to axis {axis} of the input"));
        }
        let part = |n: &usize| {
            let mut part = x.clone();
            part.shape[axis] = x.shape[axis].with_extent(*n);
            part
        };
        Ok(sizes.iter().map(part).collect())
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        if !call.wanted[0] {
            return Gradients::Inputs(vec![None]);
        }
        let axis = checked_axis(&call.node.attrs);
        let parts = call.all_dy();
        Gradients::Inputs(vec![Some(call.one(id::STACK, &parts, Attrs::new().with("axis", axis)))])
    }

    fn alias(&self, inputs: &[TensorRef], attrs: &Attrs) -> Vec<TensorRef> {
        parts_along(checked_axis(attrs), &inputs[0], &attrs.sizes("sizes").expect("checked by the shape rule"))
    }

    fn lower(&self, _call: &LowerCall<'_>) -> Lowered {
        unreachable!("views are not lowered")
    }

    crate::reference!(unstack);

    fn examples(&self) -> Vec<Example> {
        vec![
            Example::new(vec![normal(&[5, 4])], Attrs::new().with("sizes", vec![2, 3])).differentiate(&[0]),
            Example::new(vec![normal(&[2, 5, 4])], Attrs::new().with("sizes", vec![2, 3]).with("axis", 1))
                .differentiate(&[0]),
        ]
    }
}

fn unstack<T: Real>(call: &mut Call<'_, T>) {
    let axis = checked_axis(call.attrs);
    let blocks = Blocks::new(call.inputs[0].shape, axis);
    let mut start = 0;
    for output in call.outputs.iter_mut() {
        let n = output.shape()[axis];
        for (index, from) in blocks.of(start, n).enumerate() {
            let to = index * n * blocks.inner..(index + 1) * n * blocks.inner;
            match (&mut *output, call.inputs[0].data) {
                (Output::Real { data, .. }, Data::Real(x)) => data[to].copy_from_slice(&x[from]),
                (Output::Int { data, .. }, Data::Int(x)) => data[to].copy_from_slice(&x[from]),
                (Output::Byte { data, .. }, Data::Byte(x)) => data[to].copy_from_slice(&x[from]),
                _ => panic!("the shape rule keeps element types"),
            }
        }
        start += n;
    }
}
