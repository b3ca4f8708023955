//! NEFTune: noise on what the tokens' embedding gives, in training steps alone. Other tables, such as those of positions,
//! stay as they are.

use graph::{Element, Graph, Phase, ValueId};
use ops::{Append, Emit, id};
use program::EntryKind;
use tensor::Attrs;

use crate::{CompileError, CompileOptions};

const TOKENS: &str = "input_ids";
const STARTS: &str = "document_start";

pub fn run(graph: &mut Graph, options: &CompileOptions, kind: EntryKind) -> Result<(), CompileError> {
    let alpha = options.training.as_ref().map_or(0.0, |training| training.embedding_noise);
    if alpha == 0.0 || kind != EntryKind::FirstMicroStep {
        return Ok(());
    }
    let tokens = graph.input(TOKENS);
    let reads_tokens = |input: Option<&ValueId>| input.is_some_and(|input| Some(*input) == tokens);
    let place = graph.nodes.iter().position(|node| node.op == id::EMBEDDING && reads_tokens(node.inputs.first()));
    let (Some(place), Some(starts)) = (place, graph.input(STARTS)) else {
        let missing = format!("{}: noise on embeddings needs an embedding of `{TOKENS}` and `{STARTS}`", graph.name);
        return Err(CompileError::option("neftune_noise_alpha", missing, "remove `neftune_noise_alpha`"));
    };
    let step = scalar_of_step(graph);
    let (node, noisy) = (graph.nodes[place].clone(), graph.nodes[place].outputs[0]);
    // Whoever read the embedding reads the sum.
    let plain = graph.add(graph.value(noisy).clone());
    graph.nodes[place].outputs[0] = plain;
    let mut append = Append::new(graph, Phase::Forward);
    append.place_like(&node);
    let attrs = Attrs::new().with("alpha", alpha).with("seed", options.seed);
    append.emit(id::EMBEDDING_NOISE, &[plain, starts, step], attrs);
    let mut made = append.nodes.pop().expect("it was just emitted");
    made.outputs[0] = noisy;
    graph.nodes.insert(place + 1, made);
    Ok(())
}

/// The number of the micro-batch.
pub(super) fn scalar_of_step(graph: &mut Graph) -> ValueId {
    const NAME: &str = "micro_step";
    graph.input(NAME).unwrap_or_else(|| graph.add_input(NAME, Element::I32, vec![1]))
}
