//! QK norm and rotation of query and key heads together: they share positions, and one kernel computes sines and
//! cosines once for both. Each operation here is two calls of a neighboring one.

use graph::{OpId, ValueType};
use program::{Arg, TensorRef};
use tensor::Attrs;

use super::backward::{Places, kernels};
use super::{RmsNormRope, RopeRmsNormBackward, RopeRmsNormGradients, forward_kernel, half};
use crate::call::{Call, Input, Output};
use crate::evaluate::Evaluate;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op, Pairing};
use crate::registry::id;

/// Both calls of an operation over heads.
pub struct Both {
    id: OpId,
    doc: &'static str,
    one: &'static dyn Op,
    /// Inputs of `one` that each call has for itself, and those that both share.
    own: &'static [usize],
    shared: &'static [usize],
    /// Results of one call.
    results: usize,
}

/// r, y, r2, y2 = two calls of `rmsnorm_rope`
pub static RMSNORM_ROPE_BOTH: Both = Both {
    id: id::RMSNORM_ROPE_BOTH,
    doc: "`rmsnorm_rope` of two tensors of heads at the same positions. x, w, x2, w2, positions, inv_freq, \
          attention_scaling → r, y, r2, y2.",
    one: &RmsNormRope,
    own: &[0, 1],
    shared: &[2, 3, 4],
    results: 2,
};

/// dx, dx2 = two calls of `rope_rmsnorm_backward`
pub static ROPE_RMSNORM_BACKWARD_BOTH: Both = Both {
    id: id::ROPE_RMSNORM_BACKWARD_BOTH,
    doc: "`rope_rmsnorm_backward` of two tensors of heads at the same positions. dy, x, w, r, dy2, x2, w2, r2, \
          positions, inv_freq, attention_scaling → dx, dx2.",
    one: &RopeRmsNormBackward,
    own: &[0, 4, 5, 6],
    shared: &[1, 2, 3],
    results: 1,
};

/// dx, dw, dx2, dw2 = two calls of `rope_rmsnorm_gradients`
pub static ROPE_RMSNORM_GRADIENTS_BOTH: Both = Both {
    id: id::ROPE_RMSNORM_GRADIENTS_BOTH,
    doc: "`rope_rmsnorm_gradients` of two tensors of heads at the same positions. dy, x, w, r, dy2, x2, w2, r2, \
          positions, inv_freq, attention_scaling → dx, dw, dx2, dw2. With `accumulate`, dw and dw2 are added to.",
    one: &RopeRmsNormGradients,
    own: &[0, 4, 5, 6],
    shared: &[1, 2, 3],
    results: 2,
};

impl Both {
    /// The inputs of one call among those of both, in the order of `one`.
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

    fn kernels(&self, call: &LowerCall<'_>) -> (Vec<KernelSpec>, usize) {
        self.joint(call).unwrap_or_else(|| self.apart(call))
    }

    fn reference<T: Evaluate>(&self, call: &mut Call<'_, T>) {
        for (side, outputs) in call.outputs.chunks_mut(self.results).enumerate() {
            let inputs: Vec<Input<'_, T>> = self.inputs_of(side).into_iter().map(|i| call.inputs[i]).collect();
            let mut outputs: Vec<Output<'_, T>> = outputs.iter_mut().map(Output::lend).collect();
            T::call(self.one, &mut Call { attrs: call.attrs, inputs: &inputs, outputs: &mut outputs });
        }
    }
}

/// The same with half as many heads.
fn fewer_heads(input: &ExampleInput) -> ExampleInput {
    let mut input = input.clone();
    if let ExampleInput::Normal { shape, .. } | ExampleInput::UniformF32 { shape, .. } = &mut input
        && shape.len() > 2
    {
        shape[2] = shape[2].div_ceil(2);
    }
    input
}

impl Op for Both {
    fn id(&self) -> OpId {
        self.id
    }

    fn class(&self) -> Class {
        self.one.class()
    }

    fn doc(&self) -> &'static str {
        self.doc
    }

    fn attributes(&self) -> &'static [Attribute] {
        self.one.attributes()
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        if inputs.len() != 2 * self.own.len() + self.shared.len() {
            return Err(format!("takes the inputs of two calls of `{}`", self.one.name()));
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
        self.kernels(call).1
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        Lowered::Kernels(self.kernels(call).0)
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
        self.one.examples().into_iter().map(both).collect()
    }

    fn pairing(&self) -> Option<Pairing> {
        Some(Pairing { of: self.one.id(), own: self.own, shared: self.shared })
    }
}

#[cfg(test)]
mod tests {
    use tensor::DType;

    use super::*;
    use crate::examples::{Instance, instantiate};

    #[test]
    fn they_give_the_bits_of_two_calls() {
        for both in [&RMSNORM_ROPE_BOTH, &ROPE_RMSNORM_BACKWARD_BOTH, &ROPE_RMSNORM_GRADIENTS_BOTH] {
            for (example, dtype) in
                both.examples().iter().flat_map(|e| [DType::F32, DType::BF16, DType::F16].map(|d| (e, d)))
            {
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
