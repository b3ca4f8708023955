//! The products of the backward pass: gradients of what linears read, and of their weights.

use graph::{Graph, Node, ValueId};
use ops::id;
use tensor::Attrs;

use super::{Codes, Factor, Order, Rewrite, Rotated, Weight};
use crate::recipes::groups::{Group, Linear};

impl Rewrite<'_> {
    /// The gradients of a group: one factor for all, so its products stand where the last of them stood.
    pub(super) fn backward(&mut self, number: usize, group: &Group, x: Option<&Codes>, weights: &[Weight]) {
        let Some(last) = group.last_gradient() else { return };
        let like = self.graph.nodes[last].clone();
        let mut nodes = Vec::new();
        let gradients = |of: fn(&Linear) -> Option<usize>, graph: &Graph| -> Vec<(usize, ValueId)> {
            let members = group.members.iter().enumerate().filter(|(_, member)| of(member).is_some());
            members.filter_map(|(index, member)| Some((index, group.gradient_of(graph, member)?))).collect()
        };
        let stream = |of: u32| 2 * number as u32 + of;
        let to_inputs = gradients(|member| member.input_gradient, self.graph);
        if !to_inputs.is_empty() {
            let tensors: Vec<ValueId> = to_inputs.iter().map(|(_, dy)| *dy).collect();
            let units = self.units_of(group);
            let codes = self.quantise(&mut nodes, &like, &tensors, units, Some((stream(0), Order::SideBySide)));
            for ((index, _), dy) in to_inputs.iter().zip(&codes) {
                self.input_gradient(&mut nodes, &group.members[*index], dy, &weights[*index], units);
            }
        }
        let to_weights = gradients(|member| member.weight_gradient, self.graph);
        if let Some(x) = x.filter(|_| !to_weights.is_empty()) {
            let tensors: Vec<ValueId> = to_weights.iter().map(|(_, dy)| *dy).collect();
            let Rotated { codes, starts } =
                self.rotated(&mut nodes, &like, group, &tensors, Some((stream(1), Order::After)));
            let x = self.factor(&mut nodes, &like, x);
            let x = if starts.is_some() { self.in_rows(&mut nodes, &like, x) } else { x };
            for ((index, _), dy) in to_weights.iter().zip(&codes) {
                let member = &group.members[*index];
                match starts {
                    Some(starts) => self.expert_gradient(&mut nodes, member, group.x, dy, x, starts),
                    None => self.weight_gradient(&mut nodes, member, dy, x),
                }
            }
        }
        self.replaced.insert(last, nodes);
    }

    /// Appends the product dx = dy·W.
    fn input_gradient(&mut self, nodes: &mut Vec<Node>, member: &Linear, dy: &Codes, weight: &Weight, units: bool) {
        let at = member.input_gradient.expect("of members that have one");
        let node = self.graph.nodes[at].clone();
        let weight = weight.along(!member.transposed, units);
        let (a, b) = (self.factor(nodes, &node, dy), self.factor(nodes, &node, weight));
        nodes.push(match member.experts {
            Some(count) => self.of_experts(at, count, [a, b], !member.transposed),
            None => {
                let (inputs, attrs) = self.product(a, b, member.transposed, Attrs::new());
                Node { op: id::MATMUL_CODES, inputs, attrs, ..node }
            }
        });
        self.replaced.insert(at, Vec::new());
    }

    /// dW = dyᵀ·x, or its transpose where the weight is that.
    fn weight_gradient(&mut self, nodes: &mut Vec<Node>, member: &Linear, dy: &Codes, x: Factor) {
        let at = member.weight_gradient.expect("of members that have one");
        let node = self.graph.nodes[at].clone();
        let dy = self.factor(nodes, &node, dy);
        let (a, b) = if member.transposed { (x, dy) } else { (dy, x) };
        let (inputs, attrs) = self.product(a, b, true, Attrs::new().with("f32", true));
        nodes.push(Node { op: id::MATMUL_CODES, inputs, attrs, ..node });
        self.replaced.insert(at, Vec::new());
    }
}
