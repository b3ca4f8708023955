//! Precision: which element type every value has. One file per recipe.

mod fp8_hybrid;
pub mod groups;
mod nvfp4;
mod quantize_aware;
mod uniform;

use std::collections::{BTreeSet, HashSet};

use graph::{Element, Graph, Node, OpId, ParameterId, ValueId};
use ops::{Append, Emit};
use program::Machine;
use tensor::{Attrs, DType};

pub use quantize_aware::QuantizeAware;

use crate::passes::dead_code;
use crate::{CompileError, CompileOptions};

/// The formats of matrix products.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Recipe {
    /// All products in the compute type.
    #[default]
    Uniform,
    /// The layers' linears in eight bits.
    Fp8Hybrid(Fp8Hybrid),
    /// The layers' linears in four bits.
    Nvfp4(Nvfp4),
    /// The layers' linears with the values that their weights will have in another format.
    QuantizeAware(QuantizeAware),
}

impl Recipe {
    /// True if products read codes of weights or their values, which are made next to them; those of experts, too.
    pub fn quantises_weights(&self) -> bool {
        match self {
            Recipe::Uniform => false,
            Recipe::Fp8Hybrid(_) | Recipe::Nvfp4(_) | Recipe::QuantizeAware(_) => true,
        }
    }

    /// Returns the operations that it adds to a program, with the attribute that calls of units of four bits have if
    /// not all have it. Empty where it needs no units whose results were never checked on hardware.
    pub fn calls(&self) -> &'static [(OpId, Option<&'static str>)] {
        match self {
            Recipe::Uniform | Recipe::Fp8Hybrid(_) | Recipe::QuantizeAware(_) => &[],
            Recipe::Nvfp4(_) => nvfp4::CALLS,
        }
    }

    /// Steps whose magnitudes its quantisers remember; none where scales follow from the tensors alone.
    pub fn history(&self) -> Option<usize> {
        match self {
            Recipe::Uniform | Recipe::Nvfp4(_) | Recipe::QuantizeAware(_) => None,
            Recipe::Fp8Hybrid(recipe) => Some(recipe.amax_history),
        }
    }
}

/// E4M3 forward, another format for gradients, powers of two from the magnitudes of earlier steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fp8Hybrid {
    pub gradient: GradientFormat,
    /// Steps that a power of two follows from; 0: the tensor's own magnitude, in every step.
    pub amax_history: usize,
    /// Number of first layers in the compute type; `skip_last` is that of last ones.
    pub skip_first: usize,
    pub skip_last: usize,
}

/// E2M1 in blocks with E4M3 scales.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Nvfp4 {
    /// Products are those of the numbers that codes stand for, also where the machine has units of four bits. On a CPU they
    /// always are.
    pub emulate: bool,
    /// Gradients are rounded up or down at random.
    pub stochastic: bool,
    /// Number of first layers in the compute type; `skip_last` is that of last ones.
    pub skip_first: usize,
    pub skip_last: usize,
}

/// The format of gradients in products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientFormat {
    E5M2,
    E4M3,
    /// In the compute type, with the numbers that the codes of the other factor stand for.
    Unquantised,
}

/// Decides every element type that the graph left open.
pub fn run(graph: &mut Graph, options: &CompileOptions, machine: &Machine) -> Result<(), CompileError> {
    uniform::run(graph, options.compute)?;
    match &options.recipe {
        Recipe::Uniform => return Ok(()),
        Recipe::Fp8Hybrid(recipe) => fp8_hybrid::run(graph, recipe, options, machine)?,
        Recipe::Nvfp4(recipe) => nvfp4::run(graph, recipe, options, machine)?,
        Recipe::QuantizeAware(recipe) => quantize_aware::run(graph, recipe, options)?,
    }
    // Views of weights that lost their readers.
    dead_code::run(graph)
}

/// The weights that may be one matrix when they are multiplied with one value, as far as the recipe is concerned.
pub enum Alike {
    /// All weights are treated alike.
    All,
    /// All but matrices that score experts, and those that are not taken.
    ButRouters(HashSet<ParameterId>),
    /// Weights that have codes, and share what these are scaled by or do not come near each other.
    Codes(QuantizeAware, HashSet<ParameterId>),
}

impl Alike {
    pub fn new(graph: &Graph, recipe: &Recipe) -> Alike {
        match recipe {
            Recipe::Uniform => Alike::All,
            Recipe::Fp8Hybrid(_) | Recipe::Nvfp4(_) => Alike::ButRouters(groups::routers(graph)),
            Recipe::QuantizeAware(recipe) => Alike::Codes(*recipe, quantize_aware::taken(graph, recipe)),
        }
    }

    pub fn treats(&self, graph: &Graph, one: ParameterId, other: ParameterId) -> bool {
        match self {
            Alike::All => true,
            Alike::ButRouters(routers) => {
                let taken = |id: ParameterId| groups::takes(graph.parameter(id)) && !routers.contains(&id);
                taken(one) == taken(other)
            }
            Alike::Codes(recipe, taken) => match (taken.contains(&one), taken.contains(&other)) {
                (true, true) => recipe.joins(graph.parameter(one), graph.parameter(other)),
                (one, other) => one == other,
            },
        }
    }
}

/// The matrices whose values of codes products read, by the names of their parameters; none where the recipe is another.
pub fn quantize_aware(graph: &Graph, recipe: &Recipe) -> BTreeSet<String> {
    let Recipe::QuantizeAware(recipe) = recipe else { return BTreeSet::new() };
    let taken = quantize_aware::taken(graph, recipe);
    taken.into_iter().map(|id| graph.parameter(id).name.clone()).collect()
}

/// The weights of the layers' products that a recipe that quantises leaves in the compute type, by their names with
/// a star for the layer: routers, and what has the wrong size.
pub fn unquantised(graph: &Graph) -> Vec<String> {
    let (producers, routers) = (graph.producers(), groups::routers(graph));
    let mut names = BTreeSet::new();
    for node in graph.nodes.iter().filter(|node| node.layer.is_some() && ops::get(node.op).multiplies()) {
        let Some(weight) = node.inputs.get(1) else { continue };
        let of = groups::parameters(graph, &producers, *weight).unwrap_or_default();
        if groups::takes_product(graph, node, &of, &routers) {
            continue;
        }
        for id in of {
            let parameter = &graph.parameters[id as usize];
            if !parameter.adapter {
                let parts = parameter.name.split('.');
                let part = |part: &str| if part.bytes().all(|b| b.is_ascii_digit()) { "*" } else { part }.to_owned();
                names.insert(parts.map(part).collect::<Vec<_>>().join("."));
            }
        }
    }
    names.into_iter().collect()
}

/// Appends an operation to `nodes`, in the place of `like`; its real numbers have the compute type.
fn emit(
    graph: &mut Graph,
    compute: DType,
    nodes: &mut Vec<Node>,
    like: &Node,
    op: OpId,
    inputs: &[ValueId],
    attrs: Attrs,
) -> Vec<ValueId> {
    let mut append = Append::new(graph, like.phase);
    append.place_like(like);
    let results = append.emit(op, inputs, attrs);
    nodes.append(&mut append.nodes);
    for id in &results {
        let value = graph.value_mut(*id);
        if value.element == Element::Float {
            value.element = Element::Fixed(compute);
        }
    }
    results
}
