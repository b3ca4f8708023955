//! Values that wait in host memory between their uses: when each leaves the device, when it comes back, and when its
//! place on the device is free in between. Knows when buffers are touched and how long nodes take; not what they hold.

use graph::Graph;
use program::{Machine, TensorRef};

use super::place::Placement;
use super::{ALIGNMENT_BYTES, align};
use crate::plan::node_seconds;

/// A place is kept for this much of the time that its transfer should take.
const SLACK: f64 = 1.25;

/// Transfers that are under way at most, in each direction, before the computation waits.
const AHEAD: usize = 2;

/// One buffer's way to the host and back. Nodes by index.
#[derive(Clone, Debug)]
pub(crate) struct Trip {
    pub buffer: usize,
    pub bytes: usize,
    /// Behind this node it is complete, and is stored.
    pub written: usize,
    /// Behind this node its first place is free.
    pub released: usize,
    /// Before this node it is fetched to its second place.
    pub fetched: usize,
    /// This node needs it again.
    pub needed: usize,
    /// Where it waits.
    pub host: usize,
}

/// When a buffer is touched, in order, and when it was written last.
struct Touches {
    nodes: Vec<usize>,
    written: usize,
}

/// The ways of everything that is to wait and can: what is written once and then left alone for longer than it takes.
pub(crate) fn plan_trips(graph: &Graph, placement: &Placement, machine: &Machine) -> Vec<Trip> {
    if graph.waiting.is_empty() {
        return Vec::new();
    }
    let mut clock = vec![0.0];
    for node in &graph.nodes {
        clock.push(clock[clock.len() - 1] + node_seconds(graph, node, machine));
    }
    let mut trips: Vec<Trip> = Vec::new();
    for id in &graph.waiting {
        let tensor = placement.get(*id).expect("every value was placed");
        let Some(buffer) = placement.buffer_of(tensor) else { continue };
        if trips.iter().any(|trip| trip.buffer == buffer) {
            continue;
        }
        let Touches { nodes, written } = touches(graph, placement, buffer);
        let pauses = nodes.windows(2).map(|pair| (pair[0], pair[1]));
        let length = |(from, to): &(usize, usize)| clock[*to] - clock[*from + 1];
        let longest = pauses.max_by(|a, b| length(a).total_cmp(&length(b)));
        if let Some((last, needed)) = longest.filter(|(last, _)| written <= *last) {
            let bytes = placement.buffers[buffer];
            trips.push(Trip { buffer, bytes, written, released: last, fetched: needed, needed, host: 0 });
        }
    }
    let seconds = |bytes: usize| SLACK * bytes as f64 / (machine.link.both_ways / 2.0);
    trips.sort_by_key(|trip| trip.written);
    let written: Vec<usize> = trips.iter().map(|trip| trip.written).collect();
    for (index, trip) in trips.iter_mut().enumerate() {
        let done = clock.partition_point(|at| *at < clock[trip.written + 1] + seconds(trip.bytes)).saturating_sub(1);
        let most = written.get(index + AHEAD).copied().unwrap_or(trip.needed);
        trip.released = trip.released.max(done.min(most));
    }
    trips.sort_by_key(|trip| trip.needed);
    let needed: Vec<usize> = trips.iter().map(|trip| trip.needed).collect();
    for (index, trip) in trips.iter_mut().enumerate() {
        let start = clock.partition_point(|at| *at <= clock[trip.needed] - seconds(trip.bytes)).saturating_sub(1);
        let least = index.checked_sub(AHEAD).map_or(trip.released + 1, |before| needed[before]);
        trip.fetched = trip.fetched.min(start.max(least));
    }
    trips.retain(|trip| trip.released < trip.fetched && trip.fetched <= trip.needed);
    let mut end = 0;
    for trip in &mut trips {
        trip.host = end;
        end = align(end + trip.bytes, ALIGNMENT_BYTES);
    }
    trips
}

/// Bytes of host memory that trips take.
pub(crate) fn waiting_bytes<'a>(trips: impl Iterator<Item = &'a Trip>) -> usize {
    trips.map(|trip| align(trip.host + trip.bytes, ALIGNMENT_BYTES)).max().unwrap_or(0)
}

fn touches(graph: &Graph, placement: &Placement, buffer: usize) -> Touches {
    let lies = |tensor: &TensorRef| placement.buffer_of(tensor) == Some(buffer);
    let inside = |id: &graph::ValueId| placement.get(*id).is_some_and(lies);
    let mut touches = Touches { nodes: Vec::new(), written: 0 };
    for (index, node) in graph.nodes.iter().enumerate() {
        let copied = placement.copies.get(&index).into_iter().flatten().any(|copy| lies(&copy.to));
        let writes = node.outputs.iter().any(inside) && !super::place::is_view(node) || copied;
        if writes {
            touches.written = index;
        }
        if writes || node.inputs.iter().chain(&node.outputs).any(inside) {
            touches.nodes.push(index);
        }
    }
    if graph.outputs.iter().any(|(_, id)| inside(id)) {
        touches.nodes.push(graph.nodes.len());
    }
    touches
}
