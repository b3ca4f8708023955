//! A call of an operation's reference implementation. Loading decides which operands are used in place and which
//! through a dense copy.

use ops::{Call, Input, Op, Output, id};
use program::{AttentionForward, Launch, TensorRef};
use tensor::Attrs;

use crate::arena::{Memory, overlap};
use crate::attention::{self, Own, Room};
use crate::scratch::Scratch;
use crate::storage::{Buffer, Kind, input_in_place, is_native, output_in_place};

/// An operand of the call.
struct Operand {
    at: TensorRef,
    in_place: bool,
}

/// A call that is ready to run.
pub struct ReferenceCall {
    op: &'static dyn Op,
    /// An implementation to use instead of the reference.
    own: Option<Own>,
    room: Room,
    attrs: Attrs,
    inputs: Vec<Operand>,
    outputs: Vec<Operand>,
}

impl ReferenceCall {
    pub fn launch(launch: &Launch) -> Result<ReferenceCall, String> {
        Self::new(ops::find(&launch.op)?, launch.attrs.clone(), &launch.inputs, &launch.outputs)
    }

    pub fn attention_forward(call: &AttentionForward) -> Result<ReferenceCall, String> {
        let inputs = [&call.q, &call.k, &call.v, &call.document_start].map(Clone::clone);
        let attrs = Attrs::new().with("scale", call.scale);
        Self::new(ops::get(id::ATTENTION), attrs, &inputs, &[call.o.clone(), call.lse.clone()])
    }

    fn new(
        op: &'static dyn Op,
        attrs: Attrs,
        inputs: &[TensorRef],
        outputs: &[TensorRef],
    ) -> Result<ReferenceCall, String> {
        for at in inputs.iter().chain(outputs) {
            Kind::of(at.dtype).ok_or_else(|| format!("{at}: operations on {} are not run on the CPU", at.dtype))?;
        }
        let alone = |index: usize| {
            let others = outputs.iter().enumerate().filter(|(i, _)| *i != index);
            others.into_iter().all(|(_, other)| !overlap(&outputs[index], other))
        };
        let usable = |at: &TensorRef| at.is_dense() && is_native(at.dtype);
        let results: Vec<Operand> = outputs
            .iter()
            .enumerate()
            .map(|(i, at)| Operand { at: at.clone(), in_place: usable(at) && alone(i) })
            .collect();
        let operands = inputs.iter().map(|at| {
            let overwritten = results.iter().any(|r| r.in_place && overlap(&r.at, at));
            Operand { at: at.clone(), in_place: usable(at) && !overwritten }
        });
        let own = attention::find(op.id());
        let room = own.map_or(Room::default(), |own| (own.room)(inputs));
        Ok(ReferenceCall { op, own, room, attrs, inputs: operands.collect(), outputs: results })
    }

    /// Makes room for the copies: one buffer for each operand, in order.
    pub fn reserve(&self, scratch: &mut Scratch) {
        let operands = self.inputs.iter().chain(&self.outputs);
        scratch.reserve_packed(self.room.packed);
        scratch.reserve_partial(self.room.partial);
        scratch.reserve_buffers(self.inputs.len() + self.outputs.len());
        for (index, operand) in operands.enumerate().filter(|(_, operand)| !operand.in_place) {
            scratch.reserve(index, &operand.at);
        }
    }

    pub fn run(&self, memory: &mut Memory, scratch: &mut Scratch) {
        let Scratch { buffers, packed, partial } = scratch;
        let operands = self.inputs.iter().chain(&self.outputs);
        for (operand, buffer) in operands.zip(&mut *buffers).filter(|(operand, _)| !operand.in_place) {
            buffer.load(memory, &operand.at);
        }
        let (for_inputs, for_outputs) = buffers.split_at_mut(self.inputs.len());
        self.compute(memory, for_inputs, for_outputs, packed, partial);
        for (operand, buffer) in self.outputs.iter().zip(for_outputs).filter(|(operand, _)| !operand.in_place) {
            buffer.store(memory, &operand.at);
        }
    }

    fn compute(
        &self,
        memory: &mut Memory,
        for_inputs: &[Buffer],
        for_outputs: &mut [Buffer],
        packed: &mut [u32],
        partial: &mut [f32],
    ) {
        let (reads, writes) = memory.lend(&in_place(&self.inputs), &in_place(&self.outputs));
        let (mut reads, mut writes) = (reads.into_iter(), writes.into_iter());
        let inputs: Vec<Input<'_, f32>> = self
            .inputs
            .iter()
            .zip(for_inputs)
            .map(|(operand, buffer)| match operand.in_place {
                true => input_in_place(&reads.next().expect("one span for each"), &operand.at),
                false => buffer.input(&operand.at),
            })
            .collect();
        let mut outputs: Vec<Output<'_, f32>> = self
            .outputs
            .iter()
            .zip(for_outputs)
            .map(|(operand, buffer)| match operand.in_place {
                true => output_in_place(writes.next().expect("one span for each"), &operand.at),
                false => buffer.output(&operand.at),
            })
            .collect();
        let mut call = Call { attrs: &self.attrs, inputs: &inputs, outputs: &mut outputs };
        match &self.own {
            Some(own) => (own.run)(&mut call, packed, partial),
            None => self.op.reference_f32(&mut call),
        }
    }
}

fn in_place(operands: &[Operand]) -> Vec<&TensorRef> {
    operands.iter().filter(|operand| operand.in_place).map(|operand| &operand.at).collect()
}
