//! The operation that computes attention.

use graph::{OpId, ValueType};
use program::{Arch, Arithmetic, AttentionForward, Cost, Realisation, TensorRef};
use tensor::Attrs;

use super::examples::{Given, calls};
use super::library::realisation;
use super::{ATTRIBUTES, Extents, FORWARD_INPUTS, Optional, Reading, check, cpu, hopper, kernels, portable};
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, Op};
use crate::registry::id;

/// o, lse = attention(q, k, v, document_start [, last_key | last_query] [, sink])
pub struct Attention;

impl Op for Attention {
    fn id(&self) -> OpId {
        id::ATTENTION
    }

    fn class(&self) -> Class {
        Class::Attention
    }

    fn doc(&self) -> &'static str {
        "o = softmax(scale·q·kᵀ)·v over the visible keys. Key j is visible to query i when first[i] ≤ j ≤ last[i]: \
         first[i] is document_start[i], with a window max(document_start[i], i + 1 − window); last[i] is i, or \
         last_key[i] where that is given (prefixes, spans that see each other), or the end of the row when \
         `bidirectional`. Both never fall from one query to the next and first[i] ≤ i ≤ last[i]. With `branches` of \
         a common beginning, key j is visible to queries up to last_query[j] alone, which is no less than j, and at a \
         document's first token no less than the index of its last. With a sink, \
         exp(sink) of the head joins the sum of the exponentials. q [B, T, heads, D], k [B, T, kv_heads, D], v \
         [B, T, kv_heads, DV] (heads share key heads in groups), document_start i32 [B, T], then as wanted last_key \
         or last_query i32 [B, T], sink [heads] → o [B, T, heads, DV], lse f32 [B, heads, T], the log of the sum of the \
         exponentials of a row's scores; lse has no gradient."
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [q, k, v, document_start, ..] = inputs else {
            return Err("takes q, k, v, document_start and as wanted last_key or last_query, and sink".into());
        };
        let Optional { limit, sink } = Optional::of(inputs, FORWARD_INPUTS)?;
        let given = |at: Option<usize>| at.map(|at| &inputs[at]);
        Ok(check([q, k, v, document_start], given(limit), given(sink), attrs)?.to_vec())
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let count = call.node.inputs.len();
        let mut results = vec![None; count];
        let [o, lse, d_o] = [call.output(0), call.output(1), call.dy()];
        if call.wanted[..3].contains(&true) {
            let mut inputs = vec![call.input(0), call.input(1), call.input(2), o, lse, d_o];
            inputs.extend(&call.node.inputs[3..]);
            let made = call.emit.emit(id::ATTENTION_BACKWARD, &inputs, call.node.attrs.clone());
            let made = made.into_iter().zip(call.wanted).map(|(id, wanted)| wanted.then_some(id));
            results.iter_mut().zip(made).for_each(|(result, made)| *result = made);
        }
        // A sink comes last; document_start and limits want none.
        if count > FORWARD_INPUTS && call.wanted[count - 1] {
            let inputs = [o, d_o, lse, call.input(count - 1)];
            results[count - 1] = Some(call.one(id::ATTENTION_SINK_GRADIENT, &inputs, Attrs::new()));
        }
        Gradients::Inputs(results)
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], attrs: &Attrs) -> Cost {
        let e = Extents::of_call(inputs);
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        Cost { flops: e.flops(&Reading::checked(attrs, e.head_dim), 1.0, 1.0), bytes }
    }

    fn arithmetic(&self, call: &LowerCall<'_>) -> Arithmetic {
        Arithmetic::Attention { backward: false, by: realisation(call) }
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        match realisation(call) {
            _ if portable::takes_in_one_order(call) => 0,
            Realisation::Library => program::library::ATTENTION_SCRATCH,
            Realisation::Hopper => hopper::forward_scratch(),
            Realisation::Portable | Realisation::Scalar => 0,
        }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        Lowered::Kernels(match realisation(call) {
            _ if call.machine.arch == Arch::Cpu => vec![],
            _ if portable::takes_in_one_order(call) => portable::forward_in_one_order(call),
            Realisation::Scalar => kernels::forward(call),
            Realisation::Portable => portable::forward(call),
            Realisation::Hopper => hopper::forward(call),
            Realisation::Library => return Lowered::AttentionForward(Box::new(instruction(call))),
        })
    }

    crate::reference!(cpu::forward);

    fn examples(&self) -> Vec<Example> {
        let example = |given: Given| {
            let inputs = given.tensors().into_iter().chain(given.optional()).collect();
            let differentiable = given.differentiable();
            Example::new(inputs, given.attrs).differentiate(&differentiable)
        };
        calls().into_iter().map(example).collect()
    }
}

/// The library's instruction for a call that it takes.
fn instruction(call: &LowerCall<'_>) -> AttentionForward {
    let [q, k, v, document_start, ..] = call.inputs else { unreachable!("the shape rule requires four inputs") };
    AttentionForward {
        q: q.clone(),
        k: k.clone(),
        v: v.clone(),
        o: call.outputs[0].clone(),
        lse: call.outputs[1].clone(),
        document_start: document_start.clone(),
        scale: Reading::checked(call.attrs, q.shape[3]).scale as f32,
        scratch: None,
    }
}
