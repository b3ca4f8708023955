//! The sum of weighted token losses and the sum of the weights. The mean is their quotient over all
//! micro-steps, so the division happens once, in the update. Differentiation starts here.

use graph::{Element, OpId, ValueType};
use program::Arg;
use tensor::Attrs;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("weighted_sum.cu");
const HEADERS: &[(&str, &str)] =
    &[("types.cuh", include_str!("../../cuda/types.cuh")), ("reduce.cuh", include_str!("../../cuda/reduce.cuh"))];

const THREADS: u32 = 1024;

/// loss_sum, weight_sum = weighted_sum(token_loss, weights)
pub struct WeightedSum;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
    let (losses, weights) = (call.inputs[0].real(), call.inputs[1].real());
    let [loss_sum, weight_sum] = call.outputs_mut();
    // In f64: a batch has few tokens, and the sum should not depend on how they are distributed to batches.
    let loss: f64 = losses.iter().zip(weights).map(|(l, w)| l.to_f64() * w.to_f64()).sum();
    let weight: f64 = weights.iter().map(|w| w.to_f64()).sum();
    for (sum, output) in [(loss, loss_sum), (weight, weight_sum)] {
        let output = &mut output.real()[0];
        *output = T::from_f64(if accumulate { output.to_f64() + sum } else { sum });
    }
}

impl Op for WeightedSum {
    fn id(&self) -> OpId {
        id::WEIGHTED_SUM
    }

    fn class(&self) -> Class {
        Class::Loss
    }

    fn doc(&self) -> &'static str {
        "loss_sum = Σ weights·token_loss, weight_sum = Σ weights. token_loss, weights f32 […] → loss_sum, weight_sum \
         f32 [1]. With `accumulate`, added to. The gradient of the loss sum is 1: differentiation starts here."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[Attribute { name: "accumulate", kind: "bool?", doc: "add to the results instead of overwriting them" }]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [losses, weights] = inputs else { return Err("takes token_loss and weights".into()) };
        if losses.dtype != Element::F32 || weights.dtype != Element::F32 || losses.shape != weights.shape {
            return Err("token_loss and weights must be f32 of the same shape".into());
        }
        attrs.flag("accumulate")?;
        Ok(vec![ValueType::new(Element::F32, [1.into()]); 2])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let weights = call.input(1);
        Gradients::Inputs(vec![call.wanted[0].then_some(weights), None])
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
        for tensor in call.inputs {
            assert!(tensor.is_dense(), "batch values lie densely: {tensor}");
        }
        Lowered::Kernels(vec![KernelSpec {
            entry: "weighted_sum",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines: vec![
                ("COUNT".to_owned(), call.inputs[0].len().to_string()),
                ("ACCUMULATE".to_owned(), (accumulate as u32).to_string()),
                ("THREADS".to_owned(), THREADS.to_string()),
            ],
            grid: [1, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Input(1), Arg::Output(0), Arg::Output(1)],
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let sum = || ExampleInput::UniformF32 { shape: vec![1], low: 1.0, high: 2.0 };
        let example = |shape: &[usize], attrs: Attrs| {
            let shape = shape.to_vec();
            Example::new(
                vec![
                    ExampleInput::UniformF32 { shape: shape.clone(), low: 0.0, high: 5.0 },
                    ExampleInput::UniformF32 { shape, low: 0.0, high: 1.0 },
                ],
                attrs,
            )
            .differentiate(&[0])
            .with_state(vec![sum(), sum()])
        };
        vec![example(&[2, 700], Attrs::new()), example(&[3, 5], Attrs::new().with("accumulate", true))]
    }
}
