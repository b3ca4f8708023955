//! Finds the first non-finite value: runs a micro-step again and checks every result.
//!
//! Slow, and used only after a run has diverged. Knows tensors and where instructions come from; no operation.

use data::Batch;
use program::{Provenance, TensorRef};
use tensor::{DType, HostTensor};

use crate::engine::Engine;
use crate::engine::weights;
use crate::error::Result;

/// The first value of the batches' micro-steps that is not finite, in words; none when all are. Gradients and sums
/// are overwritten, weights and optimizer states are not.
pub fn find(
    engine: &mut Engine,
    batches: &[Batch],
    one_per_row: bool,
    first_micro_step: u64,
) -> Result<Option<String>> {
    let program = engine.program().clone();
    for slot in &program.layout.parameters {
        if let Some(what) = first_bad(&slot.weight, &weights::read_stored(engine, slot)?) {
            return Ok(Some(format!("the weights of `{}` already hold {what}", slot.name)));
        }
    }
    let (ranks, replicas) = (engine.ranks(), engine.replicas());
    for (index, round) in batches.chunks(replicas).enumerate() {
        let variant = engine.prepare(engine.variant_of(round, one_per_row))?;
        engine.number_micro_steps(first_micro_step + (index * replicas) as u64)?;
        let entry = engine.micro_step(index == 0, (index + 1) * replicas == batches.len(), variant);
        engine.load_batches(entry, round)?;
        let program = engine.program().clone();
        let passes = program.passes(entry).into_iter();
        let steps = passes.flat_map(|pass| program.entries[pass].steps.iter().enumerate().map(move |of| (pass, of)));
        for (pass, (number, step)) in steps {
            engine.session().run_instruction(pass, number)?;
            let places = step.instruction.writes().into_iter().flat_map(|at| (0..ranks).map(move |rank| (rank, at)));
            for (rank, at) in places {
                if let Some(what) = look(engine, rank, at)? {
                    let number = index * replicas + rank * replicas / ranks;
                    let of = if batches.len() > 1 { format!(" of micro-batch {number}") } else { String::new() };
                    return Ok(Some(format!("{what} first came out of {}{of}", place(&step.provenance))));
                }
            }
        }
    }
    Ok(None)
}

/// `rmsnorm (forward, layer 3, llama.py:41)`
fn place(from: &Provenance) -> String {
    let layer = from.layer.as_ref().map(|layer| format!("layer {layer}"));
    let parts = [Some(from.phase.name().to_owned()), layer, from.at.clone()].into_iter().flatten();
    let parts: Vec<String> = parts.filter(|part| !part.is_empty()).collect();
    format!("{} ({})", from.op, parts.join(", "))
}

/// The first value of a rank's tensor that is not finite, in words.
fn look(engine: &mut Engine, rank: usize, at: &TensorRef) -> Result<Option<String>> {
    if !at.dtype.is_float() || at.is_empty() {
        return Ok(None);
    }
    // The elements are apart: all that is between them is read, too, and passed over.
    let span = TensorRef::dense(at.arena, at.offset, at.dtype, [at.span() / at.dtype.size()]);
    let mut values = HostTensor::zeros(span.dtype, span.shape.clone());
    engine.session().read_rank(rank, &span, &mut values.bytes)?;
    Ok(first_bad(at, &values))
}

/// The first value that is not finite in a tensor whose span was read.
fn first_bad(at: &TensorRef, values: &HostTensor) -> Option<String> {
    if !at.dtype.is_float() {
        return None;
    }
    let values = if values.dtype == DType::F32 { values.to_f32() } else { values.cast(DType::F32).to_f32() };
    let bad = Elements::of(at).map(|place| values[place]).enumerate().find(|(_, value)| !value.is_finite());
    bad.map(|(index, value)| format!("{value} (element {index} of {:?})", at.shape))
}

/// Places of a tensor's elements in row-major order, from its first.
struct Elements<'a> {
    at: &'a TensorRef,
    index: usize,
}

impl<'a> Elements<'a> {
    fn of(at: &'a TensorRef) -> Elements<'a> {
        Elements { at, index: 0 }
    }
}

impl Iterator for Elements<'_> {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        if self.index == self.at.len() {
            return None;
        }
        let mut rest = self.index;
        self.index += 1;
        let axes = self.at.shape.iter().zip(&self.at.strides).rev();
        Some(axes.fold(0, |place, (n, stride)| {
            let along = rest % n;
            rest /= n;
            place + along * stride
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use program::ArenaId;

    #[test]
    fn elements_are_visited_in_order() {
        let whole = TensorRef::dense(ArenaId(0), 0, DType::F32, [2, 4]);
        let part = TensorRef { shape: vec![2, 2], ..whole };
        assert_eq!(Elements::of(&part).collect::<Vec<_>>(), [0, 1, 4, 5]);
    }
}
