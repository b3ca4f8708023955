//! Precision: which element type every value has. One file per recipe.

mod emit;
mod fp8_hybrid;
pub mod groups;
mod nvfp4;
mod quantize_aware;
mod recipe;
mod uniform;

use std::collections::{BTreeSet, HashSet};

use graph::{Graph, ParameterId};
use program::Machine;

pub use recipe::{Fp8Hybrid, GradientFormat, Nvfp4, QuantizeAware, Recipe};

use crate::error::CompileError;
use crate::options::CompileOptions;
use crate::passes::dead_code;

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
