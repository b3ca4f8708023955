//! One type for all activations and matrix operands, f32 for statistics, losses and weight
//! gradients. With bf16 this is the recipe `bf16`; with f32 it is the reference precision.

use std::collections::HashMap;

use graph::{Element, Graph, Node, Origin, ValueId};
use ops::{Append, Class, Emit, id};
use tensor::{Attrs, DType, Storage};

use crate::CompileError;

pub fn run(graph: &mut Graph, compute: DType) -> Result<(), CompileError> {
    for index in 0..graph.values.len() {
        let storage = match graph.values[index].origin {
            Origin::Parameter(id) => match graph.parameter(id).storage {
                Storage::Plain(storage) => storage,
                // What products read of it.
                Storage::Packed(_) => compute,
            },
            Origin::Input | Origin::Node | Origin::Constant | Origin::State(_) => compute,
        };
        let value = &mut graph.values[index];
        if value.element == Element::Float {
            value.element = Element::Fixed(storage);
        }
    }
    settle_views(graph);
    cast_operands(graph, compute);
    Ok(())
}

/// Views keep the type of what they look at: stacked f32 adapters are f32.
fn settle_views(graph: &mut Graph) {
    for index in 0..graph.nodes.len() {
        let node = &graph.nodes[index];
        let is_view = ops::get(node.op).class() == Class::View;
        if !is_view {
            continue;
        }
        let element = graph.value(node.inputs[0]).element;
        for output in node.outputs.clone() {
            graph.value_mut(output).element = element;
        }
    }
}

/// Matrix operands that are kept in another type (f32 adapters under bf16) are rounded before use,
/// once for all uses.
fn cast_operands(graph: &mut Graph, compute: DType) {
    let mut casts: HashMap<ValueId, ValueId> = HashMap::new();
    let nodes = std::mem::take(&mut graph.nodes);
    let mut result: Vec<Node> = Vec::with_capacity(nodes.len());
    for mut node in nodes {
        if ops::get(node.op).class() == Class::Matmul {
            let mut append = Append::new(graph, node.phase);
            append.place_like(&node);
            for input in &mut node.inputs {
                if append.graph.value(*input).element == Element::Fixed(compute) {
                    continue;
                }
                *input = *casts
                    .entry(*input)
                    .or_insert_with(|| append.emit(id::CAST, &[*input], Attrs::new().with("dtype", compute.name()))[0]);
            }
            result.append(&mut append.nodes);
        }
        result.push(node);
    }
    graph.nodes = result;
}
