//! The gradients of attention.

use graph::{Element, ValueType};
use program::{Arch, Attention as Shared, AttentionBackward as Instruction, Cost, TensorRef};
use tensor::Attrs;

use super::examples::{Given, calls};
use super::library::{backward_bytes, takes_instruction};
use super::{ATTRIBUTES, BACKWARD_INPUTS, Extents, Optional, Reading, check, cpu, hopper, kernels};
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};

/// dq, dk, dv = attention_backward(q, k, v, o, lse, d_o, document_start [, last_key] [, sink])
pub struct AttentionBackward;

impl Op for AttentionBackward {
    fn name(&self) -> &'static str {
        "attention_backward"
    }

    fn class(&self) -> Class {
        Class::Attention
    }

    fn doc(&self) -> &'static str {
        "Gradients of `attention`: with p = exp(s − lse) and ds = p·(d_o·v − mean) over the visible keys, times \
         1 − (s/soft_cap)² with a cap, dq = scale·Σ ds·k, dk = scale·Σ ds·q, dv = Σ p·d_o. The mean is that of d_o·v \
         under p, a sink having the value 0; a backend may take d_o·o for it, which is the same when o and lse are \
         those that `attention` gives. q, k, v, o, lse, d_o, document_start, then what `attention` was given of \
         last_key and sink → dq, dk, dv."
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [q, k, v, o, lse, d_o, document_start, ..] = inputs else {
            return Err("takes q, k, v, o, lse, d_o, document_start and as wanted last_key and sink".into());
        };
        let Optional { last_key, sink } = Optional::of(inputs, BACKWARD_INPUTS)?;
        let given = |at: Option<usize>| at.map(|at| &inputs[at]);
        let [like_o, like_lse] = check([q, k, v, document_start], given(last_key), given(sink), attrs)?;
        if *lse != like_lse || o.shape != like_o.shape || d_o.shape != like_o.shape {
            return Err(format!("o and d_o must be {like_o}, lse must be {like_lse}"));
        }
        Ok(vec![q.clone(), k.clone(), v.clone()])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not taken")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], attrs: &Attrs) -> Cost {
        let e = Extents::of_call(inputs);
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        Cost { flops: e.flops(&Reading::checked(attrs, e.head_dim), 3.0, 2.0), bytes }
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        match call.machine.arch {
            Arch::Cpu => 0,
            _ if hopper::takes(call) => hopper::scratch(call),
            _ if takes_instruction(call) => backward_bytes(call),
            _ => kernels::backward_scratch(call),
        }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        if call.machine.arch == Arch::Cpu {
            return Lowered::Kernels(vec![]);
        }
        if hopper::takes(call) {
            return Lowered::Kernels(hopper::backward(call));
        }
        if !takes_instruction(call) {
            return Lowered::Kernels(kernels::backward(call));
        }
        let [q, k, v, o, lse, d_o, document_start, ..] = call.inputs else {
            unreachable!("the shape rule asks for seven inputs")
        };
        let [d_q, d_k, d_v] = call.outputs else { unreachable!("the shape rule gives three results") };
        let shared = Shared {
            q: q.clone(),
            k: k.clone(),
            v: v.clone(),
            o: o.clone(),
            lse: lse.clone(),
            document_start: document_start.clone(),
            scale: Reading::checked(call.attrs, q.shape[3]).scale as f32,
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
        let example = |given: Given| {
            let [batch, tokens, heads, _, _, value_dim] = given.shape;
            let (mut inputs, optional) = (given.tensors(), given.optional());
            let document_start = inputs.pop().expect("four inputs");
            let like_o = vec![batch, tokens, heads, value_dim];
            let places: Vec<usize> = (0..3).chain(6..7 + optional.len()).collect();
            let forward = |result: usize, element: Element, shape: &[usize]| ExampleInput::Computed {
                op: "attention",
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
