//! Random schedules: what is touched is there, as it was written last; nothing leaves before its last use; and the
//! events order the streams, so that no timing changes this (`program::check_order`).

use program::{ArenaId, Arithmetic, Entry, EntryKind, Instruction, Launch, Provenance, Step, TensorRef, check_order};
use tensor::DType;
use tensor::philox::{Purpose, word};

use super::super::clock::Clock;
use super::super::{Homes, LiveRange, Streams, Transfers, ring};
use super::{Resident, Touch, schedule, together};
use crate::memory::{Interval, arena, pack};
use crate::options::OffloadOptions;

/// Numbers below a limit, the same in every run.
struct Draw {
    seed: u64,
    drawn: u64,
}

impl Draw {
    fn below(&mut self, limit: usize) -> usize {
        self.drawn += 1;
        word(self.seed, Purpose::Shuffle, 0, 0, self.drawn) as usize % limit
    }
}

/// An activation that is written once, or a gradient that is written again and again.
fn resident(draw: &mut Draw, number: usize, start: usize, nodes: usize) -> Resident {
    let len = 64 * (1 + draw.below(20));
    let activation = draw.below(2) == 0;
    let mut nodes_of: Vec<usize> = (0..1 + draw.below(6)).map(|_| draw.below(nodes)).collect();
    // Some activations are results of the entry.
    nodes_of.extend((activation && draw.below(4) == 0).then_some(nodes));
    nodes_of.sort_unstable();
    nodes_of.dedup();
    let touch = |(index, node): (usize, &usize)| (*node, !activation || index == 0);
    let touches: Vec<Touch> = nodes_of.iter().enumerate().map(touch).collect();
    match activation {
        true => Resident { home: arena::WAITING, bytes: 0..len, buffer: Some(number), touches },
        false => Resident { home: arena::GRADIENTS, bytes: start..start + len, buffer: None, touches },
    }
}

/// The contents of tensors: the name of what each holds, and the number of times that this had been written.
#[derive(Default)]
struct Memory {
    known: Vec<(TensorRef, (String, usize))>,
    newest: std::collections::HashMap<String, usize>,
}

impl Memory {
    fn at(&self, at: &TensorRef) -> Option<(String, usize)> {
        let found = self.known.iter().find(|(known, _)| (known.arena, known.offset) == (at.arena, at.offset));
        found.map(|(_, holds)| holds.clone())
    }

    fn put(&mut self, at: &TensorRef, holds: (String, usize)) {
        self.known.retain(|(known, _)| !known.overlaps(at));
        self.known.push((at.clone(), holds));
    }

    /// Runs instructions in their order. The name of a launch is that of the resident whose tensors it touches.
    fn run(&mut self, entry: &Entry) {
        for step in &entry.steps {
            match &step.instruction {
                Instruction::Transfer { from, to, .. } => {
                    let holds = self.at(from).unwrap_or_else(|| panic!("{from} is moved, but holds nothing"));
                    self.put(to, holds);
                }
                Instruction::Launch(launch) => {
                    let newest = self.newest.get(&launch.op).copied().unwrap_or(0);
                    for at in &launch.inputs {
                        assert_eq!(self.at(at), Some((launch.op.clone(), newest)), "{at} is read");
                    }
                    self.newest.insert(launch.op.clone(), newest + launch.outputs.len());
                    launch.outputs.iter().for_each(|at| self.put(at, (launch.op.clone(), newest + 1)));
                }
                _ => {}
            }
        }
    }
}

fn launch(whose: &str, inputs: Vec<TensorRef>, outputs: Vec<TensorRef>) -> Step {
    let (op, attrs) = (whose.to_owned(), Default::default());
    let instruction = Instruction::Launch(Launch {
        op,
        attrs,
        inputs,
        outputs,
        scratch: None,
        arithmetic: Arithmetic::default(),
        calls: Vec::new(),
    });
    Step { instruction, provenance: Provenance::default(), cost: Default::default() }
}

fn entry(kind: EntryKind, streams: Streams) -> Entry {
    let entry = Entry {
        kind,
        name: String::new(),
        variant: None,
        steps: streams.steps,
        inputs: Vec::new(),
        outputs: Vec::new(),
        stage: Default::default(),
    };
    assert_eq!(check_order(&entry), Ok(()));
    entry
}

/// A micro-step in which residents are touched as they say, each by its number as a name.
fn micro_step(
    kind: EntryKind,
    residents: &[(String, Option<usize>, ArenaId, usize, Vec<Touch>)],
    live_ranges: &[LiveRange],
    nodes: usize,
) -> Entry {
    let (mut streams, from) = (Streams::default(), Provenance::default());
    let mut transfers = Transfers::new(live_ranges, kind);
    for node in 0..=nodes {
        match node == nodes {
            true => std::mem::replace(&mut transfers, Transfers::new(&[], kind)).end(node, &from, &mut streams),
            false => transfers.before(node, &from, &mut streams),
        }
        for (whose, buffer, home, start, touches) in residents {
            let Some((number, (_, writes))) = touches.iter().enumerate().find(|(_, touch)| touch.0 == node) else {
                continue;
            };
            let value = TensorRef::dense(*home, *start, DType::U8, [1]);
            let mut here = live_ranges.iter().filter(|live_range| {
                live_range.holds(&value, *buffer) && (live_range.begin..=live_range.last).contains(&node)
            });
            let Some(live_range) = here.next() else {
                assert!(
                    buffer.is_some() && !live_ranges.iter().any(|live_range| live_range.buffer == *buffer),
                    "{whose} is not there"
                );
                continue;
            };
            assert!(here.next().is_none(), "{whose} is there twice");
            let at = vec![live_range.moves[0].device.clone()];
            let made = number == 0 && (buffer.is_some() || kind == EntryKind::FirstMicroStep);
            streams.push(launch(
                whose,
                if made { Vec::new() } else { at.clone() },
                if *writes { at } else { Vec::new() },
            ));
        }
        if node < nodes {
            transfers.due(node).into_iter().for_each(|(number, _)| transfers.store(number, &from, &mut streams));
        }
    }
    entry(kind, streams)
}

/// Entries of up to 60 nodes over links from far too slow to faster than anything, two micro-steps each.
#[test]
fn micro_steps_find_what_they_touch() {
    let (mut moved, mut returns) = (0, 0);
    for seed in 0..400 {
        let mut draw = Draw { seed, drawn: 0 };
        let nodes = 4 + draw.below(57);
        let mut begins = vec![0.0];
        (0..nodes).for_each(|node| begins.push(begins[node] + draw.below(5) as f64));
        let clock = Clock { begins, link: [1.0, 1e2, 1e3, 1e5][draw.below(4)], ranks: f64::INFINITY, busy: 0.0 };
        let (mut residents, mut end) = (Vec::new(), 0);
        for number in 0..1 + draw.below(12) {
            let new = resident(&mut draw, number, end, nodes);
            end = end.max(if new.buffer.is_none() { new.bytes.end } else { 0 });
            residents.push(new);
        }
        let of = |(number, of): (usize, &Resident)| {
            (number.to_string(), of.buffer, of.home, of.bytes.start, of.touches.clone())
        };
        let named: Vec<_> = residents.iter().enumerate().map(of).collect();
        let gradients: Vec<(String, TensorRef)> = residents
            .iter()
            .enumerate()
            .filter(|(_, of)| of.buffer.is_none())
            .map(|(number, of)| {
                (number.to_string(), TensorRef::dense(of.home, of.bytes.start, DType::U8, [of.bytes.len()]))
            })
            .collect();
        let mut live_ranges = schedule(residents, &clock);
        assert!(live_ranges.iter().all(|live_range| live_range.arrives <= live_range.begin
            && live_range.begin <= live_range.last
            && live_range.last <= live_range.released));
        let span = |live_range: &LiveRange| Interval {
            bytes: live_range.bytes(),
            first: live_range.arrives,
            last: live_range.released,
        };
        let (offsets, _) = pack(&live_ranges.iter().map(span).collect::<Vec<_>>());
        live_ranges.iter_mut().zip(offsets).for_each(|(live_range, offset)| live_range.moves[0].device.offset = offset);
        let mut memory = Memory::default();
        for kind in [EntryKind::FirstMicroStep, EntryKind::NextMicroStep, EntryKind::NextMicroStep] {
            memory.known.retain(|(at, _)| at.arena == arena::GRADIENTS);
            memory.run(&micro_step(kind, &named, &live_ranges, nodes));
            for (whose, home) in &gradients {
                assert_eq!(
                    memory.at(home),
                    Some((whose.clone(), memory.newest[whose])),
                    "{home} is read by the update"
                );
            }
        }
        moved += live_ranges.iter().filter(|live_range| live_range.buffer.is_some()).count();
        returns += live_ranges.iter().filter(|live_range| live_range.buffer.is_none() && !live_range.opens).count();
    }
    assert!(moved > 200 && returns > 200, "{moved} live_ranges of activations, {returns} returns of gradients");
}

/// Updates of up to 20 pieces whose tensors are at home anywhere.
#[test]
fn updates_find_what_they_touch() {
    let on = Some(true);
    let mut slots = 0;
    for seed in 0..200 {
        let mut draw = Draw { seed, drawn: 0 };
        let some = |draw: &mut Draw| if draw.below(3) > 0 { on } else { None };
        let [optimizer, master, gradients] = std::array::from_fn(|_| some(&mut draw));
        let homes = Homes::new(&OffloadOptions { optimizer, master, gradients, ..Default::default() });
        let mut end = 0;
        let mut tensor = |draw: &mut Draw| {
            let at = [arena::OPTIMIZER, arena::MASTERS, arena::GRADIENTS, arena::WEIGHTS][draw.below(4)];
            end += 4096;
            (TensorRef::dense(at, end, DType::U8, [1 + draw.below(4096)]), at != arena::GRADIENTS)
        };
        let mut pieces: Vec<Vec<(TensorRef, bool)>> =
            (0..1 + draw.below(20)).map(|_| (0..1 + draw.below(4)).map(|_| tensor(&mut draw)).collect()).collect();
        let homes_of = pieces.clone();
        let mut memory = Memory::default();
        let named = |piece: usize, index: usize| format!("{piece}.{index}");
        for (piece, tensors) in homes_of.iter().enumerate() {
            tensors.iter().enumerate().for_each(|(index, (at, _))| memory.put(at, (named(piece, index), 0)));
        }
        let touched = pieces.iter_mut().map(|piece| piece.iter_mut().map(|(at, writes)| (at, *writes)).collect());
        let (live_ranges, bytes) = ring(touched.collect(), &homes);
        let within = |at: &TensorRef| at.arena == arena::ACTIVATIONS && at.offset + at.bytes() <= bytes;
        assert!(live_ranges.iter().flat_map(|live_range| &live_range.moves).all(|moved| within(&moved.device)));
        let (mut streams, from) = (Streams::default(), Provenance::default());
        let mut transfers = Transfers::new(&live_ranges, EntryKind::Update);
        transfers.before(0, &from, &mut streams);
        for (piece, tensors) in pieces.iter().enumerate() {
            transfers.before(piece + 1, &from, &mut streams);
            for (index, (at, writes)) in tensors.iter().enumerate() {
                assert!(!homes.streams(at.arena), "{at} is streamed");
                let outputs = if *writes { vec![at.clone()] } else { Vec::new() };
                streams.push(launch(&named(piece, index), vec![at.clone()], outputs));
            }
            transfers.due(piece + 1).into_iter().for_each(|(number, _)| transfers.store(number, &from, &mut streams));
        }
        transfers.end(pieces.len() + 1, &from, &mut streams);
        memory.run(&entry(EntryKind::Update, streams));
        for (piece, tensors) in homes_of.iter().enumerate() {
            for (index, (at, writes)) in tensors.iter().enumerate() {
                assert_eq!(memory.at(at), Some((named(piece, index), usize::from(*writes))), "{at} after the update");
            }
        }
        slots = slots.max(live_ranges.len());
    }
    assert!(slots > 10, "{slots} live_ranges at most");
}

#[test]
fn gradients_that_one_node_writes_come_together() {
    let at = |node: usize| (node, true);
    let found = together(vec![(0..8, at(3)), (8..16, at(2)), (4..8, at(5)), (16..24, at(1)), (8..24, at(7))]);
    assert_eq!(found, [(0..8, vec![at(3), at(5)]), (8..24, vec![at(1), at(2), at(7)])]);
}

/// Ten nodes of a second each; a byte and its slack take half of one.
fn ten_seconds() -> Clock {
    Clock { begins: (0..=10).map(f64::from).collect(), link: 2.5, ranks: f64::INFINITY, busy: 0.0 }
}

fn times(residents: Vec<Resident>) -> Vec<[usize; 2]> {
    schedule(residents, &ten_seconds()).iter().map(|live_range| [live_range.arrives, live_range.released]).collect()
}

#[test]
fn places_are_kept_while_the_link_is_busy() {
    let gradient = |start: usize, nodes: &[usize]| {
        let touches = nodes.iter().map(|node| (*node, true)).collect();
        Resident { home: arena::GRADIENTS, bytes: start..start + 4, buffer: None, touches }
    };
    assert_eq!(times(vec![gradient(0, &[3, 9]), gradient(4, &[4])]), [[0, 5], [2, 7], [7, 9]]);
}

/// Both share the link, in one queue for each direction.
#[test]
fn activations_wait_where_there_is_time_for_the_way() {
    let activation = |buffer: usize, written: usize, needed: usize| {
        let touches = vec![(written, true), (needed, false)];
        Resident { home: arena::WAITING, bytes: 0..4, buffer: Some(buffer), touches }
    };
    assert_eq!(times(vec![activation(0, 4, 8)]), Vec::<[usize; 2]>::new());
    assert_eq!(times(vec![activation(0, 2, 8)]), [[2, 4], [6, 8]]);
    assert_eq!(times(vec![activation(0, 0, 9), activation(1, 1, 9)]), [[0, 2], [1, 4], [5, 9], [7, 9]]);
}
