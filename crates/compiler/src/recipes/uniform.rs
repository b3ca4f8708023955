//! One type for all activations and matrix operands, f32 for statistics, losses and weight
//! gradients. With bf16 this is the recipe `bf16`; with f32 it is the reference precision.

use std::collections::HashMap;

use graph::{Element, Graph, Node, Origin, ValueId};
use ops::{Append, Class, Emit, id};
use tensor::{Attrs, DType, HostTensor, Storage};

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
    round_factors(graph);
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

/// Factors that have the type of what they multiply.
fn round_factors(graph: &mut Graph) {
    for index in 0..graph.nodes.len() {
        let node = &graph.nodes[index];
        if node.op != id::SCALE || !node.attrs.flag("rounded").expect("checked by the shape rule") {
            continue;
        }
        let Element::Fixed(dtype) = graph.value(node.inputs[0]).element else { unreachable!("all types are decided") };
        let factor = node.attrs.float("factor").expect("checked by the shape rule");
        let rounded = HostTensor::from_f32([1], &[factor as f32]).cast(dtype).to_f64()[0];
        graph.nodes[index].attrs = Attrs::new().with("factor", rounded);
    }
}

/// Matrix operands that are kept in another type (f32 adapters under bf16) are rounded before use,
/// once for all uses. Offsets of groups are no such operands.
fn cast_operands(graph: &mut Graph, compute: DType) {
    let mut casts: HashMap<ValueId, ValueId> = HashMap::new();
    let nodes = std::mem::take(&mut graph.nodes);
    let mut result: Vec<Node> = Vec::with_capacity(nodes.len());
    for mut node in nodes {
        if ops::get(node.op).class() == Class::Matmul || node.op == id::GROUPED_LINEAR {
            let mut append = Append::new(graph, node.phase);
            append.place_like(&node);
            for input in &mut node.inputs {
                let element = append.graph.value(*input).element;
                if element == Element::Fixed(compute) || !element.is_float() {
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

#[cfg(test)]
mod tests {
    use graph::Phase;

    use super::*;

    #[test]
    fn a_rounded_factor_has_the_type_of_what_it_multiplies() {
        let factor = 3584f64.sqrt();
        let of = |rounded: bool, compute: DType| {
            let mut graph = Graph::default();
            let x = graph.add_input("x", Element::Float, vec![4]);
            let mut append = Append::new(&mut graph, Phase::Forward);
            append.emit(id::SCALE, &[x], Attrs::new().with("factor", factor).with("rounded", rounded));
            let nodes = append.nodes;
            graph.nodes.extend(nodes);
            run(&mut graph, compute).unwrap();
            graph.nodes[0].attrs.float("factor").unwrap()
        };
        assert_eq!(of(true, DType::BF16), 59.75);
        assert_eq!(of(true, DType::F32), factor as f32 as f64);
        assert_eq!(of(false, DType::BF16), factor);
    }
}
