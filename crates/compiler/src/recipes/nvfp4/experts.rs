//! Products with a matrix for each expert. Each has a factor, the rows of all experts have one. Sums over rows are those of an
//! expert, so each has whole blocks of 16 rows of its own.

use graph::{Node, ValueId};
use ops::dequantise::of_members;
use ops::id;
use tensor::Attrs;
use tensor::storage::NVFP4_TILES;

use super::{Codes, Factor, Form, Rewrite, Weight, emit};
use crate::recipes::groups::{Group, Linear};

impl Rewrite<'_> {
    /// The offsets of the experts' rows, and how many experts there are, as an attribute; nothing of other groups.
    pub(super) fn rows_of_experts(&self, group: &Group) -> (Option<ValueId>, Attrs) {
        let first = &group.members[0];
        match first.experts {
            Some(count) => {
                let offsets = self.graph.nodes[first.forward].inputs[2];
                (Some(offsets), Attrs::new().with("groups", count))
            }
            None => (None, Attrs::new()),
        }
    }

    /// The codes of the matrices that a product reads.
    pub(super) fn expert_weights(
        &mut self,
        nodes: &mut Vec<Node>,
        like: &Node,
        group: &Group,
        member: &Linear,
    ) -> Weight {
        let count = member.experts.expect("a matrix for each expert");
        let (graph, compute, weight) = (&mut *self.graph, self.compute, member.weight);
        let each = Attrs::new().with("groups", count);
        let parts = emit(graph, compute, nodes, like, id::OWN_AMAX, &[weight], each.clone())[0];
        let attrs = each.with("tiles", true);
        let results = emit(graph, compute, nodes, like, id::QUANTISE_BLOCKS, &[weight, parts], attrs);
        let (columns, rows) = graph.value(weight).shape.split_last().expect("matrices have columns");
        let shape = [rows.iter().product::<usize>() / count, *columns];
        let attrs = of_members(NVFP4_TILES, &shape, count).with("unscaled", true);
        self.keep(group, &results);
        let codes = Codes { form: Form::Packed { packed: results[0], attrs }, factor: results[1] };
        Weight { plain: Some(codes), transposed: None }
    }

    /// A product of rows with the matrices of their experts, which are `transposed` or not.
    pub(super) fn of_experts(&self, at: usize, count: usize, [rows, matrices]: [Factor; 2], transposed: bool) -> Node {
        let node = self.graph.nodes[at].clone();
        let attrs = Attrs::new().with("groups", count);
        let attrs = if transposed { attrs.with("transposed", true) } else { attrs };
        let inputs = vec![rows.values, matrices.values, node.inputs[2], rows.of, matrices.of];
        Node { op: id::GROUPED_CODES, inputs, attrs, ..node }
    }

    /// Numbers that lie along the rows' axis, as rows.
    pub(super) fn in_rows(&mut self, nodes: &mut Vec<Node>, like: &Node, of: Factor) -> Factor {
        let [columns, rows] = self.graph.value(of.values).shape[..] else {
            unreachable!("rotated tensors are matrices")
        };
        let attrs = Attrs::new().with("columns", rows).with("shape", vec![rows, columns]);
        let values = emit(self.graph, self.compute, nodes, like, id::TRANSPOSE, &[of.values], attrs)[0];
        Factor { values, ..of }
    }

    /// dW of each expert; `of_x`: numbers of x as rows, of which those of an expert begin at `starts`.
    pub(super) fn expert_gradient(
        &mut self,
        nodes: &mut Vec<Node>,
        member: &Linear,
        x: ValueId,
        dy: &Codes,
        of_x: Factor,
        starts: ValueId,
    ) {
        let at = member.weight_gradient.expect("of members that have one");
        let node = self.graph.nodes[at].clone();
        let dy = self.factor(nodes, &node, dy);
        let dy = self.in_rows(nodes, &node, dy);
        let [a, b] = [0, 1].map(|place| if node.inputs[place] == x { of_x } else { dy });
        nodes.push(Node { inputs: vec![a.values, b.values, starts, a.of, b.of], ..node });
        self.replaced.insert(at, Vec::new());
    }
}
