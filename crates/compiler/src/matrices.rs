//! The matrices of a model by what they are used for, found in its graph.

use std::collections::HashSet;

use graph::{Graph, Model, Origin, Parameter, ParameterId, ValueId};
use ops::id;

use crate::passes::packed_linears;
use crate::recipes::groups;
use crate::{CompileError, CompileOptions, first_entry};

/// The use of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MatrixUse {
    /// A product of the text's layers, or of an expert.
    Layer,
    /// The scores by which tokens choose experts.
    Router,
    /// A product of the layers of a tower.
    Tower,
    /// The product that gives logits.
    Head,
    /// The head's, and looked up for each token, too.
    Tied,
}

/// Returns the matrices of a model with their uses: those of layers in the order of the graph, then routers, then the head. Left
/// out: scores that weigh a shared expert. Cheap, as [`crate::parameters`] is.
pub fn matrices(model: &Model, options: &CompileOptions) -> Result<Vec<(Parameter, MatrixUse)>, CompileError> {
    let graph = first_entry(model, options)?;
    let routers = groups::routers(&graph);
    let (mut found, mut seen): (Vec<(ParameterId, MatrixUse)>, HashSet<ParameterId>) = Default::default();
    for (id, is_apart) in packed_linears::weights(&graph) {
        let of = if is_apart { MatrixUse::Tower } else { MatrixUse::Layer };
        if !routers.contains(&id) && !graph.parameter(id).table && seen.insert(id) {
            found.push((id, of));
        }
    }
    let mut routers: Vec<ParameterId> = routers.into_iter().collect();
    routers.sort_by_key(|id| id.0);
    found.extend(routers.into_iter().map(|id| (id, MatrixUse::Router)));
    if let Some(id) = head(&graph) {
        let looked_up = graph.nodes.iter().filter(|node| node.op == id::EMBEDDING).flat_map(|node| &node.inputs);
        let is_tied = looked_up.filter_map(|value| parameter(&graph, *value)).any(|of| of == id);
        found.push((id, if is_tied { MatrixUse::Tied } else { MatrixUse::Head }));
    }
    let all = found.into_iter().map(|(id, of)| (graph.parameter(id).clone(), of));
    Ok(all.filter(|(of, _)| of.shape.iter().all(|extent| *extent > 1)).collect())
}

fn parameter(graph: &Graph, value: ValueId) -> Option<ParameterId> {
    match graph.value(value).origin {
        Origin::Parameter(id) => Some(id),
        Origin::Input | Origin::Node | Origin::Constant | Origin::State(_) => None,
    }
}

/// The matrix of the product that gives logits; what follows the product may scale or bound them.
fn head(graph: &Graph) -> Option<ParameterId> {
    let producers = graph.producers();
    let (_, value) = graph.outputs.iter().find(|(name, _)| name == "logits")?;
    let mut place = producers[value.0 as usize];
    while let Some(node) = place.map(|index| &graph.nodes[index]) {
        if node.op == id::LINEAR {
            return parameter(graph, node.inputs[1]);
        }
        place = node.inputs.first().and_then(|id| producers[id.0 as usize]);
    }
    None
}
