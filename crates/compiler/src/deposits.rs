//! The transfers of gradients that lie on the host, as the nodes of an entry come up: what they were is fetched before
//! they are added to, what they have become is stored behind that. Knows their visits; not what computes them.

use program::{Documents, EntryKind, EventId, Lane, Provenance, Step, TensorRef};
use tensor::{Attrs, DType};

use crate::lower::Lowering;
use crate::memory::{Buffers, ParameterPlan, Squares, Visit};
use crate::offload::Stream;

pub(crate) struct Deposits<'a> {
    visits: &'a [(Visit, usize)],
    kind: EntryKind,
    parameters: &'a ParameterPlan,
    stored: Vec<Option<EventId>>,
    fetched: Vec<Option<EventId>>,
}

impl<'a> Deposits<'a> {
    pub fn new(buffers: &'a Buffers, kind: EntryKind, parameters: &'a ParameterPlan) -> Deposits<'a> {
        let none = vec![None; buffers.visits.len()];
        Deposits { visits: &buffers.visits, kind, parameters, stored: none.clone(), fetched: none }
    }

    /// The visits for which something holds.
    fn visits(&self, of: impl Fn(&Visit) -> bool) -> Vec<usize> {
        (0..self.visits.len()).filter(|index| of(&self.visits[*index].0)).collect()
    }

    /// What is due before a node: places are freed first, then taken again.
    pub fn before(&mut self, node: usize, from: &Provenance, stream: &mut Stream) {
        for index in self.visits(|visit| visit.released + 1 == node) {
            let stored = self.stored[index].expect("gradients are stored before their place is free");
            stream.wait(Lane::Compute, stored, from);
        }
        let first = self.kind == EntryKind::FirstMicroStep;
        for index in self.visits(|visit| visit.fetched == node && !(first && visit.begins)) {
            let (visit, offset) = &self.visits[index];
            let [host, device] = visit.stations(*offset);
            stream.follow(Lane::ToDevice, from);
            stream.transfer(Lane::ToDevice, (host, device), from);
            self.fetched[index] = Some(stream.record(Lane::ToDevice, from));
        }
        for fetched in self.visits(|visit| visit.begin == node).into_iter().filter_map(|index| self.fetched[index]) {
            stream.wait(Lane::Compute, fetched, from);
        }
    }

    /// What is due behind a node.
    pub fn behind(&mut self, node: usize, from: &Provenance, lowering: &mut Lowering<'_>, stream: &mut Stream) {
        for index in self.visits(|visit| visit.last == node) {
            let (visit, offset) = &self.visits[index];
            let [host, device] = visit.stations(*offset);
            if visit.completes {
                self.sum_up(visit, &device, from, lowering, stream);
            }
            stream.follow(Lane::ToHost, from);
            stream.transfer(Lane::ToHost, (device, host), from);
            self.stored[index] = Some(stream.record(Lane::ToHost, from));
        }
    }

    /// Sums the squares of gradients while they are on the device: the norm needs no second look at them.
    fn sum_up(
        &self,
        visit: &Visit,
        device: &TensorRef,
        from: &Provenance,
        lowering: &mut Lowering<'_>,
        stream: &mut Stream,
    ) {
        let Squares { blocks, sums } = self.parameters.squares(visit.bytes.clone());
        if sums.is_empty() {
            return;
        }
        let elements = device.bytes() / DType::F32.size();
        let gradients = TensorRef::dense(device.arena, device.offset, DType::F32, [elements]);
        let inputs = vec![gradients, lowering.constant(&blocks)];
        let op = ops::find("block_squares").expect("the norm needs the squares of blocks");
        let (instruction, cost) = lowering.instruction(op, &Attrs::new(), inputs, vec![sums], None, Documents::Rows);
        let provenance = Provenance { op: op.name().to_owned(), ..from.clone() };
        stream.push(Step { instruction, provenance, cost });
    }

    /// Waits for what is still under way.
    pub fn end(self, from: &Provenance, stream: &mut Stream) {
        if let Some(last) = self.stored.iter().flatten().max() {
            stream.wait(Lane::Compute, *last, from);
        }
    }
}
