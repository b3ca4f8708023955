//! Linears that a recipe quantises, in groups: all such linears of a layer that read one value, merged or not. A group
//! shares what its tensors are scaled by. Products with a matrix for each expert are such linears.
//!
//! Knows operations by name, not models: what is quantised follows from layers and shapes. Does not know formats.

use std::collections::HashSet;

use graph::{Element, Graph, Node, Origin, Parameter, ParameterId, Phase, ValueId};
use ops::id;
use program::{Arch, Machine};
use tensor::DType;

use crate::CompileError;

/// Features of a linear that is quantised are multiples of this.
const FEATURES: usize = 16;

/// True for a parameter that is a matrix by itself and may be quantized.
pub fn takes(parameter: &Parameter) -> bool {
    let matrix = parameter.shape.len() == 2 && !parameter.adapter;
    matrix && parameter.shape.iter().all(|extent| extent.is_multiple_of(FEATURES))
}

/// True if the matrices of experts that a product reads may be quantized.
fn takes_experts(graph: &Graph, node: &Node, parameters: &[u32]) -> bool {
    let count = experts(node);
    if count == 0 || parameters.iter().any(|id| graph.parameters[*id as usize].adapter) {
        return false;
    }
    let (columns, rows) = graph.value(node.inputs[1]).shape.split_last().expect("matrices have columns");
    let features = [*columns, rows.iter().product::<usize>() / count];
    features.iter().all(|extent| extent.is_multiple_of(FEATURES))
}

/// Returns the number of matrices that a product with one for each expert reads; 0 for another operation.
fn experts(node: &Node) -> usize {
    match node.op == id::GROUPED_LINEAR {
        true => node.attrs.size("groups").expect("checked by the shape rule"),
        false => 0,
    }
}

/// True if the recipe quantizes the matrices of a product, which are these parameters.
pub fn takes_product(graph: &Graph, node: &Node, parameters: &[u32], routers: &HashSet<ParameterId>) -> bool {
    let taken = |id: &u32| takes(&graph.parameters[*id as usize]) && !routers.contains(&ParameterId(*id));
    node.op == id::LINEAR && parameters.iter().all(taken) || takes_experts(graph, node, parameters)
}

/// Returns the matrices that score experts. Their linears are not quantized, so that a choice is that of the model.
pub fn routers(graph: &Graph) -> HashSet<ParameterId> {
    let producers = graph.producers();
    let mut found = HashSet::new();
    for route in graph.nodes.iter().filter(|node| node.op == id::ROUTE) {
        // The scores may be a slice of a merged product, or cast.
        let mut place = producers[route.inputs[0].0 as usize];
        while let Some(node) = place.map(|index| &graph.nodes[index]) {
            if node.op == id::LINEAR {
                let of = parameters(graph, &producers, node.inputs[1]).unwrap_or_default();
                found.extend(of.into_iter().map(ParameterId));
                break;
            }
            place = node.inputs.first().and_then(|id| producers[id.0 as usize]);
        }
    }
    found
}

/// One linear of a group, by the numbers of its nodes.
pub struct Linear {
    pub forward: usize,
    pub weight: ValueId,
    /// The weight is [inputs, outputs].
    pub transposed: bool,
    /// The product that gives the gradient of what it reads.
    pub input_gradient: Option<usize>,
    /// The product that gives the gradient of its weight.
    pub weight_gradient: Option<usize>,
    /// Number of contiguous matrices, where each group of rows has one.
    pub experts: Option<usize>,
}

/// The quantised linears of a layer that read one value.
pub struct Group {
    /// The module of the first member.
    pub name: String,
    pub x: ValueId,
    pub members: Vec<Linear>,
}

impl Linear {
    /// Its products of the backward pass, in order: (place, whether it gives the gradient of the input).
    pub fn gradients(&self) -> Vec<(usize, bool)> {
        let mut both: Vec<(usize, bool)> = self.input_gradient.map(|at| (at, true)).into_iter().collect();
        both.extend(self.weight_gradient.map(|at| (at, false)));
        both.sort_unstable();
        both
    }
}

impl Group {
    /// The last product of its backward pass; none where there is none.
    pub fn last_gradient(&self) -> Option<usize> {
        self.members.iter().flat_map(Linear::gradients).map(|(at, _)| at).max()
    }

    /// True if its weights have gradients.
    pub fn trains_weights(&self) -> bool {
        self.members.iter().any(|member| member.weight_gradient.is_some())
    }

    /// True if each group of rows has a matrix of its own.
    pub fn has_experts(&self) -> bool {
        self.members.iter().any(|member| member.experts.is_some())
    }

    /// dy of a linear, where a product reads it.
    pub fn gradient_of(&self, graph: &Graph, member: &Linear) -> Option<ValueId> {
        let other = |at: usize, known: ValueId| {
            let inputs = &graph.nodes[at].inputs;
            inputs.iter().copied().find(|id| *id != known).expect("a product has two factors")
        };
        let of_input = member.input_gradient.map(|at| other(at, member.weight));
        of_input.or(member.weight_gradient.map(|at| other(at, self.x)))
    }
}

/// Returns the groups that a recipe called `name` quantizes, in the order of the forward pass, without `skip_first`
/// first and `skip_last` last layers. An error if none is left.
pub fn find(
    graph: &Graph,
    name: &str,
    (skip_first, skip_last): (usize, usize),
    machine: &Machine,
) -> Result<Vec<Group>, CompileError> {
    let groups = find_groups(graph, skip_first, skip_last);
    if groups.is_empty() {
        let text = format!(
            "`recipe: {name}` leaves nothing to quantise: of the linears in layers that `skip_quant_first_layers: \
             {skip_first}` and `skip_quant_last_layers: {skip_last}` leave, none has in- and out-features that are \
             multiples of {FEATURES}"
        );
        return Err(CompileError::option("recipe", text, "skip fewer layers, or set `recipe: bf16`"));
    }
    for member in groups.iter().flat_map(|group| &group.members) {
        let node = &graph.nodes[member.forward];
        let bias = node.attrs.flag("bias").unwrap_or(false).then(|| graph.value(node.inputs[2]).element);
        let wide = bias.is_some_and(|bias| bias != Element::Fixed(DType::BF16));
        if wide && machine.arch != Arch::Cpu {
            let text = format!("`recipe: {name}` on a GPU adds biases in bf16");
            return Err(CompileError::option("recipe", text, "set `torch_dtype: bfloat16`"));
        }
    }
    Ok(groups)
}

/// The parameters that a linear multiplies with, where its weight is one or several contiguous ones.
pub fn parameters(graph: &Graph, producers: &[Option<usize>], weight: ValueId) -> Option<Vec<u32>> {
    let of = |id: ValueId| match graph.value(id).origin {
        Origin::Parameter(parameter) => Some(parameter.0),
        _ => None,
    };
    match producers[weight.0 as usize].map(|index| &graph.nodes[index]) {
        None => of(weight).map(|parameter| vec![parameter]),
        Some(node) if node.op == id::STACK => node.inputs.iter().map(|id| of(*id)).collect(),
        Some(_) => None,
    }
}

/// The parameters that share what they are scaled by, of all layers: those of a group, or of the matrix of an expert. They do
/// not depend on a recipe's options.
pub fn weights(graph: &Graph) -> Vec<Vec<ParameterId>> {
    let producers = graph.producers();
    let of = |member: &Linear| -> Vec<ParameterId> {
        let of = parameters(graph, &producers, member.weight).expect("members multiply with parameters");
        of.into_iter().map(ParameterId).collect()
    };
    let all = |group: &Group| match group.has_experts() {
        false => vec![group.members.iter().flat_map(of).collect()],
        true => group.members.iter().flat_map(|member| of_experts(member, of(member))).collect(),
    };
    find_groups(graph, 0, 0).iter().flat_map(all).collect()
}

/// The parameters of each expert's matrix; none where one parameter has the matrices of several.
fn of_experts(member: &Linear, parameters: Vec<ParameterId>) -> Vec<Vec<ParameterId>> {
    let count = member.experts.expect("a matrix for each expert");
    match parameters.len().is_multiple_of(count) {
        true => parameters.chunks(parameters.len() / count).map(<[ParameterId]>::to_vec).collect(),
        false => Vec::new(),
    }
}

fn find_groups(graph: &Graph, skip_first: usize, skip_last: usize) -> Vec<Group> {
    let mut layers = graph.layers();
    layers.retain(|layer| !graph.is_apart(*layer));
    let kept = skip_first..layers.len().saturating_sub(skip_last);
    let kept: HashSet<_> = layers.get(kept).unwrap_or_default().iter().copied().collect();
    let (producers, routers) = (graph.producers(), routers(graph));
    let mut groups: Vec<(graph::Layer, Group)> = Vec::new();
    for (index, node) in graph.nodes.iter().enumerate() {
        let Some(layer) = node.layer.filter(|layer| kept.contains(layer)) else { continue };
        if node.phase != Phase::Forward || node.inputs.len() < 2 {
            continue;
        }
        let (x, weight) = (node.inputs[0], node.inputs[1]);
        let Some(of) = parameters(graph, &producers, weight) else { continue };
        if !takes_product(graph, node, &of, &routers) {
            continue;
        }
        let transposed = node.attrs.flag("transposed").unwrap_or(false);
        let (input_gradient, weight_gradient) = products(graph, &producers, node, &of);
        let experts = Some(experts(node)).filter(|count| *count > 0);
        let member = Linear { forward: index, weight, transposed, input_gradient, weight_gradient, experts };
        match groups.iter_mut().find(|(known, group)| (*known, group.x) == (layer, x)) {
            Some((_, group)) => group.members.push(member),
            None => {
                let name = &graph.parameters[of[0] as usize].name;
                let name = name.strip_suffix(".weight").unwrap_or(name).to_owned();
                groups.push((layer, Group { name, x, members: vec![member] }));
            }
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

/// The products of the backward pass that belong to a linear: those that give the gradients of its input and of its weight.
pub(super) fn products(
    graph: &Graph,
    producers: &[Option<usize>],
    linear: &Node,
    parameters: &[u32],
) -> (Option<usize>, Option<usize>) {
    let (x, weight) = (linear.inputs[0], linear.inputs[1]);
    let ops = [id::MATMUL, id::GROUPED_LINEAR, id::GROUPED_WEIGHT_GRADIENT];
    let backward = |node: &Node| node.phase == Phase::Backward && ops.contains(&node.op);
    let reads_weight = |node: &Node| node.inputs[1] == weight || node.inputs[0] == weight;
    let of_input = graph.nodes.iter().position(|node| backward(node) && reads_weight(node));
    let of_weight = graph.gradients.iter().filter(|(id, _)| parameters.contains(&id.0)).find_map(|(_, value)| {
        // The gradient of a merged weight is computed as one and taken apart by a view.
        let mut index = producers[value.0 as usize]?;
        while !backward(&graph.nodes[index]) {
            index = producers[graph.nodes[index].inputs.first()?.0 as usize]?;
        }
        graph.nodes[index].inputs.contains(&x).then_some(index)
    });
    (of_input, of_weight)
}

/// Returns the nodes in an order in which each comes after what it reads, otherwise unchanged: the products of a group
/// stand where the last of them stood, and what reads another of them may have stood before, as the parts of a gradient
/// of merged weights.
pub fn in_order(nodes: Vec<Node>) -> Vec<Node> {
    let mut missing: HashSet<ValueId> = nodes.iter().flat_map(|node| &node.outputs).copied().collect();
    let (mut ordered, mut waiting) = (Vec::with_capacity(nodes.len()), Vec::new());
    let is_ready = |node: &Node, missing: &HashSet<ValueId>| node.inputs.iter().all(|id| !missing.contains(id));
    for node in nodes {
        waiting.push(node);
        while let Some(next) = waiting.iter().position(|node| is_ready(node, &missing)) {
            let node: Node = waiting.remove(next);
            node.outputs.iter().for_each(|id| _ = missing.remove(id));
            ordered.push(node);
        }
    }
    assert!(waiting.is_empty(), "no node reads what follows from it");
    ordered
}

#[cfg(test)]
mod tests {
    use graph::{Init, Layer};
    use ops::{Append, Emit};
    use tensor::Attrs;

    use super::*;

    /// A linear that scores 16 experts has the size of one that is quantised, and is not: cast or not.
    #[test]
    fn routers_are_never_quantised() {
        for cast in [false, true] {
            let mut graph = Graph::default();
            let x = graph.add_input("x", Element::Fixed(DType::BF16), vec![2, 4, 32]);
            let [router, other] =
                ["gate", "up"].map(|name| graph.add_parameter(name, vec![16, 32], Init::Ones, DType::BF16));
            let weights = [router, other].map(|id| graph.parameter(id).value);
            let mut append = Append::new(&mut graph, Phase::Forward);
            append.layer = Some(Layer { stack: 0, index: 0 });
            let scores = append.emit(id::LINEAR, &[x, weights[0]], Attrs::new())[0];
            append.emit(id::LINEAR, &[x, weights[1]], Attrs::new());
            let scores = match cast {
                true => append.emit(id::CAST, &[scores], Attrs::new().with("dtype", "f32"))[0],
                false => scores,
            };
            append.emit(id::ROUTE, &[scores], Attrs::new().with("top_k", 2).with("scores", "softmax"));
            let nodes = append.nodes;
            graph.nodes = nodes;
            assert_eq!(routers(&graph), HashSet::from([router]));
            let groups = find_groups(&graph, 0, 0);
            let found: Vec<ValueId> = groups.iter().flat_map(|group| &group.members).map(|of| of.weight).collect();
            assert_eq!(found, [weights[1]], "cast {cast}");
        }
    }

    /// Skipped layers are counted without those of parts other than the text.
    #[test]
    fn linears_of_other_parts_are_never_quantised() {
        let mut graph = Graph { apart: vec![0], ..Graph::default() };
        let x = graph.add_input("x", Element::Fixed(DType::BF16), vec![2, 4, 32]);
        let mut weights = Vec::new();
        for name in ["w0", "w1", "w2", "w3"] {
            let id = graph.add_parameter(name, vec![32, 32], Init::Ones, DType::BF16);
            weights.push(graph.parameter(id).value);
        }
        let mut append = Append::new(&mut graph, Phase::Forward);
        for (number, weight) in weights.iter().enumerate() {
            append.layer = Some(Layer { stack: number as u32 / 2, index: number as u32 % 2 });
            append.emit(id::LINEAR, &[x, *weight], Attrs::new());
        }
        let nodes = append.nodes;
        graph.nodes = nodes;
        let found = |first| -> Vec<ValueId> {
            find_groups(&graph, first, 0).iter().flat_map(|group| &group.members).map(|of| of.weight).collect()
        };
        assert_eq!((found(0), found(1)), (weights[2..].to_vec(), weights[3..].to_vec()));
    }
}
