//! The model's own dropout, active only in training steps. There each dropout gets the run's seed and its own stream;
//! everywhere else it is the identity.
//!
//! Dropout of attention weights has no kernel and is left out, of which the plan of a run has a note.

use graph::Graph;
use ops::id;
use program::EntryKind;

use crate::CompileOptions;

/// Streams below are those of the adapters.
const FIRST_STREAM: u64 = 1 << 16;

pub fn run(graph: &mut Graph, options: &CompileOptions, kind: EntryKind) {
    let drops = kind == EntryKind::FirstMicroStep && options.training.as_ref().is_some_and(|training| training.dropout);
    for node in graph.nodes.iter_mut().filter(|node| node.op == id::ATTENTION) {
        node.attrs.remove("dropout");
    }
    let places = graph.nodes.iter_mut().filter(|node| node.op == id::DROPOUT);
    for (stream, node) in (FIRST_STREAM..).zip(places) {
        node.attrs = match drops {
            true => node.attrs.clone().with("seed", options.seed).with("stream", stream),
            false => node.attrs.clone().with("p", 0.0),
        };
    }
}
