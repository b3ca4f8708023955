//! Momentum of a flat tensor: a running mean of its gradients, kept in f32; and the part that one of several nodes adds
//! to it.

mod part;

use graph::{Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;
use crate::vector::{Loop, vectorised};

pub use part::MomentumPart;

const SOURCE: &str = include_str!("momentum.cu");
const HEADERS: &[(&str, &str)] =
    &[("types.cuh", include_str!("../../cuda/types.cuh")), ("pack.cuh", include_str!("../../cuda/pack.cuh"))];

const THREADS: u32 = 256;
/// Number of elements in a thread.
const ELEMENTS: usize = 4;

/// Elements of one task on the CPU.
const CHUNK: usize = 4096;

/// first ← momentum(gradient, gradient_scale, applied)
pub struct Momentum;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let (gradient, scale, applied) = (call.inputs[0].real(), call.inputs[1].real()[0], call.inputs[2].real()[0]);
    if applied == T::default() {
        return;
    }
    let momentum = call.attrs.float("momentum").expect("checked by the shape rule");
    let factors = [T::from_f64(momentum), T::from_f64(1.0 - momentum), scale];
    let [first] = call.outputs_mut();
    let chunks = first.real().par_chunks_mut(CHUNK).zip(gradient.par_chunks(CHUNK));
    chunks.for_each(|(first, gradient)| vectorised(Move, (factors, first, gradient)));
}

struct Move;

impl<'a, T: Real> Loop<([T; 3], &'a mut [T], &'a [T])> for Move {
    type Output = ();

    #[inline(always)]
    fn run(([kept, rest, scale], first, gradient): ([T; 3], &'a mut [T], &'a [T])) {
        for (m, g) in first.iter_mut().zip(gradient) {
            *m = kept * *m + rest * (*g * scale);
        }
    }
}

impl Op for Momentum {
    fn id(&self) -> OpId {
        id::MOMENTUM
    }

    fn class(&self) -> Class {
        Class::Update
    }

    fn doc(&self) -> &'static str {
        "m ← momentum·m + (1 − momentum)·gradient·gradient_scale; unchanged when applied is 0. gradient f32 [n], \
         gradient_scale, applied f32 [1] → first (m) f32 [n]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[Attribute { name: "momentum", kind: "float", doc: "what a step keeps of the mean" }]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let one = ValueType::new(Element::F32, [1.into()]);
        attrs.float("momentum")?;
        match inputs {
            [gradient, scale, applied] if *scale == one && *applied == one => {
                match gradient.dtype == Element::F32 && gradient.shape.len() == 1 {
                    true => Ok(vec![gradient.clone()]),
                    false => Err("the gradient must be f32 and flat".into()),
                }
            }
            _ => Err("takes the gradient and two step scalars".into()),
        }
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of the update")
    }

    /// The mean is read and written.
    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let n = outputs[0].len() as f64;
        Cost { flops: 4.0 * n, bytes: (inputs[0].bytes() + 2 * outputs[0].bytes()) as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (gradient, first) = (&call.inputs[0], &call.outputs[0]);
        for tensor in [gradient, first] {
            assert!(tensor.is_dense(), "gradients and states lie densely: {tensor}");
        }
        let momentum = call.attrs.float("momentum").expect("checked by the shape rule");
        let aligned = [gradient, first].iter().all(|t| t.offset.is_multiple_of(16));
        let defines = [
            ("MOMENTUM", format!("{:e}f", momentum as f32)),
            ("REST", format!("{:e}f", (1.0 - momentum) as f32)),
            ("COUNT", format!("{}ull", first.len())),
            ("ALIGNED", aligned.to_string()),
            ("THREADS", THREADS.to_string()),
        ];
        Lowered::Kernels(vec![KernelSpec {
            entry: "momentum",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines: defines.map(|(name, value)| (name.to_owned(), value)).to_vec(),
            grid: [first.len().div_ceil(THREADS as usize * ELEMENTS) as u32, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Input(1), Arg::Input(2), Arg::Output(0)],
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |n: usize, applied: f32| {
            let scalar = |value: f32| ExampleInput::F32 { shape: vec![1], values: vec![value] };
            let gradient = ExampleInput::NormalF32 { shape: vec![n], scale: 0.3 };
            Example::new(vec![gradient, scalar(0.4), scalar(applied)], Attrs::new().with("momentum", 0.95))
                .with_state(vec![ExampleInput::NormalF32 { shape: vec![n], scale: 0.1 }])
        };
        vec![example(4096, 1.0), example(10_003, 1.0), example(100, 0.0)]
    }
}
