//! Appending operations to a flat graph with inferred types: what autodiff and the rewriting passes
//! build with.

use graph::{Graph, Layer, Node, OpId, Origin, Phase, Value, ValueId, ValueType};
use tensor::Attrs;

use crate::gradient::Emit;
use crate::verify::infer;

/// Collects new nodes for a graph. They are not part of its node list until the owner puts them
/// there; their values are.
pub struct Append<'g> {
    pub graph: &'g mut Graph,
    /// The new nodes, in order.
    pub nodes: Vec<Node>,
    pub phase: Phase,
    pub layer: Option<Layer>,
    pub region: Option<String>,
    pub at: Option<String>,
}

impl<'g> Append<'g> {
    pub fn new(graph: &'g mut Graph, phase: Phase) -> Self {
        Append { graph, nodes: Vec::new(), phase, layer: None, region: None, at: None }
    }

    /// Makes new nodes take layer, region and source line from this one.
    pub fn place_like(&mut self, node: &Node) {
        self.layer = node.layer;
        self.region = node.region.clone();
        self.at = node.at.clone();
    }
}

impl Emit for Append<'_> {
    fn emit(&mut self, op: OpId, inputs: &[ValueId], attrs: Attrs) -> Vec<ValueId> {
        let types: Vec<ValueType> = inputs.iter().map(|id| self.graph.value(*id).value_type()).collect();
        let results = infer(op, &types, &attrs).unwrap_or_else(|message| {
            panic!("a rule of the engine built an ill-typed operation: {message}");
        });
        let outputs: Vec<ValueId> =
            results.iter().map(|of| self.graph.add_typed(op.name(), of, Origin::Node)).collect();
        self.nodes.push(Node {
            op,
            inputs: inputs.to_vec(),
            outputs: outputs.clone(),
            attrs,
            phase: self.phase,
            layer: self.layer,
            region: self.region.clone(),
            at: self.at.clone(),
        });
        outputs
    }

    fn value(&self, id: ValueId) -> &Value {
        self.graph.value(id)
    }
}
