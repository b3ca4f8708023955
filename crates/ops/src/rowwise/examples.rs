//! Examples of composed operations: each is a chain of declared ones, as fusing makes it.

use graph::{Element, Graph, ValueId};
use tensor::{Attrs, DType};

use super::join::join;
use crate::append::Append;
use crate::gradient::Emit;
use crate::op::{Example, ExampleInput};
use crate::registry::id;

/// A chain over tensors […, H], statistics […] and weights [H] as one node; the results that `build` gives stay.
fn chain(
    shape: &[usize],
    like_x: usize,
    statistics: usize,
    weights: usize,
    build: impl Fn(&mut Append<'_>, &[ValueId]) -> Vec<ValueId>,
) -> Example {
    let (rows, columns) = (&shape[..shape.len() - 1], &shape[shape.len() - 1..]);
    let mut graph = Graph::default();
    let shapes = [vec![shape; like_x], vec![rows; statistics], vec![columns; weights]].concat();
    let stored = |place: usize| if (like_x..like_x + statistics).contains(&place) { DType::F32 } else { DType::BF16 };
    let operands: Vec<ValueId> = shapes
        .iter()
        .enumerate()
        .map(|(i, shape)| graph.add_input(&i.to_string(), Element::Fixed(stored(i)), shape.to_vec()))
        .collect();
    let mut append = Append::new(&mut graph, graph::Phase::Forward);
    let keep = build(&mut append, &operands);
    let nodes = std::mem::take(&mut append.nodes);
    // The recipe's choice, as the operations' rules leave it open.
    graph
        .values
        .iter_mut()
        .filter(|v| v.element == Element::Float)
        .for_each(|v| v.element = Element::Fixed(DType::BF16));
    let mut one = nodes[0].clone();
    for (index, node) in nodes.iter().enumerate().skip(1) {
        let later = nodes[index + 1..].iter().flat_map(|later| later.inputs.iter().copied());
        let keep: Vec<ValueId> = keep.iter().copied().chain(later).collect();
        one = join(&graph, &one, node, &keep).expect("neighbours of a chain have forms over the same rows");
    }
    let place = |id: &ValueId| operands.iter().position(|o| o == id).expect("a chain reads its operands only");
    let inputs = one.inputs.iter().map(|id| match place(id) {
        i if stored(i) == DType::F32 => ExampleInput::UniformF32 { shape: shapes[i].to_vec(), low: 0.5, high: 1.5 },
        i => ExampleInput::Normal { shape: shapes[i].to_vec(), scale: 1.0 },
    });
    let types: Vec<&str> =
        one.outputs.iter().map(|id| if graph.value(*id).element == Element::F32 { "f32" } else { "float" }).collect();
    let state = one.outputs.iter().map(|id| match graph.value(*id) {
        value if value.element == Element::F32 => ExampleInput::NormalF32 { shape: value.shape.clone(), scale: 1.0 },
        value => ExampleInput::Normal { shape: value.shape.clone(), scale: 1.0 },
    });
    Example::new(inputs.collect(), one.attrs.with("dtypes", types)).with_state(state.collect())
}

/// What models and their gradients are made of, and a chain that is none of them.
pub fn examples() -> Vec<Example> {
    let eps = || Attrs::new().with("eps", 1e-6);
    let none = Attrs::new;
    let mut examples = Vec::new();
    for (shape, offset) in [(&[2, 3, 64][..], false), (&[5, 1000], true), (&[3, 33], false)] {
        let eps = || eps().with("offset", offset);
        let offset = || none().with("offset", offset);
        // The residual stream's sum, and its norm.
        examples.push(chain(shape, 2, 0, 1, |g, x| {
            let sum = g.emit(id::ADD, &x[..2], none())[0];
            [vec![sum], g.emit(id::RMSNORM, &[sum, x[2]], eps())].concat()
        }));
        // Gradients, and the residual stream's added to them.
        examples.push(chain(shape, 3, 1, 1, |g, x| {
            let dx = g.emit(id::RMSNORM_BACKWARD, &[x[0], x[4], x[3], x[1]], offset())[0];
            g.emit(id::ADD, &[x[2], dx], none())
        }));
        examples.push(chain(shape, 3, 1, 1, |g, x| {
            let both = g.emit(id::RMSNORM_GRADIENTS, &[x[0], x[4], x[3], x[1]], offset());
            [vec![both[1]], g.emit(id::ADD, &[both[0], x[2]], none())].concat()
        }));
        // The norm again beside its gradient.
        examples.push(chain(shape, 3, 0, 1, |g, x| {
            let y = g.emit(id::RMSNORM, &[x[0], x[3]], eps());
            let dx = g.emit(id::RMSNORM_BACKWARD, &[x[0], x[3], y[1], x[1]], offset())[0];
            [y, g.emit(id::ADD, &[dx, x[2]], none())].concat()
        }));
    }
    for shape in [&[6, 64][..], &[3, 1000]] {
        examples.push(chain(shape, 2, 0, 2, |g, x| {
            let sum = g.emit(id::ADD, &x[..2], none())[0];
            [vec![sum], g.emit(id::LAYERNORM, &[sum, x[2], x[3]], eps())].concat()
        }));
        examples.push(chain(shape, 3, 2, 1, |g, x| {
            let dx = g.emit(id::LAYERNORM_BACKWARD, &[x[0], x[5], x[3], x[4], x[1]], none())[0];
            let dw = g.emit(id::LAYERNORM_WEIGHT_GRADIENT, &[x[0], x[3], x[4], x[1]], none())[0];
            [vec![dw], g.emit(id::ADD, &[dx, x[2]], none())].concat()
        }));
        // Norm of a sum with a norm, scaled.
        examples.push(chain(shape, 2, 0, 2, |g, x| {
            let inner = g.emit(id::RMSNORM, &[x[0], x[2]], eps())[0];
            let sum = g.emit(id::ADD, &[x[1], inner], none())[0];
            let y = g.emit(id::RMSNORM, &[sum, x[3]], eps())[0];
            [vec![sum], g.emit(id::SCALE, &[y], none().with("factor", 0.3))].concat()
        }));
    }
    let Example { attrs, .. } = examples[2].clone();
    examples.push(Example { attrs: attrs.with("accumulate", true), ..examples[2].clone() });
    examples
}
