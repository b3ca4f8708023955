//! q|k|v and gate|up as one matrix product: linears that share an input become one linear over the
//! stacked weights, and their results are slices of its result. Adapter matrices that share an
//! input merge the same way.
//!
//! A group merges only if its weights can be contiguous: equal storage, all trained or none, all or none quantised,
//! none transposed, none with a bias (its terms lie apart: Qwen2's q, k and v stay three products), and each but the
//! last a multiple of the arena alignment long. Where optimizer states are sharded, the optimizer must treat them
//! alike, too: what it treats alike is cut as a whole.

use std::collections::HashMap;

use graph::{Graph, Layer, Node, Origin, ParameterId, ValueId};
use ops::{Append, Emit, id};
use tensor::Attrs;

use crate::CompileError;
use crate::memory::{ALIGNMENT_ELEMENTS, updated_alike};
use crate::options::CompileOptions;
use crate::recipes::Alike;

pub fn run(graph: &mut Graph, options: &CompileOptions) -> Result<(), CompileError> {
    let groups = find_groups(graph, options);
    let mut group_of: HashMap<usize, usize> = HashMap::new();
    for (group, members) in groups.iter().enumerate() {
        for (position, member) in members.iter().enumerate() {
            group_of.insert(*member, group);
            let ParameterId(id) = weight(graph, &graph.nodes[*member]).expect("groups hold linears over parameters");
            graph.parameters[id as usize].merge_group = Some((group as u32, position as u32));
        }
    }
    let nodes = std::mem::take(&mut graph.nodes);
    let mut result: Vec<Node> = Vec::with_capacity(nodes.len());
    for (index, node) in nodes.iter().enumerate() {
        match group_of.get(&index) {
            None => result.push(node.clone()),
            // The merged linear is where its first member stood.
            Some(group) if groups[*group].first() == Some(&index) => {
                let members: Vec<&Node> = groups[*group].iter().map(|m| &nodes[*m]).collect();
                result.extend(merge(graph, &members));
            }
            Some(_) => {}
        }
    }
    graph.nodes = result;
    Ok(())
}

fn weight(graph: &Graph, node: &Node) -> Option<ParameterId> {
    match graph.value(*node.inputs.get(1)?).origin {
        Origin::Parameter(id) => Some(id),
        _ => None,
    }
}

/// Indices of the members of each group, in node order.
fn find_groups(graph: &Graph, options: &CompileOptions) -> Vec<Vec<usize>> {
    let (uses, recipe) = (graph.use_counts(), Alike::new(graph, &options.recipe));
    // In training steps these weights are multiplied twice (`magnitude.rs`), and parameters lie alike in every entry.
    let is_twice = options.adapter.as_ref().is_some_and(|adapter| adapter.magnitudes && adapter.dropout > 0.0);
    let mut by_input: Vec<(Key, Vec<usize>)> = Vec::new();
    for (index, node) in graph.nodes.iter().enumerate() {
        let Some(parameter) = (node.op == id::LINEAR).then(|| weight(graph, node)).flatten() else { continue };
        let own = parameter;
        let parameter = graph.parameter(own);
        let is = |name: &str| node.attrs.flag(name).unwrap_or(false);
        if is_twice && node.attrs.get("columns").is_some() {
            continue;
        }
        if is("bias") || is("transposed") || is("f32") || uses[parameter.value.0 as usize] != 1 {
            continue;
        }
        let key = Key {
            input: node.inputs[0],
            layer: node.layer,
            storage: parameter.storage,
            trainable: parameter.trainable,
            adapter: parameter.adapter,
            scale: node.attrs.optional_float("scale").ok().flatten(),
        };
        let alike = |members: &[usize]| {
            let id = weight(graph, &graph.nodes[members[0]]).expect("groups hold linears over parameters");
            let first = graph.parameter(id);
            let cut_alike = options.sharding.ranks == 1 || updated_alike(first, parameter, options);
            cut_alike && recipe.treats(graph, id, own)
        };
        match by_input.iter_mut().find(|(k, members)| k.merges_with(&key) && alike(members)) {
            Some((known, members)) => {
                known.scale = known.scale.or(key.scale);
                members.push(index);
            }
            None => by_input.push((key, vec![index])),
        }
    }
    // A group is placed at its first member, which may make the inputs of a later group available.
    by_input.sort_by_key(|(_, members)| members[0]);
    let mut available: Vec<usize> = graph.producers().into_iter().map(|p| p.unwrap_or(0)).collect();
    let mut groups = Vec::new();
    for (_, members) in by_input {
        if mergeable(graph, &members, &available) {
            for member in &members {
                available[graph.nodes[*member].outputs[0].0 as usize] = members[0];
            }
            groups.push(members);
        }
    }
    groups
}

/// The properties that members of a group share.
struct Key {
    input: ValueId,
    layer: Option<Layer>,
    storage: tensor::Storage,
    trainable: bool,
    adapter: bool,
    /// Factor of the adapters that ride on the linears: a product has one. None where nothing rides.
    scale: Option<f64>,
}

impl Key {
    fn merges_with(&self, other: &Key) -> bool {
        let same = |k: &Key| (k.input, k.layer, k.storage, k.trainable, k.adapter);
        same(self) == same(other) && (self.scale.is_none() || other.scale.is_none() || self.scale == other.scale)
    }
}

fn mergeable(graph: &Graph, members: &[usize], available: &[usize]) -> bool {
    let [leading @ .., _] = members else { return false };
    let aligned = leading.iter().all(|m| {
        let id = weight(graph, &graph.nodes[*m]).expect("groups hold linears over parameters");
        graph.parameter(id).shape.iter().product::<usize>().is_multiple_of(ALIGNMENT_ELEMENTS)
    });
    let inputs = members.iter().flat_map(|m| &graph.nodes[*m].inputs);
    let in_time = inputs.into_iter().all(|id| !graph.is_computed(*id) || available[id.0 as usize] < members[0]);
    !leading.is_empty() && aligned && in_time
}

/// One linear for all members, then the slices under their old ids.
fn merge(graph: &mut Graph, members: &[&Node]) -> Vec<Node> {
    let rows: Vec<usize> = members.iter().map(|m| graph.value(m.inputs[1]).shape[0]).collect();
    let weights: Vec<ValueId> = members.iter().map(|m| m.inputs[1]).collect();
    let mut inputs = vec![members[0].inputs[0]];
    let mut append = Append::new(graph, members[0].phase);
    append.place_like(members[0]);
    inputs.push(append.emit(id::STACK, &weights, Attrs::new())[0]);
    let mut columns: Vec<usize> = Vec::new();
    let mut attrs = Attrs::new();
    let mut start = 0;
    for (member, rows) in members.iter().zip(&rows) {
        if let Ok(own) = member.attrs.sizes("columns") {
            inputs.extend(&member.inputs[2..]);
            columns.extend(own.chunks(2).flat_map(|c| [c[0] + start, c[1]]));
            attrs = attrs.with("scale", member.attrs.float("scale").expect("adapters come with a scale"));
        }
        start += rows;
    }
    if !columns.is_empty() {
        attrs = attrs.with("columns", columns);
    }
    let merged = append.emit(id::LINEAR, &inputs, attrs)[0];
    append.emit(id::SPLIT, &[merged], Attrs::new().with("sizes", rows));
    let mut nodes = append.nodes;
    let slices = nodes.last_mut().expect("the split was just emitted");
    slices.outputs = members.iter().map(|m| m.outputs[0]).collect();
    nodes
}
