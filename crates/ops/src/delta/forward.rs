//! The operation that applies the gated delta rule.

use graph::{OpId, ValueType};
use program::{Arch, Arithmetic, Cost, TensorRef};
use tensor::Attrs;

use super::examples::calls;
use super::{ATTRIBUTES, Extents, check, cpu, launch};
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, Op};
use crate::registry::id;

/// o = gated_delta(q, k, v, g, beta, document_start)
pub struct GatedDelta;

impl Op for GatedDelta {
    fn id(&self) -> OpId {
        id::GATED_DELTA
    }

    fn class(&self) -> Class {
        Class::Attention
    }

    fn doc(&self) -> &'static str {
        "The gated delta rule. Each head has a state S [DK, DV], zero where a document starts. Every token lets it \
         decay and moves what it gives for the key towards the value: S ← e^g·S, S ← S + k·(beta·(v − kᵀS)), o = \
         scale·qᵀS. With `additive`, S ← S + k·(beta·v): the scan of Mamba-2, with C, B, x, dt·A and dt for q, k, v, g \
         and beta. q, k [B, T, key_heads, DK], v [B, T, heads, DV] (heads share key heads in groups of neighbours), g \
         and beta [B, T, heads], document_start i32 [B, T] → o like v. The state is f32."
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [q, k, v, g, beta, document_start] = inputs else {
            return Err("takes q, k, v, g, beta and document_start".into());
        };
        Ok(vec![check([q, k, v, g, beta, document_start], attrs)?])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let mut results = vec![None; 6];
        if call.wanted[..5].contains(&true) {
            let mut inputs = call.node.inputs.clone();
            inputs.push(call.dy());
            let made = call.emit.emit(id::GATED_DELTA_BACKWARD, &inputs, call.node.attrs.clone());
            let made = made.into_iter().zip(call.wanted).map(|(id, wanted)| wanted.then_some(id));
            results.iter_mut().zip(made).for_each(|(result, made)| *result = made);
        }
        Gradients::Inputs(results)
    }

    /// Decay, kᵀS, the correction and qᵀS.
    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        Cost { flops: Extents::of(&inputs[1].shape, &inputs[2].shape).flops(7.0), bytes }
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        launch::scratch(call)
    }

    fn rounds_between(&self) -> bool {
        true
    }

    fn arithmetic(&self, call: &LowerCall<'_>) -> Arithmetic {
        launch::arithmetic(call)
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        Lowered::Kernels(if call.machine.arch == Arch::Cpu { vec![] } else { launch::forward(call) })
    }

    crate::reference!(cpu::forward);

    fn examples(&self) -> Vec<Example> {
        let example = |given: super::examples::Given| {
            let inputs = given.tensors().into_iter().chain([given.document_start()]).collect();
            // The state of a single token decays nowhere.
            let differentiable = if given.shape[1] == 1 { vec![0, 1, 2, 4] } else { vec![0, 1, 2, 3, 4] };
            Example::new(inputs, given.attrs).differentiate(&differentiable)
        };
        calls().into_iter().map(example).collect()
    }
}
