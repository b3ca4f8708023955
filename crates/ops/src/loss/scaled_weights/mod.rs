//! The weights of the tokens times the loss scale: the gradient of a loss that is multiplied so that f16 gradients do
//! not vanish. Only differentiation adds it; the update divides by the scale again.

use graph::{Element, OpId, ValueType};
use program::Arg;
use tensor::Attrs;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::op::{Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("scaled_weights.cu");
const THREADS: u32 = 256;

/// scaled = scaled_weights(weights, loss_scale)
pub struct ScaledWeights;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let (weights, scale) = (call.inputs[0].real(), call.inputs[1].real()[0]);
    let [scaled] = call.outputs_mut();
    for (to, weight) in scaled.real().iter_mut().zip(weights) {
        *to = *weight * scale;
    }
}

impl Op for ScaledWeights {
    fn id(&self) -> OpId {
        id::SCALED_WEIGHTS
    }

    fn class(&self) -> Class {
        Class::Loss
    }

    fn doc(&self) -> &'static str {
        "weights·loss_scale: what the gradient of a scaled loss begins with. weights f32 […], loss_scale f32 [1] → like \
         weights."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        match inputs {
            [weights, scale] if weights.dtype == Element::F32 && *scale == ValueType::new(Element::F32, [1.into()]) => {
                Ok(vec![weights.clone()])
            }
            _ => Err("takes weights and loss_scale, f32 and f32[1]".into()),
        }
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of the backward pass")
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let count = call.inputs[0].len();
        for tensor in call.inputs.iter().chain(call.outputs) {
            assert!(tensor.is_dense(), "batch values lie densely: {tensor}");
        }
        Lowered::Kernels(vec![KernelSpec {
            entry: "scaled_weights",
            source: SOURCE.to_owned(),
            headers: Vec::new(),
            defines: vec![("COUNT".to_owned(), count.to_string()), ("THREADS".to_owned(), THREADS.to_string())],
            grid: [count.div_ceil(THREADS as usize) as u32, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Input(1), Arg::Output(0)],
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |shape: &[usize], scale: f32| {
            let weights = ExampleInput::UniformF32 { shape: shape.to_vec(), low: 0.0, high: 1.0 };
            Example::new(vec![weights, ExampleInput::F32 { shape: vec![1], values: vec![scale] }], Attrs::new())
        };
        vec![example(&[2, 700], 65536.0), example(&[3, 5], 0.5)]
    }
}
