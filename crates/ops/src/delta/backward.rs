//! The gradients of the gated delta rule.

use graph::{OpId, ValueType};
use program::{Arch, Arithmetic, Cost, TensorRef};
use tensor::Attrs;

use super::examples::{Given, calls};
use super::{ATTRIBUTES, CHUNK, Extents, check, cpu, launch};
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::registry::id;

/// dq, dk, dv, dg, dbeta = gated_delta_backward(q, k, v, g, beta, document_start, d_o)
pub struct GatedDeltaBackward;

impl Op for GatedDeltaBackward {
    fn id(&self) -> OpId {
        id::GATED_DELTA_BACKWARD
    }

    fn class(&self) -> Class {
        Class::Attention
    }

    fn doc(&self) -> &'static str {
        "Gradients of `gated_delta`. States are recomputed, and kept for every 64th token while this runs. q, k, \
         v, g, beta, document_start, d_o like v → dq, dk, dv, dg and dbeta like their operands."
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [q, k, v, g, beta, document_start, d_o] = inputs else {
            return Err("takes q, k, v, g, beta, document_start and d_o".into());
        };
        let o = check([q, k, v, g, beta, document_start], attrs)?;
        if d_o.shape != o.shape || !d_o.dtype.is_float() {
            return Err(format!("d_o must be {o}"));
        }
        Ok([q, k, v, g, beta].map(ValueType::clone).to_vec())
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    /// The states again, their gradients, and the products within chunks: five with the state, six with tokens.
    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let e = Extents::of(&inputs[1].shape, &inputs[2].shape);
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        let within = e.flops(12.0) * CHUNK as f64 / e.value_dim as f64;
        Cost { flops: e.flops(5.0 + 7.0 + 6.0) + within, bytes: bytes + 2.0 * launch::handed(&e) as f64 }
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
        Lowered::Kernels(if call.machine.arch == Arch::Cpu { vec![] } else { launch::backward(call) })
    }

    crate::reference!(cpu::backward);

    fn examples(&self) -> Vec<Example> {
        let example = |given: Given| {
            let [batch, tokens, _, heads, _, value_dim] = given.shape;
            let d_o = ExampleInput::Normal { shape: vec![batch, tokens, heads, value_dim], scale: 1.0 };
            let inputs = given.tensors().into_iter().chain([given.document_start(), d_o]).collect();
            Example::new(inputs, given.attrs)
        };
        calls().into_iter().map(example).collect()
    }
}
