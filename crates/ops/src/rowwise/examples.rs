//! Examples of composed operations: each is a chain of declared ones, as fusing makes it.

use graph::{Element, Graph, ValueId};
use tensor::{Attrs, DType};

use super::form::{Extent, Form, texts};
use super::join::join;
use super::quantised::quantising;
use crate::append::Append;
use crate::elementwise::Expr;
use crate::gradient::Emit;
use crate::op::{Example, ExampleInput};
use crate::registry::id;

/// Returns a chain over tensors […, H], statistics […] and weights [H] as one node; the results that `build` gives are
/// kept.
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

/// A chain whose results at these places are given as codes, too, with one power of two: by a factor, or where that is
/// 0 by their magnitude.
fn quantised(chain: Example, places: &[usize], format: DType, top: i32, factor: f32) -> Example {
    let count = format == DType::E4M3;
    let Example { mut inputs, attrs, .. } = chain;
    let form = Form::of(&attrs).expect("a chain is a form");
    let types = texts(&attrs, "dtypes").expect("a chain has types");
    let codes = quantising(places.len(), format, top, true, count);
    let of_codes = Form::of(&codes).expect("codes are a form");
    let stored = |place: usize| form.results[places[place]].1.clone().stored_as(DType::BF16);
    let read = |operand: usize| if operand < places.len() { stored(operand) } else { Expr::Input(inputs.len()) };
    let after: Vec<_> = of_codes.results.iter().map(|(extent, e)| (*extent, e.substitute(&read))).collect();
    let shape = match &inputs[0] {
        ExampleInput::Normal { shape, .. } => shape.clone(),
        _ => unreachable!("a chain reads a tensor first"),
    };
    let one = |value: f32| ExampleInput::F32 { shape: vec![1], values: vec![value] };
    let state = |extent: Extent, dtype: &str| match (extent, dtype) {
        (Extent::Element, "float") => ExampleInput::Normal { shape: shape.clone(), scale: 1.0 },
        (Extent::Element, "f32") => ExampleInput::NormalF32 { shape: shape.clone(), scale: 1.0 },
        (Extent::Element, _) => ExampleInput::Codes { dtype: format, shape: shape.clone(), scale: 0.0 },
        (Extent::Row, _) => ExampleInput::NormalF32 { shape: shape[..shape.len() - 1].to_vec(), scale: 1.0 },
        (Extent::Column, _) => ExampleInput::NormalF32 { shape: shape[shape.len() - 1..].to_vec(), scale: 1.0 },
        (Extent::Tensor, "f64") => ExampleInput::Codes { dtype: DType::F64, shape: vec![1], scale: 0.0 },
        (Extent::Tensor, _) => one(0.25),
    };
    let types = [types, texts(&codes, "dtypes").expect("codes have types")].concat();
    let operands = [form.operands.clone(), vec![Extent::Tensor]].concat();
    let form = Form { operands, results: [form.results.clone(), after].concat() };
    let states = form.results.iter().zip(&types).map(|((extent, _), dtype)| state(*extent, dtype)).collect();
    inputs.push(one(factor));
    let attrs = form.attrs().with("of", vec!["quantise"]).with("dtypes", types);
    Example::new(inputs, attrs).with_state(states)
}

/// Returns the chains of models and of their gradients, and one that is in neither.
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
        // The norm again next to its gradient.
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
    examples.extend(of_codes(&examples));
    let Example { attrs, .. } = examples[2].clone();
    examples.push(Example { attrs: attrs.with("accumulate", true), ..examples[2].clone() });
    examples
}

/// Norms and their gradients with codes of what they give, in rows for warps, for blocks and with sums over them; and
/// elements whose rows are taken in slices.
fn of_codes(chains: &[Example]) -> Vec<Example> {
    let wide = |columns: usize| {
        chain(&[9, columns], 2, 0, 0, |g, x| {
            let product = g.emit(id::MUL, &x[..2], Attrs::new())[0];
            [vec![product], g.emit(id::SCALE, &[product], Attrs::new().with("factor", 3.0))].concat()
        })
    };
    let rows = chain(&[3, 2560], 2, 0, 1, |g, x| {
        let sum = g.emit(id::ADD, &x[..2], Attrs::new())[0];
        [vec![sum], g.emit(id::RMSNORM, &[sum, x[2]], Attrs::new().with("eps", 1e-6))].concat()
    });
    let mut examples = vec![
        quantised(chains[0].clone(), &[1], DType::E4M3, 7, 0.0),
        quantised(chains[0].clone(), &[1], DType::E4M3, 7, 64.0),
        // A part of the elements becomes 0.
        quantised(chains[0].clone(), &[1], DType::E4M3, -6, 0.0),
        quantised(chains[1].clone(), &[0], DType::E5M2, 11, 0.0),
        quantised(chains[2].clone(), &[1], DType::E5M2, 11, 0.0),
        quantised(rows.clone(), &[1], DType::E4M3, -6, 0.0),
        quantised(rows, &[0, 1], DType::E4M3, 7, 256.0),
    ];
    for columns in [48, 3072] {
        let chain = || Example { attrs: as_form(&wide(columns)), ..wide(columns) };
        examples.push(quantised(chain(), &[0, 1], DType::E5M2, 11, 0.0));
        examples.push(quantised(chain(), &[1], DType::E4M3, 7, 16.0));
        examples.push(quantised(chain(), &[0, 1], DType::E4M3, -6, 0.0));
    }
    examples
}

/// The attributes of a chain of elements as those of a form.
fn as_form(chain: &Example) -> Attrs {
    let texts = texts(&chain.attrs, "expressions").expect("a chain has expressions");
    let expressions = texts.iter().map(|text| text.parse().expect("a chain's expressions")).collect();
    let mut attrs = chain.attrs.clone();
    attrs.extend((*Form::of_elements(chain.inputs.len(), expressions).attrs()).clone());
    attrs
}
