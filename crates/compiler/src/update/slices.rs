//! The pieces of work of an update: runs of the flat arenas, or slices of those that are streamed from the host.
//! Separate from residency: this cuts work and numbers its random streams, `residency/ring.rs` says when the tensors of
//! a piece are on the device. Knows runs, their matrices and their tensors; not what an update computes.

use program::{ArenaId, OptimizerState, TensorRef};
use tensor::DType;

use super::exchange::Updated;
use super::matrices::{Batch, batches};
use crate::memory::{ALIGNMENT_ELEMENTS, Matrices, Run, align, arena};
use crate::options::Sharding;
use crate::residency::{Homes, LiveRange, ring};
use crate::rule::{Pace, Per, State};

/// Slices begin on multiples of this many elements, so that every tensor of theirs begins on 16 bytes.
const GRANULE: usize = 16 * ALIGNMENT_ELEMENTS;

/// One piece of work of an update, with tensors where the update finds them.
pub(crate) struct Slice {
    pub work: Work,
    /// Keeps its random numbers apart from those of the others.
    pub number: usize,
    /// The weights that each of several ranks has updated with this.
    pub updated: Option<Updated>,
}

/// The kinds of work of an update.
pub(crate) enum Work {
    /// A run that is updated element by element, or the part of it that begins at this element.
    Elements { run: Box<Run>, start: Option<usize> },
    /// A run of matrices that are all on the device.
    Matrices(Box<Run>),
    /// The momentum of one matrix, which is that of this index in its batch.
    Momentum { batch: usize, index: usize, gradient: TensorRef, first: TensorRef },
    /// The step of matrices of a batch from this index on, and the weights that are rounded from their copies.
    Step { batch: usize, from: usize, matrices: Matrices, pace: Pace, rounded: Option<TensorRef> },
    /// The weights of a run, rounded from their copies.
    Rounding { master: TensorRef, weight: TensorRef },
}

/// All slices of an update in order.
pub(crate) struct Slices {
    pub all: Vec<Slice>,
    /// Matrices that are made orthogonal together, of those that move.
    pub batches: Vec<Batch>,
    /// The live ranges of tensors with a home on the host: positions are the numbers of slices, from 1.
    pub live_ranges: Vec<LiveRange>,
    /// Bytes of the activation arena through which they pass, from its start.
    pub bytes: usize,
}

impl Slices {
    /// Cuts the runs as far as something of theirs is in host memory and is not used there.
    pub fn new(runs: &[Run], sharding: &Sharding, homes: &Homes) -> Slices {
        let moves = |of: ArenaId| homes.streams(of);
        let gathers = sharding.shards() > 1;
        // Stages draw from other streams, as other parameters do.
        let mut cut = Cut { all: Vec::new(), batches: Vec::new(), numbers: sharding.stage << 16 };
        for whole in runs {
            for (index, run) in whole.pieces(sharding).iter().enumerate() {
                let bytes = moving(run).filter(|of| moves(of.arena)).map(TensorRef::bytes).sum::<usize>();
                match (run.rule.takes_matrices(), bytes) {
                    (true, 0) => cut.whole_matrices(run),
                    (true, _) => cut.matrices(run, moves(arena::MASTERS)),
                    (false, 0) => cut.push(Work::Elements { run: Box::new(run.clone()), start: None }, 0),
                    (false, _) => cut.elements(run, bytes.div_ceil(homes.slice_bytes())),
                }
                if let Some(bucket) = whole.buckets.get(index).filter(|_| gathers && !whole.shards_weights(sharding)) {
                    let whole = bucket.whole(&whole.weight, sharding.shards());
                    let updated = Updated { own: run.weight.clone(), whole };
                    cut.all.last_mut().expect("a piece is updated").updated = Some(updated);
                }
            }
            // Elements of a run count on through its pieces and slices.
            cut.numbers += usize::from(!whole.rule.takes_matrices());
        }
        let Cut { mut all, batches, .. } = cut;
        let (live_ranges, bytes) = ring(all.iter_mut().map(|slice| slice.work.tensors()).collect(), homes);
        Slices { all, batches, live_ranges, bytes }
    }
}

/// Slices as they are cut, nothing of them moved yet.
struct Cut {
    all: Vec<Slice>,
    batches: Vec<Batch>,
    /// The numbers that are taken.
    numbers: usize,
}

impl Cut {
    /// Adds work that takes `numbers` numbers.
    fn push(&mut self, work: Work, numbers: usize) {
        self.all.push(Slice { work, number: self.numbers, updated: None });
        self.numbers += numbers;
    }

    fn elements(&mut self, run: &Run, parts: usize) {
        let elements = run.gradient.len();
        let step = align(elements.div_ceil(parts), GRANULE);
        for start in (0..elements).step_by(step) {
            let run = Box::new(part(run, start, step.min(elements - start)));
            self.push(Work::Elements { run, start: Some(start) }, 0);
        }
    }

    fn whole_matrices(&mut self, run: &Run) {
        let parts = batches(&run.matrices, run.weight.dtype).iter().map(|batch| batch.parts.len()).sum();
        self.push(Work::Matrices(Box::new(run.clone())), parts);
    }

    /// Momentum matrix by matrix until a batch is complete, then its steps: by matrices where their copies move, else
    /// as the run in one piece takes them.
    fn matrices(&mut self, run: &Run, copies_move: bool) {
        let first = &run.states[0].at;
        let flat = |of: &TensorRef, matrix: &TensorRef| {
            let start = (matrix.offset - first.offset) / DType::F32.size();
            let flat = TensorRef::dense(of.arena, of.offset + start * of.dtype.size(), of.dtype, [matrix.len()]);
            TensorRef { per_rank: of.per_rank, ..flat }
        };
        let rounded = run.master.as_ref().filter(|_| copies_move).map(|_| &run.weight);
        for of in batches(&run.matrices, run.weight.dtype) {
            let batch = self.batches.len();
            let matrices = of.parts.iter().flat_map(|part| (0..part.count()).map(|at| part.part(at, 1)));
            for (index, matrix) in matrices.enumerate() {
                let [gradient, first] = [&run.gradient, first].map(|of| flat(of, &matrix.first));
                self.push(Work::Momentum { batch, index, gradient, first }, 0);
            }
            let mut from = 0;
            for part in &of.parts {
                let step = if rounded.is_some() { 1 } else { part.count() };
                for at in (0..part.count()).step_by(step) {
                    let matrices = part.part(at, step);
                    let rounded = rounded.map(|weight| flat(weight, &matrices.first));
                    self.push(Work::Step { batch, from: from + at, matrices, pace: run.pace, rounded }, 0);
                }
                from += part.count();
                self.numbers += 1;
            }
            self.batches.push(of);
        }
        if let (Some(master), None) = (&run.master, rounded) {
            self.push(Work::Rounding { master: master.clone(), weight: run.weight.clone() }, 0);
        }
    }
}

impl Work {
    /// The tensors that may lie in host memory, and whether the update writes them.
    fn tensors(&mut self) -> Vec<(&mut TensorRef, bool)> {
        match self {
            Work::Elements { run, .. } => tensors(run),
            Work::Momentum { gradient, first, .. } => vec![(gradient, false), (first, true)],
            Work::Step { matrices, .. } => vec![(&mut matrices.weight, true), (&mut matrices.rows, true)],
            Work::Matrices(_) | Work::Rounding { .. } => Vec::new(),
        }
    }
}

/// The tensors of a run that may lie in host memory.
fn moving(run: &Run) -> impl Iterator<Item = &TensorRef> {
    let states = run.states.iter().map(|state| &state.at);
    std::iter::once(&run.gradient).chain(&run.master).chain(states)
}

/// [`moving`], and whether the update writes them.
fn tensors(run: &mut Run) -> Vec<(&mut TensorRef, bool)> {
    let states = run.states.iter_mut().map(|state| &mut state.at);
    let written = run.master.iter_mut().chain(states).map(|tensor| (tensor, true));
    std::iter::once((&mut run.gradient, false)).chain(written).collect()
}

/// The part of a run from an element on, which begins a block of the optimizer.
fn part(run: &Run, start: usize, elements: usize) -> Run {
    let cut = |of: &TensorRef, start: usize, elements: usize| {
        let cut = TensorRef::dense(of.arena, of.offset + start * of.dtype.size(), of.dtype, [elements]);
        TensorRef { per_rank: of.per_rank, ..cut }
    };
    let flat = |of: &TensorRef| cut(of, start, elements);
    let state = |(kind, of): (&State, &OptimizerState)| {
        let at = match kind.per {
            Per::Element => flat(&of.at),
            Per::Block => cut(&of.at, start / ALIGNMENT_ELEMENTS, elements.div_ceil(ALIGNMENT_ELEMENTS)),
            Per::Row => panic!("matrices are not cut by elements"),
        };
        OptimizerState { name: of.name, at }
    };
    let mut part = run.clone();
    part.states = run.rule.states().iter().zip(&run.states).map(state).collect();
    (part.weight, part.gradient) = (flat(&run.weight), flat(&run.gradient));
    part.master = run.master.as_ref().map(flat);
    part
}
