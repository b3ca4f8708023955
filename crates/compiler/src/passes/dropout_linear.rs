//! Fuses adapter dropout into the adapter's products: the mask is generated where it is used, and the masked copy is
//! neither written nor saved for the backward pass. Only for GPUs whose tiles support the shapes.
//!
//! Forward, t = dropout(x)·aᵀ. Backward, da = dtᵀ·dropout(x) and dx = base + dropout(dt·a) are one operation.

use graph::{Element, Graph, Node, ValueId};
use ops::id;
use program::Machine;
use tensor::DType;

use crate::CompileError;

pub fn run(graph: &mut Graph, machine: &Machine) -> Result<(), CompileError> {
    let mut nodes: Vec<Option<Node>> = graph.nodes.iter().cloned().map(Some).collect();
    let uses = Uses::of(graph);
    // The tiles count elements from the beginning of a tensor, which a part of a sequence does not begin with.
    let whole = |node: &&Node| node.op == id::DROPOUT && node.attrs.get("first_per_part").is_none();
    for (index, node) in graph.nodes.iter().enumerate().filter(|(_, node)| whole(node)) {
        let readers = &uses.readers[node.outputs[0].0 as usize];
        let fits = |reader: &usize| is_forward(graph, *reader, node, machine) || is_backward(graph, *reader, node);
        if readers.is_empty() || uses.is_output(node.outputs[0]) || !readers.iter().all(fits) {
            continue;
        }
        nodes[index] = None;
        for reader in readers {
            if is_backward(graph, *reader, node) {
                way_back(graph, &uses, *reader, node, &mut nodes);
            } else {
                let product = &graph.nodes[*reader];
                let inputs = vec![node.inputs[0], node.inputs[1], product.inputs[1]];
                let attrs = node.attrs.clone();
                nodes[*reader] = Some(Node { op: id::DROPOUT_LINEAR, inputs, attrs, ..product.clone() });
            }
        }
    }
    graph.nodes = nodes.into_iter().flatten().collect();
    Ok(())
}

/// The readers and the producer of each value.
struct Uses {
    readers: Vec<Vec<usize>>,
    producers: Vec<Option<usize>>,
    /// Uses by nodes, as an output or as a gradient.
    counts: Vec<usize>,
}

impl Uses {
    fn of(graph: &Graph) -> Uses {
        let mut readers = vec![Vec::new(); graph.values.len()];
        for (index, node) in graph.nodes.iter().enumerate() {
            node.inputs.iter().for_each(|id| readers[id.0 as usize].push(index));
        }
        Uses { readers, producers: graph.producers(), counts: graph.use_counts() }
    }

    fn is_output(&self, id: ValueId) -> bool {
        self.counts[id.0 as usize] > self.readers[id.0 as usize].len()
    }

    /// The only reader of a value.
    fn sole(&self, id: ValueId) -> Option<usize> {
        match self.readers[id.0 as usize].as_slice() {
            [reader] if !self.is_output(id) => Some(*reader),
            _ => None,
        }
    }
}

fn bf16(graph: &Graph, ids: &[ValueId]) -> bool {
    ids.iter().all(|id| graph.value(*id).element == Element::Fixed(DType::BF16))
}

/// True for the product with an adapter's first factor, in a shape that the tiles take.
fn is_forward(graph: &Graph, index: usize, dropout: &Node, machine: &Machine) -> bool {
    let node = &graph.nodes[index];
    let plain = node.op == id::LINEAR && node.attrs.is_empty() && node.inputs[0] == dropout.outputs[0];
    let shape = |id: ValueId| graph.value(id).shape.as_slice();
    plain
        && bf16(graph, &[dropout.inputs[0], node.inputs[1]])
        && matches!(shape(node.inputs[1]), [rank, columns] if ops::dropout_linear_fits(machine, *columns, *rank))
}

/// True for the gradient of that factor.
fn is_backward(graph: &Graph, index: usize, dropout: &Node) -> bool {
    let node = &graph.nodes[index];
    let flag = |name: &str| node.attrs.flag(name).unwrap_or(false);
    let factors = node.op == id::MATMUL && node.inputs[1] == dropout.outputs[0] && node.inputs[0] != dropout.outputs[0];
    factors && flag("transpose_a") && flag("f32") && node.attrs.len() == 2 && bf16(graph, &node.inputs[..1])
}

/// Replaces the gradient of the factor and, where it is found, the gradient of the input.
fn way_back(graph: &Graph, uses: &Uses, index: usize, dropout: &Node, nodes: &mut [Option<Node>]) {
    let product = &graph.nodes[index];
    let mut joined = Node {
        op: id::DROPOUT_LINEAR_BACKWARD,
        inputs: vec![product.inputs[0], dropout.inputs[0], dropout.inputs[1]],
        attrs: dropout.attrs.clone(),
        ..product.clone()
    };
    nodes[index] = None;
    let Some(back) = input_gradient(graph, uses, product.inputs[0], dropout) else {
        nodes[index] = Some(joined);
        return;
    };
    let place = index.min(back.product);
    // The gradient of the base weight was there first; otherwise the sum stays where it is.
    if uses.producers[back.base.0 as usize].is_some_and(|made| made > place) {
        nodes[index] = Some(joined);
        return;
    }
    joined.inputs.extend([graph.nodes[back.product].inputs[1], back.base]);
    joined.outputs.push(graph.nodes[back.sum].outputs[0]);
    [back.product, back.dropout, back.sum].iter().for_each(|taken| nodes[*taken] = None);
    nodes[place] = Some(joined);
}

/// The nodes of base + dropout(dt·a).
struct Back {
    product: usize,
    dropout: usize,
    sum: usize,
    base: ValueId,
}

/// Finds the sum in which the gradient `dt` comes back through `dropout`.
fn input_gradient(graph: &Graph, uses: &Uses, dt: ValueId, dropout: &Node) -> Option<Back> {
    let node = |index: usize| &graph.nodes[index];
    let is_product = |index: &&usize| {
        let product = node(**index);
        product.op == id::MATMUL && product.attrs.is_empty() && product.inputs[0] == dt && bf16(graph, &product.inputs)
    };
    let product = *uses.readers[dt.0 as usize].iter().find(is_product)?;
    let masked = uses.sole(node(product).outputs[0])?;
    let same = node(masked).op == id::DROPOUT && node(masked).attrs == dropout.attrs;
    let sum = uses.sole(node(masked).outputs[0]).filter(|sum| same && node(*sum).op == id::ADD)?;
    let base = *node(sum).inputs.iter().find(|id| **id != node(masked).outputs[0])?;
    let shape = |id: ValueId| &graph.value(id).shape;
    (bf16(graph, &[base]) && shape(base) == shape(dropout.inputs[0])).then_some(Back {
        product,
        dropout: masked,
        sum,
        base,
    })
}
