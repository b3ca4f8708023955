//! An update over flat tensors, executed on pieces of them: the elements of 16 bits that a piece widens, updates and rounds stay
//! in the cache, and no tensor is copied as a whole. The bits are those of a single call. Does not know what the update
//! computes.

use std::cell::RefCell;

use ops::optimizer::START;
use ops::{Call, Data, Input, Op, Output};
use program::{Launch, TensorRef};
use rayon::prelude::*;
use tensor::{Attrs, DType};

use crate::arena::{Memory, Span, overlap};
use crate::storage::Stored;

/// Elements of a piece, a multiple of those of a block of random numbers.
const PIECE: usize = 1 << 15;

thread_local! {
    /// The widened elements of each result of 16 bits.
    static WIDE: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// An update that is ready to run.
pub struct PiecewiseCall {
    op: &'static dyn Op,
    attrs: Attrs,
    /// Elements of the whole tensor before those of the call.
    start: u64,
    inputs: Vec<TensorRef>,
    outputs: Vec<TensorRef>,
    length: usize,
}

/// A piece of a result.
enum Part<'a> {
    Wide(&'a mut [f32]),
    Narrow(&'a mut [u16]),
}

impl PiecewiseCall {
    /// `None` where the operation cannot be divided, or all of its operands are used where they lie anyway.
    pub fn launch(launch: &Launch) -> Option<PiecewiseCall> {
        let op = ops::find(&launch.op).ok().filter(|op| op.divides())?;
        let (inputs, outputs) = (launch.inputs.clone(), launch.outputs.clone());
        let length = outputs.first()?.len();
        let is_native = |at: &TensorRef| matches!(at.dtype, DType::F32 | DType::I32);
        let is_read = |at: &TensorRef| at.is_dense() && is_native(at) && [1, length].contains(&at.len());
        let is_written =
            |at: &TensorRef| at.is_dense() && matches!(at.dtype, DType::F32 | DType::BF16) && at.len() == length;
        let apart = |index: usize| {
            let others = outputs[..index].iter().chain(&inputs);
            others.into_iter().all(|other| !overlap(&outputs[index], other))
        };
        let suits = inputs.iter().all(is_read)
            && outputs.iter().all(is_written)
            && outputs.iter().any(|at| at.dtype == DType::BF16)
            && (0..outputs.len()).all(apart);
        let start = launch.attrs.get(START).and_then(|start| start.as_u64()).unwrap_or(0);
        suits.then(|| PiecewiseCall { op, attrs: launch.attrs.clone(), start, inputs, outputs, length })
    }

    pub fn run(&self, memory: &mut Memory) {
        let lent: Vec<&TensorRef> = self.inputs.iter().collect();
        let written: Vec<&TensorRef> = self.outputs.iter().collect();
        let (spans, spans_mut) = memory.lend(&lent, &written);
        let mut pieces: Vec<Vec<Part<'_>>> = (0..self.length.div_ceil(PIECE)).map(|_| Vec::new()).collect();
        for (at, span) in self.outputs.iter().zip(spans_mut) {
            let parts: Vec<Part<'_>> = match at.dtype {
                DType::F32 => span.slice().chunks_mut(PIECE).map(Part::Wide).collect(),
                _ => span.slice().chunks_mut(PIECE).map(Part::Narrow).collect(),
            };
            pieces.iter_mut().zip(parts).for_each(|(piece, part)| piece.push(part));
        }
        pieces.into_par_iter().enumerate().for_each(|(index, parts)| {
            // Taken, not borrowed: the reference may run another piece while it waits.
            let mut wide = WIDE.take();
            self.piece(index * PIECE, &spans, parts, &mut wide);
            WIDE.set(wide);
        });
    }

    /// Runs the update on the elements from `first` on.
    fn piece(&self, first: usize, spans: &[Span<'_>], mut parts: Vec<Part<'_>>, wide: &mut Vec<Vec<f32>>) {
        let length = PIECE.min(self.length - first);
        let shape = [length];
        let inputs: Vec<Input<'_, f32>> = self
            .inputs
            .iter()
            .zip(spans)
            .map(|(at, span)| {
                let (shape, range) = match at.len() == self.length {
                    true => (&shape[..], first..first + length),
                    false => (&at.shape[..], 0..at.len()),
                };
                let data = match at.dtype {
                    DType::I32 => Data::Int(&span.slice()[range]),
                    _ => Data::Real(&span.slice()[range]),
                };
                Input { shape, data }
            })
            .collect();
        wide.resize_with(wide.len().max(parts.len()), Vec::new);
        let outputs = self.outputs.iter().zip(&mut parts).zip(wide.iter_mut());
        let mut outputs: Vec<Output<'_, f32>> = outputs
            .map(|((at, part), wide)| {
                let data = match part {
                    Part::Wide(values) => &mut **values,
                    Part::Narrow(stored) => {
                        wide.resize(wide.len().max(PIECE), 0.0);
                        u16::widen(stored, &mut wide[..length]);
                        &mut wide[..length]
                    }
                };
                Output::Real { shape: &shape, data, storage: at.dtype }
            })
            .collect();
        let attrs = self.attrs.clone().with(START, self.start + first as u64);
        self.op.reference_f32(&mut Call { attrs: &attrs, inputs: &inputs, outputs: &mut outputs });
        for (part, wide) in parts.iter_mut().zip(wide) {
            if let Part::Narrow(stored) = part {
                u16::round(&wide[..length], stored);
            }
        }
    }
}
