//! Documents that hold branches of a common beginning, as both answers to one prompt: attention gets the last query that
//! sees each key, so that a branch does not see those before it.

use graph::{Graph, Node, Origin, ValueId};
use ops::id;

use crate::{CompileError, CompileOptions, EntryOptions};

const STARTS: &str = "document_start";
const LAST_QUERY: &str = "last_query";
/// The inputs by which the attention of a vision tower knows where images and windows begin: its rows are patches.
const OF_TOWERS: [&str; 2] = ["image_first_patch", "window_first_patch"];

/// Gives every attention of an entry over whole documents the input `last_query`.
pub fn run(graph: &mut Graph, options: &CompileOptions, entry: &EntryOptions) -> Result<(), CompileError> {
    let Some(longest) = options.branches.filter(|_| !entry.generates()) else { return Ok(()) };
    if let Some(why) = obstacle(graph, longest) {
        let message = format!("{}: answers cannot share their prompt: {why}", graph.name);
        return Err(CompileError::option("share_prompts", message, "set `share_prompts: false`"));
    }
    let Some(starts) = graph.input(STARTS) else { return Ok(()) };
    let last_query = graph.add_typed(LAST_QUERY, &graph.value(starts).value_type(), Origin::Input);
    graph.inputs.push(last_query);
    for node in graph.nodes.iter_mut().filter(|node| node.op == id::ATTENTION && node.inputs.contains(&starts)) {
        // It hides nothing of a document.
        node.attrs.remove("window");
        node.attrs = node.attrs.clone().with("branches", true);
        node.inputs.insert(4, last_query);
    }
    Ok(())
}

/// The reason why documents of up to `longest` tokens cannot hold branches; none where they can: all that mixes tokens is causal
/// attention, which sees whole documents, and nothing else asks where these begin.
pub fn obstacle(graph: &Graph, longest: usize) -> Option<String> {
    let starts = graph.input(STARTS);
    let reason = |node: &Node| {
        let (name, reads_starts) = (node.op.name(), node.inputs.iter().any(|id| Some(*id) == starts));
        match () {
            () if node.op != id::ATTENTION => (ops::get(node.op).mixes_tokens() || reads_starts)
                .then(|| format!("`{name}` carries a state from token to token")),
            () if is_of_tower(graph, node) => None,
            () if !reads_starts => Some("its attention does not ask where documents begin".to_owned()),
            () if limits(graph, node).is_some() => Some("images see themselves whole".to_owned()),
            () if node.attrs.flag("bidirectional") == Ok(true) => Some("its attention is not causal".to_owned()),
            () => {
                let window = node.attrs.optional_int("window").ok().flatten().unwrap_or(i64::MAX);
                (window < longest as i64).then(|| {
                    format!("its attention has a window of {window} tokens, and documents have up to {longest}")
                })
            }
        }
    };
    graph.nodes.iter().find_map(reason)
}

/// True for the attention of a vision tower, between patches.
fn is_of_tower(graph: &Graph, node: &Node) -> bool {
    node.inputs.get(3).is_some_and(|id| OF_TOWERS.contains(&graph.value(*id).name.as_str()))
}

/// The input that limits what the queries of an attention see.
fn limits(graph: &Graph, node: &Node) -> Option<ValueId> {
    node.inputs.get(4).copied().filter(|id| graph.value(*id).shape.len() == 2)
}

#[cfg(test)]
mod tests {
    use graph::{Element, OpId, Phase};
    use tensor::Attrs;

    use super::*;

    /// An attention with these attributes, and another reader of its first value.
    fn graph(attrs: Attrs, other: Option<(OpId, bool)>) -> Graph {
        let mut graph = Graph::default();
        let q = graph.add_value("q", Element::Float, vec![1, 9, 2, 8], Origin::Input);
        let starts = graph.add_input(STARTS, Element::I32, vec![1, 9]);
        let mut add = |op: OpId, inputs: Vec<ValueId>, attrs: Attrs| {
            let outputs = vec![q];
            graph.nodes.push(Node {
                op,
                inputs,
                outputs,
                attrs,
                phase: Phase::Forward,
                layer: None,
                region: None,
                at: None,
            });
        };
        add(id::ATTENTION, vec![q, q, q, starts], attrs);
        if let Some((op, reads_starts)) = other {
            add(op, if reads_starts { vec![q, starts] } else { vec![q] }, Attrs::new());
        }
        graph
    }

    #[test]
    fn causal_attention_over_whole_documents_can_have_branches() {
        let of = |attrs: Attrs, longest: usize| obstacle(&graph(attrs, None), longest);
        assert_eq!(of(Attrs::new(), 9), None);
        assert_eq!(of(Attrs::new().with("window", 9), 9), None);
        let narrow = of(Attrs::new().with("window", 8), 9).unwrap();
        assert!(narrow.contains("a window of 8 tokens, and documents have up to 9"), "{narrow}");
        assert!(of(Attrs::new().with("bidirectional", true), 9).unwrap().contains("not causal"));
    }

    #[test]
    fn what_else_reads_other_tokens_or_starts_cannot() {
        let of = |op: OpId, reads_starts: bool| obstacle(&graph(Attrs::new(), Some((op, reads_starts))), 9);
        assert_eq!(of(id::DETACH, false), None);
        assert!(of(id::CAUSAL_CONV, true).unwrap().contains("`causal_conv` carries a state"));
        assert!(of(id::EMBEDDING_NOISE, true).is_some());
        let mut tower = graph(Attrs::new(), None);
        tower.nodes[0].inputs[3] = tower.add_value("image_first_patch", Element::I32, vec![1, 9], Origin::Input);
        assert_eq!(obstacle(&tower, 9), None);
        tower.nodes[0].inputs[3] = tower.add_value("others", Element::I32, vec![1, 9], Origin::Input);
        assert!(obstacle(&tower, 9).unwrap().contains("where documents begin"));
    }
}
