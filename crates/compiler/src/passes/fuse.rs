//! Fusion by rules: pairs of operations that have a fused form become it (the operations declare which), and calls of one
//! operation that share a kernel. `join_forms` joins what expressions give.

use std::collections::HashMap;

use graph::{Graph, Node, ValueId};
use ops::{Fusion, OpId, Pairing, id};
use tensor::Attrs;

use crate::CompileError;

/// `joins_losses`: a loss and its gradient may become one operation.
pub fn run(graph: &mut Graph, joins_losses: bool) -> Result<(), CompileError> {
    let rules: Vec<(OpId, Fusion)> =
        ops::all().iter().flat_map(|op| op.fusions().into_iter().map(|f| (op.id(), f))).collect();
    sum_products(graph);
    sum_grouped_products(graph);
    if joins_losses {
        losses_with_gradients(graph);
    }
    for (fused, rule) in &rules {
        apply_rule(graph, *fused, rule);
    }
    for op in ops::all() {
        if let Some(pairing) = op.pairing() {
            join_calls(graph, op.id(), &pairing);
        }
    }
    Ok(())
}

/// Joins the sum of two plain products that nothing else reads to one product: an adapted linear gives its input one
/// gradient from the base weight, of codes or not, and one from the adapter.
fn sum_products(graph: &mut Graph) {
    let uses = graph.use_counts();
    let producers = graph.producers();
    let plain = |id: &ValueId| {
        let index = producers[id.0 as usize]?;
        let node = &graph.nodes[index];
        let matrix = graph.value(node.inputs.get(1).copied()?).shape.len() == 2;
        (node.op == id::MATMUL && node.attrs.is_empty() && matrix && uses[id.0 as usize] == 1).then_some(index)
    };
    let of_codes = |id: &ValueId| {
        let index = producers[id.0 as usize]?;
        let node = &graph.nodes[index];
        let bare = ["columns", "bias", "f32"].iter().all(|name| node.attrs.get(name).is_none());
        (node.op == id::MATMUL_CODES && bare && uses[id.0 as usize] == 1).then_some(index)
    };
    let mut nodes: Vec<Option<Node>> = graph.nodes.iter().cloned().map(Some).collect();
    for (index, node) in graph.nodes.iter().enumerate().filter(|(_, node)| node.op == id::ADD) {
        let [a, b] = [&node.inputs[0], &node.inputs[1]];
        if let Some((base, low_rank)) = of_codes(a).zip(plain(b)).or(of_codes(b).zip(plain(a))) {
            let columns = *graph.value(node.outputs[0]).shape.last().expect("products have columns");
            let of_base = &graph.nodes[base];
            let inputs = of_base.inputs.iter().chain(&graph.nodes[low_rank].inputs).copied().collect();
            let attrs = of_base.attrs.clone().with("columns", vec![0, columns]).with("across", true);
            nodes[index] = Some(Node { op: of_base.op, inputs, attrs, ..node.clone() });
            (nodes[base], nodes[low_rank]) = (None, None);
            continue;
        }
        let (Some(one), Some(other)) = (plain(a), plain(b)) else { continue };
        let inner = |n: usize| graph.value(graph.nodes[n].inputs[1]).shape[0];
        let (base, low_rank) = if inner(one) >= inner(other) { (one, other) } else { (other, one) };
        let inputs = [base, low_rank].iter().flat_map(|n| graph.nodes[*n].inputs.clone()).collect();
        nodes[index] = Some(Node { op: id::MATMUL_SUM, inputs, ..node.clone() });
        (nodes[one], nodes[other]) = (None, None);
    }
    graph.nodes = nodes.into_iter().flatten().collect();
}

/// Terms of a second product of groups are a multiple of this: rows that tensor cores read.
const TERMS: usize = 8;

/// Does the same for products with a matrix for each group, of codes or not: an adapter's part of a result, or of the
/// gradient of an input.
fn sum_grouped_products(graph: &mut Graph) {
    let (uses, producers) = (graph.use_counts(), graph.producers());
    let single = |id: &ValueId| {
        let index = producers[id.0 as usize]?;
        let node = &graph.nodes[index];
        let inputs = [(id::GROUPED_LINEAR, 3), (id::GROUPED_CODES, 5)];
        let alone = inputs.contains(&(node.op, node.inputs.len()));
        (alone && uses[id.0 as usize] == 1).then_some(index)
    };
    let terms = |n: usize| *graph.value(graph.nodes[n].inputs[0]).shape.last().expect("products have terms");
    let of_codes = |n: usize| graph.nodes[n].op == id::GROUPED_CODES;
    let mut nodes: Vec<Option<Node>> = graph.nodes.iter().cloned().map(Some).collect();
    for (index, node) in graph.nodes.iter().enumerate().filter(|(_, node)| node.op == id::ADD) {
        let (Some(one), Some(other)) = (single(&node.inputs[0]), single(&node.inputs[1])) else { continue };
        let first = of_codes(one) || !of_codes(other) && terms(one) >= terms(other);
        let (base, second) = if first { (one, other) } else { (other, one) };
        let (of_base, of_second) = (&graph.nodes[base], &graph.nodes[second]);
        if of_codes(second) || of_base.inputs[2] != of_second.inputs[2] || !terms(second).is_multiple_of(TERMS) {
            continue;
        }
        let inputs = of_base.inputs.iter().chain(&of_second.inputs[..2]).copied().collect();
        let across = of_second.attrs.flag("transposed").unwrap_or(false);
        let attrs = if across { of_base.attrs.clone().with("across", true) } else { of_base.attrs.clone() };
        nodes[index] = Some(Node { op: of_base.op, inputs, attrs, ..node.clone() });
        (nodes[one], nodes[other]) = (None, None);
    }
    graph.nodes = nodes.into_iter().flatten().collect();
}

/// Joins a loss and its gradient to one operation in the loss's place: the logits are read once, and their gradient may
/// take their memory. The scale of the gradient must be computed before that place.
fn losses_with_gradients(graph: &mut Graph) {
    let (uses, producers) = (graph.use_counts(), graph.producers());
    let mut nodes: Vec<Option<Node>> = graph.nodes.iter().cloned().map(Some).collect();
    for (index, gradient) in graph.nodes.iter().enumerate().filter(|(_, n)| n.op == id::CROSS_ENTROPY_BACKWARD) {
        let [logits, targets, lse, d] = gradient.inputs[..] else { unreachable!("the verifier counts inputs") };
        let Some(first) = producers[lse.0 as usize] else { continue };
        let loss = &graph.nodes[first];
        let early = producers[d.0 as usize].is_none_or(|at| at < first);
        let same = loss.op == id::CROSS_ENTROPY && loss.inputs == [logits, targets] && loss.outputs[1] == lse;
        if !same || !early || uses[lse.0 as usize] != 1 {
            continue;
        }
        nodes[first] = Some(Node {
            op: id::CROSS_ENTROPY_WITH_GRADIENT,
            inputs: vec![logits, targets, d],
            outputs: vec![loss.outputs[0], gradient.outputs[0]],
            ..loss.clone()
        });
        nodes[index] = None;
    }
    graph.nodes = nodes.into_iter().flatten().collect();
}

/// Joins two calls of an operation that share inputs to one node: in the place of the second if nothing in between
/// reads the results of the first, or in that of the first if nothing in between gives the inputs of the second.
fn join_calls(graph: &mut Graph, op: OpId, pairing: &Pairing) {
    let alone = pairing.own.len() + pairing.shared.len();
    let mut nodes: Vec<Option<Node>> = std::mem::take(&mut graph.nodes).into_iter().map(Some).collect();
    let mut last: Option<usize> = None;
    for index in 0..nodes.len() {
        if nodes[index].as_ref().is_none_or(|node| node.op != op || node.inputs.len() != alone) {
            continue;
        }
        let place = last.and_then(|first| Some((first, joint_place(&nodes, first, index, pairing)?)));
        let Some((first, place)) = place else {
            last = Some(index);
            continue;
        };
        let [first, second] = [first, index].map(|at| nodes[at].take().expect("both calls are there"));
        let own = [&first, &second].into_iter().flat_map(|node| pairing.own.iter().map(|i| node.inputs[*i]));
        let inputs = own.chain(pairing.shared.iter().map(|i| second.inputs[*i])).collect();
        let outputs = [first.outputs, second.outputs.clone()].concat();
        nodes[place] = Some(Node { inputs, outputs, ..second });
        last = None;
    }
    graph.nodes = nodes.into_iter().flatten().collect();
}

/// Returns the place where two calls can be made at once, if there is one.
fn joint_place(nodes: &[Option<Node>], first: usize, second: usize, pairing: &Pairing) -> Option<usize> {
    let (one, two) = (nodes[first].as_ref()?, nodes[second].as_ref()?);
    let shared = pairing.shared.iter().all(|i| one.inputs[*i] == two.inputs[*i]);
    let alike = one.attrs == two.attrs && (one.phase, one.layer) == (two.phase, two.layer);
    let apart = |ids: &[ValueId], others: &[ValueId]| !ids.iter().any(|id| others.contains(id));
    if !shared || !alike || !apart(&two.inputs, &one.outputs) {
        return None;
    }
    let between: Vec<&Node> = nodes[first + 1..second].iter().flatten().collect();
    if between.iter().all(|node| apart(&node.inputs, &one.outputs)) {
        return Some(second);
    }
    between.iter().all(|node| apart(&two.inputs, &node.outputs)).then_some(first)
}

/// Applies one rule wherever it fits, first to last.
fn apply_rule(graph: &mut Graph, fused: OpId, rule: &Fusion) {
    let uses = graph.use_counts();
    let mut producer: HashMap<ValueId, usize> = HashMap::new();
    let mut nodes: Vec<Option<Node>> = std::mem::take(&mut graph.nodes).into_iter().map(Some).collect();
    for index in 0..nodes.len() {
        if let Some(first) = candidate(&nodes, &producer, &uses, index, rule)
            && takes(fused, &nodes, [first, index])
        {
            let (taken, second) = (nodes[first].take(), nodes[index].take());
            let merged = join(fused, rule, taken.expect("a candidate exists"), second.expect("the node exists"));
            nodes[index] = Some(merged);
        }
        for output in &nodes[index].as_ref().expect("only earlier nodes are taken").outputs {
            producer.insert(*output, index);
        }
    }
    graph.nodes = nodes.into_iter().flatten().collect();
}

/// The index of the node that can be joined with `nodes[index]`.
fn candidate(
    nodes: &[Option<Node>],
    producer: &HashMap<ValueId, usize>,
    uses: &[usize],
    index: usize,
    rule: &Fusion,
) -> Option<usize> {
    let second = nodes[index].as_ref().filter(|n| n.op == rule.second)?;
    let joined = *second.inputs.get(rule.operand)?;
    let first_index = *producer.get(&joined)?;
    let first = nodes[first_index].as_ref().filter(|n| n.op == rule.first && n.outputs[0] == joined)?;
    let repeated = second.inputs.iter().filter(|id| first.outputs.contains(id)).count() > 1;
    let alone = first.phase == second.phase && !repeated;
    let dropped = &first.outputs[..rule.keeps.dropped(first.outputs.len())];
    let single = dropped.iter().all(|id| uses[id.0 as usize] == usize::from(*id == joined));
    // The first node moves down to the second: no node in between may need what it computes.
    let between = nodes[first_index + 1..index].iter().flatten();
    let undisturbed = between.into_iter().all(|n| !n.inputs.iter().any(|id| first.outputs.contains(id)));
    (alone && single && undisturbed).then_some(first_index)
}

/// Returns true if the fused operation takes the attributes of both, but for flags that are off.
fn takes(fused: OpId, nodes: &[Option<Node>], places: [usize; 2]) -> bool {
    let mut given = places.into_iter().filter_map(|at| nodes[at].as_ref()).map(|node| &node.attrs);
    given.all(|attrs| attrs.keys().all(|name| is_known(fused, name) || is_off(attrs, name)))
}

fn is_known(fused: OpId, name: &str) -> bool {
    ops::get(fused).attributes().iter().any(|of| of.name == name)
}

fn is_off(attrs: &Attrs, name: &str) -> bool {
    attrs.flag(name).is_ok_and(|on| !on)
}

/// Inputs of the first, then those of the second without the joined one; outputs and attributes of
/// both (the first's outputs as far as they are kept).
fn join(fused: OpId, rule: &Fusion, first: Node, second: Node) -> Node {
    let rest = second.inputs.iter().enumerate().filter(|(i, _)| *i != rule.operand).map(|(_, id)| *id);
    let mut attrs = Attrs::new();
    for of in [&first.attrs, &second.attrs] {
        let taken = of.iter().filter(|(name, _)| is_known(fused, name));
        attrs.extend(taken.map(|(name, value)| (name.clone(), value.clone())));
    }
    let kept: Vec<ValueId> = first.outputs.iter().copied().skip(rule.keeps.dropped(first.outputs.len())).collect();
    Node {
        op: fused,
        inputs: first.inputs.into_iter().chain(rest).collect(),
        outputs: kept.into_iter().chain(second.outputs.iter().copied()).collect(),
        attrs,
        ..second
    }
}

#[cfg(test)]
mod tests {
    use graph::{Element, Phase};
    use ops::{Append, Emit};

    use super::*;

    /// A norm and a rotation of its result, with a flag that the fused operation does not take.
    fn normed(skip: bool) -> Graph {
        let mut graph = Graph::default();
        let x = graph.add_input("x", Element::Float, vec![1, 4, 2, 16]);
        let w = graph.add_input("w", Element::Float, vec![16]);
        let positions = graph.add_input("positions", Element::I32, vec![1, 4]);
        let frequencies = graph.add_input("inv_freq", Element::F32, vec![8]);
        let scaling = graph.add_input("scaling", Element::F32, vec![1]);
        let mut append = Append::new(&mut graph, Phase::Forward);
        let norm = append.emit(id::RMSNORM, &[x, w], Attrs::new().with("eps", 1e-6))[0];
        let given = [norm, positions, frequencies, scaling];
        let y = append.emit(id::ROPE, &given, Attrs::new().with("skip", skip))[0];
        graph.nodes = append.nodes;
        graph.outputs.push(("y".to_owned(), y));
        graph
    }

    #[test]
    fn flags_that_a_fused_operation_does_not_take_are_off_or_it_is_not_made() {
        let mut fused = normed(false);
        run(&mut fused, true).unwrap();
        assert_eq!(fused.nodes.iter().map(|node| node.op).collect::<Vec<_>>(), [id::RMSNORM_ROPE]);
        assert!(fused.nodes[0].attrs.get("skip").is_none());
        ops::verify(&fused).unwrap();

        let mut apart = normed(true);
        run(&mut apart, true).unwrap();
        assert_eq!(apart.nodes.iter().map(|node| node.op).collect::<Vec<_>>(), [id::RMSNORM, id::ROPE]);
        ops::verify(&apart).unwrap();
    }
}
