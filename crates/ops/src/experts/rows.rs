//! Rows of tokens in the order of their experts, and back: each choice of a token has a row.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use super::{PACK, choices, example_groups, ints, kernel, normal, vector};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered, defines_for};
use crate::op::{Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("rows.cu");

const THREADS: usize = 128;

/// y[place] = x[token] (· weight), for the choice at each place
pub struct ToGroups;

/// y[token] = Σ over its choices of (weight ·) x[place of the choice]
pub struct FromGroups;

/// d_weight[choice] = x[place of the choice] · d_y[token]
pub struct GroupWeightGradient;

/// Checks order, places and the optional weights; gives the tokens' axes and the choices of a token.
fn check(rest: &[ValueType]) -> Result<(&[Dim], usize), String> {
    let (order, places, weights) = match rest {
        [order, places] => (order, places, None),
        [order, places, weights] => (order, places, Some(weights)),
        _ => return Err("takes x, order, places and perhaps weights".into()),
    };
    let (tokens, k) = choices(order)?;
    if places != order || weights.is_some_and(|w| w.dtype != Element::F32 || w.shape != order.shape) {
        return Err("order, places and weights must have a number for each choice, weights f32".into());
    }
    Ok((tokens, k))
}

fn last(x: &ValueType) -> Result<Dim, String> {
    x.shape.last().filter(|d| d.fixed().is_some()).cloned().ok_or_else(|| "the last axis of x must be known".into())
}

fn bytes_of(inputs: &[TensorRef], outputs: &[TensorRef]) -> Cost {
    let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
    Cost { flops: 0.0, bytes }
}

/// Returns the numbers that kernels need. `places`: the input with the number of choices; `rows`: what is read, and
/// what is written or read next to it.
fn numbers(call: &LowerCall<'_>, places: usize, rows: [&TensorRef; 2]) -> Vec<(&'static str, usize)> {
    let shape = &call.inputs[places].shape;
    let k = shape[shape.len() - 1];
    let columns = rows[0].shape[rows[0].shape.len() - 1];
    vec![("CHOICES", call.inputs[places].len()), ("EACH", k), ("COLUMNS", columns), ("VECTOR", vector(&rows))]
}

/// The kernel `entry` over tensors that it calls by these names.
fn row_kernel(
    entry: &'static str,
    grid: usize,
    numbers: &[(&str, usize)],
    tensors: [(&str, &TensorRef); 2],
    args: Vec<Arg>,
) -> Lowered {
    let mut kernel = kernel(entry, SOURCE, [grid, 1, 1], THREADS, numbers, args);
    kernel.headers.push(PACK);
    kernel.defines.extend(tensors.iter().flat_map(|(name, t)| defines_for(name, t)));
    Lowered::Kernels(vec![kernel])
}

impl Op for ToGroups {
    fn id(&self) -> OpId {
        id::TO_GROUPS
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "A row for each choice, in the order of the groups: y[place] = x[token], times the choice's weight where there are \
         weights. x […, H], order and places i32 […, k] of `group_rows` (, weights f32 […, k]) → y […, k, H]."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, rest @ ..] = inputs else { return Err("takes x, order, places and perhaps weights".into()) };
        let ((tokens, k), columns) = (check(rest)?, last(x)?);
        if !x.dtype.is_float() || &x.shape[..x.shape.len() - 1] != tokens {
            return Err("x must have a row for each token".into());
        }
        let shape = tokens.iter().cloned().chain([Dim::Fixed(k), columns]).collect::<Vec<_>>();
        Ok(vec![ValueType::new(x.dtype, shape)])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        if call.node.inputs.len() != 3 {
            return Gradients::NoGradient("weights are applied on the way back");
        }
        let inputs = [call.dy(), call.input(1), call.input(2)];
        let dx = call.wanted(0, id::FROM_GROUPS, &inputs, Attrs::new());
        Gradients::Inputs(vec![dx, None, None])
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        bytes_of(inputs, outputs)
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (x, y) = (&call.inputs[0], &call.outputs[0]);
        let weighted = call.inputs.len() == 4;
        let mut of = numbers(call, 1, [x, y]);
        of.push(("WEIGHTED", weighted as usize));
        let args = vec![Arg::Input(0), Arg::Input(1), Arg::Input(if weighted { 3 } else { 1 }), Arg::Output(0)];
        row_kernel("to_groups", call.inputs[1].len(), &of, [("TO", x), ("Y", y)], args)
    }

    crate::reference!(to_groups);

    fn examples(&self) -> Vec<Example> {
        let example = |tokens: usize, k: usize, columns: usize, weighted: bool| {
            let (order, places, _) = example_groups(tokens, k, 5);
            let shape = [1, tokens, k];
            let mut inputs = vec![normal(&[1, tokens, columns]), ints(&shape, order), ints(&shape, places)];
            if weighted {
                inputs.push(ExampleInput::UniformF32 { shape: shape.to_vec(), low: 0.0, high: 1.0 });
            }
            Example::new(inputs, Attrs::new())
        };
        vec![example(6, 2, 8, false).differentiate(&[0]), example(40, 3, 300, false), example(7, 2, 33, true)]
    }
}

fn to_groups<T: Real>(call: &mut Call<'_, T>) {
    let (x, order) = (call.inputs[0], call.inputs[1]);
    let weights = call.inputs.get(3).map(|w| w.real());
    let (k, columns) = (order.columns(), x.columns());
    let (x, order) = (x.real(), order.int());
    let [y] = call.outputs_mut();
    y.real().par_chunks_mut(columns).zip(order).for_each(|(y, choice)| {
        let token = *choice as usize / k;
        let weight = weights.map_or(T::from_f64(1.0), |w| w[*choice as usize]);
        let row = &x[token * columns..(token + 1) * columns];
        y.iter_mut().zip(row).for_each(|(y, x)| *y = if weights.is_some() { weight * *x } else { *x });
    });
}

impl Op for FromGroups {
    fn id(&self) -> OpId {
        id::FROM_GROUPS
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "The rows of a token's choices added up, the first choice first: y[token] = Σ (weight ·) x[place of the choice]. x \
         […, k, H], order and places i32 […, k] of `group_rows` (, weights f32 […, k]) → y […, H]."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, rest @ ..] = inputs else { return Err("takes x, order, places and perhaps weights".into()) };
        let ((tokens, _), columns) = (check(rest)?, last(x)?);
        if !x.dtype.is_float() || x.shape[..x.shape.len() - 1] != rest[0].shape[..] {
            return Err("x must have a row for each choice".into());
        }
        let shape = tokens.iter().cloned().chain([columns]).collect::<Vec<_>>();
        Ok(vec![ValueType::new(x.dtype, shape)])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let (order, places, dy) = (call.input(1), call.input(2), call.dy());
        let mut inputs = vec![dy, order, places];
        inputs.extend(call.node.inputs.get(3).copied());
        let dx = call.wanted(0, id::TO_GROUPS, &inputs, Attrs::new());
        let mut gradients = vec![dx, None, None];
        if call.node.inputs.len() == 4 {
            let of = [call.input(0), places, dy];
            gradients.push(call.wanted(3, id::GROUP_WEIGHT_GRADIENT, &of, Attrs::new()));
        }
        Gradients::Inputs(gradients)
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        bytes_of(inputs, outputs)
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (x, y) = (&call.inputs[0], &call.outputs[0]);
        let weighted = call.inputs.len() == 4;
        let mut of = numbers(call, 2, [x, y]);
        of.push(("WEIGHTED", weighted as usize));
        let tokens = y.len() / x.shape[x.shape.len() - 1];
        let args = vec![Arg::Input(0), Arg::Input(2), Arg::Input(if weighted { 3 } else { 2 }), Arg::Output(0)];
        row_kernel("from_groups", tokens, &of, [("FROM", x), ("Y", y)], args)
    }

    crate::reference!(from_groups);

    fn examples(&self) -> Vec<Example> {
        let example = |tokens: usize, k: usize, columns: usize, weighted: bool| {
            let (order, places, _) = example_groups(tokens, k, 5);
            let shape = [1, tokens, k];
            let mut inputs = vec![normal(&[1, tokens, k, columns]), ints(&shape, order), ints(&shape, places)];
            if weighted {
                inputs.push(ExampleInput::UniformF32 { shape: shape.to_vec(), low: 0.0, high: 1.0 });
            }
            let differentiable: &[usize] = if weighted { &[0, 3] } else { &[0] };
            Example::new(inputs, Attrs::new()).differentiate(differentiable)
        };
        vec![example(6, 2, 8, false), example(7, 3, 33, true), example(30, 2, 260, true)]
    }
}

fn from_groups<T: Real>(call: &mut Call<'_, T>) {
    let (x, places) = (call.inputs[0], call.inputs[2]);
    let weights = call.inputs.get(3).map(|w| w.real());
    let (k, columns) = (places.columns(), x.columns());
    let (x, places) = (x.real(), places.int());
    let [y] = call.outputs_mut();
    y.real().par_chunks_mut(columns).enumerate().for_each(|(token, y)| {
        y.fill(T::default());
        for choice in token * k..(token + 1) * k {
            let row = &x[places[choice] as usize * columns..][..columns];
            let weight = weights.map(|w| w[choice]);
            y.iter_mut().zip(row).for_each(|(y, x)| *y += weight.map_or(*x, |w| w * *x));
        }
    });
}

impl Op for GroupWeightGradient {
    fn id(&self) -> OpId {
        id::GROUP_WEIGHT_GRADIENT
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "Gradient of the weights of `from_groups`: d[choice] = x[place of the choice]·dy[token]. x […, k, H], places i32 \
         […, k], dy […, H] → f32 […, k]."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, places, dy] = inputs else { return Err("takes x, places and dy".into()) };
        let (tokens, _) = choices(places)?;
        let columns = last(x)?;
        let row: Vec<Dim> = tokens.iter().cloned().chain([columns]).collect();
        if x.shape[..x.shape.len() - 1] != places.shape[..] || dy.shape != row {
            return Err("x must have a row for each choice, dy one for each token".into());
        }
        Ok(vec![ValueType::new(Element::F32, places.shape.clone())])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        Cost { flops: 2.0 * inputs[0].len() as f64, ..bytes_of(inputs, outputs) }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (x, dy) = (&call.inputs[0], &call.inputs[2]);
        let of = numbers(call, 1, [x, dy]);
        let args = vec![Arg::Input(0), Arg::Input(1), Arg::Input(2), Arg::Output(0)];
        row_kernel("group_weight_gradient", call.inputs[1].len(), &of, [("DOT", x), ("DY", dy)], args)
    }

    crate::reference!(weight_gradient);

    fn examples(&self) -> Vec<Example> {
        let example = |tokens: usize, k: usize, columns: usize| {
            let (_, places, _) = example_groups(tokens, k, 5);
            let x = normal(&[1, tokens, k, columns]);
            Example::new(vec![x, ints(&[1, tokens, k], places), normal(&[1, tokens, columns])], Attrs::new())
        };
        vec![example(6, 2, 8), example(20, 3, 300)]
    }
}

fn weight_gradient<T: Real>(call: &mut Call<'_, T>) {
    let [x, places, dy] = call.inputs else { unreachable!("the shape rule requires three inputs") };
    let (k, columns) = (places.columns(), x.columns());
    let (x, places, dy) = (x.real(), places.int(), dy.real());
    let [d] = call.outputs_mut();
    d.real().par_iter_mut().zip(places).enumerate().for_each(|(choice, (d, place))| {
        let (row, other) = (&x[*place as usize * columns..][..columns], &dy[choice / k * columns..][..columns]);
        *d = row.iter().zip(other).map(|(a, b)| *a * *b).sum();
    });
}
