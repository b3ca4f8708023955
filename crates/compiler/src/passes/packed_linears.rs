//! Frozen linears of the layers are kept in codes where the options ask for it, or where their files hold them so: marks
//! their weights. What reads them still reads numbers; `plan/dequantise.rs` makes these. Codes of transposes are kept of
//! matrices that grouped products alone read: not where a recipe makes codes of its own from them. Tiles of four bits are those
//! that a recipe makes of the weights, so they share its scales: those of all linears that read one value, or of an expert.

use std::collections::{HashMap, HashSet};

use graph::{Graph, Node, Origin, ParameterId, ValueId};
use ops::id;
use tensor::Storage;
use tensor::packed::Quantisation;

use crate::recipes::groups;
use crate::{CompileError, CompileOptions};

pub fn run(graph: &mut Graph, options: &CompileOptions) -> Result<(), CompileError> {
    if options.quantised.is_none() && options.stored.is_empty() {
        return Ok(());
    }
    if options.adapter.is_none() && options.training.is_some() {
        return Err(CompileError::Options("quantised weights are frozen: only adapters on them are trained".into()));
    }
    let weights = weights(graph);
    let other_readers = read_by_others(graph);
    let mut any = false;
    for (ParameterId(index), is_apart) in weights {
        let parameter = &mut graph.parameters[index as usize];
        let fitting = options.quantised.filter(|quantised| !is_apart && quantised.fits(&parameter.shape));
        let stored = options.stored.get(&parameter.name).copied();
        let as_they_lie = !options.recipe.quantises_weights() && !other_readers.contains(&parameter.value);
        let stored = stored.filter(|of| !of.transposed || as_they_lie);
        let packing = stored.or(fitting.map(Quantisation::packing));
        if let Some(packing) = packing.filter(|_| !parameter.table && !parameter.saved) {
            parameter.storage = Storage::Packed(packing);
            any = true;
        }
    }
    if options.quantised == Some(Quantisation::Fp4Tiles) {
        share_magnitudes(graph);
    }
    match any || options.quantised.is_none() {
        true => Ok(()),
        false => Err(CompileError::Options(format!("{}: no linear of a layer can be quantised", graph.name))),
    }
}

/// Marks the weights in codes that a recipe scales by one magnitude.
fn share_magnitudes(graph: &mut Graph) {
    let groups = groups::weights(graph);
    for (number, members) in groups.into_iter().enumerate() {
        let is_packed = |id: &ParameterId| matches!(graph.parameter(*id).storage, Storage::Packed(_));
        let packed: Vec<ParameterId> = members.into_iter().filter(is_packed).collect();
        for ParameterId(index) in packed.iter().filter(|_| packed.len() > 1) {
            graph.parameters[*index as usize].magnitude_group = Some(number as u32);
        }
    }
}

/// Returns the values that have readers other than grouped products, which take transposed matrices as well.
fn read_by_others(graph: &Graph) -> HashSet<ValueId> {
    let reads = |node: &Node| {
        let is_matrices = |place: usize| node.op == id::GROUPED_LINEAR && place == 1;
        let others = node.inputs.iter().enumerate().filter(|(place, _)| !is_matrices(*place));
        others.map(|(_, id)| *id).collect::<Vec<_>>()
    };
    let results = graph.outputs.iter().map(|(_, id)| *id);
    graph.nodes.iter().chain(&graph.prepared).flat_map(reads).chain(results).collect()
}

/// The matrices that products of the layers read, those of experts too, but not routers: their scores decide. With each
/// whether its layer is of a part other than the text.
pub fn weights(graph: &Graph) -> Vec<(ParameterId, bool)> {
    let routed: HashSet<ValueId> =
        graph.nodes.iter().filter(|node| node.op == id::ROUTE).map(|node| node.inputs[0]).collect();
    let stacks: HashMap<ValueId, &Node> =
        graph.nodes.iter().filter(|node| node.op == id::STACK).map(|node| (node.outputs[0], node)).collect();
    let parameter = |value: &ValueId| match graph.value(*value).origin {
        Origin::Parameter(id) => Some(id),
        Origin::Input | Origin::Node | Origin::Constant | Origin::State(_) => None,
    };
    let mut found = Vec::new();
    for (node, layer) in graph.nodes.iter().filter_map(|node| Some((node, node.layer?))) {
        let marked = |id: ParameterId| (id, graph.is_apart(layer));
        let is_product = node.op == id::LINEAR || node.op == id::GROUPED_LINEAR;
        let Some(weight) = node.inputs.get(1).filter(|_| is_product && !routed.contains(&node.outputs[0])) else {
            continue;
        };
        match stacks.get(weight) {
            Some(stack) => found.extend(stack.inputs.iter().filter_map(parameter).map(marked)),
            None => found.extend(parameter(weight).map(marked)),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use graph::{Element, Init, Layer, Phase};
    use ops::{Append, Emit};
    use tensor::{Attrs, DType};

    use super::*;

    #[test]
    fn weights_are_marked_by_the_part_of_their_layer() {
        let mut graph = Graph { apart: vec![1], ..Graph::default() };
        let x = graph.add_input("x", Element::Fixed(DType::BF16), vec![2, 4, 32]);
        let ids = ["w0", "w1"].map(|name| graph.add_parameter(name, vec![32, 32], Init::Ones, DType::BF16));
        let values = ids.map(|id| graph.parameter(id).value);
        let mut append = Append::new(&mut graph, Phase::Forward);
        for (stack, weight) in values.into_iter().enumerate() {
            append.layer = Some(Layer { stack: stack as u32, index: 0 });
            append.emit(id::LINEAR, &[x, weight], Attrs::new());
        }
        let nodes = append.nodes;
        graph.nodes = nodes;
        assert_eq!(weights(&graph), [(ids[0], false), (ids[1], true)]);
    }
}
