//! `nvfp4`: the linears of the layers multiply codes of four bits in blocks of 16 along the sum (arXiv 2509.25149). Weights
//! have tiles of 16 by 16, so that both products that read them read the same codes. Factors of the gradient of a weight
//! are rotated along the tokens before they are quantised, gradients rounded stochastically. Adapters and biases see
//! unquantised values.
//!
//! Every tensor is scaled by its own magnitude, that of its group; of experts the matrix of each is. The tensor's factor
//! multiplies the sum. Units of four bits read codes with the scales of their blocks, both factors along the sum, so weights
//! have two forms. Emulated products, which those of experts always are, read code times scale of the block, a number of the
//! compute type. Codes of weights are made when weights were written, not in an entry, unless weights are cut over ranks:
//! `plan/prepare.rs`.

mod backward;
mod experts;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use graph::{Element, Graph, Node, ValueId};
use ops::dequantise::unscaled;
use ops::id;
use program::{Arch, Architecture, Machine};
use tensor::storage::{NVFP4, NVFP4_TILES, Packing};
use tensor::{Attrs, DType};

use super::emit::emit;
use super::groups::{self, Group, Linear};
use super::recipe::Nvfp4;
use crate::CompileError;
use crate::options::CompileOptions;

/// A tensor that is in codes.
#[derive(Clone)]
struct Codes {
    form: Form,
    /// The factor of the codes' numbers.
    factor: ValueId,
}

#[derive(Clone)]
enum Form {
    /// In a packed tensor, of which a call with these attributes makes numbers for emulated products.
    Packed { packed: ValueId, attrs: Attrs },
    /// In the layout that units read.
    Operand(Operand),
}

/// Codes along the sum, and the scales of their blocks.
#[derive(Clone, Copy)]
struct Operand {
    codes: ValueId,
    scales: ValueId,
}

/// The codes of a weight: as it lies, and of its transpose, where units read that.
#[derive(Clone)]
struct Weight {
    plain: Option<Codes>,
    transposed: Option<Codes>,
}

impl Weight {
    /// The codes for a product that sums over its columns, or where `turned` over its rows.
    fn along(&self, turned: bool, units: bool) -> &Codes {
        let codes = if units && turned { &self.transposed } else { &self.plain };
        codes.as_ref().expect("what products read is prepared")
    }
}

/// The operand that a product reads of a tensor.
#[derive(Clone, Copy)]
struct Factor {
    /// The numbers, or their codes.
    values: ValueId,
    /// The scales, where values are codes.
    scales: Option<ValueId>,
    of: ValueId,
}

pub fn run(graph: &mut Graph, recipe: &Nvfp4, options: &CompileOptions, machine: &Machine) -> Result<(), CompileError> {
    let units = !recipe.emulate && machine.arch != Arch::Cpu;
    if units && !machine.arch.has_four_bits() {
        let text =
            format!("`recipe: nvfp4` without `fp4_backend: emulate` needs a GPU from {} on", Architecture::BLACKWELL);
        let hint = "`fp4_backend: emulate` has the same codes on any machine; `recipe: fp8_hybrid` is faster than bf16";
        return Err(CompileError::option("recipe", text, hint));
    }
    let groups = groups::find(graph, "nvfp4", (recipe.skip_first, recipe.skip_last), machine)?;
    let draws = recipe.stochastic && groups.iter().any(|group| group.last_gradient().is_some());
    let step = draws
        .then(|| graph.input("micro_step").unwrap_or_else(|| graph.add_input("micro_step", Element::I32, vec![1])));
    let (compute, seed, trains) = (options.compute, options.seed, options.training.is_some());
    let mut rewrite = Rewrite { graph, compute, seed, units, trains, step, replaced: HashMap::new() };
    for (number, group) in groups.iter().enumerate() {
        rewrite.group(number, group);
    }
    rewrite.finish();
    Ok(())
}

struct Rewrite<'a> {
    graph: &'a mut Graph,
    compute: DType,
    seed: u64,
    /// Products are those of units of four bits, but for experts.
    units: bool,
    /// There is a backward pass to prepare weights for.
    trains: bool,
    /// Number of the micro-step, where gradients are rounded stochastically.
    step: Option<ValueId>,
    /// The nodes that replace a node, by its index; others are kept.
    replaced: HashMap<usize, Vec<Node>>,
}

impl Rewrite<'_> {
    /// Rewrites all linears of a group, in both passes.
    fn group(&mut self, number: usize, group: &Group) {
        let weights = self.weights(group);
        let like = self.graph.nodes[group.members[0].forward].clone();
        let (units, mut nodes) = (self.units_of(group), Vec::new());
        let x = self.quantise(&mut nodes, &like, &[group.x], units, None).remove(0);
        let x = self.factor(&mut nodes, &like, &x);
        // What the backward pass reads of x: codes along the tokens, made where x is.
        let along =
            group.trains_weights().then(|| self.rotated(&mut nodes, &like, group, &[group.x], None).codes.remove(0));
        for (member, weight) in group.members.iter().zip(&weights) {
            let weight = self.factor(&mut nodes, &like, weight.along(member.transposed, units));
            nodes.push(match member.experts {
                Some(count) => self.of_experts(member.forward, count, [x, weight], member.transposed),
                None => self.forward(member, x, weight),
            });
            self.replaced.insert(member.forward, std::mem::take(&mut nodes));
        }
        self.backward(number, group, along.as_ref(), &weights);
    }

    /// True if units of four bits multiply what a group reads: they have no products with a matrix for each group of
    /// rows.
    fn units_of(&self, group: &Group) -> bool {
        self.units && !group.has_experts()
    }

    /// The codes of a group's weights: states, made by nodes of their own.
    fn weights(&mut self, group: &Group) -> Vec<Weight> {
        let producers = self.graph.producers();
        let of_group: Vec<ValueId> = group.members.iter().map(|member| member.weight).collect();
        let stacks = of_group.iter().filter_map(|id| producers[id.0 as usize]);
        let mut nodes: Vec<Node> = stacks.map(|index| self.graph.nodes[index].clone()).collect();
        let like = self.graph.nodes[group.members[0].forward].clone();
        if group.has_experts() {
            let all =
                group.members.iter().map(|member| self.expert_weights(&mut nodes, &like, group, member)).collect();
            self.graph.prepared.extend(nodes);
            return all;
        }
        let parts = emit(self.graph, self.compute, &mut nodes, &like, id::OWN_AMAX, &of_group, Attrs::new())[0];
        let mut all = Vec::new();
        for member in &group.members {
            let (plain, transposed) = match self.units {
                true => (self.trains || !member.transposed, self.trains || member.transposed),
                false => (true, false),
            };
            let mut code = |transposed: bool| {
                let attrs = Attrs::new().with("tiles", true);
                let attrs = if self.units { attrs.with("operand", true) } else { attrs };
                let attrs = if transposed { attrs.with("transposed", true) } else { attrs };
                let inputs = [member.weight, parts];
                let results = emit(self.graph, self.compute, &mut nodes, &like, id::QUANTISE_BLOCKS, &inputs, attrs);
                self.keep(group, &results);
                self.codes(member.weight, &results, NVFP4_TILES)
            };
            let (plain, transposed) = (plain.then(|| code(false)), transposed.then(|| code(true)));
            all.push(Weight { plain, transposed });
        }
        self.graph.prepared.extend(nodes);
        all
    }

    /// Codes of weights are states.
    fn keep(&mut self, group: &Group, results: &[ValueId]) {
        results.iter().for_each(|id| _ = self.graph.keep(*id, &format!("fp4.{}.w", group.name)));
    }

    fn codes(&self, of: ValueId, results: &[ValueId], packing: Packing) -> Codes {
        let form = match *results {
            [codes, scales, _] => Form::Operand(Operand { codes, scales }),
            _ => {
                let attrs = unscaled(packing, &self.graph.value(of).value_type().shape);
                Form::Packed { packed: results[0], attrs }
            }
        };
        Codes { form, factor: *results.last().expect("codes have a factor") }
    }

    /// Codes of tensors in blocks of their rows, which share a factor. Random numbers have the places of the matrix that
    /// the tensors make in this order.
    fn quantise(
        &mut self,
        nodes: &mut Vec<Node>,
        like: &Node,
        tensors: &[ValueId],
        units: bool,
        dice: Option<(u32, Order)>,
    ) -> Vec<Codes> {
        let parts = emit(self.graph, self.compute, nodes, like, id::OWN_AMAX, tensors, Attrs::new())[0];
        let columns = |graph: &Graph, of: ValueId| *graph.value(of).shape.last().expect("tensors have axes");
        let side_by_side: usize = tensors.iter().map(|of| columns(self.graph, *of)).sum();
        let mut first = 0;
        let mut all = Vec::new();
        for tensor in tensors {
            let (mut inputs, mut attrs) = (vec![*tensor, parts], Attrs::new());
            if units {
                attrs = attrs.with("operand", true);
            }
            if let (Some((stream, order)), Some(step)) = (dice, self.step) {
                inputs.push(step);
                let own = columns(self.graph, *tensor);
                let width = if order == Order::After { own } else { side_by_side };
                attrs = attrs.with("stream", stream).with("seed", self.seed).with("first", first).with("width", width);
                let elements = self.graph.value(*tensor).shape.iter().product::<usize>();
                first += if order == Order::After { elements } else { own };
            }
            let results = emit(self.graph, self.compute, nodes, like, id::QUANTISE_BLOCKS, &inputs, attrs);
            all.push(self.codes(*tensor, &results, NVFP4));
        }
        all
    }

    /// Returns codes of tensors along their rows' axis, rotated: [columns, rows up to a multiple of 16], where rows of
    /// experts are filled up for each expert.
    fn rotated(
        &mut self,
        nodes: &mut Vec<Node>,
        like: &Node,
        group: &Group,
        tensors: &[ValueId],
        dice: Option<(u32, Order)>,
    ) -> Rotated {
        let (offsets, attrs) = self.rows_of_experts(group);
        let (mut turned, mut starts) = (Vec::new(), None);
        for of in tensors {
            let inputs: Vec<ValueId> = [*of].into_iter().chain(offsets).collect();
            let results = emit(self.graph, self.compute, nodes, like, id::ROTATE, &inputs, attrs.clone());
            turned.push(results[0]);
            starts = results.get(1).copied();
        }
        Rotated { codes: self.quantise(nodes, like, &turned, self.units_of(group), dice), starts }
    }

    /// Returns the operand that products read: codes, or the numbers that they stand for.
    fn factor(&mut self, nodes: &mut Vec<Node>, like: &Node, of: &Codes) -> Factor {
        match &of.form {
            Form::Operand(operand) => Factor { values: operand.codes, scales: Some(operand.scales), of: of.factor },
            Form::Packed { packed, attrs } => {
                let inputs = [*packed];
                let values = emit(self.graph, self.compute, nodes, like, id::DEQUANTISE, &inputs, attrs.clone())[0];
                Factor { values, scales: None, of: of.factor }
            }
        }
    }

    /// Inputs and attributes of a product of two factors, of which the second lies along the sum where `along` says so.
    fn product(&self, a: Factor, b: Factor, along: bool, attrs: Attrs) -> (Vec<ValueId>, Attrs) {
        let inputs = [a.values, b.values, a.of, b.of].into_iter().chain(a.scales).chain(b.scales).collect();
        let attrs = if along || self.units { attrs.with("transpose_b", true) } else { attrs };
        (inputs, if self.units { attrs.with("blocks", true) } else { attrs })
    }

    /// Returns the product y of one linear.
    fn forward(&self, member: &Linear, x: Factor, weight: Factor) -> Node {
        let node = self.graph.nodes[member.forward].clone();
        let mut attrs = node.attrs.clone();
        attrs.remove("transposed");
        let (mut inputs, attrs) = self.product(x, weight, !member.transposed, attrs);
        inputs.extend(&node.inputs[2..]);
        Node { op: id::MATMUL_CODES, inputs, attrs, ..node }
    }

    fn finish(self) {
        let Rewrite { graph, mut replaced, .. } = self;
        let nodes = std::mem::take(&mut graph.nodes);
        let place = |(index, node)| replaced.remove(&index).unwrap_or_else(|| vec![node]);
        graph.nodes = groups::in_order(nodes.into_iter().enumerate().flat_map(place).collect());
    }
}

/// Rotated tensors that are in codes.
struct Rotated {
    codes: Vec<Codes>,
    /// The first row of each expert, whose rows are filled up; none where rows have no experts.
    starts: Option<ValueId>,
}

/// The order in which the tensors of a group make one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// The rows of all tensors side by side make a row.
    SideBySide,
    /// The rows of one come after those of the one before.
    After,
}
