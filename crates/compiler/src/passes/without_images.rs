//! Leaves the vision tower out of an entry for batches that have no image: sums of text and rows of images are the text.
//! The parameters of the tower stay, as every entry has the same ones.

use std::collections::{HashMap, HashSet};

use graph::{Graph, ValueId};
use ops::id;
use program::Variant;

use crate::CompileError;

pub fn run(graph: &mut Graph, variant: Variant) -> Result<(), CompileError> {
    if variant.patches > 0 {
        return Ok(());
    }
    let taken: HashSet<ValueId> =
        graph.nodes.iter().filter(|node| node.op == id::TAKE_ROWS).map(|node| node.outputs[0]).collect();
    if taken.is_empty() {
        return Ok(());
    }
    let mut same: HashMap<ValueId, ValueId> = HashMap::new();
    for mut node in std::mem::take(&mut graph.nodes) {
        for input in &mut node.inputs {
            *input = same.get(input).copied().unwrap_or(*input);
        }
        let of_text: Vec<ValueId> = node.inputs.iter().copied().filter(|id| !taken.contains(id)).collect();
        match of_text[..] {
            _ if of_text.len() == node.inputs.len() => graph.nodes.push(node),
            [text] if node.op == id::ADD => drop(same.insert(node.outputs[0], text)),
            _ => {
                let problem =
                    format!("`{}` reads rows of images, which may only be added to those of text", node.op.name());
                return Err(CompileError::Model(format!("{}: {problem}", graph.name)));
            }
        }
    }
    graph.nodes.retain(|node| node.op != id::TAKE_ROWS);
    for (_, value) in &mut graph.outputs {
        *value = same.get(value).copied().unwrap_or(*value);
    }
    crate::passes::dead_code::run(graph)
}

#[cfg(test)]
mod tests {
    use graph::{Element, Node, OpId, Origin, Phase};
    use program::Documents;
    use tensor::Attrs;

    use super::*;

    fn add(graph: &mut Graph, op: OpId, inputs: &[ValueId]) -> ValueId {
        let output = graph.add_value(op.name(), Element::Float, vec![1, 4], Origin::Node);
        graph.nodes.push(Node {
            op,
            inputs: inputs.to_vec(),
            outputs: vec![output],
            attrs: Attrs::new(),
            phase: Phase::Forward,
            layer: None,
            region: None,
            at: None,
        });
        output
    }

    /// A text to which rows of a tower are added, and what else is done with these.
    fn with_tower(other: Option<OpId>) -> (Graph, ValueId) {
        let mut graph = Graph::default();
        let float = |graph: &mut Graph, name: &str| graph.add_input(name, Element::Float, vec![1, 4]);
        let (text, patches) = (float(&mut graph, "x"), float(&mut graph, "patches"));
        let index = graph.add_input("image_rows", Element::I32, vec![1]);
        let tower = add(&mut graph, id::DETACH, &[patches]);
        let taken = add(&mut graph, id::TAKE_ROWS, &[tower, index, index]);
        let sum = add(&mut graph, id::ADD, &[text, taken]);
        let last = add(&mut graph, id::DETACH, &[sum]);
        graph.outputs.push(("y".into(), last));
        if let Some(op) = other {
            let read = add(&mut graph, op, &[taken]);
            graph.outputs.push(("z".into(), read));
        }
        (graph, text)
    }

    fn shape(patches: usize) -> Variant {
        Variant { batch: 1, seq_len: 1, documents: Documents::Rows, patches, logits: 0 }
    }

    #[test]
    fn without_patches_the_text_alone_is_computed() {
        let (mut graph, text) = with_tower(None);
        let whole = graph.nodes.len();
        run(&mut graph, shape(16)).unwrap();
        assert_eq!(graph.nodes.len(), whole);
        run(&mut graph, shape(0)).unwrap();
        assert_eq!(graph.nodes.len(), 1);
        assert_eq!((graph.nodes[0].op, &graph.nodes[0].inputs), (id::DETACH, &vec![text]));
    }

    #[test]
    fn rows_of_images_that_are_not_added_are_refused() {
        let (mut graph, _) = with_tower(Some(id::DETACH));
        let error = run(&mut graph, shape(0)).unwrap_err().to_string();
        assert!(error.contains("`detach` reads rows of images"), "{error}");
    }
}
