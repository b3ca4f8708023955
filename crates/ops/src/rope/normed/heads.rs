//! QK norm and rotation of query and key heads together: they share positions, and one kernel computes sines and
//! cosines once for both. Each operation here takes the tensors of one call, or those of two followed by the shared
//! inputs.

use graph::{OpId, ValueType};
use program::{Arg, TensorRef};
use tensor::Attrs;

use super::backward::{Places, kernels};
use super::{RmsNormRope, RopeRmsNormBackward, RopeRmsNormGradients, forward_kernel, half};
use crate::call::{Call, Input, Output};
use crate::evaluate::Evaluate;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Fusion, Op, Pairing};

/// An operation over the heads of one tensor, or of two at the same positions.
pub struct Heads {
    one: &'static dyn Op,
    /// Inputs of `one` that each call has for itself, and those that both share.
    own: &'static [usize],
    shared: &'static [usize],
    /// Number of results of one call.
    results: usize,
}

/// r, y = rope(rmsnorm(x))
pub static RMSNORM_ROPE: Heads = Heads { one: &RmsNormRope, own: &[0, 1], shared: &[2, 3, 4], results: 2 };

/// dx = rmsnorm_backward(rope(dy))
pub static ROPE_RMSNORM_BACKWARD: Heads =
    Heads { one: &RopeRmsNormBackward, own: &[0, 4, 5, 6], shared: &[1, 2, 3], results: 1 };

/// dx, dw = rmsnorm_gradients(rope(dy))
pub static ROPE_RMSNORM_GRADIENTS: Heads =
    Heads { one: &RopeRmsNormGradients, own: &[0, 4, 5, 6], shared: &[1, 2, 3], results: 2 };

impl Heads {
    fn is_one(&self, inputs: usize) -> bool {
        inputs == self.own.len() + self.shared.len()
    }

    /// The inputs of a side among those of both, in the order of `one`.
    fn inputs_of(&self, side: usize) -> Vec<usize> {
        let place = |list: &[usize], input: usize| list.iter().position(|i| *i == input);
        let of = |input: usize| match place(self.own, input) {
            Some(own) => side * self.own.len() + own,
            None => 2 * self.own.len() + place(self.shared, input).expect("every input is one's own or shared"),
        };
        (0..self.own.len() + self.shared.len()).map(of).collect()
    }

    /// One kernel for both, and its workspace.
    fn joint(&self, call: &LowerCall<'_>) -> Option<(Vec<KernelSpec>, usize)> {
        let own = self.own.len();
        let shared = [0, 1, 2].map(|i| 2 * own + i);
        if own == 2 {
            return forward_kernel(call, &[[0, 1, 0, 1], [2, 3, 2, 3]], shared).map(|kernel| (vec![kernel], 0));
        }
        let side = |side: usize| {
            let (input, result) = (side * own, side * self.results);
            let dw = (self.results == 2).then_some(result + 1);
            Places { dy: input, x: input + 1, w: input + 2, r: input + 3, dx: result, dw }
        };
        kernels(call, &[side(0), side(1)], shared)
    }

    /// The kernels of both calls one after the other, and their workspace.
    fn apart(&self, call: &LowerCall<'_>) -> (Vec<KernelSpec>, usize) {
        let (mut all, mut scratch) = (Vec::new(), 0);
        for side in 0..2 {
            let inputs: Vec<(&TensorRef, Arg)> =
                self.inputs_of(side).into_iter().map(|i| (&call.inputs[i], Arg::Input(i))).collect();
            let results = side * self.results..(side + 1) * self.results;
            let outputs: Vec<(&TensorRef, Arg)> = results.map(|i| (&call.outputs[i], Arg::Output(i))).collect();
            all.extend(half(self.one, call, &inputs, &outputs, scratch));
            let own = |list: &[(&TensorRef, Arg)]| list.iter().map(|(t, _)| (*t).clone()).collect::<Vec<_>>();
            scratch += self.one.scratch(&LowerCall { inputs: &own(&inputs), outputs: &own(&outputs), ..*call });
        }
        (all, scratch)
    }

    /// Returns the kernels for two sides, and their bytes of scratch.
    fn kernels(&self, call: &LowerCall<'_>) -> (Vec<KernelSpec>, usize) {
        self.joint(call).unwrap_or_else(|| self.apart(call))
    }

    fn reference<T: Evaluate>(&self, call: &mut Call<'_, T>) {
        if self.is_one(call.inputs.len()) {
            return T::call(self.one, call);
        }
        for (side, outputs) in call.outputs.chunks_mut(self.results).enumerate() {
            let inputs: Vec<Input<'_, T>> = self.inputs_of(side).into_iter().map(|i| call.inputs[i]).collect();
            let mut outputs: Vec<Output<'_, T>> = outputs.iter_mut().map(Output::lend).collect();
            T::call(self.one, &mut Call { attrs: call.attrs, inputs: &inputs, outputs: &mut outputs });
        }
    }
}

/// Returns the same input with half the number of heads.
fn fewer_heads(input: &ExampleInput) -> ExampleInput {
    let mut input = input.clone();
    if let ExampleInput::Normal { shape, .. } | ExampleInput::UniformF32 { shape, .. } = &mut input
        && shape.len() > 2
    {
        shape[2] = shape[2].div_ceil(2);
    }
    input
}

impl Op for Heads {
    fn id(&self) -> OpId {
        self.one.id()
    }

    fn class(&self) -> Class {
        self.one.class()
    }

    fn doc(&self) -> &'static str {
        self.one.doc()
    }

    fn attributes(&self) -> &'static [Attribute] {
        self.one.attributes()
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        if inputs.len() != 2 * self.own.len() + self.shared.len() {
            return self.one.infer(inputs, attrs);
        }
        let of = |side: usize| -> Result<Vec<ValueType>, String> {
            let inputs: Vec<ValueType> = self.inputs_of(side).into_iter().map(|i| inputs[i].clone()).collect();
            self.one.infer(&inputs, attrs)
        };
        Ok([of(0)?, of(1)?].concat())
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("operations are fused after differentiation")
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        if self.is_one(call.inputs.len()) { self.one.scratch(call) } else { self.kernels(call).1 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        if self.is_one(call.inputs.len()) { self.one.lower(call) } else { Lowered::Kernels(self.kernels(call).0) }
    }

    fn reference_f32(&self, call: &mut Call<'_, f32>) {
        self.reference(call)
    }

    fn reference_f64(&self, call: &mut Call<'_, f64>) {
        self.reference(call)
    }

    fn examples(&self) -> Vec<Example> {
        let both = |example: Example| {
            let own: Vec<ExampleInput> = self.own.iter().map(|i| example.inputs[*i].clone()).collect();
            let second: Vec<ExampleInput> = own.iter().map(fewer_heads).collect();
            let shared = self.shared.iter().map(|i| example.inputs[*i].clone());
            let inputs = own.into_iter().chain(second).chain(shared).collect();
            let state: Vec<ExampleInput> = example.state.iter().map(fewer_heads).collect();
            Example::new(inputs, example.attrs).with_state([example.state, state].concat())
        };
        self.one.examples().into_iter().chain(self.one.examples().into_iter().map(both)).collect()
    }

    fn fusions(&self) -> Vec<Fusion> {
        self.one.fusions()
    }

    fn pairing(&self) -> Option<Pairing> {
        Some(Pairing { own: self.own, shared: self.shared })
    }
}

#[cfg(test)]
mod tests {
    use tensor::DType;

    use super::*;
    use crate::examples::{Instance, instantiate};

    #[test]
    fn two_sides_give_the_bits_of_two_calls() {
        for both in [&RMSNORM_ROPE, &ROPE_RMSNORM_BACKWARD, &ROPE_RMSNORM_GRADIENTS] {
            let all = both.examples();
            let of_two = all.iter().filter(|example| !both.is_one(example.inputs.len()));
            assert_eq!(2 * of_two.clone().count(), all.len());
            for (example, dtype) in of_two.flat_map(|e| [DType::F32, DType::BF16].map(|d| (e, d))) {
                let joint = instantiate(example, both, dtype, 11);
                let one = |side: usize| {
                    let inputs = both.inputs_of(side).into_iter().map(|i| joint.inputs[i].clone()).collect();
                    let outputs = joint.outputs[side * both.results..][..both.results].to_vec();
                    Instance { op: both.one, attrs: joint.attrs.clone(), inputs, outputs }.expected()
                };
                assert_eq!(joint.expected(), [one(0), one(1)].concat(), "{} in {dtype}", both.name());
            }
        }
    }
}
