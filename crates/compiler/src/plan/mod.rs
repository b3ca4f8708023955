//! What is kept for the backward pass, what is computed again, and what is done in parts: one
//! decision for each shape of batches, from the memory there is and the machine's ceilings.
//!
//! The choice is a prefix of one list of moves, ordered from cheap to dear: first the shortest that
//! fits, then as many more as cost less than [`MARGIN`] of the step. Options that the user set are
//! obeyed before the list begins. No pass runs after this one: clones must not be found equal.

mod attention;
mod head;
mod memory;
mod parts;
mod recompute;
mod report;
mod time;

use graph::Graph;
use program::{Arch, EntryKind, Machine, PlanLine, Variant};

use crate::CompileError;
use crate::options::CompileOptions;
use head::Head;
use memory::Memory;
use parts::{Part, Parts};

/// Share of the fastest fitting plan's time that a smaller one may cost.
const MARGIN: f64 = 0.015;

/// Logits up to this size are not worth parts of their own.
const SMALL_LOGITS: usize = 256 << 20;

/// Rows of a head's part that still fill a GPU.
const FULL_ROWS: usize = 2048;

/// Fewer rows than this in a part waste the product's tiles.
const FEWEST_ROWS: usize = 64;

/// Everything that is decided for one shape.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Decision {
    /// By layer.
    recomputed: Vec<Parts>,
    head_parts: usize,
    attention_parts: usize,
}

/// The steps in which parts of the layers are given up, layer by layer. Parts of one step need each
/// other: what follows a norm is computed again from the norm's output.
const STEPS: [&[Part]; 6] = [
    &[Part::Norms, Part::Activation],
    &[Part::Rotation],
    &[Part::FeedForward],
    &[Part::Projections],
    &[Part::Attention],
    &[Part::Residual],
];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Move {
    Recompute(Parts, usize),
    HeadParts(usize),
    AttentionParts(usize),
}

impl Decision {
    fn after(&self, moves: &[Move]) -> Decision {
        let mut decision = self.clone();
        for step in moves {
            match *step {
                Move::Recompute(parts, layer) => {
                    decision.recomputed[layer] = decision.recomputed[layer].and(parts);
                }
                Move::HeadParts(parts) => decision.head_parts = parts,
                Move::AttentionParts(parts) => decision.attention_parts = parts,
            }
        }
        decision
    }

    fn apply(&self, graph: &Graph, head: Option<&Head>) -> Graph {
        let mut graph = graph.clone();
        if let Some(head) = head {
            head::split_head(&mut graph, head, self.head_parts);
        }
        recompute::recompute(&mut graph, &self.recomputed);
        attention::split_attention(&mut graph, self.attention_parts);
        graph
    }
}

/// Rewrites the graphs so that the plan fits, and says what was decided. What cannot be made to fit
/// is left at its smallest; lowering refuses it.
pub(crate) fn decide(
    graphs: &mut [(EntryKind, Variant, Graph)],
    options: &CompileOptions,
    machine: &Machine,
) -> Result<Vec<PlanLine>, CompileError> {
    let memory = Memory::new(graphs, options, machine);
    let limit = machine.memory.min(options.plan.memory_limit.unwrap_or(usize::MAX));
    let available = limit.saturating_sub(memory.fixed_bytes());
    let mut lines = Vec::new();
    // The training step first: the other entries may use the arena that it needs.
    let mut shared = None;
    let (training, others): (Vec<_>, Vec<_>) =
        graphs.iter_mut().partition(|(kind, _, _)| *kind == EntryKind::FirstMicroStep);
    for (kind, variant, graph) in training.into_iter().chain(others) {
        let trains = *kind == EntryKind::FirstMicroStep;
        let available = if trains { available } else { shared.unwrap_or(available) };
        let margin = if trains { MARGIN } else { 0.0 };
        let search = Search { kind: *kind, variant: *variant, graph, memory: &memory, machine, available, margin };
        let (decided, of_entry) = search.run(options)?;
        if trains {
            shared = shared.max(Some(memory.activation_bytes(&decided, *variant)));
        }
        *graph = decided;
        lines.extend(of_entry);
    }
    Ok(lines)
}

struct Search<'a> {
    kind: EntryKind,
    variant: Variant,
    graph: &'a Graph,
    memory: &'a Memory<'a>,
    machine: &'a Machine,
    /// Bytes that the activation arena may have.
    available: usize,
    /// Share of the fastest fitting plan's time that a smaller one may cost.
    margin: f64,
}

impl Search<'_> {
    fn run(&self, options: &CompileOptions) -> Result<(Graph, Vec<PlanLine>), CompileError> {
        let head = Head::find(self.graph);
        let (asked, open) = self.layers(options);
        let layers = self.graph.nodes.iter().filter_map(|node| node.layer).max().map_or(0, |last| last as usize + 1);
        let start = Decision {
            recomputed: vec![asked; layers],
            head_parts: self.head_parts(options, head.as_ref())?,
            attention_parts: options.plan.attention_chunks.unwrap_or(1),
        };
        let moves = self.moves(options, head.as_ref(), open, &start);
        let graph_after = |n: usize| start.after(&moves[..n]).apply(self.graph, head.as_ref());
        let needed = |n: usize| self.memory.activation_bytes(&graph_after(n), self.variant);
        let seconds = |n: usize| time::seconds(&graph_after(n), self.machine);

        let fitting = first(moves.len(), |n| needed(n) <= self.available).unwrap_or(moves.len());
        let (fastest, bytes) = (seconds(fitting), needed(fitting));
        let within = |n: usize| seconds(fitting + n) <= fastest * (1.0 + self.margin);
        let cheap = first(moves.len() - fitting, |n| !within(n)).unwrap_or(moves.len() - fitting + 1) - 1;
        let cheap = if self.margin > 0.0 { cheap } else { 0 };
        let chosen = if cheap > 0 && needed(fitting + cheap) < bytes { fitting + cheap } else { fitting };
        let decision = start.after(&moves[..chosen]);
        let graph = graph_after(chosen);
        let reasons = report::Reasons { start: &start, fitting: &start.after(&moves[..fitting]) };
        let lines = report::lines((self.kind, self.variant), self.graph, &decision, &reasons, self.machine);
        Ok((graph, lines))
    }

    /// What is computed again because it was asked for, and what may be.
    fn layers(&self, options: &CompileOptions) -> (Parts, Parts) {
        match self.kind {
            EntryKind::FirstMicroStep => Parts::asked(&options.plan.recompute, options.adapter.is_some()),
            _ => Default::default(),
        }
    }

    fn head_parts(&self, options: &CompileOptions, head: Option<&Head>) -> Result<usize, CompileError> {
        match (options.plan.head_chunks, head) {
            (Some(parts), Some(_)) => Ok(parts),
            (Some(parts), None) if parts > 1 && self.kind == EntryKind::FirstMicroStep => {
                Err(CompileError::Options(format!(
                    "{}: the output head cannot be done in {parts} parts: its logits are asked for as a whole, or \
                         something other than the loss reads them",
                    self.graph.name
                )))
            }
            // A frozen head in parts costs nothing; a trained one adds its gradient up again for each.
            (None, Some(head)) if !head.trained && head.bytes > SMALL_LOGITS => Ok(head.tokens.div_ceil(FULL_ROWS)),
            _ => Ok(1),
        }
    }

    /// All moves, cheap ones first.
    fn moves(&self, options: &CompileOptions, head: Option<&Head>, open: Parts, start: &Decision) -> Vec<Move> {
        let mut moves = Vec::new();
        let head = head.filter(|_| options.plan.head_chunks.is_none());
        let doubled = |from: usize, rows: usize| {
            let tokens = head.map_or(0, |head| head.tokens);
            let parts = std::iter::successors(Some(from * 2), |parts| Some(parts * 2));
            parts.take_while(move |parts| tokens / parts >= rows).map(Move::HeadParts).collect::<Vec<_>>()
        };
        if self.machine.arch != Arch::Cpu || head.is_some_and(|head| head.bytes > SMALL_LOGITS) {
            moves.extend(doubled(start.head_parts, FULL_ROWS / 2));
        }
        let parts_so_far = |moves: &[Move]| match moves.last() {
            Some(Move::HeadParts(parts)) => *parts,
            _ => start.head_parts,
        };
        let coarse = parts_so_far(&moves);
        let layers = start.recomputed.len();
        for step in STEPS {
            let parts = step.iter().filter(|part| open.has(**part)).fold(Parts::default(), |sum, part| sum.with(*part));
            if parts != Parts::default() {
                moves.extend((0..layers).map(|layer| Move::Recompute(parts, layer)));
            }
        }
        moves.extend(doubled(coarse, FEWEST_ROWS.min(FULL_ROWS)));
        if options.plan.attention_chunks.is_none() && self.kind == EntryKind::FirstMicroStep {
            let most = attention::most_attention_parts(self.graph);
            let parts = std::iter::successors(Some(2), |parts| Some(parts * 2)).take_while(|parts| *parts <= most);
            moves.extend(parts.map(Move::AttentionParts));
        }
        moves
    }
}

/// The first number from 0 to `last` for which `holds`, where it holds for all greater ones too.
fn first(last: usize, holds: impl Fn(usize) -> bool) -> Option<usize> {
    if holds(0) {
        return Some(0);
    }
    if !holds(last) {
        return None;
    }
    let (mut no, mut yes) = (0, last);
    while yes - no > 1 {
        let middle = no + (yes - no) / 2;
        if holds(middle) { yes = middle } else { no = middle }
    }
    Some(yes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_number_is_found() {
        for threshold in 0..20 {
            assert_eq!(first(15, |n| n >= threshold), (threshold <= 15).then_some(threshold));
        }
    }
}
