//! The transfers of an entry's live ranges as its positions come up. Knows live ranges and their places; not why they
//! are there.

use std::collections::HashMap;

use program::{Collective, EntryKind, EventId, Provenance, StreamId, TensorRef};
use tensor::DType;

use super::{Follows, LiveRange, Streams};

pub(crate) struct Transfers<'a> {
    live_ranges: &'a [LiveRange],
    /// The live ranges by the position before which they give up their places, and by those at which they are fetched, first
    /// touched and stored.
    freed: At,
    arriving: At,
    beginning: At,
    ending: At,
    fetched: Vec<Option<EventId>>,
    stored: Vec<Option<EventId>>,
    /// The last store that the computation has waited for.
    joined: Option<EventId>,
}

/// Numbers of live ranges by a position, in their order.
#[derive(Default)]
struct At(HashMap<usize, Vec<usize>>);

impl At {
    fn new(live_ranges: &[LiveRange], position: impl Fn(&LiveRange) -> Option<usize>) -> At {
        let mut at = At::default();
        for (number, live_range) in live_ranges.iter().enumerate() {
            if let Some(position) = position(live_range) {
                at.0.entry(position).or_default().push(number);
            }
        }
        at
    }

    fn get(&self, position: usize) -> &[usize] {
        self.0.get(&position).map_or(&[], Vec::as_slice)
    }
}

impl<'a> Transfers<'a> {
    pub fn new(live_ranges: &'a [LiveRange], kind: EntryKind) -> Transfers<'a> {
        let none = vec![None; live_ranges.len()];
        let made = |of: &LiveRange| of.opens && kind == EntryKind::FirstMicroStep;
        Transfers {
            live_ranges,
            freed: At::new(live_ranges, |of| {
                (of.follows == Follows::Computation).then(|| of.released.checked_add(1)).flatten()
            }),
            arriving: At::new(live_ranges, |of| (of.fetched && !made(of)).then_some(of.arrives)),
            beginning: At::new(live_ranges, |of| Some(of.begin)),
            ending: At::new(live_ranges, |of| of.stored),
            fetched: none.clone(),
            stored: none,
            joined: None,
        }
    }

    /// Queues the transfers that are due before a position: places are freed first, then taken again.
    pub fn before(&mut self, position: usize, from: &Provenance, streams: &mut Streams) {
        for stored in self.freed.get(position).iter().filter_map(|number| self.stored[*number]) {
            streams.wait(StreamId::Compute, stored, from);
            self.joined = self.joined.max(Some(stored));
        }
        self.fetch(position, from, streams);
    }

    /// Queues the transfers that arrive before a position.
    fn fetch(&mut self, position: usize, from: &Provenance, streams: &mut Streams) {
        for index in self.arriving.get(position).iter().copied() {
            let live_range = &self.live_ranges[index];
            if !live_range.shards.is_empty() {
                self.fetched[index] = Some(gather(live_range, from, streams));
                continue;
            }
            match live_range.follows {
                Follows::Nothing => {}
                Follows::Computation => streams.follow(StreamId::ToDevice, from),
                Follows::LiveRange(before) => match self.stored[before] {
                    Some(stored) => streams.wait(StreamId::ToDevice, stored, from),
                    None => streams.follow(StreamId::ToDevice, from),
                },
            }
            for moved in &live_range.moves {
                streams.transfer(StreamId::ToDevice, &moved.home, &moved.device, from);
            }
            self.fetched[index] = Some(streams.record(StreamId::ToDevice, from));
        }
        for fetched in self.beginning.get(position).iter().filter_map(|number| self.fetched[*number]) {
            streams.wait(StreamId::Compute, fetched, from);
        }
    }

    /// Returns the live ranges that are stored after a position, by number.
    pub fn due(&self, position: usize) -> Vec<(usize, &'a LiveRange)> {
        let of = |number: &usize| (*number, &self.live_ranges[*number]);
        self.ending.get(position).iter().map(of).collect()
    }

    /// Stores what a live range wrote, after what was computed so far.
    pub fn store(&mut self, number: usize, from: &Provenance, streams: &mut Streams) {
        streams.follow(StreamId::ToHost, from);
        for moved in self.live_ranges[number].moves.iter().filter(|moved| moved.written) {
            streams.transfer(StreamId::ToHost, &moved.device, &moved.home, from);
        }
        self.stored[number] = Some(streams.record(StreamId::ToHost, from));
    }

    /// Waits for what is still in flight after the last position.
    pub fn end(mut self, position: usize, from: &Provenance, streams: &mut Streams) {
        self.fetch(position, from, streams);
        if let Some(last) = self.stored.iter().flatten().max().filter(|last| Some(**last) > self.joined) {
            streams.wait(StreamId::Compute, *last, from);
        }
    }
}

/// Gathers a live range from the pieces of all ranks.
fn gather(live_range: &LiveRange, from: &Provenance, streams: &mut Streams) -> EventId {
    streams.follow(StreamId::Exchange, from);
    let (home, device) = (&live_range.moves[0].home, &live_range.moves[0].device);
    let bytes = |arena, offset: usize, count: usize| TensorRef::dense(arena, offset, DType::U8, [count]);
    let ends = live_range.shards[1..].iter().map(|next| next.start).chain([home.offset + home.bytes()]);
    for (shard, end) in live_range.shards.iter().zip(ends) {
        let own = bytes(home.arena, shard.at, shard.piece);
        let to = bytes(device.arena, device.offset + shard.start - home.offset, end - shard.start);
        streams.collective(Collective::gather(own, to), from);
    }
    streams.record(StreamId::Exchange, from)
}
