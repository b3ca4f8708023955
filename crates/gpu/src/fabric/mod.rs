//! The transports of bytes from one rank to another: copies between GPUs with peer access, copies through host memory
//! without it, NCCL to other processes and where that is requested. None of them adds, so results have the same bits by
//! all. Knows ranks, addresses and streams; not what the bytes are.

mod host;
#[cfg(test)]
mod tests;

use std::ops::Range;

use program::{Instruction, Movement, ProcessGroup, Program};

use crate::driver::{Device, Event, Stream};
use crate::error::Result;
use crate::nccl::{Communicators, Ending};
use host::Staging;
use std::sync::Arc;

/// A transport of bytes between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    /// A GPU copies from the memory of another.
    Peers,
    /// A GPU copies to host memory, another one from there.
    Host,
    Nccl,
}

/// The requested transports: copies, or not; `None` where it was left open.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ways {
    pub gather: Option<bool>,
    pub exchange: Option<bool>,
    /// True to treat no two GPUs as peers.
    pub without_peers: bool,
}

/// Returns the transports of all-gathers and all-to-alls. `peers`: true if all GPUs have peer access to each other.
pub(crate) fn transports(ways: Ways, processes: usize, peers: bool) -> [Transport; 2] {
    [ways.gather, ways.exchange].map(|copies| match copies {
        _ if processes > 1 => Transport::Nccl,
        Some(false) => Transport::Nccl,
        _ if peers && !ways.without_peers => Transport::Peers,
        _ => Transport::Host,
    })
}

/// Returns true if every GPU has peer access to every other one and it is not ruled out.
pub(crate) fn all_reach(devices: &[Arc<Device>], ways: Ways) -> Result<bool> {
    let mut all = !ways.without_peers;
    for (own, device) in devices.iter().enumerate() {
        for (_, other) in devices.iter().enumerate().filter(|(other, _)| *other != own) {
            all = all && device.reach(other)?;
        }
    }
    Ok(all)
}

/// A rank in a collective: the addresses of its input and result, and the bytes of its input.
#[derive(Clone, Copy)]
pub(crate) struct Lane<'a> {
    pub stream: &'a Stream,
    pub from: u64,
    pub to: u64,
    pub bytes: usize,
}

/// The transports between the ranks of this process and of others.
pub(crate) struct Fabric {
    here: Range<usize>,
    ranks: usize,
    transports: [Transport; 2],
    devices: Vec<Arc<Device>>,
    /// Marks of the ranks in a collective: that a rank has come, that it has its pieces.
    come: Vec<Event>,
    done: Vec<Event>,
    staging: Option<Staging>,
    /// The NCCL communicators, where a transport uses them.
    nccl: Option<Communicators>,
}

impl Fabric {
    /// Makes the fabric of the ranks `here` of `ranks`, with a device each.
    pub fn new(
        here: Range<usize>,
        ranks: usize,
        devices: Vec<Arc<Device>>,
        transports: [Transport; 2],
        nccl: Option<Communicators>,
    ) -> Result<Fabric> {
        let marks = || {
            let mark = |device: &Arc<Device>| {
                device.bind()?;
                Event::without_time(device)
            };
            devices.iter().map(mark).collect::<Result<Vec<_>>>()
        };
        let (come, done) = (marks()?, marks()?);
        assert_eq!(nccl.is_some(), transports.contains(&Transport::Nccl), "NCCL is there where it is used");
        let mut fabric = Fabric { here, ranks, transports, devices, come, done, staging: None, nccl };
        if fabric.transports.contains(&Transport::Host) {
            fabric.staging = Some(Staging::new(&fabric.devices)?);
        }
        Ok(fabric)
    }

    fn transport(&self, movement: Movement) -> Transport {
        let [gather, exchange] = self.transports;
        match movement {
            Movement::AllGather => gather,
            Movement::AllToAll | Movement::AllToAllOthers => exchange,
        }
    }

    /// Returns the bytes that host memory between GPUs needs for a program, if it has fewer.
    pub fn missing(&self, program: &Program) -> Option<usize> {
        let steps = program.entries.iter().flat_map(|entry| &entry.steps);
        let missing = steps.filter_map(|step| match &step.instruction {
            Instruction::Collective(of) if self.must_grow(of.movement, of.from.bytes()) => Some(of.from.bytes()),
            _ => None,
        });
        missing.max()
    }

    /// True if host memory between GPUs is too small for a collective with this number of bytes from each rank.
    fn must_grow(&self, movement: Movement, bytes: usize) -> bool {
        self.transport(movement) == Transport::Host
            && self.staging.as_ref().is_some_and(|staging| staging.bytes() < bytes)
    }

    /// Enlarges the memory. Graphs that were captured before have the old addresses.
    pub fn grow(&mut self, bytes: usize) -> Result<()> {
        let staging = self.staging.as_mut().expect("only what goes through host memory must grow");
        staging.grow(&self.devices, bytes)
    }

    /// Returns an error that came up in the background.
    pub fn check(&self) -> Result<()> {
        self.nccl.as_ref().map_or(Ok(()), Communicators::check)
    }

    /// Queues a collective in groups of ranks, of which `lanes` are those of this process. Work that a rank queues
    /// after it on its stream has all bytes, and may overwrite the rank's input.
    pub fn queue(&self, movement: Movement, group: ProcessGroup, lanes: &[Lane<'_>]) -> Result<()> {
        match self.transport(movement) {
            Transport::Nccl => self.by_nccl(movement, group, lanes),
            Transport::Peers => self.met(lanes, || self.between_peers(movement, group, lanes)),
            Transport::Host => self.met(lanes, || {
                let staging = self.staging.as_ref().expect("it is there where it is used");
                staging.queue(movement, group, lanes, &self.come)
            }),
        }
    }

    /// Queues work after all ranks have come, and lets all go on when it has ended.
    fn met(&self, lanes: &[Lane<'_>], queue: impl FnOnce() -> Result<()>) -> Result<()> {
        for (lane, come) in lanes.iter().zip(&self.come) {
            lane.stream.device.bind()?;
            come.record(lane.stream)?;
        }
        queue()?;
        for (lane, done) in lanes.iter().zip(&self.done) {
            lane.stream.device.bind()?;
            done.record(lane.stream)?;
        }
        for lane in lanes {
            lane.stream.device.bind()?;
            self.done.iter().try_for_each(|done| lane.stream.wait(done))?;
        }
        Ok(())
    }

    /// Each rank copies its pieces from the others when all have come.
    fn between_peers(&self, movement: Movement, group: ProcessGroup, lanes: &[Lane<'_>]) -> Result<()> {
        for (rank, lane) in lanes.iter().enumerate() {
            lane.stream.device.bind()?;
            self.come.iter().try_for_each(|come| lane.stream.wait(come))?;
            // Every rank begins with another peer, so that all links are in use.
            let own = group.number(rank);
            let first = usize::from(movement == Movement::AllToAllOthers);
            for peer in (first..group.size).map(|far| (own + far) % group.size) {
                let from = lanes[group.member(rank, peer)].from;
                let (from, piece) = match movement {
                    Movement::AllGather => (from, lane.bytes),
                    Movement::AllToAll | Movement::AllToAllOthers => {
                        let piece = lane.bytes / group.size;
                        (from + (own * piece) as u64, piece)
                    }
                };
                lane.stream.copy_between(lane.to + (peer * piece) as u64, from, piece)?;
            }
        }
        Ok(())
    }

    fn by_nccl(&self, movement: Movement, group: ProcessGroup, lanes: &[Lane<'_>]) -> Result<()> {
        let nccl = self.nccl.as_ref().expect("it is there where it is used");
        if lanes[0].bytes == 0 {
            return Ok(());
        }
        if movement == Movement::AllGather && group.size == self.ranks {
            return nccl.grouped(|| {
                let mut of = lanes.iter().enumerate();
                of.try_for_each(|(own, lane)| nccl.gather(own, lane.stream, lane.from, lane.to, lane.bytes))
            });
        }
        let piece = |lane: &Lane<'_>| match movement {
            Movement::AllGather => lane.bytes,
            Movement::AllToAll | Movement::AllToAllOthers => lane.bytes / group.size,
        };
        // The address of a rank's bytes for another one.
        let given = |lane: &Lane<'_>, to: usize| match movement {
            Movement::AllGather => lane.from,
            Movement::AllToAll | Movement::AllToAllOthers => lane.from + (to * piece(lane)) as u64,
        };
        let moves_own = movement != Movement::AllToAllOthers;
        for (rank, lane) in self.here.clone().zip(lanes).filter(|_| moves_own) {
            lane.stream.device.bind()?;
            let own = group.number(rank);
            lane.stream.copy_between(lane.to + (own * piece(lane)) as u64, given(lane, own), piece(lane))?;
        }
        nccl.grouped(|| {
            for (local, (rank, lane)) in self.here.clone().zip(lanes).enumerate() {
                let own = group.number(rank);
                for peer in (1..group.size).map(|far| (own + far) % group.size) {
                    let other = group.member(rank, peer);
                    nccl.send(local, lane.stream, given(lane, peer), piece(lane), other)?;
                    let to = lane.to + (peer * piece(lane)) as u64;
                    nccl.receive(local, lane.stream, to, piece(lane), other)?;
                }
            }
            Ok(())
        })
    }

    /// Begins to end the communicators, if there are any: in order if all queued work has run.
    pub fn end(&mut self, in_order: bool) -> Option<Ending> {
        self.nccl.take().map(|nccl| nccl.end(in_order))
    }
}
