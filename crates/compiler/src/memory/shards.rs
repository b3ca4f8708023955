//! The partition of the flat arenas over the ranks that share them, all or those of a node: a run consists of buckets,
//! which are exchanged at once, and each rank has one piece of every bucket. Elements are cut anywhere between blocks,
//! matrices as wholes: then all pieces of a bucket have the same number of units (matrices, or groups of them), filled
//! up with units of zeros.
//!
//! States lie in the whole as a single device lays them out, so that a checkpoint knows no ranks; each rank keeps its
//! pieces contiguous.

use std::ops::Range;

use ops::optimizer::block_count;
use program::{ArenaId, Shard, TensorRef};
use tensor::DType;

use super::{ALIGNMENT_ELEMENTS, Matrices, align, arena};
use crate::options::Sharding;
use crate::rule::Per;

/// The share of a bucket's bytes at which a group is closed: small enough that few are alive at once where groups come
/// and go, large enough for the link.
const OF_BUCKET: usize = 2;

/// Pieces begin on multiples of this many elements, so that the states of blocks begin on 16 bytes.
pub(super) const GRANULE: usize = 16 * ALIGNMENT_ELEMENTS;

/// A stretch of a flat arena of whole tensors, which ranks exchange or gather together. All in bytes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Group {
    pub arena: ArenaId,
    pub bytes: Range<usize>,
    /// The shards that it is cut into.
    pub shards: Vec<Shard>,
    /// True for gradients whose squares count in the norm.
    pub squared: bool,
}

impl Group {
    /// Blocks of squares of a piece.
    pub fn blocks(&self, shard: &Shard) -> usize {
        if self.squared { block_count(shard.piece / DType::F32.size()) } else { 0 }
    }
}

/// A stretch of a run of which every rank has a piece.
#[derive(Clone, Debug)]
pub(crate) struct Bucket {
    /// Its first element in the run, and the elements of a piece.
    pub start: usize,
    pub piece: usize,
    /// Elements of parameters in the run before it: what random numbers are counted by.
    pub counted: usize,
    /// The number of its group in the run.
    pub group: usize,
    /// Rows of matrices before it, and those of a piece.
    pub rows: (usize, usize),
    /// The matrices of the first rank's piece, with its states.
    pub matrices: Vec<Matrices>,
}

/// The tensors of a run since its last bucket, before they are cut.
#[derive(Clone, Debug, Default)]
pub(super) struct Stretch {
    /// Elements, and rows of matrices.
    pub elements: usize,
    pub rows: usize,
    /// Equal parts of it that are not cut; 0 where elements are.
    pub units: usize,
}

impl Stretch {
    /// True if it is large enough for a group, and divides into whole buckets where tensors are not cut.
    pub fn is_group(&self, of: &Sharding) -> bool {
        self.elements * DType::F32.size() >= group_bytes(of) && self.units.is_multiple_of(of.shards())
    }

    /// Cuts the stretch that begins at an element and a row of its run.
    pub fn cut(&self, start: usize, row: usize, of: &Sharding) -> Vec<Bucket> {
        let shards = of.shards();
        let most = of.bucket() / DType::F32.size() / shards;
        let mut buckets = Vec::new();
        let mut push = |start: usize, piece: usize, rows: (usize, usize)| {
            buckets.push(Bucket { start, piece, counted: start, group: 0, rows, matrices: Vec::new() });
        };
        if self.units == 0 {
            let all = align(self.elements, shards * ALIGNMENT_ELEMENTS) / shards;
            let most = (most / GRANULE * GRANULE).max(GRANULE);
            let each = align(all.div_ceil(all.div_ceil(most).max(1)), GRANULE);
            for done in (0..all).step_by(each.max(1)) {
                push(start + done * shards, each.min(all - done), (0, 0));
            }
            return buckets;
        }
        let (elements, rows) = (self.elements / self.units, self.rows / self.units);
        let most = (most / elements).max(1);
        let (mut begun, mut left) = (0, self.units);
        while left > 0 {
            let each = left.div_ceil(shards).min(most);
            push(start + begun * elements, each * elements, (row + begun * rows, each * rows));
            (begun, left) = (begun + each * shards, left.saturating_sub(each * shards));
        }
        buckets
    }
}

impl Bucket {
    /// Number of elements on all ranks together.
    pub fn elements(&self, ranks: usize) -> usize {
        self.piece * ranks
    }

    /// Returns the first element in the run of a state with one element for each `per`, and the number of elements in a
    /// piece.
    fn share(&self, per: Per) -> (usize, usize) {
        match per {
            Per::Element => (self.start, self.piece),
            Per::Block => (self.start / ALIGNMENT_ELEMENTS, self.piece / ALIGNMENT_ELEMENTS),
            Per::Row => self.rows,
        }
    }

    /// Returns the bucket's part, of all ranks, of a tensor that every rank has for the whole run.
    pub fn whole(&self, of: &TensorRef, ranks: usize) -> TensorRef {
        TensorRef::dense(of.arena, of.offset + self.start * of.dtype.size(), of.dtype, [self.elements(ranks)])
    }

    /// Returns a rank's own piece of such a tensor.
    pub fn own(&self, of: &TensorRef) -> TensorRef {
        let (size, count) = (of.dtype.size(), self.piece);
        let first = TensorRef::dense(of.arena, of.offset + self.start * size, of.dtype, [count]);
        TensorRef { per_rank: count * size, ..first }
    }

    /// Returns the place of a rank's own piece of a sharded tensor.
    pub fn kept(&self, of: &TensorRef, per: Per, ranks: usize) -> TensorRef {
        let (first, count) = self.share(per);
        let offset = (of.offset + first * of.dtype.size()) / ranks;
        TensorRef::dense(of.arena, offset, of.dtype, [count])
    }

    /// Returns [`Bucket::kept`] of one of its parameters, which lies in the first rank's piece.
    pub fn kept_part(&self, part: &TensorRef, of: &TensorRef, per: Per, ranks: usize) -> TensorRef {
        let (first, _) = self.share(per);
        let before = part.offset - (of.offset + first * of.dtype.size());
        TensorRef { offset: self.kept(of, per, ranks).offset + before, ..part.clone() }
    }

    /// The place of a sharded tensor's bucket in its arena.
    pub fn shard(&self, of: &TensorRef, per: Per, ranks: usize) -> Shard {
        let ((first, count), size) = (self.share(per), of.dtype.size());
        Shard { start: of.offset + first * size, piece: count * size, at: self.kept(of, per, ranks).offset }
    }
}

/// Bytes from which a group is closed.
pub(super) fn group_bytes(of: &Sharding) -> usize {
    of.bucket() / OF_BUCKET
}

/// Returns the multiple of bytes to which a group of frozen weights is filled up.
pub(super) fn frozen_unit(of: &Sharding) -> usize {
    of.shards() * GRANULE
}

/// Returns the group of the frozen weights in a range of bytes, cut into one piece for each rank.
pub(super) fn frozen_group(bytes: Range<usize>, of: &Sharding) -> Group {
    let shard = Shard { start: bytes.start, piece: bytes.len() / of.shards(), at: bytes.start / of.shards() };
    Group { arena: arena::WEIGHTS, bytes, shards: vec![shard], squared: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(of: Stretch, ranks: usize, bucket_bytes: usize) -> Vec<(usize, usize, (usize, usize))> {
        let buckets = of.cut(512, 7, &Sharding { ranks, bucket_bytes: Some(bucket_bytes), ..Sharding::default() });
        buckets.into_iter().map(|of| (of.start, of.piece, of.rows)).collect()
    }

    #[test]
    fn elements_are_cut_into_equal_buckets_of_whole_blocks() {
        let stretch = |elements| Stretch { elements, ..Stretch::default() };
        assert_eq!(cut(stretch(256), 2, 1 << 20), [(512, 256, (0, 0))]);
        let found = cut(stretch(40_000), 2, 4 * 2 * 16_384);
        assert_eq!(found, [(512, 12_288, (0, 0)), (512 + 24_576, 7936, (0, 0))]);
        assert_eq!(cut(stretch(0), 4, 1 << 20), []);
    }

    #[test]
    fn units_stay_whole_and_every_rank_has_as_many() {
        let of = Stretch { elements: 5 * 1024, rows: 5 * 256, units: 5 };
        assert_eq!(cut(of.clone(), 2, 1 << 30), [(512, 3072, (7, 768))]);
        // Two units of each rank at once; of the last bucket the second rank's is empty.
        let found = cut(of, 2, 2 * 4 * 2048);
        assert_eq!(found, [(512, 2048, (7, 512)), (512 + 4096, 1024, (7 + 1024, 256))]);
    }
}
