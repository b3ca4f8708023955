//! `fp8_hybrid`: the linears of the layers multiply codes of eight bits, E4M3 forward and E5M2 for gradients, each
//! tensor with one power of two. Adapters and biases see unquantised values.
//!
//! A group has one power for what its linears read, one for their weights, one for their gradients; of experts each has one
//! for its matrix. Powers of values and gradients follow from the magnitudes of earlier steps, which the update keeps
//! (`amax_history`). Codes of weights are made when weights were written, not in an entry, unless weights are cut over
//! ranks: `plan/prepare.rs`.
//!
//! Knows operations by name, not models: what is quantised follows from layers and shapes.

use std::collections::HashMap;

use graph::{Element, Graph, Node, Phase, Quantiser, StateId, ValueId};
use ops::id;
use program::{Arch, Machine};
use tensor::{Attrs, DType};

use super::emit::emit;
use super::groups::{self, Group, Linear};
use super::recipe::{Fp8Hybrid, GradientFormat};
use crate::CompileError;
use crate::options::CompileOptions;

/// Exponents of the largest magnitudes: 448 for weights, 224 for values, a bit of room; E5M2 3584 likewise.
const TOP_WEIGHT: i32 = 8;
const TOP_VALUE: i32 = 7;
const TOP_E5M2: i32 = 11;

/// The states of every quantizer: the factor of this step and its largest magnitude; and in the first steps the number
/// of elements that were not 0, and the number of those that became 0.
const FACTOR: &str = "fp8.factor";
const AMAX: &str = "fp8.amax";
const NONZERO: &str = "fp8.nonzero";
const FLUSHED: &str = "fp8.flushed";

impl Fp8Hybrid {
    /// Format of the gradients, and the exponent of their largest magnitude; none where they are not quantised.
    fn gradients(&self) -> Option<(DType, i32)> {
        match self.gradient {
            GradientFormat::E5M2 => Some((DType::E5M2, TOP_E5M2)),
            GradientFormat::E4M3 => Some((DType::E4M3, TOP_VALUE)),
            GradientFormat::Unquantised => None,
        }
    }
}

/// Codes of one tensor with their scale.
#[derive(Clone, Copy)]
struct Codes {
    /// The codes in the layout of the tensor.
    plain: ValueId,
    transposed: Option<ValueId>,
    scale: ValueId,
}

pub fn run(
    graph: &mut Graph,
    recipe: &Fp8Hybrid,
    options: &CompileOptions,
    machine: &Machine,
) -> Result<(), CompileError> {
    let groups = groups::find(graph, "fp8_hybrid", (recipe.skip_first, recipe.skip_last), machine)?;
    let mut rewrite = Rewrite::new(graph, recipe, options, machine, groups.len());
    for (number, group) in groups.iter().enumerate() {
        rewrite.group(number, group);
    }
    rewrite.finish();
    Ok(())
}

struct Rewrite<'a> {
    graph: &'a mut Graph,
    recipe: &'a Fp8Hybrid,
    compute: DType,
    /// Products of the library read both operands along the sum.
    along: bool,
    /// True if products with the matrices of experts do, too.
    experts_along: bool,
    /// There is a backward pass to prepare weights for.
    trains: bool,
    /// True if largest magnitudes are recorded.
    records: bool,
    groups: usize,
    /// The factor of every quantizer.
    factors: Vec<StateId>,
    amaxes: Vec<StateId>,
    counts: [Vec<StateId>; 2],
    /// The nodes that replace a node, by its index; others are kept.
    replaced: HashMap<usize, Vec<Node>>,
}

impl<'a> Rewrite<'a> {
    fn new(
        graph: &'a mut Graph,
        recipe: &'a Fp8Hybrid,
        options: &CompileOptions,
        machine: &Machine,
        groups: usize,
    ) -> Rewrite<'a> {
        let mut states = |name: &str, element: Element| -> Vec<StateId> {
            (0..2 * groups).map(|_| graph.add_state(name, element, vec![1])).collect()
        };
        let (factors, amaxes) = (states(FACTOR, Element::F32), states(AMAX, Element::F32));
        let counts = [NONZERO, FLUSHED].map(|name| states(name, Element::Fixed(DType::F64)));
        graph.quantisers = vec![Quantiser::default(); 2 * groups];
        let updates = options.training.as_ref().is_some_and(|training| training.optimizer.is_some());
        Rewrite {
            records: updates && graph.nodes.iter().any(|node| node.phase == Phase::Backward),
            trains: options.training.is_some(),
            graph,
            recipe,
            compute: options.compute,
            along: machine.arch != Arch::Cpu,
            experts_along: machine.arch.is_hopper(),
            groups,
            factors,
            amaxes,
            counts,
            replaced: HashMap::new(),
        }
    }

    /// Rewrites all linears of a group, in both passes.
    fn group(&mut self, number: usize, group: &Group) {
        let weights = self.weights(group);
        let unquantised = self.recipe.gradients().is_none();
        let mut nodes = Vec::new();
        let value = Quantised {
            slot: number,
            format: DType::E4M3,
            top: TOP_VALUE,
            transposed: self.along && group.trains_weights() && !unquantised && !group.has_experts(),
            counted: self.records,
        };
        let first = group.members[0].forward;
        let x = self.quantise(&mut nodes, first, &[group.x], value, format!("{}.x", group.name))[0];
        for (member, weight) in group.members.iter().zip(&weights) {
            nodes.push(self.forward(member, x, *weight));
            self.replaced.insert(member.forward, std::mem::take(&mut nodes));
        }
        match self.recipe.gradients() {
            Some((format, top)) => self.backward(number, group, x, &weights, format, top),
            None => self.backward_of_numbers(group, x, &weights),
        }
    }

    /// The codes of a group's weights: states, made by nodes of their own.
    fn weights(&mut self, group: &Group) -> Vec<Codes> {
        let producers = self.graph.producers();
        let mut nodes: Vec<Node> = Vec::new();
        let of_group: Vec<ValueId> = group.members.iter().map(|member| member.weight).collect();
        let stacks = of_group.iter().filter_map(|id| producers[id.0 as usize]);
        nodes.extend(stacks.map(|index| self.graph.nodes[index].clone()));
        let like = self.graph.nodes[group.members[0].forward].clone();
        let amax = |graph: &mut Graph, nodes: &mut Vec<Node>, of: &[ValueId], attrs: Attrs| {
            emit(graph, self.compute, nodes, &like, id::OWN_AMAX, of, attrs)[0]
        };
        let shared = (!group.has_experts()).then(|| amax(self.graph, &mut nodes, &of_group, Attrs::new()));
        let mut codes = Vec::new();
        for member in &group.members {
            let along = self.along(member);
            let backward = along && self.trains && self.recipe.gradients().is_some();
            let transposed = backward || along && member.transposed;
            let attrs = quantised(DType::E4M3, TOP_WEIGHT).with("transposed", transposed);
            let of_experts = |attrs: Attrs| match member.experts {
                Some(count) => attrs.with("groups", count),
                None => attrs,
            };
            let parts =
                shared.unwrap_or_else(|| amax(self.graph, &mut nodes, &[member.weight], of_experts(Attrs::new())));
            let (inputs, attrs) = ([member.weight, parts], of_experts(attrs));
            let results = emit(self.graph, self.compute, &mut nodes, &like, id::QUANTISE, &inputs, attrs);
            results.iter().for_each(|id| _ = self.graph.keep(*id, &format!("fp8.{}.w", group.name)));
            codes.push(Codes { plain: results[0], scale: results[1], transposed: results.get(2).copied() });
        }
        self.graph.prepared.extend(nodes);
        codes
    }

    /// Codes of the tensors of a group, which share a power.
    fn quantise(
        &mut self,
        nodes: &mut Vec<Node>,
        place: usize,
        tensors: &[ValueId],
        of: Quantised,
        name: String,
    ) -> Vec<Codes> {
        let like = self.graph.nodes[place].clone();
        let factor = self.graph.states[self.factors[of.slot].0 as usize];
        let inputs: Vec<ValueId> = [factor].into_iter().chain(tensors.iter().copied()).collect();
        let parts =
            emit(self.graph, self.compute, nodes, &like, id::OWN_AMAX, &inputs, Attrs::new().with("factor", true))[0];
        if self.records {
            let limit = of.format.small().expect("a format of eight bits").largest();
            self.graph.quantisers[of.slot] = Quantiser { name, limit, top: of.top };
        }
        let attrs = quantised(of.format, of.top).with("factor", true);
        let attrs = if of.transposed { attrs.with("transposed", true) } else { attrs };
        let attrs = if self.records { attrs.with("record", true) } else { attrs };
        let attrs = if of.counted { attrs.with("count", true) } else { attrs };
        let mut all = Vec::new();
        for tensor in tensors {
            let results =
                emit(self.graph, self.compute, nodes, &like, id::QUANTISE, &[*tensor, parts, factor], attrs.clone());
            let mut kept = results[2 + usize::from(of.transposed)..].iter();
            if self.records {
                let amax = *kept.next().expect("a quantiser that records gives what it recorded");
                self.graph.stored.push((amax, self.amaxes[of.slot]));
            }
            self.graph.stored.extend(kept.zip(&self.counts).map(|(count, states)| (*count, states[of.slot])));
            let transposed = of.transposed.then(|| results[2]);
            all.push(Codes { plain: results[0], scale: results[1], transposed });
        }
        all
    }

    /// True if the products of a linear read both operands along the sum.
    fn along(&self, member: &Linear) -> bool {
        if member.experts.is_some() { self.experts_along } else { self.along }
    }

    /// A product of rows with the matrices of their experts.
    fn of_experts(&self, node: Node, member: &Linear, rows: Codes, weight: Codes, turned: bool) -> Node {
        let (matrices, along) = operand(weight, turned, self.along(member));
        let attrs = Attrs::new().with("groups", member.experts.expect("a matrix for each expert"));
        let attrs = if along { attrs } else { attrs.with("transposed", true) };
        let inputs = vec![rows.plain, matrices, node.inputs[2], rows.scale, weight.scale];
        Node { op: id::GROUPED_CODES, inputs, attrs, ..node }
    }

    /// Returns the product y of one linear.
    fn forward(&mut self, member: &Linear, x: Codes, weight: Codes) -> Node {
        let node = self.graph.nodes[member.forward].clone();
        if member.experts.is_some() {
            let node = self.of_experts(node, member, x, weight, member.transposed);
            return Node { attrs: node.attrs.clone().with("fast_sum", true), ..node };
        }
        let (b, turned) = operand(weight, member.transposed, self.along);
        let mut attrs = node.attrs.clone();
        attrs.remove("transposed");
        let attrs = if turned { attrs.with("transpose_b", true) } else { attrs };
        let attrs = attrs.with("fast_sum", true);
        let inputs = [x.plain, b, x.scale, weight.scale].into_iter().chain(node.inputs[2..].iter().copied()).collect();
        Node { op: id::MATMUL_CODES, inputs, attrs, ..node }
    }

    /// The gradients of a group: one power for all, so its products stand where the last of them stood.
    fn backward(&mut self, number: usize, group: &Group, x: Codes, weights: &[Codes], format: DType, top: i32) {
        let Some(last) = group.last_gradient() else { return };
        let mut gradients = Vec::new();
        for (index, member) in group.members.iter().enumerate() {
            if let Some(dy) = group.gradient_of(self.graph, member) {
                gradients.push((index, dy));
            }
        }
        let of = Quantised {
            slot: self.groups + number,
            format,
            top,
            transposed: self.along && group.trains_weights() && !group.has_experts(),
            counted: false,
        };
        let mut nodes = Vec::new();
        let tensors: Vec<ValueId> = gradients.iter().map(|(_, dy)| *dy).collect();
        let codes = self.quantise(&mut nodes, last, &tensors, of, format!("{}.dy", group.name));
        for ((index, _), dy) in gradients.iter().zip(codes) {
            let member = &group.members[*index];
            for (at, of_input) in member.gradients() {
                let node = self.graph.nodes[at].clone();
                let product = match of_input {
                    true => self.input_gradient(node, member, dy, weights[*index]),
                    false if member.experts.is_some() => self.expert_gradient(&mut nodes, node, group.x, dy, x),
                    false => self.weight_gradient(node, member, dy, x),
                };
                nodes.push(product);
                self.replaced.insert(at, Vec::new());
            }
        }
        self.replaced.insert(last, nodes);
    }

    fn input_gradient(&self, node: Node, member: &Linear, dy: Codes, weight: Codes) -> Node {
        // dx = dy·W, whose sum goes along the rows of W as a linear has it.
        if member.experts.is_some() {
            return self.of_experts(node, member, dy, weight, !member.transposed);
        }
        let (b, turned) = operand(weight, !member.transposed, self.along);
        let attrs = if turned { Attrs::new().with("transpose_b", true) } else { Attrs::new() };
        Node { op: id::MATMUL_CODES, inputs: vec![dy.plain, b, dy.scale, weight.scale], attrs, ..node }
    }

    /// The gradient of the matrices of experts: a product of the numbers that codes stand for, since each expert's sum goes
    /// along the rows of its tokens, wherever they begin.
    fn expert_gradient(&mut self, nodes: &mut Vec<Node>, mut node: Node, x: ValueId, dy: Codes, of_x: Codes) -> Node {
        let [of_x, dy] = [of_x, dy].map(|codes| self.numbers(nodes, &node, codes));
        node.inputs[..2].iter_mut().for_each(|id| *id = if *id == x { of_x } else { dy });
        node
    }

    fn weight_gradient(&self, node: Node, member: &Linear, dy: Codes, x: Codes) -> Node {
        let (a, b) = if member.transposed { (x, dy) } else { (dy, x) };
        let attrs = Attrs::new().with("f32", true);
        let (inputs, attrs) = match (a.transposed, b.transposed) {
            (Some(a), Some(b)) => ([a, b], attrs.with("transpose_b", true)),
            _ => ([a.plain, b.plain], attrs.with("transpose_a", true)),
        };
        let inputs = inputs.into_iter().chain([a.scale, b.scale]).collect();
        Node { op: id::MATMUL_CODES, inputs, attrs, ..node }
    }

    /// Gradients are not quantised: products of numbers, with the numbers that the codes stand for.
    fn backward_of_numbers(&mut self, group: &Group, x: Codes, weights: &[Codes]) {
        let mut numbers: Option<ValueId> = None;
        let mut places: Vec<(usize, usize, bool)> = Vec::new();
        for (index, member) in group.members.iter().enumerate() {
            places.extend(member.gradients().into_iter().map(|(at, of_input)| (at, index, of_input)));
        }
        places.sort_unstable();
        for (at, index, of_input) in places {
            let mut nodes = Vec::new();
            let mut node = self.graph.nodes[at].clone();
            let (known, quantised) = match of_input {
                true => (group.members[index].weight, self.numbers(&mut nodes, &node, weights[index])),
                false => {
                    let of_x = numbers.unwrap_or_else(|| self.numbers(&mut nodes, &node, x));
                    numbers = Some(of_x);
                    (group.x, of_x)
                }
            };
            node.inputs.iter_mut().filter(|id| **id == known).for_each(|id| *id = quantised);
            nodes.push(node);
            self.replaced.insert(at, nodes);
        }
    }

    fn numbers(&mut self, nodes: &mut Vec<Node>, like: &Node, of: Codes) -> ValueId {
        emit(self.graph, self.compute, nodes, like, id::DECODE, &[of.plain, of.scale], Attrs::new())[0]
    }

    fn finish(self) {
        let Rewrite { graph, mut replaced, .. } = self;
        let nodes = std::mem::take(&mut graph.nodes);
        let place = |(index, node)| replaced.remove(&index).unwrap_or_else(|| vec![node]);
        graph.nodes = groups::in_order(nodes.into_iter().enumerate().flat_map(place).collect());
    }
}

/// The quantization of a tensor of values or gradients.
#[derive(Clone, Copy)]
struct Quantised {
    slot: usize,
    format: DType,
    top: i32,
    transposed: bool,
    /// True if elements that become 0 are counted in the first steps.
    counted: bool,
}

fn quantised(format: DType, top: i32) -> Attrs {
    Attrs::new().with("format", format.name()).with("top", top)
}

/// The codes of a weight as the second factor of a product, and whether they are its transpose: always so, where products
/// read along the sum. `turned`: what is in memory is [K, N] of the product, not its transpose.
fn operand(weight: Codes, turned: bool, along: bool) -> (ValueId, bool) {
    match (along, turned) {
        (true, true) => (weight.transposed.expect("made where products read along the sum"), true),
        (true, false) => (weight.plain, true),
        (false, turned) => (weight.plain, !turned),
    }
}
