//! Programs that move bytes between device and host memory: what a machine's link is measured with.
//!
//! Knows streams and arenas; neither clocks nor what is made of the times.

use program::{
    Arena, ArenaId, ArenaKind, Cluster, Documents, Entry, EntryKind, Layout, Machine, MemorySpace, Program, Provenance,
    StreamId, TensorRef, Variant,
};
use tensor::DType;

use crate::residency::Streams;

/// Bytes that go one way: a few milliseconds of a fast link.
pub const LINK_BYTES: usize = 256 << 20;

/// The programs of a link, each of which moves [`Links::bytes`] in each of its directions.
pub struct Links {
    pub to_device: Program,
    pub to_host: Program,
    pub both: Program,
    pub bytes: usize,
}

/// The programs for a machine.
pub fn links(machine: &Machine) -> Links {
    let of = |directions: &[StreamId]| link(directions, machine);
    Links {
        to_device: of(&[StreamId::ToDevice]),
        to_host: of(&[StreamId::ToHost]),
        both: of(&[StreamId::ToDevice, StreamId::ToHost]),
        bytes: LINK_BYTES,
    }
}

fn link(directions: &[StreamId], machine: &Machine) -> Program {
    let origin = Provenance { op: "transfer".into(), phase: program::Phase::Forward, layer: None, at: None };
    // Each direction has its own half of both arenas.
    let at = |arena: u32, half: usize| TensorRef::dense(ArenaId(arena), half * LINK_BYTES, DType::U8, [LINK_BYTES]);
    let mut stream = Streams::default();
    for direction in directions {
        let moved = if *direction == StreamId::ToDevice { (at(1, 0), at(0, 0)) } else { (at(0, 1), at(1, 1)) };
        stream.transfer(*direction, &moved.0, &moved.1, &origin);
    }
    for direction in directions {
        let event = stream.record(*direction, &origin);
        stream.wait(StreamId::Compute, event, &origin);
    }
    let host = MemorySpace::Host { write_combined: false };
    Program {
        name: "link".into(),
        machine: machine.clone(),
        cluster: Cluster::ONE,
        arenas: vec![
            Arena::on_device(ArenaKind::Batch, 2 * LINK_BYTES),
            Arena { kind: ArenaKind::Waiting, bytes: 2 * LINK_BYTES, place: host, shards: Vec::new() },
        ],
        layout: Layout::default(),
        constants: Vec::new(),
        scalars: Vec::new(),
        kernels: Vec::new(),
        entries: vec![Entry {
            kind: EntryKind::Forward,
            name: String::new(),
            variant: Some(Variant { batch: 1, seq_len: 1, documents: Documents::Rows, patches: 0, logits: 0 }),
            steps: stream.steps,
            inputs: Vec::new(),
            outputs: Vec::new(),
            stage: Default::default(),
        }],
        memory: Vec::new(),
        activations: Vec::new(),
        phases: Vec::new(),
        plan: Vec::new(),
        seed: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_of_links_cannot_race() {
        let found = links(&Machine::h200());
        for program in [&found.to_device, &found.to_host, &found.both] {
            program::check_order(&program.entries[0]).unwrap();
        }
        // Both directions at once: the sum takes as long as one of them at the rate of both.
        let seconds = |of: &Program| program::estimate(&of.entries[0], of, program::Seen::default()).seconds;
        assert!(seconds(&found.both) < 1.1 * seconds(&found.to_device));
    }
}
