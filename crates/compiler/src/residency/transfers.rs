//! The transfers of an entry's stays as its positions come up. Knows stays and their places; not why they are there.

use program::{Collective, EntryKind, EventId, Provenance, StreamId, TensorRef};
use tensor::DType;

use super::{Follows, Stay, Streams};

pub(crate) struct Transfers<'a> {
    stays: &'a [Stay],
    kind: EntryKind,
    fetched: Vec<Option<EventId>>,
    stored: Vec<Option<EventId>>,
    /// The last store that the computation has waited for.
    joined: Option<EventId>,
}

impl<'a> Transfers<'a> {
    pub fn new(stays: &'a [Stay], kind: EntryKind) -> Transfers<'a> {
        let none = vec![None; stays.len()];
        Transfers { stays, kind, fetched: none.clone(), stored: none, joined: None }
    }

    /// The stays for which something holds.
    fn stays(&self, of: impl Fn(&Stay) -> bool) -> Vec<usize> {
        (0..self.stays.len()).filter(|index| of(&self.stays[*index])).collect()
    }

    /// Queues the transfers that are due before a position: places are freed first, then taken again.
    pub fn before(&mut self, position: usize, from: &Provenance, streams: &mut Streams) {
        let freed = |stay: &Stay| stay.follows == Follows::Computation && stay.released + 1 == position;
        for stored in self.stays(freed).into_iter().filter_map(|index| self.stored[index]) {
            streams.wait(StreamId::Compute, stored, from);
            self.joined = self.joined.max(Some(stored));
        }
        self.fetch(position, from, streams);
    }

    /// Queues the transfers that arrive before a position.
    fn fetch(&mut self, position: usize, from: &Provenance, streams: &mut Streams) {
        let made = |stay: &Stay| stay.opens && self.kind == EntryKind::FirstMicroStep;
        for index in self.stays(|stay| stay.arrives == position && stay.fetched && !made(stay)) {
            let stay = &self.stays[index];
            if !stay.shards.is_empty() {
                self.fetched[index] = Some(gather(stay, from, streams));
                continue;
            }
            match stay.follows {
                Follows::Nothing => {}
                Follows::Computation => streams.follow(StreamId::ToDevice, from),
                Follows::Stay(before) => match self.stored[before] {
                    Some(stored) => streams.wait(StreamId::ToDevice, stored, from),
                    None => streams.follow(StreamId::ToDevice, from),
                },
            }
            for moved in &stay.moves {
                streams.transfer(StreamId::ToDevice, &moved.home, &moved.device, from);
            }
            self.fetched[index] = Some(streams.record(StreamId::ToDevice, from));
        }
        for fetched in self.stays(|stay| stay.begin == position).into_iter().filter_map(|index| self.fetched[index]) {
            streams.wait(StreamId::Compute, fetched, from);
        }
    }

    /// Returns the stays that are stored after a position, by number.
    pub fn due(&self, position: usize) -> Vec<(usize, &'a Stay)> {
        let stays: &'a [Stay] = self.stays;
        stays.iter().enumerate().filter(|(_, stay)| stay.stored == Some(position)).collect()
    }

    /// Stores what a stay wrote, after what was computed so far.
    pub fn store(&mut self, number: usize, from: &Provenance, streams: &mut Streams) {
        streams.follow(StreamId::ToHost, from);
        for moved in self.stays[number].moves.iter().filter(|moved| moved.written) {
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

/// Gathers a stay from the pieces of all ranks.
fn gather(stay: &Stay, from: &Provenance, streams: &mut Streams) -> EventId {
    streams.follow(StreamId::Exchange, from);
    let (home, device) = (&stay.moves[0].home, &stay.moves[0].device);
    let bytes = |arena, offset: usize, count: usize| TensorRef::dense(arena, offset, DType::U8, [count]);
    let ends = stay.shards[1..].iter().map(|next| next.start).chain([home.offset + home.bytes()]);
    for (shard, end) in stay.shards.iter().zip(ends) {
        let own = bytes(home.arena, shard.at, shard.piece);
        let to = bytes(device.arena, device.offset + shard.start - home.offset, end - shard.start);
        streams.collective(Collective::gather(own, to), from);
    }
    streams.record(StreamId::Exchange, from)
}
