//! A check for races between the streams of an entry: two instructions of different streams that touch the same bytes,
//! one of them writing, need an event between them. Knows reads and writes; not what is computed.

use std::collections::HashMap;
use std::ops::Range;

use crate::instruction::{EventId, Instruction, StreamId};
use crate::memory::ArenaId;
use crate::program::Entry;

const STREAMS: usize = StreamId::ALL.len();

/// A vector clock: the progress of each stream as one of them knows it.
type Clock = [usize; STREAMS];

struct Access {
    /// The number of the access in its stream, from 1.
    time: usize,
    step: usize,
    /// The bytes of its arena from the first to the last.
    bytes: Range<usize>,
    writes: bool,
}

/// Checks that every order of execution that the events of an entry allow has the results of running it instruction by
/// instruction, and that no stream is still running at its end. The error names the instructions.
pub fn check_order(entry: &Entry) -> Result<(), String> {
    let mut known: [Clock; STREAMS] = [[0; STREAMS]; STREAMS];
    // True for each stream that has waited for the beginning of the entry.
    let mut joined = [false; STREAMS];
    let mut marks: HashMap<EventId, Clock> = HashMap::new();
    let mut accesses: [HashMap<ArenaId, Vec<Access>>; STREAMS] = Default::default();
    let name = |index: usize| format!("instruction {index} of {} ({})", entry.kind.name(), entry.steps[index]);
    for (index, step) in entry.steps.iter().enumerate() {
        let stream = step.instruction.stream() as usize;
        match &step.instruction {
            Instruction::Record { event, .. } => {
                if stream != StreamId::Compute as usize && !joined[stream] {
                    return Err(format!("{}: nothing was queued on its stream", name(index)));
                }
                if marks.insert(*event, known[stream]).is_some() {
                    return Err(format!("{}: the event was recorded before", name(index)));
                }
                continue;
            }
            Instruction::Wait { event, .. } => {
                let mark = marks.get(event).ok_or_else(|| format!("{}: nothing recorded it", name(index)))?;
                joined[stream] = true;
                (0..STREAMS).for_each(|other| known[stream][other] = known[stream][other].max(mark[other]));
                continue;
            }
            Instruction::Launch(_)
            | Instruction::Gemm(_)
            | Instruction::AttentionForward(_)
            | Instruction::Copy { .. }
            | Instruction::Zero { .. }
            | Instruction::Transfer { .. }
            | Instruction::Collective(_) => {}
        }
        if stream != StreamId::Compute as usize && !joined[stream] {
            return Err(format!("{}: its stream has not waited for the beginning of the entry", name(index)));
        }
        known[stream][stream] += 1;
        let time = known[stream][stream];
        let scratch = step.instruction.scratch();
        let writes = step.instruction.writes().into_iter().chain(scratch).map(|at| (at, true));
        let touched = step.instruction.reads().into_iter().map(|at| (at, false)).chain(writes);
        for (at, writes) in touched.filter(|(at, _)| !at.is_empty()) {
            let bytes = at.offset..at.offset + at.span();
            for other in (0..STREAMS).filter(|other| *other != stream) {
                let before = accesses[other].get(&at.arena).into_iter().flatten().rev();
                let mut open = before.take_while(|before| before.time > known[stream][other]);
                let meets = |of: &Range<usize>| of.start < bytes.end && bytes.start < of.end;
                if let Some(race) = open.find(|before| (before.writes || writes) && meets(&before.bytes)) {
                    return Err(format!("{} and {} touch {at} with no event between", name(race.step), name(index)));
                }
            }
            accesses[stream].entry(at.arena).or_default().push(Access { time, step: index, bytes, writes });
        }
    }
    let end = known[StreamId::Compute as usize];
    match StreamId::ALL.into_iter().find(|stream| end[*stream as usize] < known[*stream as usize][*stream as usize]) {
        Some(stream) => Err(format!("{} ends while transfers {} are in flight", entry.kind.name(), stream.name())),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use tensor::{Attrs, DType};

    use super::*;
    use crate::arithmetic::Arithmetic;
    use crate::instruction::{Cost, Launch, Provenance, Step};
    use crate::memory::TensorRef;
    use crate::variant::EntryKind;

    fn at(arena: u32, offset: usize) -> TensorRef {
        TensorRef::dense(ArenaId(arena), offset, DType::F32, [4])
    }

    fn check(instructions: Vec<Instruction>) -> Result<(), String> {
        let step = |instruction| Step { instruction, provenance: Provenance::default(), cost: Cost::default() };
        let steps = instructions.into_iter().map(step).collect();
        check_order(&Entry {
            kind: EntryKind::Update,
            name: String::new(),
            variant: None,
            steps,
            inputs: vec![],
            outputs: vec![],
            stage: Default::default(),
        })
    }

    fn record(event: u32, stream: StreamId) -> Instruction {
        Instruction::Record { event: EventId(event), stream }
    }

    fn wait(event: u32, stream: StreamId) -> Instruction {
        Instruction::Wait { event: EventId(event), stream }
    }

    /// Zeroed, stored, and overwritten when that is done.
    fn stored() -> Vec<Instruction> {
        vec![
            Instruction::Zero { at: at(0, 0) },
            record(0, StreamId::Compute),
            wait(0, StreamId::ToHost),
            Instruction::Transfer { from: at(0, 0), to: at(1, 0), stream: StreamId::ToHost },
            record(1, StreamId::ToHost),
            wait(1, StreamId::Compute),
            Instruction::Zero { at: at(0, 8) },
        ]
    }

    #[test]
    fn every_event_of_a_store_is_needed() {
        assert_eq!(check(stored()), Ok(()));
        for (left_out, expected) in [(2, "has not waited"), (5, "no event between")] {
            let mut instructions = stored();
            instructions.remove(left_out);
            let message = check(instructions).unwrap_err();
            assert!(message.contains(expected), "{message}");
        }
        let mut early = stored();
        early.swap(0, 2);
        early.swap(0, 1);
        let message = check(early).unwrap_err();
        assert!(message.contains("no event between"), "{message}");
        let mut elsewhere = stored();
        elsewhere.remove(5);
        elsewhere[5] = Instruction::Zero { at: at(0, 16) };
        assert!(check(elsewhere).unwrap_err().contains("are in flight"));
    }

    #[test]
    fn streams_are_ordered_through_one_another() {
        let fetched = |through: bool| {
            let mut all = stored();
            all.truncate(5);
            // A load of bytes that are being stored needs the store's event, which the computation may pass on.
            all.extend(through.then(|| wait(1, StreamId::Compute)));
            all.extend([record(2, StreamId::Compute), wait(2, StreamId::ToDevice)]);
            all.extend([
                Instruction::Transfer { from: at(1, 0), to: at(0, 64), stream: StreamId::ToDevice },
                record(3, StreamId::ToDevice),
                wait(3, StreamId::Compute),
                Instruction::Copy { from: at(0, 64), to: at(0, 80) },
                record(4, StreamId::ToHost),
                wait(4, StreamId::Compute),
            ]);
            check(all)
        };
        assert_eq!(fetched(true), Ok(()));
        assert!(fetched(false).unwrap_err().contains("no event between"));
    }

    #[test]
    fn a_workspace_is_not_fetched_into() {
        let launch = |scratch: usize| {
            Instruction::Launch(Launch {
                op: "test".into(),
                attrs: Attrs::new(),
                inputs: vec![],
                outputs: vec![],
                scratch: Some(at(0, scratch)),
                arithmetic: Arithmetic::default(),
                calls: vec![],
            })
        };
        let fetched = |scratch: usize| {
            check(vec![
                record(0, StreamId::Compute),
                wait(0, StreamId::ToDevice),
                Instruction::Transfer { from: at(1, 0), to: at(0, 0), stream: StreamId::ToDevice },
                record(1, StreamId::ToDevice),
                launch(scratch),
                wait(1, StreamId::Compute),
            ])
        };
        assert_eq!(fetched(16), Ok(()));
        assert!(fetched(8).unwrap_err().contains("no event between"));
    }

    #[test]
    fn what_was_never_recorded_is_not_waited_for() {
        assert!(check(vec![wait(0, StreamId::Compute)]).unwrap_err().contains("nothing recorded"));
        assert!(
            check(vec![record(0, StreamId::Compute), record(0, StreamId::Compute)]).unwrap_err().contains("before")
        );
    }
}
