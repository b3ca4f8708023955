//! The forward operation.

use graph::ValueType;
use program::{Attention as Shared, AttentionForward, Cost, TensorRef};
use tensor::Attrs;

use super::library::{forward_bytes, takes_instruction};
use super::{ATTRIBUTES, Extents, Reading, check, cpu, example_calls, example_inputs, kernels};
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, Op};

/// o, lse = attention(q, k, v, document_start)
pub struct Attention;

impl Op for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn class(&self) -> Class {
        Class::Attention
    }

    fn doc(&self) -> &'static str {
        "o = softmax(scale·q·kᵀ)·v over the visible keys. Key j is visible to query i when document_start[i] ≤ j ≤ i, \
         and with a window j > i − window. q [B, T, heads, D], k and v [B, T, kv_heads, D] (heads share key heads in \
         groups), document_start i32 [B, T] → o [B, T, heads, D], lse f32 [B, heads, T], the log of the sum of the \
         exponentials of a row's scores; lse has no gradient."
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [q, k, v, document_start] = inputs else { return Err("takes q, k, v and document_start".into()) };
        Reading::of(attrs)?;
        let lse = check(q, k, v, document_start)?;
        Ok(vec![q.clone(), lse])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let inputs =
            [call.input(0), call.input(1), call.input(2), call.output(0), call.output(1), call.dy(), call.input(3)];
        if !call.wanted[..3].contains(&true) {
            return Gradients::Inputs(vec![None; 4]);
        }
        let results = call.emit.emit("attention_backward", &inputs, call.node.attrs.clone());
        let results = results.into_iter().zip(call.wanted).map(|(id, wanted)| wanted.then_some(id));
        Gradients::Inputs(results.chain([None]).collect())
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], attrs: &Attrs) -> Cost {
        let e = Extents::of(&inputs[0].shape, &inputs[1].shape);
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        Cost { flops: 4.0 * e.head_dim as f64 * e.pairs(Reading::checked(attrs).window), bytes }
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        match call.machine.arch {
            program::Arch::Cuda(_) if takes_instruction(call) => forward_bytes(call),
            _ => 0,
        }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        if !takes_instruction(call) {
            return Lowered::Kernels(kernels::forward(call));
        }
        let [q, k, v, document_start] = call.inputs else { unreachable!("the shape rule asks for four inputs") };
        let reading = Reading::checked(call.attrs);
        let shared = Shared {
            q: q.clone(),
            k: k.clone(),
            v: v.clone(),
            o: call.outputs[0].clone(),
            lse: call.outputs[1].clone(),
            document_start: document_start.clone(),
            scale: reading.scale as f32,
            window: reading.window,
            documents: call.documents,
            scratch: None,
        };
        Lowered::AttentionForward(Box::new(AttentionForward { shared }))
    }

    crate::reference!(cpu::forward);

    fn examples(&self) -> Vec<Example> {
        let example = |(shape, starts, attrs): ([usize; 5], Vec<i32>, Attrs)| {
            Example::new(example_inputs(shape, &starts), attrs).differentiate(&[0, 1, 2])
        };
        example_calls().into_iter().map(example).collect()
    }
}
