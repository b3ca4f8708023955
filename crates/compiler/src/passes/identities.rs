//! Removes operations that return their input: their readers read the input instead.

use std::collections::HashMap;

use graph::{Graph, ValueId};

use crate::CompileError;

pub fn run(graph: &mut Graph) -> Result<(), CompileError> {
    let mut same: HashMap<ValueId, ValueId> = HashMap::new();
    let nodes = std::mem::take(&mut graph.nodes);
    for mut node in nodes {
        for input in &mut node.inputs {
            *input = same.get(input).copied().unwrap_or(*input);
        }
        match ops::get(node.op).unchanged(&node.attrs) {
            true => drop(same.insert(node.outputs[0], node.inputs[0])),
            false => graph.nodes.push(node),
        }
    }
    for (_, value) in &mut graph.outputs {
        *value = same.get(value).copied().unwrap_or(*value);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use graph::{Element, Node, Origin, Phase};
    use ops::id;
    use tensor::Attrs;

    use super::*;

    #[test]
    fn what_changes_nothing_goes_and_its_readers_read_the_input() {
        let mut graph = Graph::default();
        let x = graph.add_input("x", Element::Float, vec![2, 4]);
        let step = graph.add_input("micro_step", Element::I32, vec![1]);
        let mut dropout = |input: ValueId, p: f64| {
            let output = graph.add_value("dropout", Element::Float, vec![2, 4], Origin::Node);
            graph.nodes.push(Node {
                op: id::DROPOUT,
                inputs: vec![input, step],
                outputs: vec![output],
                attrs: Attrs::new().with("p", p),
                phase: Phase::Forward,
                layer: None,
                region: None,
                at: None,
            });
            output
        };
        let off = dropout(x, 0.0);
        let on = dropout(off, 0.5);
        let last = dropout(on, 0.0);
        graph.outputs.push(("y".into(), last));
        run(&mut graph).unwrap();
        assert_eq!(graph.nodes.len(), 1);
        assert_eq!((&graph.nodes[0].inputs, &graph.outputs), (&vec![x, step], &vec![("y".to_owned(), on)]));
    }
}
