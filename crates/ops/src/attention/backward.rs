//! The operation that computes the gradients of attention.

use graph::{Element, OpId, ValueType};
use program::{Arch, Arithmetic, Cost, Realisation, TensorRef};
use tensor::Attrs;

use super::examples::{Given, calls};
use super::library::realisation;
use super::{ATTRIBUTES, BACKWARD_INPUTS, Extents, Optional, Reading, check, cpu, hopper, kernels, portable};
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::registry::id;

/// dq, dk, dv = attention_backward(q, k, v, o, lse, d_o, document_start [, last_key | last_query] [, sink])
pub struct AttentionBackward;

impl Op for AttentionBackward {
    fn id(&self) -> OpId {
        id::ATTENTION_BACKWARD
    }

    fn class(&self) -> Class {
        Class::Attention
    }

    fn doc(&self) -> &'static str {
        "Gradients of `attention`: with p = exp(s − lse) and ds = p·(d_o·v − mean) over the visible keys, times \
         1 − (s/soft_cap)² with a cap, dq = scale·Σ ds·k, dk = scale·Σ ds·q, dv = Σ p·d_o. The mean is that of d_o·v \
         under p, a sink having the value 0; a backend may take d_o·o for it, which is the same when o and lse are \
         those that `attention` gives. q, k, v, o, lse, d_o, document_start, then what `attention` was given of \
         a limit and a sink → dq, dk, dv."
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [q, k, v, o, lse, d_o, document_start, ..] = inputs else {
            return Err(
                "takes q, k, v, o, lse, d_o, document_start and as wanted last_key or last_query, and sink".into()
            );
        };
        let Optional { limit, sink } = Optional::of(inputs, BACKWARD_INPUTS)?;
        let given = |at: Option<usize>| at.map(|at| &inputs[at]);
        let [like_o, like_lse] = check([q, k, v, document_start], given(limit), given(sink), attrs)?;
        if *lse != like_lse || o.shape != like_o.shape || d_o.shape != like_o.shape {
            return Err(format!("o and d_o must be {like_o}, lse must be {like_lse}"));
        }
        Ok(vec![q.clone(), k.clone(), v.clone()])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], attrs: &Attrs) -> Cost {
        let e = Extents::of_call(inputs);
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        Cost { flops: e.flops(&Reading::checked(attrs, e.head_dim), 3.0, 2.0), bytes }
    }

    fn arithmetic(&self, call: &LowerCall<'_>) -> Arithmetic {
        Arithmetic::Attention { backward: true, by: realisation(call) }
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        match realisation(call) {
            _ if call.machine.arch == Arch::Cpu => 0,
            Realisation::Hopper => hopper::scratch(call),
            Realisation::Portable => portable::backward_scratch(call),
            Realisation::Scalar => kernels::backward_scratch(call),
            Realisation::Library => unreachable!("the library has the forward pass alone"),
        }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        Lowered::Kernels(match realisation(call) {
            _ if call.machine.arch == Arch::Cpu => vec![],
            Realisation::Hopper => hopper::backward(call),
            Realisation::Portable => portable::backward(call),
            Realisation::Scalar => kernels::backward(call),
            Realisation::Library => unreachable!("the library has the forward pass alone"),
        })
    }

    crate::reference!(cpu::backward);

    /// Returns the examples. `o` and `lse` are those of the forward pass: only then is d_o·o the mean of d_o·v.
    fn examples(&self) -> Vec<Example> {
        let example = |given: Given| {
            let [batch, tokens, heads, _, _, value_dim] = given.shape;
            let (mut inputs, optional) = (given.tensors(), given.optional());
            let document_start = inputs.pop().expect("four inputs");
            let like_o = vec![batch, tokens, heads, value_dim];
            let places: Vec<usize> = (0..3).chain(6..7 + optional.len()).collect();
            let forward = |result: usize, element: Element, shape: &[usize]| ExampleInput::Computed {
                op: id::ATTENTION,
                inputs: places.clone(),
                result,
                element,
                shape: shape.to_vec(),
            };
            let o = forward(0, Element::Float, &like_o);
            let lse = forward(1, Element::F32, &[batch, heads, tokens]);
            inputs.extend([o, lse, ExampleInput::Normal { shape: like_o, scale: 1.0 }, document_start]);
            inputs.extend(optional);
            Example::new(inputs, given.attrs)
        };
        calls().into_iter().map(example).collect()
    }
}
