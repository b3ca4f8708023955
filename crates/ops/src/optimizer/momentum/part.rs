//! A node's addend of a momentum that several nodes share, so that the sum of all is the momentum of the next step.

use graph::{Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::{Attrs, DType};

use super::{CHUNK, ELEMENTS, HEADERS, THREADS};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;
use crate::vector::{Loop, vectorised};

const SOURCE: &str = include_str!("part.cu");

/// gradient ← momentum_part(first, second, gradient_scale, applied)
pub struct MomentumPart;

/// A node's part of what is kept, and what a gradient adds.
fn factors(attrs: &Attrs) -> [f64; 2] {
    let beta1 = attrs.float("beta1").expect("checked by the shape rule");
    [beta1 / attrs.size("nodes").expect("checked by the shape rule") as f64, 1.0 - beta1]
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let (first, second) = (call.inputs[0].real(), call.inputs[1].real());
    let (scale, applied) = (call.inputs[2].real()[0], call.inputs[3].real()[0] != T::default());
    let [kept, rest] = factors(call.attrs).map(T::from_f64);
    let [gradient] = call.outputs_mut();
    let states = first.par_chunks(CHUNK).zip(second.par_chunks(CHUNK));
    gradient.real().par_chunks_mut(CHUNK).zip(states).for_each(|(gradient, (first, second))| match applied {
        true => vectorised(Add, ([kept, rest, scale], gradient, first, second)),
        false => gradient.fill(T::from_f32(f32::NAN)),
    });
}

struct Add;

impl<'a, T: Real> Loop<([T; 3], &'a mut [T], &'a [T], &'a [T])> for Add {
    type Output = ();

    #[inline(always)]
    fn run(([kept, rest, scale], gradient, first, second): ([T; 3], &'a mut [T], &'a [T], &'a [T])) {
        for ((g, m), v) in gradient.iter_mut().zip(first).zip(second) {
            *g = if *v > T::default() { kept * *m + rest * (*g * scale) } else { T::default() };
        }
    }
}

impl Op for MomentumPart {
    fn id(&self) -> OpId {
        id::MOMENTUM_PART
    }

    fn class(&self) -> Class {
        Class::Update
    }

    fn doc(&self) -> &'static str {
        "gradient ← β₁/nodes·m + (1 − β₁)·gradient·gradient_scale, or 0 where v is 0: of all nodes together the momentum \
         after the step. NaN when applied is 0. first (m), second (v) f32 [n], gradient_scale, applied f32 [1] → gradient \
         f32 [n]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "beta1", kind: "float", doc: "what a step keeps of the momentum" },
            Attribute { name: "nodes", kind: "int", doc: "how many have the same momentum" },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let one = ValueType::new(Element::F32, [1.into()]);
        attrs.float("beta1")?;
        if attrs.size("nodes")? == 0 {
            return Err("`nodes` is 0, expected at least 1".into());
        }
        match inputs {
            [first, second, scale, applied] if *scale == one && *applied == one => {
                match first.dtype == Element::F32 && first.shape.len() == 1 && first == second {
                    true => Ok(vec![first.clone()]),
                    false => Err("both moments must be f32 and flat, of equal lengths".into()),
                }
            }
            _ => Err("takes both moments and two step scalars".into()),
        }
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of the update")
    }

    /// The gradient is read and written.
    fn cost(&self, _inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let n = outputs[0].len() as f64;
        Cost { flops: 4.0 * n, bytes: 4.0 * n * DType::F32.size() as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (first, second, gradient) = (&call.inputs[0], &call.inputs[1], &call.outputs[0]);
        let all = [first, second, gradient];
        for tensor in all {
            assert!(tensor.is_dense(), "gradients and states lie densely: {tensor}");
        }
        let [kept, rest] = factors(call.attrs).map(|factor| format!("{:e}f", factor as f32));
        let defines = [
            ("KEPT", kept),
            ("REST", rest),
            ("COUNT", format!("{}ull", gradient.len())),
            ("ALIGNED", all.iter().all(|t| t.offset.is_multiple_of(16)).to_string()),
            ("THREADS", THREADS.to_string()),
        ];
        Lowered::Kernels(vec![KernelSpec {
            entry: "momentum_part",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines: defines.map(|(name, value)| (name.to_owned(), value)).to_vec(),
            grid: [gradient.len().div_ceil(THREADS as usize * ELEMENTS) as u32, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            args: (0..4).map(Arg::Input).chain([Arg::Output(0)]).collect(),
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |n: usize, nodes: u64| {
            let scalar = |value: f32| ExampleInput::F32 { shape: vec![1], values: vec![value] };
            let normal = |scale: f64| ExampleInput::NormalF32 { shape: vec![n], scale };
            let second = (0..n).map(|at| if at % 5 == 0 { 0.0 } else { (at % 7 + 1) as f32 / 70.0 }).collect();
            let second = ExampleInput::F32 { shape: vec![n], values: second };
            let attrs = Attrs::new().with("beta1", 0.9).with("nodes", nodes);
            Example::new(vec![normal(0.1), second, scalar(0.4), scalar(1.0)], attrs).with_state(vec![normal(0.3)])
        };
        vec![example(4096, 2), example(10_003, 3)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Array, apply};

    fn run(gradient: &[f32], applied: f32) -> Vec<f32> {
        let n = gradient.len();
        let inputs = [vec![0.5f32; n], vec![0.25; n], vec![2.0], vec![applied]].map(Array::Real);
        let shapes: [&[usize]; 4] = [&[n], &[n], &[1], &[1]];
        let inputs: Vec<(&[usize], &Array<f32>)> = shapes.into_iter().zip(&inputs).collect();
        let mut outputs = vec![(vec![n], Array::Real(gradient.to_vec()))];
        apply::<f32>(&MomentumPart, &Attrs::new().with("beta1", 0.75).with("nodes", 2u64), &inputs, &mut outputs);
        outputs[0].1.real().to_vec()
    }

    #[test]
    fn the_sum_of_all_nodes_is_the_next_momentum() {
        let parts = [run(&[1.0, -3.0], 1.0), run(&[2.0, 5.0], 1.0)];
        let sums: Vec<f32> = parts[0].iter().zip(&parts[1]).map(|(a, b)| a + b).collect();
        assert_eq!(sums, [0.75 * 0.5 + 0.25 * 2.0 * 3.0, 0.75 * 0.5 + 0.25 * 2.0 * 2.0]);
    }

    /// Then no node sends anything, and no error is taken for sent.
    #[test]
    fn of_a_suppressed_update_nothing_is_finite() {
        assert!(run(&[1.0, 0.0], 0.0).iter().all(|part| part.is_nan()));
    }
}
