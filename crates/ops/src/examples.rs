//! Examples made concrete: an operation's example with numbers in it, in one precision. Tests compare
//! a backend with the reference through it. It does not know any backend.

use graph::{Dim, Element, Graph, Node, OpId, Origin, Phase, ValueId, ValueType};
use tensor::philox::{self, Purpose};
use tensor::{Attrs, DType, HostTensor};

use crate::evaluate::{Array, Evaluate, apply_stored};
use crate::op::{Example, ExampleInput, Op};
use crate::registry::get;
use crate::verify::infer;

/// One call with its operands' contents.
#[derive(Clone)]
pub struct Instance {
    pub op: &'static dyn Op,
    pub attrs: Attrs,
    pub inputs: Vec<HostTensor>,
    /// Types, shapes and present contents of the results: zeros but for operations that change state.
    pub outputs: Vec<HostTensor>,
}

/// The example with random contents drawn from `seed`. `dtype` stands for the activation type.
/// Panics when the example does not pass the operation's shape rule.
pub fn instantiate(example: &Example, op: &'static dyn Op, dtype: DType, seed: u64) -> Instance {
    let contents = |list: &[ExampleInput], first: usize| -> Vec<HostTensor> {
        list.iter().enumerate().map(|(i, input)| draw(input, dtype, seed, (first + i) as u32)).collect()
    };
    let mut inputs = contents(&example.inputs, 0);
    for (i, input) in example.inputs.iter().enumerate() {
        if let ExampleInput::Computed { op, inputs: places, result, .. } = input {
            inputs[i] = computed(*op, places, *result, example, &inputs, dtype);
        }
    }
    let state = contents(&example.state, inputs.len());
    let types: Vec<ValueType> = example.inputs.iter().map(type_of).collect();
    let mut outputs = results_of(op, &types, &example.attrs, dtype);
    assert!(state.is_empty() || state.len() == outputs.len(), "{}: an example gives all of its state", op.name());
    for (i, (output, present)) in outputs.iter_mut().zip(state).enumerate() {
        assert_eq!(
            (present.dtype, &present.shape),
            (output.dtype, &output.shape),
            "{}: state of result {i}",
            op.name()
        );
        *output = present;
    }
    Instance { op, attrs: example.attrs.clone(), inputs, outputs }
}

/// Zeros of the types and shapes that the operation gives.
fn results_of(op: &dyn Op, inputs: &[ValueType], attrs: &Attrs, dtype: DType) -> Vec<HostTensor> {
    let results = infer(op.id(), inputs, attrs)
        .unwrap_or_else(|message| panic!("an example does not pass its own shape rule: {message}"));
    let fixed = |d: &Dim| d.fixed().expect("examples have no symbols");
    let zeros =
        |t: &ValueType| HostTensor::zeros(concrete(t.dtype, dtype), t.shape.iter().map(fixed).collect::<Vec<_>>());
    results.iter().map(zeros).collect()
}

/// One result of another operation for some of an example's inputs.
fn computed(
    op: OpId,
    places: &[usize],
    result: usize,
    example: &Example,
    drawn: &[HostTensor],
    dtype: DType,
) -> HostTensor {
    let op = get(op);
    let types: Vec<ValueType> = places.iter().map(|at| type_of(&example.inputs[*at])).collect();
    let outputs = results_of(op, &types, &example.attrs, dtype);
    let inputs = places.iter().map(|at| drawn[*at].clone()).collect();
    Instance { op, attrs: example.attrs.clone(), inputs, outputs }.expected().swap_remove(result)
}

fn concrete(element: Element, dtype: DType) -> DType {
    match element {
        Element::Float => dtype,
        Element::Fixed(fixed) => fixed,
    }
}

/// Element type and shape of an example's input, as shape rules see them.
pub fn type_of(input: &ExampleInput) -> ValueType {
    let (element, shape) = match input {
        ExampleInput::Normal { shape, .. } => (Element::Float, shape),
        ExampleInput::NormalF32 { shape, .. }
        | ExampleInput::UniformF32 { shape, .. }
        | ExampleInput::F32 { shape, .. } => (Element::F32, shape),
        ExampleInput::Ints { shape, .. } => (Element::I32, shape),
        ExampleInput::Bytes { shape, .. } => (Element::Fixed(DType::U8), shape),
        ExampleInput::Codes { dtype, shape, .. } => (Element::Fixed(*dtype), shape),
        ExampleInput::Computed { element, shape, .. } => (*element, shape),
    };
    ValueType::new(element, shape.iter().map(|n| Dim::Fixed(*n)).collect::<Vec<_>>())
}

fn draw(input: &ExampleInput, dtype: DType, seed: u64, stream: u32) -> HostTensor {
    let word = |i: usize| philox::word(seed, Purpose::Initialisation, stream, 0, i as u64);
    let normal = |shape: &[usize], scale: f64| {
        let value = |i: usize| (philox::normal_pair(word(2 * i), word(2 * i + 1)).0 as f64 * scale) as f32;
        let values: Vec<f32> = (0..shape.iter().product()).map(value).collect();
        HostTensor::from_f32(shape.to_vec(), &values)
    };
    match input {
        ExampleInput::Normal { shape, scale } => normal(shape, *scale).cast(dtype),
        ExampleInput::NormalF32 { shape, scale } => normal(shape, *scale),
        ExampleInput::Codes { dtype, shape, scale } => normal(shape, *scale).cast(*dtype),
        ExampleInput::UniformF32 { shape, low, high } => {
            let value = |i: usize| (low + (high - low) * philox::unit(word(i)) as f64) as f32;
            let values: Vec<f32> = (0..shape.iter().product()).map(value).collect();
            HostTensor::from_f32(shape.clone(), &values)
        }
        ExampleInput::Ints { shape, values } => HostTensor::from_i32(shape.clone(), values),
        ExampleInput::F32 { shape, values } => HostTensor::from_f32(shape.clone(), values),
        ExampleInput::Bytes { shape, values } => HostTensor::new(DType::U8, shape.clone(), values.clone()),
        ExampleInput::Computed { element, shape, .. } => HostTensor::zeros(concrete(*element, dtype), shape.clone()),
    }
}

/// The elements as a reference sees them.
pub fn array_of<T: Evaluate>(tensor: &HostTensor) -> Array<T> {
    match tensor.dtype {
        DType::I32 => Array::Int(tensor.to_f64().into_iter().map(|x| x as i32).collect()),
        DType::U8 => Array::Byte(tensor.bytes.clone()),
        DType::F64 | DType::F32 | DType::BF16 | DType::F16 | DType::I64 | DType::E4M3 | DType::E5M2 => {
            Array::Real(tensor.to_f64().into_iter().map(T::from_f64).collect())
        }
    }
}

/// The elements of a reference's result, rounded to the type in which they are stored.
pub fn tensor_of(array: &Array<f32>, dtype: DType, shape: &[usize]) -> HostTensor {
    match array {
        Array::Real(x) => HostTensor::from_f32(shape.to_vec(), x).cast(dtype),
        Array::Int(x) => HostTensor::from_i32(shape.to_vec(), x),
        Array::Byte(x) => HostTensor::new(DType::U8, shape.to_vec(), x.clone()),
    }
}

impl Instance {
    /// Returns the results of the reference: computed in f32, rounded to the results' types.
    pub fn expected(&self) -> Vec<HostTensor> {
        let arrays: Vec<Array<f32>> = self.inputs.iter().map(array_of).collect();
        let inputs: Vec<(&[usize], &Array<f32>)> =
            self.inputs.iter().zip(&arrays).map(|(t, a)| (t.shape.as_slice(), a)).collect();
        let storage: Vec<DType> = self.outputs.iter().map(|t| t.dtype).collect();
        let mut outputs: Vec<(Vec<usize>, Array<f32>)> =
            self.outputs.iter().map(|t| (t.shape.clone(), array_of(t))).collect();
        apply_stored(self.op, &self.attrs, &inputs, &mut outputs, &storage);
        let results = outputs.iter().zip(storage);
        results.map(|((shape, array), dtype)| tensor_of(array, dtype, shape)).collect()
    }

    /// The call as a graph of one node; its inputs are named `0`, `1`, …, its outputs likewise.
    pub fn graph(&self) -> Graph {
        let mut graph = Graph { name: self.op.name().to_owned(), ..Graph::default() };
        let inputs: Vec<ValueId> = self
            .inputs
            .iter()
            .enumerate()
            .map(|(i, t)| graph.add_input(&i.to_string(), Element::Fixed(t.dtype), t.shape.clone()))
            .collect();
        let outputs: Vec<ValueId> = self
            .outputs
            .iter()
            .map(|t| graph.add_value(self.op.name(), Element::Fixed(t.dtype), t.shape.clone(), Origin::Node))
            .collect();
        graph.outputs = outputs.iter().enumerate().map(|(i, id)| (i.to_string(), *id)).collect();
        graph.nodes.push(Node {
            op: self.op.id(),
            inputs,
            outputs,
            attrs: self.attrs.clone(),
            phase: Phase::Forward,
            layer: None,
            region: None,
            at: None,
        });
        graph
    }
}
