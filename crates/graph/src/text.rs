//! The text form, for people and for the compiler's tests.
//!
//! ```text
//! graph Qwen3ForCausalLM
//! %h: float[1, 8, 64] = embedding(input_ids, model.embed_tokens.weight) {padding_idx=0}
//! ```
//! Identical layers fold: the first of each kind is printed, the rest are counted.

use std::fmt;

use crate::flat::{Graph, Node, ValueId};

impl Graph {
    /// One line of the text form.
    pub fn node_text(&self, node: &Node) -> String {
        let list = |ids: &[ValueId]| ids.iter().map(|id| self.reference(*id)).collect::<Vec<_>>().join(", ");
        let outputs: Vec<String> = node.outputs.iter().map(|id| self.definition(*id)).collect();
        let attrs = if node.attrs.is_empty() { String::new() } else { format!(" {}", node.attrs) };
        format!("{} = {}({}){attrs}", outputs.join(", "), node.op, list(&node.inputs))
    }

    fn reference(&self, id: ValueId) -> String {
        let value = self.value(id);
        match value.origin {
            crate::flat::Origin::Node => format!("%{}", id.0),
            _ => value.name.clone(),
        }
    }

    fn definition(&self, id: ValueId) -> String {
        let value = self.value(id);
        let dims: Vec<String> = value.shape.iter().map(usize::to_string).collect();
        format!("%{}: {}[{}]", id.0, value.element, dims.join(", "))
    }

    /// The shape of a run of nodes without ids: equal signatures fold in print.
    fn signature(&self, nodes: &[Node]) -> Vec<String> {
        nodes
            .iter()
            .map(|node| {
                let shapes: Vec<String> =
                    node.inputs.iter().chain(&node.outputs).map(|id| format!("{:?}", self.value(*id).shape)).collect();
                format!("{} {} {}", node.op, node.attrs, shapes.join(" "))
            })
            .collect()
    }
}

/// Nodes grouped into runs of the same layer and phase.
fn runs(nodes: &[Node]) -> Vec<&[Node]> {
    nodes.chunk_by(|a, b| a.layer == b.layer && a.phase == b.phase).collect()
}

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "graph {}", self.name)?;
        for id in &self.inputs {
            let value = self.value(*id);
            writeln!(f, "  input {}: {}{:?}", value.name, value.element, value.shape)?;
        }
        // The layers that were printed since the last thing that is of none.
        let mut printed: Vec<Vec<String>> = Vec::new();
        let mut folded = 0usize;
        for run in runs(&self.nodes) {
            let signature = self.signature(run);
            if run[0].layer.is_some() && printed.contains(&signature) {
                folded += 1;
                continue;
            }
            write_folded(f, &mut folded, printed.len())?;
            write_run(f, self, run)?;
            match run[0].layer {
                Some(_) => printed.push(signature),
                None => printed.clear(),
            }
        }
        write_folded(f, &mut folded, printed.len())?;
        for (name, id) in &self.outputs {
            writeln!(f, "  output {name} = {}", self.reference(*id))?;
        }
        Ok(())
    }
}

fn write_run(f: &mut fmt::Formatter<'_>, graph: &Graph, run: &[Node]) -> fmt::Result {
    if let Some(layer) = run[0].layer {
        let stack = graph.stack_name(layer);
        let dot = if stack.is_empty() { "" } else { "." };
        writeln!(f, "  layer {stack}{dot}{}, {}:", layer.index, run[0].phase.name())?;
    }
    let indent = if run[0].layer.is_some() { "    " } else { "  " };
    for node in run {
        writeln!(f, "{indent}{}", graph.node_text(node))?;
    }
    Ok(())
}

/// Says how many layers were left out, which are like the `printed` ones before them.
fn write_folded(f: &mut fmt::Formatter<'_>, folded: &mut usize, printed: usize) -> fmt::Result {
    if *folded > 0 {
        let these = if printed > 1 { "these" } else { "it" };
        writeln!(f, "    … and {folded} more layers like {these}")?;
        *folded = 0;
    }
    Ok(())
}
