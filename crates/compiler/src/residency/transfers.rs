//! The transfers of an entry's live ranges as its positions come up. Knows live ranges and their places; not why they
//! are there.

use program::{Collective, EntryKind, EventId, Provenance, StreamId, TensorRef};
use tensor::DType;

use super::{Follows, LiveRange, Streams};

pub(crate) struct Transfers<'a> {
    live_ranges: &'a [LiveRange],
    kind: EntryKind,
    fetched: Vec<Option<EventId>>,
    stored: Vec<Option<EventId>>,
    /// The last store that the computation has waited for.
    joined: Option<EventId>,
}

impl<'a> Transfers<'a> {
    pub fn new(live_ranges: &'a [LiveRange], kind: EntryKind) -> Transfers<'a> {
        let none = vec![None; live_ranges.len()];
        Transfers { live_ranges, kind, fetched: none.clone(), stored: none, joined: None }
    }

    /// The live ranges for which something holds.
    fn live_ranges(&self, of: impl Fn(&LiveRange) -> bool) -> Vec<usize> {
        (0..self.live_ranges.len()).filter(|index| of(&self.live_ranges[*index])).collect()
    }

    /// Queues the transfers that are due before a position: places are freed first, then taken again.
    pub fn before(&mut self, position: usize, from: &Provenance, streams: &mut Streams) {
        let freed =
            |live_range: &LiveRange| live_range.follows == Follows::Computation && live_range.released + 1 == position;
        for stored in self.live_ranges(freed).into_iter().filter_map(|index| self.stored[index]) {
            streams.wait(StreamId::Compute, stored, from);
            self.joined = self.joined.max(Some(stored));
        }
        self.fetch(position, from, streams);
    }

    /// Queues the transfers that arrive before a position.
    fn fetch(&mut self, position: usize, from: &Provenance, streams: &mut Streams) {
        let made = |live_range: &LiveRange| live_range.opens && self.kind == EntryKind::FirstMicroStep;
        for index in
            self.live_ranges(|live_range| live_range.arrives == position && live_range.fetched && !made(live_range))
        {
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
        for fetched in self
            .live_ranges(|live_range| live_range.begin == position)
            .into_iter()
            .filter_map(|index| self.fetched[index])
        {
            streams.wait(StreamId::Compute, fetched, from);
        }
    }

    /// Returns the live ranges that are stored after a position, by number.
    pub fn due(&self, position: usize) -> Vec<(usize, &'a LiveRange)> {
        let live_ranges: &'a [LiveRange] = self.live_ranges;
        live_ranges.iter().enumerate().filter(|(_, live_range)| live_range.stored == Some(position)).collect()
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
