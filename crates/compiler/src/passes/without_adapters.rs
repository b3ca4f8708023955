//! Takes the adapters' products out of an entry that wants the base model. The matrices stay in the parameter table,
//! which all entries share.

use graph::Graph;

use crate::{CompileError, EntryOptions};
use ops::id;

pub fn run(graph: &mut Graph, entry: &EntryOptions) -> Result<(), CompileError> {
    if entry.adapter {
        return Ok(());
    }
    for node in graph.nodes.iter_mut().filter(|node| node.op == id::LINEAR && node.attrs.get("columns").is_some()) {
        let bias = node.attrs.flag("bias").unwrap_or(false);
        node.inputs.truncate(2 + usize::from(bias));
        node.attrs.remove("columns");
        node.attrs.remove("scale");
    }
    Ok(())
}
