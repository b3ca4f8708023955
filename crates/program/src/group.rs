//! A check that the ranks of a cluster can come to the end of an entry together: all do the same collectives in the
//! same order and with the same number of bytes, and no stream waits for ever. Knows streams, events and sizes; not
//! what is moved.

use std::collections::{HashMap, HashSet, VecDeque};

use crate::instruction::{Collective, EventId, Instruction, StreamId};
use crate::order::check_order;
use crate::program::Entry;

/// Checks an entry as each rank runs it: every rank by itself ([`check_order`]), and all of them with one another. The
/// error names rank and instruction.
///
/// A collective begins when all ranks have come to it and ends on all at once, so what one rank reads of another's
/// memory is in order where each rank's own streams are.
pub fn check_group(ranks: &[Entry]) -> Result<(), String> {
    for (rank, entry) in ranks.iter().enumerate() {
        check_order(entry).map_err(|race| format!("rank {rank}: {race}"))?;
    }
    let mut group: Vec<Rank<'_>> = ranks.iter().map(Rank::new).collect();
    loop {
        group.iter_mut().for_each(Rank::run);
        let waiting: Vec<Option<usize>> = group.iter().map(Rank::at_collective).collect();
        if waiting.iter().all(Option::is_none) {
            break;
        }
        let first = waiting[0];
        for (rank, at) in waiting.iter().enumerate() {
            let differs = match (first, at) {
                (Some(a), Some(b)) => !alike(&ranks[0], a, &ranks[rank], *b),
                _ => true,
            };
            if differs {
                let of = |rank: usize, at: Option<usize>| match at {
                    Some(index) => format!("instruction {index} ({})", ranks[rank].steps[index]),
                    None => "nothing".to_owned(),
                };
                return Err(format!("rank 0 waits in {}, rank {rank} in {}", of(0, first), of(rank, *at)));
            }
        }
        group.iter_mut().for_each(Rank::pass_collective);
    }
    match group.iter().enumerate().find_map(|(rank, of)| Some((rank, of.stuck()?))) {
        Some((rank, index)) => {
            Err(format!("rank {rank} waits for ever: instruction {index} ({})", ranks[rank].steps[index]))
        }
        None => sizes(ranks),
    }
}

/// True if two instructions are the same collective, bytes included.
fn alike(a: &Entry, of_a: usize, b: &Entry, of_b: usize) -> bool {
    match (&a.steps[of_a].instruction, &b.steps[of_b].instruction) {
        (Instruction::Collective(a), Instruction::Collective(b)) => {
            let form = |of: &Collective| (of.movement, of.group, of.from.bytes(), of.to.bytes(), of.from.dtype);
            form(a) == form(b)
        }
        _ => false,
    }
}

/// Checks that the bytes of every collective fit the number of ranks in its groups.
fn sizes(ranks: &[Entry]) -> Result<(), String> {
    let Some(entry) = ranks.first() else { return Ok(()) };
    for (index, step) in entry.steps.iter().enumerate() {
        let Instruction::Collective(of) = &step.instruction else { continue };
        let whole = match of.movement {
            crate::Movement::AllGather => of.from.bytes() * of.group.size,
            crate::Movement::AllToAll | crate::Movement::AllToAllOthers => of.from.bytes(),
        };
        let fits = of.group.divides(ranks.len()) && whole.is_multiple_of(of.group.size);
        if whole != of.to.bytes() || !fits || !of.from.is_dense() || !of.to.is_dense() {
            return Err(format!("instruction {index} ({step}) does not fit {} ranks", ranks.len()));
        }
    }
    Ok(())
}

/// The progress of one rank through an entry.
struct Rank<'a> {
    entry: &'a Entry,
    /// The instructions that each stream has still to do.
    queues: [VecDeque<usize>; StreamId::ALL.len()],
    passed: HashSet<EventId>,
}

impl<'a> Rank<'a> {
    fn new(entry: &'a Entry) -> Rank<'a> {
        let mut queues: HashMap<usize, VecDeque<usize>> = HashMap::new();
        for (index, step) in entry.steps.iter().enumerate() {
            queues.entry(step.instruction.stream() as usize).or_default().push_back(index);
        }
        let queues = std::array::from_fn(|stream| queues.remove(&stream).unwrap_or_default());
        Rank { entry, queues, passed: HashSet::new() }
    }

    /// Goes on until every stream is at its end, in a collective, or waits.
    fn run(&mut self) {
        loop {
            let before: usize = self.queues.iter().map(VecDeque::len).sum();
            for queue in &mut self.queues {
                while let Some(index) = queue.front() {
                    match &self.entry.steps[*index].instruction {
                        Instruction::Wait { event, .. } if !self.passed.contains(event) => break,
                        Instruction::Collective(_) => break,
                        Instruction::Record { event, .. } => {
                            self.passed.insert(*event);
                        }
                        Instruction::Wait { .. }
                        | Instruction::Launch(_)
                        | Instruction::Gemm(_)
                        | Instruction::AttentionForward(_)
                        | Instruction::Copy { .. }
                        | Instruction::Zero { .. }
                        | Instruction::Transfer { .. } => {}
                    }
                    queue.pop_front();
                }
            }
            if self.queues.iter().map(VecDeque::len).sum::<usize>() == before {
                return;
            }
        }
    }

    /// The collective that the rank waits in.
    fn at_collective(&self) -> Option<usize> {
        let index = *self.queues[StreamId::Exchange as usize].front()?;
        matches!(self.entry.steps[index].instruction, Instruction::Collective(_)).then_some(index)
    }

    fn pass_collective(&mut self) {
        self.queues[StreamId::Exchange as usize].pop_front();
    }

    /// The first instruction that can not go on.
    fn stuck(&self) -> Option<usize> {
        self.queues.iter().find_map(|queue| queue.front().copied())
    }
}

#[cfg(test)]
mod tests {
    use tensor::DType;

    use super::*;
    use crate::instruction::{Cost, Movement, ProcessGroup, Provenance, Step};
    use crate::memory::{ArenaId, TensorRef};
    use crate::variant::EntryKind;

    const RANKS: usize = 3;

    fn at(arena: u32, elements: usize) -> TensorRef {
        TensorRef::dense(ArenaId(arena), 0, DType::F32, [elements])
    }

    fn record(event: u32, stream: StreamId) -> Instruction {
        Instruction::Record { event: EventId(event), stream }
    }

    fn wait(event: u32, stream: StreamId) -> Instruction {
        Instruction::Wait { event: EventId(event), stream }
    }

    /// Exchanges what was written, and gathers a result.
    fn instructions() -> Vec<Instruction> {
        let exchange = Collective {
            movement: Movement::AllToAll,
            group: ProcessGroup::row(RANKS),
            from: at(0, 3 * RANKS),
            to: at(1, 3 * RANKS),
        };
        let gather = Collective {
            movement: Movement::AllGather,
            group: ProcessGroup::row(RANKS),
            from: at(2, 5),
            to: at(3, 5 * RANKS),
        };
        vec![
            Instruction::Zero { at: at(0, 3 * RANKS) },
            record(0, StreamId::Compute),
            wait(0, StreamId::Exchange),
            Instruction::Collective(exchange),
            record(1, StreamId::Exchange),
            Instruction::Collective(gather),
            record(2, StreamId::Exchange),
            wait(1, StreamId::Compute),
            Instruction::Zero { at: at(1, 1) },
            wait(2, StreamId::Compute),
        ]
    }

    fn entry(instructions: Vec<Instruction>) -> Entry {
        let step = |instruction| Step { instruction, provenance: Provenance::default(), cost: Cost::default() };
        let steps = instructions.into_iter().map(step).collect();
        let (kind, name, variant) = (EntryKind::Update, String::new(), None);
        Entry { kind, name, variant, steps, inputs: vec![], outputs: vec![], stage: Default::default() }
    }

    /// The check with the instructions of one rank changed.
    fn check(rank: usize, change: impl Fn(&mut Vec<Instruction>)) -> Result<(), String> {
        let of = |number: usize| {
            let mut all = instructions();
            if number == rank {
                change(&mut all);
            }
            entry(all)
        };
        check_group(&(0..RANKS).map(of).collect::<Vec<_>>())
    }

    #[test]
    fn equal_ranks_come_to_the_end() {
        assert_eq!(check(0, |_| {}), Ok(()));
    }

    #[test]
    fn a_rank_that_leaves_out_swaps_or_resizes_a_collective_is_refused() {
        for rank in 0..RANKS {
            let dropped = check(rank, |all| drop(all.remove(5)));
            let swapped = check(rank, |all| all.swap(3, 5));
            let resized = check(rank, |all| {
                let Instruction::Collective(of) = &mut all[5] else { unreachable!("a gather is there") };
                (of.from, of.to) = (at(2, 4), at(3, 4 * RANKS));
            });
            let others = check(rank, |all| {
                let Instruction::Collective(of) = &mut all[5] else { unreachable!("a gather is there") };
                of.group.stride = 2;
            });
            let twice = check(rank, |all| all.insert(5, all[5].clone()));
            for found in [dropped, swapped, resized, others, twice] {
                let message = found.unwrap_err();
                // A swapped collective may race within its rank before the rank meets another.
                assert!(
                    message.starts_with("rank 0 waits in") || message.starts_with(&format!("rank {rank}: ")),
                    "{message}"
                );
            }
        }
    }

    #[test]
    fn a_rank_that_races_with_itself_is_refused() {
        let message = check(2, |all| drop(all.remove(7))).unwrap_err();
        assert!(message.starts_with("rank 2: ") && message.contains("no event between"), "{message}");
    }

    #[test]
    fn sizes_that_do_not_fit_the_ranks_are_refused() {
        // Made for three ranks, run by two.
        let message = check_group(&[entry(instructions()), entry(instructions())]).unwrap_err();
        assert!(message.contains("does not fit 2 ranks"), "{message}");
    }
}
