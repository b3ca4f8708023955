//! The pieces of runs that ranks update, and the errors of compressed gradients, which have the same pieces.

use ops::optimizer::COMPRESSED_BLOCK;
use program::{OptimizerState, Shard, TensorRef};
use tensor::DType;

use super::shards::{Bucket, Group};
use super::{ParameterPlan, Run, Start, arena};
use crate::options::Sharding;
use crate::rule::Per;

/// The errors of compressing a bucket's gradients, which the next step adds.
#[derive(Clone, Debug)]
pub(crate) struct Errors {
    /// f32 [n]: the error of its gradients.
    pub gradient: TensorRef,
    /// f32 \[m\]: the error of the sum of the part that the rank adds up, where it does so for others.
    pub sum: Option<TensorRef>,
}

impl ParameterPlan {
    /// Returns the errors of each bucket; empty where gradients are not compressed.
    pub fn errors(&self) -> Vec<Errors> {
        let mut end = 0;
        let mut take = |elements: usize| {
            let at = TensorRef::dense(arena::ERRORS, end, DType::F32, [elements]);
            end += at.bytes();
            at
        };
        let Some(blocks) = self.sharding.blocks() else { return Vec::new() };
        let of = |(_, bucket): (&Run, &Bucket)| Errors {
            gradient: take(bucket.piece),
            sum: (!blocks.are_sparse()).then(|| take(part(bucket.piece, &self.sharding))),
        };
        self.buckets().map(of).collect()
    }

    /// Returns the bytes of the errors of all buckets.
    pub fn errors_bytes(&self) -> usize {
        let bytes = |of: &Errors| of.gradient.bytes() + of.sum.as_ref().map_or(0, TensorRef::bytes);
        self.errors().iter().map(bytes).sum()
    }

    /// Returns the errors of all buckets and ranks as one tensor; none where gradients are not compressed.
    pub fn all_errors(&self) -> Option<TensorRef> {
        let elements = self.errors_bytes() / DType::F32.size();
        (elements > 0).then(|| TensorRef::dense(arena::ERRORS, 0, DType::F32, [self.sharding.ranks, elements]))
    }
}

/// Parts of a piece that nodes add up are multiples of this many elements, unless they are sent in blocks.
const PART: usize = 64;

/// Elements that each node adds up of a piece.
pub(crate) fn part(piece: usize, of: &Sharding) -> usize {
    let unit = if of.blocks().is_some() { COMPRESSED_BLOCK } else { PART };
    piece.div_ceil(of.inter_node_group().size).next_multiple_of(unit)
}

impl Run {
    /// True if a rank keeps only its own pieces of the weights.
    pub fn shards_weights(&self, of: &Sharding) -> bool {
        of.weights && self.weight.arena == arena::WEIGHTS
    }

    /// Returns the groups of a tensor that has one element for each element of the run.
    pub fn groups(&self, of: &TensorRef, ranks: usize) -> Vec<Group> {
        let group = |buckets: &[Bucket]| {
            let shards: Vec<Shard> = buckets.iter().map(|bucket| bucket.shard(of, Per::Element, ranks)).collect();
            let last = shards.last().expect("a group has buckets");
            let bytes = shards[0].start..last.start + last.piece * ranks;
            Group { arena: of.arena, bytes, shards, squared: self.rule.descends() }
        };
        self.buckets.chunk_by(|a, b| a.group == b.group).map(group).collect()
    }

    /// The run as a rank updates it: the whole, or its pieces of the buckets.
    pub fn pieces(&self, of: &Sharding) -> Vec<Run> {
        if of.ranks == 1 {
            return vec![self.clone()];
        }
        self.buckets.iter().map(|bucket| self.piece(bucket, of)).collect()
    }

    fn piece(&self, bucket: &Bucket, of: &Sharding) -> Run {
        let ranks = of.shards();
        let at = |of: &TensorRef, kept: bool| match kept {
            true => bucket.kept(of, Per::Element, ranks),
            false => bucket.own(of),
        };
        let state = |(kind, of): (&crate::rule::State, &OptimizerState)| OptimizerState {
            name: of.name,
            at: bucket.kept(&of.at, kind.per, ranks),
        };
        Run {
            weight: at(&self.weight, self.shards_weights(of)),
            gradient: at(&self.gradient, of.gradients),
            states: self.rule.states().iter().zip(&self.states).map(state).collect(),
            master: self.master.as_ref().map(|of| bucket.kept(of, Per::Element, ranks)),
            matrices: bucket.matrices.clone(),
            // They belong to the run: each piece with a copy would take the square of their number.
            buckets: Vec::new(),
            start: Some(Start { first: bucket.counted, per_rank: bucket.piece }),
            ..*self
        }
    }
}
