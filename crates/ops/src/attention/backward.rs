//! The gradients of attention.

use graph::{Element, ValueType};
use program::{Attention as Shared, AttentionBackward as Instruction, Cost, TensorRef};
use tensor::Attrs;

use super::library::{backward_bytes, takes_instruction};
use super::{ATTRIBUTES, Extents, Reading, check, cpu, example_calls, example_inputs, hopper, kernels};
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};

/// dq, dk, dv = attention_backward(q, k, v, o, lse, d_o, document_start)
pub struct AttentionBackward;

impl Op for AttentionBackward {
    fn name(&self) -> &'static str {
        "attention_backward"
    }

    fn class(&self) -> Class {
        Class::Attention
    }

    fn doc(&self) -> &'static str {
        "Gradients of `attention`: with p = exp(scale·q·k − lse) and ds = p·(d_o·v − mean)·scale over the visible \
         keys, dq = Σ ds·k, dk = Σ ds·q, dv = Σ p·d_o. The mean is that of d_o·v under p; a backend may take d_o·o \
         for it, which is the same when o and lse are those that `attention` gives. q, k, v, o, lse, d_o, \
         document_start → dq, dk, dv."
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [q, k, v, o, lse, d_o, document_start] = inputs else {
            return Err("takes q, k, v, o, lse, d_o and document_start".into());
        };
        Reading::of(attrs)?;
        let expected = check(q, k, v, document_start)?;
        if *lse != expected || o.shape != q.shape || d_o.shape != q.shape {
            return Err(format!("o and d_o must be shaped like q, lse must be {expected}"));
        }
        Ok(vec![q.clone(), k.clone(), v.clone()])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not taken")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], attrs: &Attrs) -> Cost {
        let e = Extents::of(&inputs[0].shape, &inputs[1].shape);
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        Cost { flops: 10.0 * e.head_dim as f64 * e.pairs(Reading::checked(attrs).window), bytes }
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        match call.machine.arch {
            program::Arch::Cpu => 0,
            _ if hopper::takes(call) => hopper::scratch(call),
            _ if takes_instruction(call) => backward_bytes(call),
            _ => kernels::backward_scratch(call),
        }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        if hopper::takes(call) {
            return Lowered::Kernels(hopper::backward(call));
        }
        if !takes_instruction(call) {
            return Lowered::Kernels(kernels::backward(call));
        }
        let [q, k, v, o, lse, d_o, document_start] = call.inputs else {
            unreachable!("the shape rule asks for seven inputs")
        };
        let [d_q, d_k, d_v] = call.outputs else { unreachable!("the shape rule gives three results") };
        let reading = Reading::checked(call.attrs);
        let shared = Shared {
            q: q.clone(),
            k: k.clone(),
            v: v.clone(),
            o: o.clone(),
            lse: lse.clone(),
            document_start: document_start.clone(),
            scale: reading.scale as f32,
            window: reading.window,
            documents: call.documents,
            scratch: None,
        };
        Lowered::AttentionBackward(Box::new(Instruction {
            shared,
            d_o: d_o.clone(),
            d_q: d_q.clone(),
            d_k: d_k.clone(),
            d_v: d_v.clone(),
            deterministic: true,
        }))
    }

    crate::reference!(cpu::backward);

    /// `o` and `lse` are those of the forward pass: only then is d_o·o the mean of d_o·v.
    fn examples(&self) -> Vec<Example> {
        let example = |(shape, starts, attrs): ([usize; 5], Vec<i32>, Attrs)| {
            let [batch, tokens, heads, _, head_dim] = shape;
            let mut inputs = example_inputs(shape, &starts);
            let document_start = inputs.pop().expect("four inputs");
            let like_q = || ExampleInput::Normal { shape: vec![batch, tokens, heads, head_dim], scale: 1.0 };
            let forward = |result: usize, element: Element, shape: &[usize]| ExampleInput::Computed {
                op: "attention",
                inputs: vec![0, 1, 2, 6],
                result,
                element,
                shape: shape.to_vec(),
            };
            let o = forward(0, Element::Float, &[batch, tokens, heads, head_dim]);
            let lse = forward(1, Element::F32, &[batch, heads, tokens]);
            inputs.extend([o, lse, like_q(), document_start]);
            Example::new(inputs, attrs)
        };
        example_calls().into_iter().map(example).collect()
    }
}
