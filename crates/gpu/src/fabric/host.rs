//! Copies between GPUs without peer access: each copies down to page-locked memory and up from there, both at once
//! where there are several parts. Knows addresses and streams.
#![allow(unsafe_code, reason = "copies between arenas and page-locked memory, which both outlive them")]

use std::ops::Range;
use std::sync::Arc;

use program::{Movement, ProcessGroup};

use super::Lane;
use crate::driver::{Device, Event, PinnedBuffer, Stream};
use crate::error::Result;

/// Number of parts of the bytes that a rank publishes: while one is copied up, the next one is copied down.
const PARTS: usize = 8;

/// The alignment of parts in bytes.
const BOUNDARY: usize = 256;

/// The page-locked memory through which a rank publishes its bytes.
struct Window {
    memory: PinnedBuffer,
    /// The stream of copies to the host.
    stream: Stream,
    /// Marks that each part has come to the host.
    parts: Vec<Event>,
}

/// The page-locked memory between the ranks of this process.
pub(super) struct Staging {
    windows: Vec<Window>,
}

impl Staging {
    pub fn new(devices: &[Arc<Device>]) -> Result<Staging> {
        let parts = PARTS.max(devices.len());
        let window = |device: &Arc<Device>| {
            device.bind()?;
            let parts = (0..parts).map(|_| Event::without_time(device)).collect::<Result<_>>()?;
            Ok(Window { memory: PinnedBuffer::new(device, 0)?, stream: Stream::new(device)?, parts })
        };
        Ok(Staging { windows: devices.iter().map(window).collect::<Result<_>>()? })
    }

    /// Number of bytes that a rank can publish.
    pub fn bytes(&self) -> usize {
        self.windows[0].memory.bytes().len()
    }

    pub fn grow(&mut self, devices: &[Arc<Device>], bytes: usize) -> Result<()> {
        for (window, device) in self.windows.iter_mut().zip(devices) {
            device.bind()?;
            window.memory = PinnedBuffer::new(device, bytes)?;
        }
        Ok(())
    }

    /// Queues a collective after the marks that each rank has come.
    pub fn queue(&self, movement: Movement, group: ProcessGroup, lanes: &[Lane<'_>], come: &[Event]) -> Result<()> {
        for (rank, lane) in lanes.iter().enumerate() {
            lane.stream.device.bind()?;
            self.down(movement, group, rank, lane, &come[rank])?;
        }
        for (rank, lane) in lanes.iter().enumerate() {
            lane.stream.device.bind()?;
            self.up(movement, group, rank, lane)?;
        }
        Ok(())
    }

    fn down(&self, movement: Movement, group: ProcessGroup, rank: usize, lane: &Lane<'_>, come: &Event) -> Result<()> {
        let Window { memory, stream, parts } = &self.windows[rank];
        stream.wait(come)?;
        let cuts = parts_of(movement, group, lane.bytes);
        // The rank that reads from this one first is served first.
        let order: Vec<usize> = match movement {
            Movement::AllGather => (0..cuts.len()).collect(),
            Movement::AllToAll | Movement::AllToAllOthers => {
                let (own, count) = (group.number(rank), group.size);
                (1..count).map(|far| (own + count - far) % count).collect()
            }
        };
        for part in order {
            let Range { start, end } = cuts[part].clone();
            // SAFETY: the rank's tensor is in an arena, the window is as large as the published bytes.
            unsafe { stream.copy_to_host(memory.slice(start, end - start), lane.from + start as u64, end - start)? };
            parts[part].record(stream)?;
        }
        // Later work of this rank may overwrite the bytes that it sends.
        lane.stream.wait(&parts[last_of(movement, group, rank, cuts.len())])
    }

    fn up(&self, movement: Movement, group: ProcessGroup, rank: usize, lane: &Lane<'_>) -> Result<()> {
        let own = group.number(rank);
        let peers = || (1..group.size).map(|far| (own + far) % group.size);
        let fetch = |peer: usize, part: usize, to: u64, range: Range<usize>| {
            let window = &self.windows[group.member(rank, peer)];
            lane.stream.wait(&window.parts[part])?;
            let bytes = range.len();
            // SAFETY: as in `down`; the part has come down.
            unsafe { lane.stream.copy_to_device(to, window.memory.slice(range.start, bytes), bytes) }
        };
        let cuts = parts_of(movement, group, lane.bytes);
        match movement {
            Movement::AllGather => {
                lane.stream.copy_between(lane.to + (own * lane.bytes) as u64, lane.from, lane.bytes)?;
                for (part, cut) in cuts.into_iter().enumerate() {
                    for peer in peers() {
                        let to = lane.to + (peer * lane.bytes + cut.start) as u64;
                        fetch(peer, part, to, cut.clone())?;
                    }
                }
                Ok(())
            }
            Movement::AllToAll | Movement::AllToAllOthers => {
                let piece = lane.bytes / group.size;
                let place = (own * piece) as u64;
                if movement == Movement::AllToAll {
                    lane.stream.copy_between(lane.to + place, lane.from + place, piece)?;
                }
                peers().try_for_each(|peer| fetch(peer, own, lane.to + (peer * piece) as u64, cuts[own].clone()))
            }
        }
    }
}

/// Returns the part that is copied down last.
fn last_of(movement: Movement, group: ProcessGroup, rank: usize, parts: usize) -> usize {
    match movement {
        Movement::AllGather => parts - 1,
        Movement::AllToAll | Movement::AllToAllOthers => (group.number(rank) + 1) % group.size,
    }
}

/// Returns the parts of the bytes that a rank publishes: in an all-to-all the pieces for each rank of its group.
fn parts_of(movement: Movement, group: ProcessGroup, bytes: usize) -> Vec<Range<usize>> {
    let piece = match movement {
        Movement::AllGather => bytes.div_ceil(PARTS).next_multiple_of(BOUNDARY),
        Movement::AllToAll | Movement::AllToAllOthers => bytes / group.size,
    };
    let count = match movement {
        Movement::AllGather => bytes.div_ceil(piece.max(1)).max(1),
        Movement::AllToAll | Movement::AllToAllOthers => group.size,
    };
    (0..count).map(|part| part * piece..((part + 1) * piece).min(bytes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_what_is_shown() {
        for (movement, size, bytes) in [
            (Movement::AllGather, 2, 1 << 20),
            (Movement::AllGather, 3, 1000),
            (Movement::AllGather, 3, 4),
            (Movement::AllGather, 2, 0),
            (Movement::AllToAll, 3, 768),
            (Movement::AllToAll, 9, 36),
        ] {
            let parts = parts_of(movement, ProcessGroup::row(size), bytes);
            assert_eq!((parts[0].start, parts.last().unwrap().end), (0, bytes));
            assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start), "{parts:?}");
            assert!(parts.len() <= PARTS.max(size));
        }
    }

    #[test]
    fn the_last_part_is_that_for_the_next_rank() {
        let apart = |size: usize, stride: usize| ProcessGroup { size, stride };
        for (rank, group) in [(0, apart(2, 1)), (1, apart(2, 1)), (4, apart(3, 1)), (8, apart(9, 1)), (4, apart(2, 3))]
        {
            let (own, count) = (group.number(rank), group.size);
            let order: Vec<usize> = (1..count).map(|far| (own + count - far) % count).collect();
            assert_eq!(*order.last().unwrap(), last_of(Movement::AllToAll, group, rank, count));
        }
    }
}
