//! Runs a graph directly with the CPU references, every value dense and in one number type. Slow
//! and simple: the oracle for gradient rules and for the compiler's rewrites.

use std::collections::HashMap;

use graph::{Element, Graph, Node, Origin, ValueId};
use tensor::{Attrs, DType};

use crate::call::{Call, Data, Input, Output};
use crate::op::{Class, Op};
use crate::real::Real;
use crate::registry::get;

/// A dense operand that owns its elements.
#[derive(Clone, Debug, PartialEq)]
pub enum Array<T> {
    Real(Vec<T>),
    Int(Vec<i32>),
    Byte(Vec<u8>),
}

impl<T: Real> Array<T> {
    /// The elements of a floating-point array.
    pub fn real(&self) -> &[T] {
        match self {
            Array::Real(x) => x,
            _ => panic!("a floating-point array was expected"),
        }
    }

    fn zeros(element: Element, len: usize) -> Self {
        match element {
            Element::Fixed(DType::I32) => Array::Int(vec![0; len]),
            Element::Fixed(DType::U8) => Array::Byte(vec![0; len]),
            Element::Float
            | Element::Fixed(
                DType::F64 | DType::F32 | DType::BF16 | DType::F16 | DType::I64 | DType::E4M3 | DType::E5M2,
            ) => Array::Real(vec![T::default(); len]),
        }
    }

    fn data(&self) -> Data<'_, T> {
        match self {
            Array::Real(x) => Data::Real(x),
            Array::Int(x) => Data::Int(x),
            Array::Byte(x) => Data::Byte(x),
        }
    }
}

/// The two number types know which reference to call.
pub trait Evaluate: Real {
    fn call(op: &dyn Op, call: &mut Call<'_, Self>);
}

impl Evaluate for f32 {
    fn call(op: &dyn Op, call: &mut Call<'_, f32>) {
        op.reference_f32(call)
    }
}

impl Evaluate for f64 {
    fn call(op: &dyn Op, call: &mut Call<'_, f64>) {
        op.reference_f64(call)
    }
}

/// One operation on dense arrays. `outputs` gives element type and shape of each result, and for
/// updates its starting contents.
pub fn apply<T: Evaluate>(
    op: &dyn Op,
    attrs: &Attrs,
    inputs: &[(&[usize], &Array<T>)],
    outputs: &mut [(Vec<usize>, Array<T>)],
) {
    apply_stored(op, attrs, inputs, outputs, &vec![DType::F32; outputs.len()])
}

/// The same, with the types in which the floating-point results will be stored. Rounding to them is
/// left to the caller, as a backend does it.
pub fn apply_stored<T: Evaluate>(
    op: &dyn Op,
    attrs: &Attrs,
    inputs: &[(&[usize], &Array<T>)],
    outputs: &mut [(Vec<usize>, Array<T>)],
    storage: &[DType],
) {
    let inputs: Vec<Input<'_, T>> = inputs.iter().map(|(shape, a)| Input { shape, data: a.data() }).collect();
    let mut outputs: Vec<Output<'_, T>> = outputs
        .iter_mut()
        .zip(storage)
        .map(|((shape, array), storage)| match array {
            Array::Real(data) => Output::Real { shape, data, storage: *storage },
            Array::Int(data) => Output::Int { shape, data },
            Array::Byte(data) => Output::Byte { shape, data },
        })
        .collect();
    T::call(op, &mut Call { attrs, inputs: &inputs, outputs: &mut outputs });
}

/// Computes every value of the graph. `given` holds the inputs and parameters.
pub fn evaluate<T: Evaluate>(graph: &Graph, given: &HashMap<ValueId, Array<T>>) -> HashMap<ValueId, Array<T>> {
    let mut values = given.clone();
    for (index, value) in graph.values.iter().enumerate() {
        let id = ValueId(index as u32);
        assert!(value.origin == Origin::Node || values.contains_key(&id), "no contents given for `{}`", value.name);
    }
    for node in &graph.nodes {
        step(graph, node, &mut values);
    }
    values
}

fn step<T: Evaluate>(graph: &Graph, node: &Node, values: &mut HashMap<ValueId, Array<T>>) {
    let op = get(node.op);
    let inputs: Vec<(&[usize], &Array<T>)> =
        node.inputs.iter().map(|id| (graph.value(*id).shape.as_slice(), &values[id])).collect();
    let mut outputs: Vec<(Vec<usize>, Array<T>)> = node
        .outputs
        .iter()
        .map(|id| {
            let value = graph.value(*id);
            (value.shape.clone(), Array::zeros(value.element, value.shape.iter().product()))
        })
        .collect();
    debug_assert!(op.class() != Class::Update, "updates are not part of a differentiable graph");
    apply(op, &node.attrs, &inputs, &mut outputs);
    for (id, (_, array)) in node.outputs.iter().zip(outputs) {
        values.insert(*id, array);
    }
}
