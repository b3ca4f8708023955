//! The times at which tensors with a home on the host are on the device in a micro-step: activations between the
//! forward pass and the backward pass, gradients while they are written, frozen weights while they are read. Knows when
//! nodes touch tensors and how long nodes take; not what they compute.

use std::collections::HashMap;
use std::ops::{Deref, Range};

use graph::Graph;
use program::{ArenaId, TensorRef};
use tensor::DType;

use super::clock::Clock;
use super::{Follows, Homes, LiveRange, Move};
use crate::memory::{ALIGNMENT_BYTES, Placement, align, arena, is_view};

/// Bytes in flight in each direction before the computation waits, or those of the largest live range.
pub(super) const AHEAD: usize = 128 << 20;

/// The live ranges of an entry, in the order in which they are stored or end. One plan serves all micro-steps of a
/// step, of which the first finds nothing to fetch for live ranges that open. `leaves`: gradients go to the other
/// ranks, and have live ranges of their own.
pub(super) fn plan(
    graph: &Graph,
    placement: &Placement,
    homes: &Homes,
    clock: &impl Deref<Target = Clock>,
    leaves: bool,
) -> Vec<LiveRange> {
    let residents = residents(graph, placement, homes, leaves);
    if residents.is_empty() { Vec::new() } else { schedule(residents, clock) }
}

fn schedule(residents: Vec<Resident>, clock: &Clock) -> Vec<LiveRange> {
    let mut live_ranges: Vec<LiveRange> = Vec::new();
    let mut end = 0;
    for mut resident in residents {
        if resident.buffer.is_none() {
            live_ranges.extend(resident.live_ranges(clock));
            continue;
        }
        // Only what leaves the device takes a place on the host.
        resident.bytes = end..end + resident.bytes.len();
        let of = resident.live_ranges(clock);
        end = if of.is_empty() { end } else { align(resident.bytes.end, ALIGNMENT_BYTES) };
        live_ranges.extend(of);
    }
    live_ranges.sort_by_key(|live_range| live_range.begin);
    arrive(&mut live_ranges, clock);
    live_ranges.sort_by_key(|live_range| live_range.stored.unwrap_or(live_range.last));
    leave(&mut live_ranges, clock, clock.last_node());
    live_ranges
}

/// Bytes of host memory that activations take.
pub(crate) fn waiting_bytes(live_ranges: &[LiveRange]) -> usize {
    let at_home = live_ranges.iter().flat_map(|live_range| &live_range.moves).map(|moved| &moved.home);
    at_home
        .filter(|home| home.arena == arena::WAITING)
        .map(|home| align(home.offset + home.bytes(), ALIGNMENT_BYTES))
        .max()
        .unwrap_or(0)
}

/// A node, and whether it writes.
type Touch = (usize, bool);

/// A tensor with a home on the host, and its touches, in order.
struct Resident {
    home: ArenaId,
    bytes: Range<usize>,
    buffer: Option<usize>,
    touches: Vec<Touch>,
}

impl Resident {
    /// Returns its live ranges, each for as long as it is touched. Gradients leave in every pause that is long enough
    /// for two transfers, tensors that are only read in those that are long enough for one; activations, which each
    /// further transfer would cost without freeing more, in the longest.
    fn live_ranges(&self, clock: &Clock) -> Vec<LiveRange> {
        let is_read_only = !self.touches.iter().any(|(_, writes)| *writes);
        let ways = if is_read_only { 1.0 } else { 2.0 };
        let there_and_back = ways * clock.transfer(self.bytes.len());
        let pause = |a: &Touch, b: &Touch| clock.begins[b.0] - clock.end(a.0);
        let pauses = self.touches.windows(2).map(|pair| pause(&pair[0], &pair[1]));
        let longest = pauses.fold(0.0, f64::max);
        let least = if self.buffer.is_some() { there_and_back.max(longest) } else { there_and_back };
        let times: Vec<&[Touch]> = self.touches.chunk_by(|a, b| pause(a, b) < least).collect();
        // What is written once and read within that time need not leave.
        if self.buffer.is_some() && (times.len() < 2 || times[1..].iter().copied().flatten().any(|(_, writes)| *writes))
        {
            return Vec::new();
        }
        let home = TensorRef::dense(self.home, self.bytes.start, DType::U8, [self.bytes.len()]);
        let device = TensorRef::dense(arena::ACTIVATIONS, 0, DType::U8, [self.bytes.len()]);
        let live_range = |(index, touches): (usize, &&[Touch])| {
            let (begin, last) = (touches[0].0, touches[touches.len() - 1].0);
            LiveRange {
                moves: vec![Move { home: home.clone(), device: device.clone(), written: true }],
                buffer: self.buffer,
                shards: Vec::new(),
                arrives: begin,
                fetched: index > 0 || self.buffer.is_none(),
                // What is only read is there from the beginning.
                opens: index == 0 && !is_read_only,
                closes: index + 1 == times.len(),
                begin,
                last,
                stored: touches.iter().rev().find(|(_, writes)| *writes).map(|(node, _)| *node),
                released: last,
                follows: Follows::Computation,
            }
        };
        times.iter().enumerate().map(live_range).collect()
    }
}

/// Gives every live range time to be fetched, each after the one before, with few in flight.
pub(super) fn arrive(live_ranges: &mut [LiveRange], clock: &Clock) {
    let mut free = f64::INFINITY;
    let ahead = most_ahead(live_ranges);
    // The position from which the home of each has been left by those before.
    let mut left: HashMap<Place, usize> = HashMap::new();
    let after = |live_range: &LiveRange| {
        let last = left.entry(Place::of(live_range)).or_default();
        let before = *last;
        *last = before.max(live_range.last + 1);
        before
    };
    let after: Vec<usize> = live_ranges.iter().map(after).collect();
    for index in (0..live_ranges.len()).rev().filter(|index| live_ranges[*index].fetched).collect::<Vec<_>>() {
        let live_range = &live_ranges[index];
        free = free.min(clock.begin(live_range.begin)) - clock.arrival(live_range);
        let mut under_way = 0;
        let others = live_ranges[..index].iter().rev().filter(|before| before.fetched);
        let least = others.map(|before| (before.begin, before.bytes())).find(|(_, bytes)| {
            under_way += bytes;
            under_way > ahead
        });
        let least = least.map_or(0, |(begin, _)| begin).max(after[index]);
        live_ranges[index].arrives = clock.begun(free).max(least).min(live_ranges[index].begin);
    }
}

/// Gives every live range time to be stored, each after the one before, with few in flight. `end` is the last position.
pub(super) fn leave(live_ranges: &mut [LiveRange], clock: &Clock, end: usize) {
    let mut free: f64 = 0.0;
    let ahead = most_ahead(live_ranges);
    let mut arrivals: HashMap<Place, Vec<usize>> = HashMap::new();
    for live_range in live_ranges.iter() {
        arrivals.entry(Place::of(live_range)).or_default().push(live_range.arrives);
    }
    for index in 0..live_ranges.len() {
        let live_range = &live_ranges[index];
        let Some(stored) = live_range.stored else { continue };
        free = free.max(clock.begin(stored + 1)) + clock.transfer(live_range.bytes());
        let mut under_way = 0;
        let others =
            live_ranges[index + 1..].iter().filter_map(|after| after.stored.map(|stored| (stored, after.bytes())));
        let most = { others }.find(|(_, bytes)| {
            under_way += bytes;
            under_way > ahead
        });
        let again = arrivals[&Place::of(live_range)].iter().filter(|arrives| **arrives > live_range.last);
        let most = again.map(|arrives| arrives - 1).fold(most.map_or(end, |(stored, _)| stored), usize::min);
        live_ranges[index].released = clock.under_way(free).min(most).max(live_range.last);
    }
}

/// The home of a live range: two of one tensor have the same.
#[derive(PartialEq, Eq, Hash)]
struct Place {
    arena: ArenaId,
    offset: usize,
    bytes: usize,
}

impl Place {
    fn of(live_range: &LiveRange) -> Place {
        let home = &live_range.moves[0].home;
        Place { arena: home.arena, offset: home.offset, bytes: home.bytes() }
    }
}

fn most_ahead(live_ranges: &[LiveRange]) -> usize {
    live_ranges.iter().map(LiveRange::bytes).max().unwrap_or(0).max(AHEAD)
}

/// Returns the tensors of an entry that are offloaded.
fn residents(graph: &Graph, placement: &Placement, homes: &Homes, leaves: bool) -> Vec<Resident> {
    let place = |id| placement.get(id).expect("every value was placed");
    let mut activations: Vec<Resident> = Vec::new();
    let mut by_buffer = HashMap::new();
    for buffer in graph.waiting.iter().filter_map(|id| placement.buffer_of(place(*id))) {
        by_buffer.entry(buffer).or_insert_with(|| {
            let bytes = 0..placement.buffers[buffer];
            activations.push(Resident { home: arena::WAITING, bytes, buffer: Some(buffer), touches: Vec::new() });
            activations.len() - 1
        });
    }
    // Arenas of parameters, with the ranges of each that nodes touch.
    let flat = [arena::GRADIENTS, arena::QUANTS].into_iter();
    let flat = flat.filter(|of| !(homes.on_device(*of) || leaves && *of == arena::GRADIENTS));
    let mut flat: Vec<(ArenaId, Vec<(Range<usize>, Touch)>)> = flat.map(|of| (of, Vec::new())).collect();
    if activations.is_empty() && flat.is_empty() {
        return Vec::new();
    }
    let mut touch = |tensor: &TensorRef, node: usize, writes: bool| {
        let known = placement.buffer_of(tensor).and_then(|buffer| by_buffer.get(&buffer));
        if let Some(known) = known {
            activations[*known].touches.push((node, writes));
        } else if let Some((_, touched)) = flat.iter_mut().find(|(of, _)| *of == tensor.arena) {
            touched.push((tensor.offset..tensor.offset + tensor.span(), (node, writes)));
        }
    };
    for (index, node) in graph.nodes.iter().enumerate() {
        let computes = |_: &&graph::ValueId| !is_view(node);
        node.inputs.iter().filter(computes).for_each(|id| touch(place(*id), index, false));
        node.outputs.iter().filter(computes).for_each(|id| touch(place(*id), index, true));
        for copied in placement.copies.get(&index).into_iter().flatten() {
            touch(&copied.from, index, false);
            touch(&copied.to, index, true);
        }
    }
    let results = graph.outputs.iter().map(|(_, id)| place(*id)).filter(|tensor| tensor.arena != arena::GRADIENTS);
    results.for_each(|tensor| touch(tensor, graph.nodes.len(), false));
    let flat = flat.into_iter().flat_map(|(home, touched)| {
        together(touched).into_iter().map(move |(bytes, touches)| Resident { home, bytes, buffer: None, touches })
    });
    activations.into_iter().chain(flat).collect()
}

/// Puts ranges together that overlap, each with its touches in order.
fn together(mut touches: Vec<(Range<usize>, Touch)>) -> Vec<(Range<usize>, Vec<Touch>)> {
    touches.sort_by_key(|(range, _)| range.start);
    let mut result: Vec<(Range<usize>, Vec<Touch>)> = Vec::new();
    for (range, touch) in touches {
        match result.last_mut().filter(|(whole, _)| range.start < whole.end) {
            Some((whole, touches)) => {
                whole.end = whole.end.max(range.end);
                touches.push(touch);
            }
            None => result.push((range, vec![touch])),
        }
    }
    result.iter_mut().for_each(|(_, touches)| touches.sort_unstable());
    result
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
