//! Gradients that lie in host memory visit the device while the backward pass writes them: when each comes, what of an
//! earlier micro-step comes with it, and when it has left. Knows when gradients are touched and how long nodes take;
//! not what computes them.

use std::ops::Range;

use graph::Graph;
use program::{Machine, TensorRef};
use tensor::DType;

use super::place::{Placement, is_view};
use crate::lower::arena;
use crate::plan::node_seconds;

/// A place is kept for this much of the time that a transfer should take.
const SLACK: f64 = 1.25;

/// Bytes of visits that are under way in each direction before the computation waits, or those of the largest of them.
const AHEAD: usize = 128 << 20;

fn most_ahead(visits: &[Visit]) -> usize {
    visits.iter().map(Visit::len).max().unwrap_or(0).max(AHEAD)
}

/// Gradients that are written together, on the device for a while. Nodes by index.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Visit {
    /// Their bytes in the arena of gradients.
    pub bytes: Range<usize>,
    /// Before this node what they were is fetched.
    pub fetched: usize,
    /// The first node and the last that touch them.
    pub begin: usize,
    pub last: usize,
    /// Behind this node their place is free.
    pub released: usize,
    /// Whether the first micro-step of a step begins here with nothing to fetch.
    pub begins: bool,
    /// Whether they are complete then.
    pub completes: bool,
}

impl Visit {
    fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Its bytes on the host, and on the device from an offset on.
    pub fn stations(&self, offset: usize) -> [TensorRef; 2] {
        let at = |arena, offset| TensorRef::dense(arena, offset, DType::U8, [self.len()]);
        [at(arena::GRADIENTS, self.bytes.start), at(arena::ACTIVATIONS, offset)]
    }
}

/// The visits of an entry in the order in which they end.
pub(crate) fn plan_visits(graph: &Graph, placement: &Placement, machine: &Machine) -> Vec<Visit> {
    let mut clock = vec![0.0];
    for node in &graph.nodes {
        clock.push(clock[clock.len() - 1] + node_seconds(graph, node, machine));
    }
    let seconds = |bytes: usize| SLACK * bytes as f64 / (machine.link.both_ways / 2.0);
    let mut visits: Vec<Visit> = Vec::new();
    for (bytes, nodes) in together(touches(graph, placement)) {
        let there_and_back = 2.0 * seconds(bytes.len());
        let stays: Vec<&[usize]> = nodes.chunk_by(|a, b| clock[*b] - clock[*a + 1] < there_and_back).collect();
        for (index, stay) in stays.iter().enumerate() {
            let (begin, last) = (stay[0], stay[stay.len() - 1]);
            let (begins, completes) = (index == 0, index + 1 == stays.len());
            visits.push(Visit { bytes: bytes.clone(), fetched: begin, begin, last, released: last, begins, completes });
        }
    }
    visits.sort_by_key(|visit| visit.begin);
    come(&mut visits, &clock, seconds);
    visits.sort_by_key(|visit| visit.last);
    leave(&mut visits, &clock, seconds);
    visits
}

/// Gives every visit time to be fetched, each behind the one before, with few under way.
fn come(visits: &mut [Visit], clock: &[f64], seconds: impl Fn(usize) -> f64) {
    let mut free = f64::INFINITY;
    let most_ahead = most_ahead(visits);
    for index in (0..visits.len()).rev() {
        let visit = &visits[index];
        free = free.min(clock[visit.begin]) - seconds(visit.len());
        let start = clock.partition_point(|at| *at <= free).saturating_sub(1);
        let mut ahead = 0;
        let under_way = |before: &&Visit| {
            ahead += before.len();
            ahead > most_ahead
        };
        let least = visits[..index].iter().rev().find(under_way).map_or(0, |before| before.begin);
        let stored = visits[..index].iter().filter(|before| before.bytes == visit.bytes).map(|before| before.last + 1);
        let least = least.max(stored.max().unwrap_or(0));
        visits[index].fetched = start.max(least).min(visits[index].begin);
    }
}

/// Gives every visit time to be stored, each behind the one before, with few under way.
fn leave(visits: &mut [Visit], clock: &[f64], seconds: impl Fn(usize) -> f64) {
    let mut free: f64 = 0.0;
    let most_ahead = most_ahead(visits);
    for index in 0..visits.len() {
        let visit = &visits[index];
        free = free.max(clock[visit.last + 1]) + seconds(visit.len());
        let done = clock.partition_point(|at| *at < free).saturating_sub(1);
        let mut ahead = 0;
        let under_way = |behind: &&Visit| {
            ahead += behind.len();
            ahead > most_ahead
        };
        let most = visits[index + 1..].iter().find(under_way).map_or(clock.len() - 2, |behind| behind.last);
        let again = visits.iter().filter(|next| next.bytes == visit.bytes && next.fetched > visit.last);
        let most = again.map(|next| next.fetched - 1).fold(most, usize::min);
        visits[index].released = done.min(most).max(visit.last);
    }
}

/// Ranges of the arena of gradients and the nodes that touch them, in the order of the nodes.
fn touches(graph: &Graph, placement: &Placement) -> Vec<(Range<usize>, usize)> {
    let mut touches = Vec::new();
    for (index, node) in graph.nodes.iter().enumerate() {
        let copied = placement.copies.get(&index).into_iter().flatten().map(|copy| &copy.to);
        let values = node.inputs.iter().chain(&node.outputs).filter(|_| !is_view(node));
        let lie = values.filter_map(|id| placement.get(*id)).chain(copied);
        let gradients = lie.filter(|tensor| tensor.arena == arena::GRADIENTS);
        touches.extend(gradients.map(|tensor| (tensor.offset..tensor.offset + tensor.span(), index)));
    }
    touches
}

/// Puts ranges together that overlap, each with its nodes in order.
fn together(mut touches: Vec<(Range<usize>, usize)>) -> Vec<(Range<usize>, Vec<usize>)> {
    touches.sort_by_key(|(range, _)| range.start);
    let mut result: Vec<(Range<usize>, Vec<usize>)> = Vec::new();
    for (range, node) in touches {
        match result.last_mut().filter(|(whole, _)| range.start < whole.end) {
            Some((whole, nodes)) => {
                whole.end = whole.end.max(range.end);
                nodes.push(node);
            }
            None => result.push((range, vec![node])),
        }
    }
    for (_, nodes) in &mut result {
        nodes.sort_unstable();
        nodes.dedup();
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_that_one_node_writes_visit_together() {
        let found = together(vec![(0..8, 3), (8..16, 2), (4..8, 5), (16..24, 1), (8..24, 7)]);
        assert_eq!(found, [(0..8, vec![3, 5]), (8..24, vec![1, 2, 7])]);
    }

    #[test]
    fn places_are_kept_while_the_link_is_busy() {
        let visit = |bytes: Range<usize>, at: usize, begins: bool| Visit {
            bytes,
            fetched: at,
            begin: at,
            last: at,
            released: at,
            begins,
            completes: true,
        };
        // Ten nodes of a second each; a byte takes half of one.
        let clock: Vec<f64> = (0..=10).map(f64::from).collect();
        let seconds = |bytes: usize| bytes as f64 / 2.0;
        let mut visits = vec![visit(0..4, 3, true), visit(4..8, 4, true), visit(0..4, 9, false)];
        come(&mut visits, &clock, seconds);
        leave(&mut visits, &clock, seconds);
        let nodes: Vec<[usize; 2]> = visits.iter().map(|visit| [visit.fetched, visit.released]).collect();
        assert_eq!(nodes, [[0, 5], [2, 7], [7, 9]]);
    }
}
