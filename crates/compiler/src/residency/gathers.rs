//! The times at which weights that are cut over the ranks are whole on a device: groups of them are gathered ahead of
//! their use and dropped after it. Knows when nodes read what, and how long both take; not what is computed.

use std::ops::Deref;

use graph::Graph;
use program::TensorRef;
use tensor::DType;

use super::clock::Clock;
use super::gradient_buckets::touches;
use super::live_ranges::arrive;
use super::{Follows, LiveRange, Move};
use crate::memory::{Group, ParameterPlan, Placement, arena};

/// A group of less than this share of a bucket is kept from its first use to its last: gathering it again would cost
/// more than its place.
const SMALL: usize = 64;

/// The live ranges of an entry, in the order of their first uses.
pub(super) fn plan(
    graph: &Graph,
    placement: &Placement,
    parameters: &ParameterPlan,
    clock: &impl Deref<Target = Clock>,
) -> Vec<LiveRange> {
    let (groups, large) = (parameters.weight_groups(), parameters.sharding.bucket());
    if groups.is_empty() {
        return Vec::new();
    }
    let mut live_ranges = Vec::new();
    let layer = clock.end(clock.last_node()) / graph.layers().len().max(1) as f64;
    for (group, touches) in groups.iter().zip(touches(graph, placement, &groups)) {
        let nodes: Vec<usize> = touches.into_iter().map(|touch| touch.node).collect();
        let pause = |a: &usize, b: &usize| clock.begins[*b] - clock.end(*a);
        // A group is gathered once for the forward pass and once for the backward pass of its layer, recomputation
        // included.
        let least = match group.bytes.len() < large / SMALL {
            true => f64::INFINITY,
            false => layer.max(clock.collective(group.bytes.len())),
        };
        let times = nodes.chunk_by(|a, b| pause(a, b) < least);
        live_ranges.extend(times.map(|nodes| live_range(group, nodes[0], nodes[nodes.len() - 1])));
    }
    live_ranges.sort_by_key(|live_range| live_range.begin);
    arrive(&mut live_ranges, clock);
    live_ranges
}

fn live_range(group: &Group, begin: usize, last: usize) -> LiveRange {
    let bytes = |arena, offset: usize| TensorRef::dense(arena, offset, DType::U8, [group.bytes.len()]);
    LiveRange {
        moves: vec![Move {
            home: bytes(group.arena, group.bytes.start),
            device: bytes(arena::ACTIVATIONS, 0),
            written: false,
        }],
        buffer: None,
        shards: group.shards.clone(),
        arrives: begin,
        fetched: true,
        opens: false,
        closes: false,
        begin,
        last,
        stored: None,
        released: last,
        follows: Follows::Computation,
    }
}
