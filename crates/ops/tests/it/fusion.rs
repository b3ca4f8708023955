//! A fused operation gives the bits of the operations that it replaces, in every storage type: the
//! values between them are rounded as they would have been in memory.

use std::collections::HashMap;

use graph::{Element, Graph, Node, Phase, ValueId};
use ops::evaluate::{Array, apply_stored};
use ops::examples::{Instance, array_of, instantiate, tensor_of, type_of};
use ops::rowwise::{around, intermediate, join};
use ops::{Append, Emit, Fusion, Op, OpId, id};
use tensor::{Attrs, DType, HostTensor};

/// The attributes among `attrs` that `op` takes.
fn taken_by(op: &dyn Op, attrs: &Attrs) -> Attrs {
    let known = |name: &String| op.attributes().iter().any(|a| a.name == name);
    attrs.iter().filter(|(name, _)| known(name)).map(|(n, v)| (n.clone(), v.clone())).collect()
}

/// The types of an operation's results, those of type `dtype` as the floating-point type.
fn results_of(op: &dyn Op, attrs: &Attrs, inputs: &[HostTensor], dtype: DType) -> Vec<graph::ValueType> {
    let type_of = |t: &HostTensor| {
        let element = if t.dtype == dtype { Element::Float } else { Element::Fixed(t.dtype) };
        graph::ValueType::new(element, t.shape.iter().map(|n| (*n).into()).collect::<Vec<_>>())
    };
    ops::infer(op.id(), &inputs.iter().map(type_of).collect::<Vec<_>>(), attrs).expect("the pair is well typed")
}

/// One operation on stored tensors: results rounded to the types that the shape rule gives. The last results
/// start with the contents of `state`.
fn run(
    op: &'static dyn Op,
    attrs: &Attrs,
    inputs: Vec<HostTensor>,
    state: &[HostTensor],
    dtype: DType,
) -> Vec<HostTensor> {
    let results = results_of(op, attrs, &inputs, dtype);
    let outputs = results.iter().map(|t| {
        let shape: Vec<usize> = t.shape.iter().map(|d| d.fixed().expect("no symbols")).collect();
        let stored = match t.dtype {
            Element::Float => dtype,
            Element::Fixed(fixed) => fixed,
        };
        HostTensor::zeros(stored, shape)
    });
    let mut outputs: Vec<HostTensor> = outputs.collect();
    let first = outputs.len() - state.len();
    outputs[first..].clone_from_slice(state);
    Instance { op, attrs: attrs.clone(), outputs, inputs }.expected()
}

/// `first`, then `second` on its result, as two operations.
fn run_pair(rule: &Fusion, fused: &Instance, dtype: DType) -> Vec<HostTensor> {
    let [first, second] = [rule.first, rule.second].map(ops::get);
    let count = first.examples()[0].inputs.len();
    let (head, rest) = fused.inputs.split_at(count);
    let count = results_of(first, &taken_by(first, &fused.attrs), head, dtype).len();
    let (kept, after) = fused.outputs.split_at(count - rule.keeps.dropped(count));
    let made = run(first, &taken_by(first, &fused.attrs), head.to_vec(), kept, dtype);
    let mut inputs = rest.to_vec();
    inputs.insert(rule.operand, made[0].clone());
    let results = run(second, &taken_by(second, &fused.attrs), inputs, after, dtype);
    let dropped = rule.keeps.dropped(made.len());
    made.into_iter().skip(dropped).chain(results).collect()
}

#[test]
fn fused_pairs_keep_their_bits() {
    let mut checked = 0;
    for op in ops::all() {
        for rule in op.fusions() {
            // Of one pair: an operation may take the operands of two at once.
            let operands = |op: OpId| ops::get(op).examples()[0].inputs.len();
            let of_one = operands(rule.first) + operands(rule.second) - 1;
            for (dtype, example) in [DType::F32, DType::BF16, DType::F16]
                .iter()
                .flat_map(|d| op.examples().into_iter().map(move |e| (*d, e)))
                .filter(|(_, example)| example.inputs.len() == of_one)
            {
                let instance = instantiate(&example, *op, dtype, 23);
                let (found, wanted) = (instance.expected(), run_pair(&rule, &instance, dtype));
                assert!(found == wanted, "{} of {} and {}, {dtype}", op.name(), rule.first, rule.second);
                checked += 1;
            }
        }
    }
    assert!(checked >= 6, "only {checked} pairs were compared");
}

type Stored = HashMap<ValueId, HostTensor>;

fn dtype_of(graph: &Graph, id: ValueId) -> DType {
    match graph.value(id).element {
        Element::Fixed(dtype) => dtype,
        Element::Float => panic!("these graphs have concrete types"),
    }
}

/// Computes the nodes one by one, every result rounded to its type.
fn evaluate_stored(graph: &Graph, given: &Stored) -> Stored {
    let mut values = given.clone();
    for node in &graph.nodes {
        let arrays: Vec<Array<f32>> = node.inputs.iter().map(|id| array_of(&values[id])).collect();
        let inputs: Vec<(&[usize], &Array<f32>)> =
            node.inputs.iter().zip(&arrays).map(|(id, a)| (graph.value(*id).shape.as_slice(), a)).collect();
        let storage: Vec<DType> = node.outputs.iter().map(|id| dtype_of(graph, *id)).collect();
        let mut outputs: Vec<(Vec<usize>, Array<f32>)> = node
            .outputs
            .iter()
            .map(|id| (graph.value(*id).shape.clone(), Array::Real(vec![0.0; graph.value(*id).shape.iter().product()])))
            .collect();
        let op = ops::get(node.op);
        apply_stored(op, &node.attrs, &inputs, &mut outputs, &storage);
        for ((id, (shape, array)), dtype) in node.outputs.iter().zip(outputs).zip(storage) {
            values.insert(*id, tensor_of(&array, dtype, &shape));
        }
    }
    values
}

/// A chain of element-wise nodes; `build` gives the named results.
fn chain(
    dtype: DType,
    operands: usize,
    build: impl Fn(&mut Append<'_>, &[ValueId]) -> Vec<ValueId>,
) -> (Graph, Stored) {
    let mut graph = Graph::default();
    let (op, mut given) = (ops::get(id::ADD), Stored::new());
    let example = op.examples().remove(1);
    let shape: Vec<usize> = type_of(&example.inputs[0]).shape.iter().map(|d| d.fixed().expect("no symbols")).collect();
    let inputs: Vec<ValueId> = (0..operands)
        .map(|i| {
            let id = graph.add_input(&format!("x{i}"), Element::Fixed(dtype), shape.clone());
            given.insert(id, instantiate(&example, op, dtype, 40 + i as u64).inputs[0].clone());
            id
        })
        .collect();
    let mut append = Append::new(&mut graph, Phase::Forward);
    let results = build(&mut append, &inputs);
    let nodes = append.nodes;
    graph.nodes = nodes;
    graph.outputs = results.into_iter().map(|id| (id.0.to_string(), id)).collect();
    (graph, given)
}

/// Composes every node into the next, keeping what is a named result.
fn fuse_all(graph: &Graph) -> Graph {
    let mut fused = graph.clone();
    let named: Vec<ValueId> = graph.outputs.iter().map(|(_, id)| *id).collect();
    let mut nodes = graph.nodes.iter().cloned();
    let mut last: Node = nodes.next().expect("a chain has nodes");
    for node in nodes {
        last = join(graph, &last, &node, &named).expect("neighbours of the chain have forms");
    }
    fused.nodes = vec![last];
    ops::verify(&fused).expect("a fused node passes its shape rule");
    fused
}

fn assert_same_bits(dtype: DType, operands: usize, build: impl Fn(&mut Append<'_>, &[ValueId]) -> Vec<ValueId>) {
    let (graph, given) = chain(dtype, operands, build);
    let fused = fuse_all(&graph);
    assert!(graph.nodes.len() > 1 && fused.nodes.len() == 1);
    let (wanted, found) = (evaluate_stored(&graph, &given), evaluate_stored(&fused, &given));
    for (name, id) in &graph.outputs {
        assert!(wanted[id] == found[id], "{dtype}, result {name}: {}", fused.node_text(&fused.nodes[0]));
    }
}

#[test]
fn composed_elementwise_nodes_keep_their_bits() {
    let none = Attrs::new;
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        assert_same_bits(dtype, 3, |g, x| {
            let product = g.emit(id::SWIGLU, &x[..2], none())[0];
            let scaled = g.emit(id::SCALE, &[product], none().with("factor", 1.7))[0];
            g.emit(id::ADD, &[x[2], scaled], none())
        });
        assert_same_bits(dtype, 3, |g, x| {
            let both = g.emit(id::SWIGLU_BACKWARD, x, none());
            let sum = g.emit(id::ADD, &both, none())[0];
            let wide = g.emit(id::CAST, &[sum], none().with("dtype", "f32"))[0];
            vec![both[1], g.emit(id::MUL, &[wide, wide], none())[0]]
        });
        assert_same_bits(dtype, 1, |g, x| {
            let twos = g.emit(id::FILL, x, none().with("value", 2.0))[0];
            let narrow = g.emit(id::CAST, &[twos], none().with("dtype", "bf16"))[0];
            g.emit(id::MUL, &[narrow, narrow], none())
        });
    }
}

/// Tensors [5, 40], a weight [40] after them, types of activations.
fn rows(dtype: DType, tensors: usize, build: impl Fn(&mut Append<'_>, &[ValueId]) -> Vec<ValueId>) -> (Graph, Stored) {
    rows_like(1, dtype, tensors, build)
}

/// The same, of the shapes of an example of the norm.
fn rows_like(
    example: usize,
    dtype: DType,
    tensors: usize,
    build: impl Fn(&mut Append<'_>, &[ValueId]) -> Vec<ValueId>,
) -> (Graph, Stored) {
    let mut graph = Graph::default();
    let mut given = Stored::new();
    let op = ops::get(id::RMSNORM);
    let example = &op.examples()[example];
    let operands: Vec<ValueId> = (0..=tensors)
        .map(|i| {
            let drawn = instantiate(example, op, dtype, 60 + i as u64).inputs[usize::from(i == tensors)].clone();
            let id = graph.add_input(&format!("x{i}"), Element::Fixed(dtype), drawn.shape.clone());
            given.insert(id, drawn);
            id
        })
        .collect();
    let mut append = Append::new(&mut graph, Phase::Forward);
    let results = build(&mut append, &operands);
    graph.nodes = append.nodes;
    graph.values.iter_mut().filter(|v| v.element == Element::Float).for_each(|v| v.element = Element::Fixed(dtype));
    graph.outputs = results.into_iter().map(|id| (id.0.to_string(), id)).collect();
    (graph, given)
}

fn norm(g: &mut Append<'_>, x: ValueId, w: ValueId) -> Vec<ValueId> {
    g.emit(id::RMSNORM, &[x, w], Attrs::new().with("eps", 1e-5).with("offset", true))
}

#[test]
fn composed_rows_keep_their_bits() {
    let none = Attrs::new;
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let check = |(graph, given): (Graph, Stored)| {
            let fused = fuse_all(&graph);
            assert_eq!(fused.nodes[0].op, id::ROWWISE);
            let (wanted, found) = (evaluate_stored(&graph, &given), evaluate_stored(&fused, &given));
            for (name, id) in &graph.outputs {
                assert!(wanted[id] == found[id], "{dtype}, result {name}: {}", fused.node_text(&fused.nodes[0]));
            }
        };
        // Prologue and epilogue, a norm after a norm, a gradient after the norm that it needs.
        check(rows(dtype, 2, |g, x| {
            let sum = g.emit(id::ADD, &x[..2], none())[0];
            let y = norm(g, sum, x[2]);
            [vec![sum, y[1]], g.emit(id::SCALE, &y[..1], none().with("factor", 1.7))].concat()
        }));
        check(rows(dtype, 2, |g, x| {
            let inner = norm(g, x[0], x[2])[0];
            let sum = g.emit(id::ADD, &[x[1], inner], none())[0];
            norm(g, sum, x[2])
        }));
        check(rows(dtype, 3, |g, x| {
            let y = norm(g, x[0], x[3]);
            let both = g.emit(id::RMSNORM_GRADIENTS, &[x[0], x[3], y[1], x[1]], none().with("offset", true));
            [y, vec![both[1]], g.emit(id::ADD, &[both[0], x[2]], none())].concat()
        }));
    }
}

/// Codes, scale, magnitude and numbers of elements of what rows give are those of the calls one after another, with a factor
/// and without; so are those of tensors that share a power of two. Without them the node gives the rest.
#[test]
fn quantised_rows_keep_their_bits() {
    // A top of -6 makes a part of the elements 0.
    let cases = [
        (DType::F32, 0.0, 7),
        (DType::BF16, 0.0, 7),
        (DType::BF16, 0.0, -6),
        (DType::BF16, 32.0, 7),
        (DType::F16, 1024.0, 7),
    ];
    for (dtype, known, top) in cases {
        for both in [false, true] {
            let (mut graph, mut given) = rows_like(0, dtype, 2, |g, x| {
                let sum = g.emit(id::ADD, &x[..2], Attrs::new())[0];
                [vec![sum], norm(g, sum, x[2])].concat()
            });
            let factor = graph.add_input("factor", Element::F32, vec![1]);
            given.insert(factor, HostTensor::from_f32([1], &[known]));
            let [sum, y] = [graph.outputs[0].1, graph.outputs[1].1];
            let tensors = if both { vec![sum, y] } else { vec![y] };
            let mut append = Append::new(&mut graph, Phase::Forward);
            let inputs: Vec<ValueId> = [factor].into_iter().chain(tensors.iter().copied()).collect();
            let parts = append.emit(id::OWN_AMAX, &inputs, Attrs::new().with("factor", true))[0];
            let attrs = Attrs::new().with("format", "e4m3").with("top", top).with("factor", true).with("record", true);
            let attrs = attrs.with("count", true);
            let calls: Vec<Vec<ValueId>> =
                tensors.iter().map(|x| append.emit(id::QUANTISE, &[*x, parts, factor], attrs.clone())).collect();
            let nodes = append.nodes;
            let apart = graph::Graph { nodes: [graph.nodes.clone(), nodes].concat(), ..graph.clone() };
            let wanted = evaluate_stored(&apart, &given);

            let mut append = Append::new(&mut graph, Phase::Forward);
            let inputs: Vec<ValueId> = tensors.iter().copied().chain([factor]).collect();
            let results = append.emit(
                id::ROWWISE,
                &inputs,
                ops::rowwise::quantising(tensors.len(), DType::E4M3, top, true, true),
            );
            let node = append.nodes.remove(0);
            graph.nodes.push(node);
            graph.outputs.extend(results.iter().map(|id| (id.0.to_string(), *id)));
            let fused = fuse_all(&graph);
            assert_eq!(fused.nodes.len(), 1, "{}", fused.node_text(&fused.nodes[0]));
            let found = evaluate_stored(&fused, &given);
            for (index, call) in calls.iter().enumerate() {
                assert!(wanted[&call[0]] == found[&results[index]], "{dtype} {known} {both}: codes {index}");
                assert!(wanted[&call[1]] == found[&results[calls.len()]], "{dtype} {known} {both}: scale");
            }
            let amax = calls.iter().map(|call| array_of::<f32>(&wanted[&call[2]]).real()[0]).fold(0.0, f32::max);
            let of_tensor = |place: usize| array_of::<f32>(&found[&results[calls.len() + place]]).real()[0];
            assert_eq!(of_tensor(1), amax, "{dtype} {known} {both}");
            for place in [2, 3] {
                let number = calls.iter().map(|call| array_of::<f32>(&wanted[&call[1 + place]]).real()[0]).sum::<f32>();
                assert_eq!(of_tensor(place), number, "{dtype} {known} {both}: number {place}");
                assert_eq!(number > 0.0, known == 0.0 && (place == 2 || top < 0), "{dtype} {known} {both}: {number}");
            }
            for id in &graph.outputs[..3] {
                assert!(wanted[&id.1] == found[&id.1], "{dtype} {known} {both}: what is quantised");
            }
            let less = ops::rowwise::without_codes(&fused, &fused.nodes[0], |id| !results.contains(&id)).unwrap();
            assert_eq!(ops::rowwise::names(&less), ["add", "rmsnorm"]);
            assert!(ops::rowwise::without_codes(&fused, &fused.nodes[0], |id| id == results[0]).is_none());
            let rest = graph::Graph { nodes: vec![less], ..fused.clone() };
            let found = evaluate_stored(&rest, &given);
            for id in &rest.nodes[0].outputs {
                assert!(wanted[id] == found[id], "{dtype} {known} {both}: without codes");
            }
        }
    }
}

/// A sum that is there already is read, and what was composed after it has the same bits.
#[test]
fn an_intermediate_sum_can_be_left_out() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let (graph, given) = rows(dtype, 2, |g, x| {
            let sum = g.emit(id::ADD, &x[..2], Attrs::new())[0];
            [vec![sum], norm(g, sum, x[2])].concat()
        });
        let fused = fuse_all(&graph);
        let index = intermediate(&fused, &fused.nodes[0]).expect("the norm is computed from the sum");
        let sum = fused.nodes[0].outputs[index];
        let mut rest = fused.clone();
        rest.nodes = vec![around(&fused, &fused.nodes[0], index).0];
        assert_eq!(rest.nodes[0].inputs, [sum, graph.inputs[2]]);
        assert_eq!(ops::rowwise::names(&rest.nodes[0]), ["rmsnorm"]);
        let wanted = evaluate_stored(&fused, &given);
        let found = evaluate_stored(&rest, &wanted);
        for id in &rest.nodes[0].outputs {
            assert!(wanted[id] == found[id], "{dtype}: {}", rest.node_text(&rest.nodes[0]));
        }
        assert!(intermediate(&rest, &rest.nodes[0]).is_none());
    }
}

/// A sum may be that of another operation: a bias is added after what scales the columns of a linear with DoRA.
#[test]
fn a_sum_need_not_be_an_addition() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let (graph, given) = rows(dtype, 2, |g, x| {
            let scaled = g.emit(id::MAGNITUDE, &[x[0], x[2], x[2], x[2]], Attrs::new().with("bias", true))[0];
            [vec![scaled], norm(g, scaled, x[2])].concat()
        });
        let fused = fuse_all(&graph);
        let index = intermediate(&fused, &fused.nodes[0]).expect("the norm is computed from the sum");
        let sum = fused.nodes[0].outputs[index];
        let (after, front) = around(&fused, &fused.nodes[0], index);
        assert_eq!((after.inputs.first(), front), (Some(&sum), None));
        let wanted = evaluate_stored(&fused, &given);
        let rest = graph::Graph { nodes: vec![after], ..fused.clone() };
        let found = evaluate_stored(&rest, &wanted);
        for id in &rest.nodes[0].outputs {
            assert!(wanted[id] == found[id], "{dtype}: {}", rest.node_text(&rest.nodes[0]));
        }
    }
}

/// Operations before and after the sum stay separate kernels, and neither reads the other's inputs.
#[test]
fn a_sum_between_two_norms_parts_them() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let (graph, given) = rows(dtype, 2, |g, x| {
            let first = norm(g, x[0], x[2]);
            let sum = g.emit(id::ADD, &[first[0], x[1]], Attrs::new())[0];
            [vec![first[1], sum], norm(g, sum, x[2])].concat()
        });
        let fused = fuse_all(&graph);
        let node = &fused.nodes[0];
        assert_eq!((fused.nodes.len(), ops::rowwise::names(node).len()), (1, 3));
        let index = intermediate(&fused, node).expect("the second norm is computed from the sum");
        let (after, front) = around(&fused, node, index);
        let front = front.expect("the first norm's scales are not computed from the sum");
        assert_eq!(after.inputs, [node.outputs[index], graph.inputs[2]]);
        assert_eq!(front.inputs, graph.inputs[..1]);
        assert_eq!(front.outputs.len() + after.outputs.len() + 1, node.outputs.len());
        let wanted = evaluate_stored(&fused, &given);
        for part in [front, after] {
            let rest = graph::Graph { nodes: vec![part], ..fused.clone() };
            let found = evaluate_stored(&rest, &wanted);
            for id in &rest.nodes[0].outputs {
                assert!(wanted[id] == found[id], "{dtype}: {}", rest.node_text(&rest.nodes[0]));
            }
        }
    }
}

#[test]
fn only_what_is_read_stays_an_operand() {
    let (graph, _) = chain(DType::BF16, 2, |g, x| {
        let sum = g.emit(id::ADD, x, Attrs::new())[0];
        g.emit(id::MUL, &[sum, x[1]], Attrs::new())
    });
    let fused = fuse_all(&graph);
    assert_eq!(fused.nodes[0].inputs, graph.inputs);
    let expressions = fused.nodes[0].attrs.get("expressions").expect("present").to_string();
    assert_eq!(expressions, r#"["mul(round_bf16(add(in0, in1)), in1)"]"#);
}

#[test]
fn neighbours_that_do_not_fit_stay_apart() {
    let (mut graph, _) = chain(DType::BF16, 2, |g, x| {
        let sum = g.emit(id::ADD, x, Attrs::new())[0];
        let other = g.emit(id::MUL, x, Attrs::new())[0];
        vec![g.emit(id::SCALE, &[sum], Attrs::new().with("factor", 2.0))[0], other]
    });
    let [sum, other, scaled] = &graph.nodes.clone()[..] else { panic!("three nodes") };
    assert!(join(&graph, sum, other, &[]).is_some(), "neighbours on the same rows");
    assert!(join(&graph, sum, scaled, &[]).is_some());
    let between = sum.outputs[0];
    graph.value_mut(between).element = Element::Float;
    assert!(join(&graph, sum, scaled, &[]).is_none(), "the rounding between them is not decided");
}
