//! The places of tensors over time. Every tensor has a home, the memory of its arena. One whose home is not the
//! device's memory comes there for a *live range*: it arrives by a transfer before what touches
//! it, unless it is made there, and is stored by one after what writes it, if anything needs it later.
//!
//! Three steps, each made from the one before: homes from the options (`homes.rs`); live ranges from homes and from
//! when tensors are touched, by a clock (`live_ranges.rs`, micro-steps) or in a ring of slots (`ring.rs`, the update);
//! instructions from live ranges as they come up (`transfers.rs`), in streams ordered by events (`streams.rs`). In
//! between, live ranges get their places: `buffers.rs` packs them with the values that live on the device alone, a ring
//! has its own.
//!
//! What is cut over the ranks has a home, too, of which each rank has its pieces: weights arrive by gathers
//! (`gathers.rs`), gradients leave by exchanges (`gradient_buckets.rs`).
//!
//! Knows nodes by when they touch what; not what any of them computes.

mod addresses;
mod buffers;
mod clock;
mod gathers;
mod gradient_buckets;
mod homes;
mod live_ranges;
mod ring;
mod streams;
mod transfers;

use program::{Shard, TensorRef};

pub(crate) use buffers::{Outline, Usage};
pub(crate) use gradient_buckets::GradientBuckets;
pub(crate) use homes::Homes;
pub(crate) use live_ranges::waiting_bytes;
pub(crate) use ring::ring;
pub(crate) use streams::Streams;
pub(crate) use transfers::Transfers;

/// A live range on the device of a tensor, or of tensors that are moved together. Positions number what is done one
/// after the other: nodes of a graph, pieces of an update.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LiveRange {
    pub moves: Vec<Move>,
    /// The buffer of the placement in which values address it; none if they address its home.
    pub buffer: Option<usize>,
    /// The shards of the home that it is gathered from, on all ranks; empty if it is not cut.
    pub shards: Vec<Shard>,
    /// The position from which it has its place, and before which it is fetched.
    pub arrives: usize,
    /// True if it is fetched, unless it is made on the device.
    pub fetched: bool,
    /// It is the first of its tensor in the entry: the first micro-step of a step finds nothing to fetch.
    pub opens: bool,
    /// It is the last of its tensor in the entry.
    pub closes: bool,
    /// The first position and the last that touch it.
    pub begin: usize,
    pub last: usize,
    /// The position after which it is stored.
    pub stored: Option<usize>,
    /// The position after which its place is free.
    pub released: usize,
    pub follows: Follows,
}

/// Bytes in the home and on the device.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Move {
    pub home: TensorRef,
    pub device: TensorRef,
    /// True if it is stored when the live range is.
    pub written: bool,
}

/// The previous user of a live range's place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Follows {
    /// The computation, and it takes the place again afterwards.
    Computation,
    /// The live range of this number: the place is a slot of a ring, which only live ranges use.
    LiveRange(usize),
    /// Nothing that is in this entry.
    Nothing,
}

impl LiveRange {
    /// True if a tensor of the placement is part of what is here, by the buffer that it lies in if it lies in one.
    pub fn holds(&self, tensor: &TensorRef, buffer: Option<usize>) -> bool {
        self.buffer == buffer && (buffer.is_some() || self.moves.iter().any(|moved| moved.home.overlaps(tensor)))
    }

    /// Returns the place of such a tensor.
    pub fn place(&self, tensor: &TensorRef) -> TensorRef {
        let Move { home, device, .. } = &self.moves[0];
        let start = if self.buffer.is_some() { 0 } else { home.offset };
        TensorRef { arena: device.arena, offset: device.offset + tensor.offset - start, ..tensor.clone() }
    }

    pub fn bytes(&self) -> usize {
        self.moves.iter().map(|of| of.home.bytes()).sum()
    }
}
