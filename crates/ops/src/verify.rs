//! Shape inference through the operations' rules, and the check of a whole graph against them.

use graph::{Element, Graph, Node, OpId, ValueType};
use tensor::Attrs;

use crate::registry::get;

/// Output types of a call by the operation's rule. Unknown attributes are errors.
pub fn infer(op: OpId, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
    let rule = get(op);
    for name in attrs.keys() {
        if !rule.attributes().iter().any(|a| a.name == name) {
            let known: Vec<&str> = rule.attributes().iter().map(|a| a.name).collect();
            return Err(format!("{op}: unknown attribute `{name}`, known are: {}", known.join(", ")));
        }
    }
    rule.infer(inputs, attrs).map_err(|message| {
        let shapes: Vec<String> = inputs.iter().map(ValueType::to_string).collect();
        format!("{op}({}): {message}", shapes.join(", "))
    })
}

/// Checks every node against its shape rule, names of axes included. The error names the node and its source line.
pub fn verify(graph: &Graph) -> Result<(), String> {
    for node in &graph.nodes {
        let inputs: Vec<ValueType> = node.inputs.iter().map(|id| graph.value(*id).value_type()).collect();
        let expected = infer(node.op, &inputs, &node.attrs).map_err(|m| at(node, &m))?;
        let found: Vec<ValueType> = node.outputs.iter().map(|id| graph.value(*id).value_type()).collect();
        let fits = expected.len() == found.len()
            && expected.iter().zip(&found).all(|(e, f)| e.shape == f.shape && compatible(e.dtype, f.dtype));
        if !fits {
            let text = |types: &[ValueType]| types.iter().map(ValueType::to_string).collect::<Vec<_>>().join(", ");
            return Err(at(node, &format!("{}: gives {}, recorded as {}", node.op, text(&expected), text(&found))));
        }
    }
    Ok(())
}

/// The recipe may narrow `float` to a concrete type and store f32 results as such.
fn compatible(rule: Element, recorded: Element) -> bool {
    rule == recorded || (rule.is_float() && recorded.is_float())
}

fn at(node: &Node, message: &str) -> String {
    match &node.at {
        Some(place) => format!("{place}: {message}"),
        None => message.to_owned(),
    }
}
