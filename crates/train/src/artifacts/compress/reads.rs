//! The matrices of a layer and the values that they are multiplied with, as the layer's graph has them.
//!
//! Knows operations by their names; not weights.

use graph::{Block, NodeSpec};

/// The operations of a linear layer, and of a matrix for each expert.
pub const LINEAR: &str = "linear";
pub const GROUPED: &str = "grouped_linear";

/// A value of a layer, and the matrices that it is multiplied with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read {
    pub value: String,
    /// Names of parameters, with `{i}`; of experts those of the first one first.
    pub matrices: Vec<String>,
    pub experts: Option<Experts>,
}

/// Values by which the rows of tokens lie in the order of their experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Experts {
    pub count: usize,
    /// i32 [experts + 1]: the first row of each.
    pub offsets: String,
    /// i32: for each row the number of its choice, of which every token has as many.
    pub order: String,
}

/// The values that matrices of a layer are multiplied with, in the order of the graph.
pub fn reads(block: &Block) -> Vec<Read> {
    let mut found: Vec<Read> = Vec::new();
    for node in &block.nodes {
        let Some(value) = node.inputs.first() else { continue };
        let matrices = matrices_of(block, node);
        let experts = if node.op == GROUPED { experts_of(block, node) } else { None };
        if matrices.is_empty() || (node.op == GROUPED) != experts.is_some() {
            continue;
        }
        match found.iter_mut().find(|read| read.value == *value && read.experts == experts && experts.is_none()) {
            Some(read) => read.matrices.extend(matrices),
            None => found.push(Read { value: value.clone(), matrices, experts }),
        }
    }
    found
}

/// The parameters of the layer that are the matrices of a product; none of another operation, or of matrices in one tensor.
pub fn matrices_of(block: &Block, node: &NodeSpec) -> Vec<String> {
    let is_parameter = |name: &&String| block.parameters.iter().any(|of| of.name == **name);
    let Some(weight) = node.inputs.get(1) else { return Vec::new() };
    match node.op.as_str() {
        LINEAR => Some(weight).filter(is_parameter).cloned().into_iter().collect(),
        GROUPED => {
            let stack = maker(block, weight).filter(|node| node.op == "stack");
            let parts = stack.map_or(&[][..], |node| &node.inputs);
            if parts.iter().all(|part| is_parameter(&part)) { parts.to_vec() } else { Vec::new() }
        }
        _ => Vec::new(),
    }
}

/// The node of a layer that makes a value.
pub fn maker<'b>(block: &'b Block, value: &str) -> Option<&'b NodeSpec> {
    block.nodes.iter().find(|node| node.outputs.iter().any(|name| name == value))
}

/// The nodes of a layer that read a value or parameter.
pub fn readers<'b>(block: &'b Block, value: &str) -> impl Iterator<Item = &'b NodeSpec> {
    block.nodes.iter().filter(move |node| node.inputs.iter().any(|name| name == value))
}

fn experts_of(block: &Block, node: &NodeSpec) -> Option<Experts> {
    let offsets = node.inputs.get(2)?;
    let by = maker(block, offsets).filter(|node| node.op == "group_rows")?;
    let count = by.attrs.size("groups").ok()?;
    Some(Experts { count, offsets: offsets.clone(), order: by.outputs[0].clone() })
}
