//! The parts of a layer that can be recomputed, in steps from cheap to expensive. Regions come from the model
//! (`attention`, `mlp`), the rest from the operations' classes; no operation is known by name.

use graph::{Axis, Graph, Layer, Node, Phase};
use ops::Class;
use program::LayerPart as Part;

use crate::options::RecomputeOptions;

/// The parts of one layer that are recomputed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Parts(u8);

impl Parts {
    pub fn with(self, part: Part) -> Parts {
        Parts(self.0 | 1 << part as u8)
    }

    pub fn without(self, part: Part) -> Parts {
        Parts(self.0 & !(1 << part as u8))
    }

    pub fn and(self, others: Parts) -> Parts {
        Parts(self.0 | others.0)
    }

    pub fn has(self, part: Part) -> bool {
        self.0 & 1 << part as u8 != 0
    }

    /// Returns the parts that the options request, and those that are left to the plan.
    pub fn requested(of: &RecomputeOptions, adapters: bool) -> (Parts, Parts) {
        let on = |option: Option<bool>, parts: &[Part], sum: Parts| match option {
            Some(true) => parts.iter().fold(sum, |sum, part| sum.with(*part)),
            _ => sum,
        };
        let mut requested = Parts::default();
        requested = on(of.block, &Part::ALL, requested);
        requested = on(of.ffn, &[Part::Activation, Part::FeedForward], requested);
        requested = on(of.att, &[Part::Rotation, Part::Projections, Part::Attention], requested);
        requested = on(of.qkv, &[Part::Rotation, Part::Projections], requested);
        requested = on(of.swiglu, &[Part::Activation], requested);
        requested = on(of.rmsnorm, &[Part::Norms], requested);
        let keep_norms = of.rmsnorm == Some(false) || adapters && of.lora == Some(false);
        // A whole that is kept leaves its parts open; a part that is kept closes the wholes around it.
        let closed = |part: Part| match part {
            Part::Norms => keep_norms,
            Part::Activation => of.swiglu == Some(false),
            Part::Rotation => of.qkv == Some(false),
            Part::FeedForward => of.ffn == Some(false) || of.swiglu == Some(false),
            Part::Projections => of.qkv == Some(false),
            Part::Attention => of.att == Some(false) || of.qkv == Some(false),
            Part::Residual => {
                [of.block, of.att, of.ffn, of.qkv, of.swiglu, of.rmsnorm].contains(&Some(false)) || keep_norms
            }
        };
        if keep_norms {
            requested = requested.without(Part::Norms);
        }
        let open = Part::ALL.into_iter().filter(|part| !requested.has(*part) && !closed(*part));
        (requested, open.fold(Parts::default(), Parts::with))
    }
}

/// For every node of the forward pass inside a layer the part that it belongs to. Work that does
/// not depend on the batch has none.
pub fn classify(graph: &Graph) -> Vec<Option<Part>> {
    let class = |node: &Node| ops::get(node.op).class();
    let region = |node: &Node| node.region.as_deref().map_or("", |r| r.split('.').next().unwrap_or(r)).to_owned();
    let mut attended: Option<Layer> = None;
    let mut parts = Vec::with_capacity(graph.nodes.len());
    for node in &graph.nodes {
        let axis = |axis| graph.value(node.outputs[0]).axis(axis);
        let of_batch = axis(Axis::Rows).or(axis(Axis::Patches)).is_some();
        let forward = node.phase == Phase::Forward && class(node) != Class::View;
        let Some(layer) = node.layer.filter(|_| of_batch && forward) else {
            parts.push(None);
            continue;
        };
        let product = ops::get(node.op).multiplies();
        if class(node) == Class::Attention {
            attended = Some(layer);
        }
        parts.push(Some(match region(node).as_str() {
            "attention" if attended == Some(layer) => Part::Attention,
            "attention" if product => Part::Projections,
            "attention" => Part::Rotation,
            "mlp" if product => Part::FeedForward,
            "mlp" => Part::Activation,
            _ if class(node) == Class::Reduction => Part::Norms,
            _ => Part::Residual,
        }));
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_includes_its_parts_and_a_kept_part_closes_the_whole() {
        let all = RecomputeOptions { block: Some(true), ..Default::default() };
        let (requested, open) = Parts::requested(&all, false);
        assert!(Part::ALL.into_iter().all(|p| requested.has(p)) && open == Parts::default());
        let kept = RecomputeOptions { swiglu: Some(false), qkv: Some(true), ..Default::default() };
        let (requested, open) = Parts::requested(&kept, false);
        assert!(requested.has(Part::Projections) && requested.has(Part::Rotation) && !requested.has(Part::Attention));
        assert!(open.has(Part::Norms) && open.has(Part::Attention));
        assert!(!open.has(Part::Activation) && !open.has(Part::FeedForward) && !open.has(Part::Residual));
        let inputs = RecomputeOptions { block: Some(true), lora: Some(false), ..Default::default() };
        assert!(!Parts::requested(&inputs, true).0.has(Part::Norms));
        assert!(Parts::requested(&inputs, false).0.has(Part::Norms));
    }
}
