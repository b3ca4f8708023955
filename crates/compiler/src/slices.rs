//! The update of what lies in host memory: slice by slice through a few places on the device, so that one slice is
//! fetched and another stored while a third is updated. Knows runs and where their tensors lie; not the update.

use program::{ArenaId, EventId, Lane, OptimizerState, Place, Provenance, TensorRef};

use crate::lower::arena;
use crate::memory::{ALIGNMENT_BYTES, ALIGNMENT_ELEMENTS, Run, align};
use crate::offload::{Offload, Stream};

/// Slices on the device at a time: one on its way in, one at work, one on its way out.
const SLOTS: usize = 3;

/// Slices begin on multiples of this many elements, so that every tensor of theirs begins on 16 bytes.
const GRANULE: usize = 16 * ALIGNMENT_ELEMENTS;

/// A part of a run as it is updated.
pub(crate) struct Slice {
    /// Its tensors where the update finds them.
    pub run: Run,
    /// Elements of the run before it; none for a run in one piece.
    pub start: Option<usize>,
    moved: Vec<Moved>,
}

/// A tensor that is fetched for the update, and stored behind it.
struct Moved {
    host: TensorRef,
    device: TensorRef,
}

/// All slices of an update in order.
pub(crate) struct Slices {
    pub all: Vec<Slice>,
    /// Bytes of the activation arena through which they pass, from its start.
    pub bytes: usize,
}

impl Slices {
    /// Cuts the runs as far as something of theirs lies in host memory and is not used there.
    pub fn new(runs: &[Run], offload: &Offload) -> Slices {
        let moves = |of: ArenaId| matches!(offload.place(of), Place::Host { .. }) && !offload.zero_copy;
        let mut all = Vec::new();
        let mut slot_bytes = 0;
        for run in runs {
            let bytes: usize = tensors(&mut run.clone()).iter().filter(|t| moves(t.arena)).map(|t| t.bytes()).sum();
            if bytes == 0 {
                all.push(Slice { run: run.clone(), start: None, moved: Vec::new() });
                continue;
            }
            let elements = run.gradient.len();
            let parts = bytes.div_ceil(offload.slice_bytes);
            let step = align(elements.div_ceil(parts), GRANULE);
            for start in (0..elements).step_by(step) {
                let run = part(run, start, step.min(elements - start));
                let mut slice = Slice { run, start: Some(start), moved: Vec::new() };
                slot_bytes = slot_bytes.max(slice.lay_out(moves));
                all.push(slice);
            }
        }
        for (index, slice) in all.iter_mut().filter(|slice| !slice.moved.is_empty()).enumerate() {
            slice.shift(index % SLOTS * slot_bytes);
        }
        let moving = all.iter().filter(|slice| !slice.moved.is_empty()).count();
        Slices { all, bytes: slot_bytes * moving.min(SLOTS) }
    }
}

impl Slice {
    /// Gives what moves a place behind one another; says how many bytes they take.
    fn lay_out(&mut self, moves: impl Fn(ArenaId) -> bool) -> usize {
        let mut end = 0;
        for tensor in tensors(&mut self.run).into_iter().filter(|t| moves(t.arena)) {
            let device = TensorRef::dense(arena::ACTIVATIONS, end, tensor.dtype, tensor.shape.clone());
            end = align(end + device.bytes(), ALIGNMENT_BYTES);
            let host = std::mem::replace(tensor, device.clone());
            self.moved.push(Moved { host, device });
        }
        end
    }

    fn shift(&mut self, by: usize) {
        let run = tensors(&mut self.run).into_iter();
        let moved = self.moved.iter_mut().map(|moved| &mut moved.device);
        run.filter(|tensor| tensor.arena == arena::ACTIVATIONS).chain(moved).for_each(|tensor| tensor.offset += by);
    }
}

/// The tensors of a run that may lie in host memory.
fn tensors(run: &mut Run) -> Vec<&mut TensorRef> {
    let states = match run.state.as_mut().expect("a run with an optimizer has states") {
        OptimizerState::Full { first, second } => vec![first, second],
        OptimizerState::Blockwise { first, second, first_scale, second_scale } => {
            vec![first, second, first_scale, second_scale]
        }
        OptimizerState::Matrices { first, rows } => vec![first, rows],
    };
    run.master.iter_mut().chain(states).collect()
}

/// The part of a run from an element on, which begins a block of the optimizer.
fn part(run: &Run, start: usize, elements: usize) -> Run {
    let cut = |of: &TensorRef, start: usize, elements: usize| {
        TensorRef::dense(of.arena, of.offset + start * of.dtype.size(), of.dtype, [elements])
    };
    let flat = |of: &TensorRef| cut(of, start, elements);
    let scale = |of: &TensorRef| cut(of, start / ALIGNMENT_ELEMENTS, elements.div_ceil(ALIGNMENT_ELEMENTS));
    let state = run.state.as_ref().map(|state| match state {
        OptimizerState::Full { first, second } => OptimizerState::Full { first: flat(first), second: flat(second) },
        OptimizerState::Blockwise { first, second, first_scale, second_scale } => OptimizerState::Blockwise {
            first: flat(first),
            second: flat(second),
            first_scale: scale(first_scale),
            second_scale: scale(second_scale),
        },
        OptimizerState::Matrices { .. } => panic!("matrices are updated as a whole"),
    });
    let mut part = run.clone();
    (part.weight, part.gradient, part.state) = (flat(&run.weight), flat(&run.gradient), state);
    part.master = run.master.as_ref().map(flat);
    part
}

/// The transfers of the slices, in the order of the slices.
pub(crate) struct Pipeline<'a> {
    moving: Vec<&'a Slice>,
    fetched: Vec<EventId>,
    /// When a slice is stored, and its place free again.
    freed: Vec<EventId>,
    from: Provenance,
}

impl<'a> Pipeline<'a> {
    /// Begins to fetch the first slices.
    pub fn begin(slices: &'a Slices, from: Provenance, stream: &mut Stream) -> Pipeline<'a> {
        let moving = slices.all.iter().filter(|slice| !slice.moved.is_empty()).collect();
        let mut pipeline = Pipeline { moving, fetched: Vec::new(), freed: Vec::new(), from };
        (0..SLOTS).for_each(|_| pipeline.fetch(stream));
        pipeline
    }

    /// Fetches the next slice, if there is one left.
    fn fetch(&mut self, stream: &mut Stream) {
        let index = self.fetched.len();
        let Some(slice) = self.moving.get(index) else { return };
        if let Some(before) = index.checked_sub(SLOTS) {
            stream.wait(Lane::ToDevice, self.freed[before], &self.from);
        }
        for moved in &slice.moved {
            stream.transfer(Lane::ToDevice, (moved.host.clone(), moved.device.clone()), &self.from);
        }
        self.fetched.push(stream.record(Lane::ToDevice, &self.from));
    }

    /// Before a slice is updated.
    pub fn arrive(&self, slice: &Slice, stream: &mut Stream) {
        if !slice.moved.is_empty() {
            stream.wait(Lane::Compute, self.fetched[self.freed.len()], &self.from);
        }
    }

    /// After a slice was updated.
    pub fn leave(&mut self, slice: &Slice, stream: &mut Stream) {
        if slice.moved.is_empty() {
            return;
        }
        let computed = stream.record(Lane::Compute, &self.from);
        stream.wait(Lane::ToHost, computed, &self.from);
        for moved in &slice.moved {
            stream.transfer(Lane::ToHost, (moved.device.clone(), moved.host.clone()), &self.from);
        }
        let stored = stream.record(Lane::ToHost, &self.from);
        self.freed.push(stored);
        self.fetch(stream);
    }

    /// Waits for what is still under way.
    pub fn end(self, stream: &mut Stream) {
        if let Some(stored) = self.freed.last() {
            stream.wait(Lane::Compute, *stored, &self.from);
        }
    }
}
