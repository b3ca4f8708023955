//! Every gradient rule against central differences in f64: one node from each example that names
//! differentiable inputs, a scalar made of its results with fixed random coefficients, and the rule's
//! own operations evaluated by the same references.

use std::collections::HashMap;

use graph::{Element, Graph, Node, Phase, ValueId};
use ops::evaluate::{Array, evaluate};
use ops::examples::{Instance, array_of, instantiate, type_of};
use ops::{Append, Class, Example, GradientCall, Gradients, Op};
use tensor::philox::{self, Purpose};
use tensor::{DType, HostTensor};

/// Elements of one input that are perturbed: all of a small one, evenly spread ones of a large one.
const MOST_PERTURBED: usize = 40;

/// ‖found − differences‖ / ‖differences‖
const TOLERANCE: f64 = 1e-6;

type Values = HashMap<ValueId, Array<f64>>;

/// Flags the results that carry a gradient: the first, and others of activation type. Further f32 results are
/// statistics that only gradient rules read.
fn differentiated(op: &dyn Op, example: &Example) -> Vec<bool> {
    let types: Vec<_> = example.inputs.iter().map(type_of).collect();
    let results = ops::infer(op.id(), &types, &example.attrs).expect("examples pass the shape rule");
    results.iter().enumerate().map(|(i, t)| t.dtype.is_float() && (i == 0 || t.dtype == Element::Float)).collect()
}

/// Random coefficients of one result; 1 for the scalar at which differentiation starts.
fn coefficients(op: &dyn Op, result: &HostTensor, index: usize) -> Vec<f64> {
    if op.class() == Class::Loss && result.len() == 1 {
        return vec![1.0];
    }
    let word = |i: usize| philox::word(77, Purpose::Initialisation, index as u32, 0, i as u64);
    (0..result.len()).map(|i| 2.0 * philox::unit(word(i)) as f64 - 1.0).collect()
}

/// The scalar and its parts.
struct Check {
    graph: Graph,
    given: Values,
    /// (result, coefficients of its elements)
    terms: Vec<(ValueId, Vec<f64>)>,
}

impl Check {
    fn scalar(&self, given: &Values) -> f64 {
        let values = evaluate(&self.graph, given);
        let dot = |id: &ValueId, c: &[f64]| values[id].real().iter().zip(c).map(|(x, c)| x * c).sum::<f64>();
        self.terms.iter().map(|(id, c)| dot(id, c)).sum()
    }

    fn difference(&self, input: ValueId, element: usize) -> f64 {
        let x = self.given[&input].real()[element];
        let step = 1e-5 * x.abs().max(1.0);
        let at = |x: f64| {
            let mut given = self.given.clone();
            let Some(Array::Real(values)) = given.get_mut(&input) else { panic!("only numbers are differentiated") };
            values[element] = x;
            self.scalar(&given)
        };
        (at(x + step) - at(x - step)) / (2.0 * step)
    }
}

/// The rule's gradients of the node's inputs; `None` with the reason where it stops.
fn apply_rule(
    op: &dyn Op,
    graph: &mut Graph,
    gradients: &[Option<ValueId>],
    wanted: &[bool],
) -> Result<Vec<Option<ValueId>>, &'static str> {
    let node: Node = graph.nodes[0].clone();
    let mut append = Append::new(graph, Phase::Backward);
    let mut call = GradientCall { emit: &mut append, node: &node, output_gradients: gradients, wanted };
    let result = op.gradient(&mut call);
    let new = append.nodes;
    graph.nodes.extend(new);
    match result {
        Gradients::Inputs(list) => Ok(list),
        Gradients::NoGradient(reason) => Err(reason),
    }
}

/// The instance's graph with an input for the gradient of each differentiated result.
fn with_gradient_inputs(instance: &Instance, carried: &[bool]) -> (Graph, Vec<Option<ValueId>>) {
    let mut graph = instance.graph();
    let gradients = instance
        .outputs
        .iter()
        .zip(carried)
        .map(|(t, carried)| carried.then(|| graph.add_input("gradient", Element::Fixed(t.dtype), t.shape.clone())))
        .collect();
    (graph, gradients)
}

fn check(op: &'static dyn Op, example: &Example, seed: u64) -> Result<(), String> {
    let instance = instantiate(example, op, DType::F32, seed);
    let forward = instance.graph();
    let node = forward.nodes[0].clone();
    let carried = differentiated(op, example);
    let (mut graph, gradients) = with_gradient_inputs(&instance, &carried);
    let mut given: Values = node.inputs.iter().copied().zip(instance.inputs.iter().map(array_of)).collect();
    let coefficients: Vec<Vec<f64>> =
        instance.outputs.iter().enumerate().map(|(i, t)| coefficients(op, t, i)).collect();
    let carried_terms = node.outputs.iter().zip(&coefficients).zip(&carried).filter(|(_, carried)| **carried);
    let terms = carried_terms.map(|((id, c), _)| (*id, c.clone())).collect();
    let check = Check { graph: forward, given: given.clone(), terms };

    let wanted: Vec<bool> = (0..node.inputs.len()).map(|i| example.differentiable.contains(&i)).collect();
    let found = apply_rule(op, &mut graph, &gradients, &wanted).map_err(|r| format!("no gradient: {r}"))?;
    for (id, c) in gradients.iter().zip(coefficients) {
        id.map(|id| given.insert(id, Array::Real(c)));
    }
    ops::verify(&graph)?;
    let values = evaluate(&graph, &given);
    for index in &example.differentiable {
        let id = found[*index].ok_or_else(|| format!("input {index}: the rule gives nothing"))?;
        let gradient = values[&id].real();
        let len = instance.inputs[*index].len();
        if gradient.len() != len {
            return Err(format!("input {index}: {} gradients for {len} elements", gradient.len()));
        }
        let stride = len.div_ceil(MOST_PERTURBED);
        let sample: Vec<usize> = (0..len).step_by(stride).collect();
        let differences: Vec<f64> = sample.iter().map(|i| check.difference(node.inputs[*index], *i)).collect();
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let error = norm(&mut sample.iter().zip(&differences).map(|(i, d)| gradient[*i] - d));
        let size = norm(&mut differences.iter().copied());
        if size == 0.0 || error.is_nan() || error > TOLERANCE * size {
            return Err(format!("input {index}: differs by {error:e} of {size:e}"));
        }
    }
    Ok(())
}

#[test]
fn rules_agree_with_central_differences() {
    let mut checked = 0;
    let mut failures = Vec::new();
    for op in ops::all() {
        for (index, example) in op.examples().iter().enumerate().filter(|(_, e)| !e.differentiable.is_empty()) {
            checked += 1;
            if let Err(message) = check(*op, example, 11 + index as u64) {
                failures.push(format!("{}, example {index} {}: {message}", op.name(), example.attrs));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(checked > 10, "only {checked} examples are differentiable");
}

/// Operations whose gradient passes through by intent: it is not that of what they compute, and no difference can check it.
const STRAIGHT_THROUGH: [&str; 1] = ["fake_quantise"];

/// A rule that the check never sees gives no gradient, or says why it has none.
#[test]
fn what_is_not_checked_has_no_gradient() {
    for op in ops::all() {
        let examples = op.examples();
        if examples.iter().any(|e| !e.differentiable.is_empty()) {
            continue;
        }
        let example = examples.first().unwrap_or_else(|| panic!("{} has no examples", op.name()));
        let instance = instantiate(example, *op, DType::F32, 1);
        let (mut graph, gradients) = with_gradient_inputs(&instance, &vec![true; instance.outputs.len()]);
        let wanted = vec![true; instance.inputs.len()];
        match apply_rule(*op, &mut graph, &gradients, &wanted) {
            Err(reason) => assert!(reason.len() > 8, "{}: `{reason}` is no reason", op.name()),
            Ok(found) if found.iter().all(Option::is_none) => {}
            Ok(found) if STRAIGHT_THROUGH.contains(&op.name()) => {
                assert_eq!(found[0], gradients[0], "{}: the gradient passes through", op.name());
                assert!(found[1..].iter().all(Option::is_none));
            }
            Ok(_) => panic!("{} has a gradient that no example checks", op.name()),
        }
    }
}
