//! Fuses the backward products of a linear's adapters into one operation: the pairs of small products dy·b and dyᵀ·t
//! over slices of one dy read it once. Only for GPUs, whose tiles it is made for; on a CPU separate products are as
//! fast.

use std::collections::{BTreeMap, HashSet};

use graph::{Element, Graph, Node, ValueId};
use ops::id;
use program::{Arch, Machine};
use tensor::{Attrs, DType};

use crate::CompileError;

/// Slices are multiples of this many columns, ranks multiples of eight: the shapes of the tiles.
const COLUMNS: usize = 64;
const RANKS: usize = 8;

/// The two products of one adapter.
#[derive(Default)]
struct Pair {
    /// The node of dt = dy·b, and that of db = dyᵀ·t.
    dt: Option<usize>,
    db: Option<usize>,
}

/// A slice of the gradient that an adapter belongs to, with the rank and the bits of the scale.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Slice {
    dy: u32,
    rank: usize,
    scale: u64,
    first: usize,
    length: usize,
}

pub fn run(graph: &mut Graph, machine: &Machine) -> Result<(), CompileError> {
    let mut seen = HashSet::new();
    // A gradient that is summed from several places is not one that an operation may add to alone.
    let shared = graph.gradients.iter().any(|(parameter, _)| !seen.insert(*parameter));
    if machine.arch == Arch::Cpu || shared {
        return Ok(());
    }
    let mut groups: BTreeMap<Slice, Vec<(Slice, usize, usize)>> = BTreeMap::new();
    for (slice, pair) in pairs(graph) {
        if let (Some(dt), Some(db)) = (pair.dt, pair.db) {
            groups.entry(Slice { first: 0, length: 0, ..slice }).or_default().push((slice, dt, db));
        }
    }
    let producers = graph.producers();
    let mut nodes: Vec<Option<Node>> = graph.nodes.iter().cloned().map(Some).collect();
    for (of, members) in groups {
        let place = members.iter().map(|(_, dt, db)| *dt.min(db)).min().expect("a group has members");
        let joined = join(graph, of, &members, place);
        // A recipe may make factors of narrow linears, which have the shapes of adapters, between the two products.
        if joined.inputs.iter().any(|id| producers[id.0 as usize].is_some_and(|at| at >= place)) {
            continue;
        }
        members.iter().for_each(|(_, dt, db)| (nodes[*dt], nodes[*db]) = (None, None));
        nodes[place] = Some(joined);
    }
    graph.nodes = nodes.into_iter().flatten().collect();
    Ok(())
}

fn join(graph: &Graph, of: Slice, members: &[(Slice, usize, usize)], place: usize) -> Node {
    let (mut inputs, mut outputs, mut columns) = (vec![ValueId(of.dy)], vec![], vec![]);
    for (slice, dt, db) in members {
        let (dt, db) = (&graph.nodes[*dt], &graph.nodes[*db]);
        inputs.extend([db.inputs[1], dt.inputs[1]]);
        outputs.extend([dt.outputs[0], db.outputs[0]]);
        columns.extend([slice.first, slice.length]);
    }
    let attrs = Attrs::new().with("columns", columns).with("scale", f64::from_bits(of.scale));
    Node { op: id::LOW_RANK_BACKWARD, inputs, outputs, attrs, ..graph.nodes[place].clone() }
}

/// The products of adapters by the slice of dy that they read.
fn pairs(graph: &Graph) -> BTreeMap<Slice, Pair> {
    let producers = graph.producers();
    let mut pairs: BTreeMap<Slice, Pair> = BTreeMap::new();
    for (index, node) in graph.nodes.iter().enumerate().filter(|(_, node)| node.op == id::MATMUL) {
        let flag = |name: &str| node.attrs.flag(name).unwrap_or(false);
        let flags = [flag("transpose_a"), flag("f32"), flag("transpose_b")];
        let rank = *graph.value(node.inputs[1]).shape.last().expect("operands of products have axes");
        let all_are = |number| node.inputs.iter().all(|id| graph.value(*id).element == Element::Fixed(number));
        let sixteen_bits = all_are(DType::BF16) || all_are(DType::F16);
        let fits = rank.is_multiple_of(RANKS) && rank <= ops::MOST_RANK && sixteen_bits;
        if !fits || (flags != [false; 3] && flags != [true, true, false]) {
            continue;
        }
        let (dy, first) = whole(graph, &producers, node.inputs[0]);
        let length = *graph.value(node.inputs[0]).shape.last().expect("operands of products have axes");
        if !length.is_multiple_of(COLUMNS) || !first.is_multiple_of(RANKS) {
            continue;
        }
        let scale = node.attrs.optional_float("scale").ok().flatten().unwrap_or(1.0).to_bits();
        let pair = pairs.entry(Slice { dy: dy.0, rank, scale, first, length }).or_default();
        let half = if flags[0] { &mut pair.db } else { &mut pair.dt };
        half.get_or_insert(index);
    }
    pairs
}

/// Returns the value that a value is a slice of, and the slice's first column; the value itself and 0 if it is no
/// slice.
fn whole(graph: &Graph, producers: &[Option<usize>], id: ValueId) -> (ValueId, usize) {
    let Some(node) = producers[id.0 as usize].map(|index| &graph.nodes[index]).filter(|node| node.op == id::SPLIT)
    else {
        return (id, 0);
    };
    let before = node.outputs.iter().take_while(|output| **output != id);
    let columns = before.map(|id| *graph.value(*id).shape.last().expect("slices have columns"));
    (node.inputs[0], columns.sum())
}

#[cfg(test)]
mod tests {
    use graph::Phase;
    use ops::{Append, Emit};

    use super::*;

    /// Two products of one gradient. A factor of the second is made between them, or before both.
    fn graph(between: bool) -> Graph {
        let mut graph = Graph::default();
        let mut input =
            |name: &str, shape: [usize; 2]| graph.add_input(name, Element::Fixed(DType::BF16), shape.to_vec());
        let [dy, x, b] = [input("dy", [32, 64]), input("x", [32, 16]), input("b", [64, 16])];
        let mut append = Append::new(&mut graph, Phase::Backward);
        let factor = append.emit(id::CAST, &[b], Attrs::new().with("dtype", "bf16"))[0];
        append.emit(id::MATMUL, &[dy, x], Attrs::new().with("transpose_a", true).with("f32", true));
        append.emit(id::MATMUL, &[dy, factor], Attrs::new());
        graph.nodes = append.nodes;
        if between {
            graph.nodes.swap(0, 1);
        }
        graph
    }

    #[test]
    fn products_are_joined_where_both_their_factors_are_there() {
        for between in [false, true] {
            let mut graph = graph(between);
            run(&mut graph, &Machine::h200()).expect("the pass runs");
            ops::verify(&graph).expect("values are read after what gives them");
            let joined = graph.nodes.iter().any(|node| node.op == id::LOW_RANK_BACKWARD);
            assert_eq!(joined, !between);
        }
    }
}
