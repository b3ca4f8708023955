//! xIELU (Huang & Schlag 2024, arXiv 2411.13010): a parabola above 0 and an integrated exponential below, with slopes that a
//! model learns. Rows of a table, as [`crate::rowwise`] has it.

use graph::{Dim, Element, ValueType};
use tensor::Attrs;

use super::expression::{Binary, Expr, Unary};
use crate::gradient::Gradients;
use crate::op::{Attribute, Example, ExampleInput};
use crate::registry::id;
use crate::rowwise::{Extent, Form, Rowwise};

use Extent::{Column, Element as Each, Tensor};

const ACCUMULATE: Attribute =
    Attribute { name: "accumulate", kind: "bool?", doc: "add to dp and dn instead of overwriting them" };

/// Checks x, the four numbers, and dy where `count` is 6.
fn check(inputs: &[ValueType], count: usize) -> Result<&ValueType, String> {
    let [x, rest @ ..] = inputs else { return Err("takes x, p, n, beta and eps".into()) };
    if inputs.len() != count {
        return Err(format!("takes {count} operands, not {}", inputs.len()));
    }
    if !x.dtype.is_float() || x.last().is_none() {
        return Err("x must be floating point with a known last axis".into());
    }
    let (numbers, dy) = rest.split_at(4);
    if numbers.iter().any(|of| !of.dtype.is_float() || of.shape != [Dim::Fixed(1)]) {
        return Err("p, n, beta and eps must be floating point [1]".into());
    }
    if dy.iter().any(|dy| dy.shape != x.shape || !dy.dtype.is_float()) {
        return Err("dy must be shaped like x".into());
    }
    Ok(x)
}

const OPERANDS: [Extent; 6] = [Each, Tensor, Tensor, Tensor, Tensor, Each];

fn form(operands: usize, results: Vec<(Extent, Expr)>) -> Form {
    Form { operands: OPERANDS[..operands].to_vec(), results }
}

fn x() -> Expr {
    Expr::Input(0)
}

fn softplus(of: usize) -> Expr {
    Expr::unary(Unary::Softplus, Expr::Input(of))
}

/// Returns the slope of the exponential part, beta + softplus(n).
fn negative() -> Expr {
    Expr::Input(3) + softplus(2)
}

/// Returns max(x, 0).
fn above() -> Expr {
    Expr::unary(Unary::Relu, x())
}

/// Returns 1 where x is not above 0, else 0.
fn is_below() -> Expr {
    Expr::Constant(1.0) - Expr::unary(Unary::Step, x())
}

/// Returns e^min(x, eps) − 1.
fn exponential() -> Expr {
    Expr::unary(Unary::ExpMinusOne, Expr::binary(Binary::Minimum, x(), Expr::Input(4)))
}

/// Returns what the slope of the exponential part multiplies.
fn bend() -> Expr {
    is_below() * (exponential() - x())
}

fn value() -> Expr {
    softplus(1) * above() * above() + negative() * bend() + Expr::Input(3) * x()
}

/// Returns the gradient of x: between eps and 0 nothing flows through the exponential.
fn gradient() -> Expr {
    let within = || Expr::unary(Unary::Step, Expr::Input(4) - x());
    let below = is_below() * (within() * exponential() + within() - Expr::Constant(1.0));
    let slope = Expr::Constant(2.0) * softplus(1) * above() + negative() * below + Expr::Input(3);
    Expr::Input(5) * slope
}

/// x, p, n, beta, eps and dy, p and n of the type of x where `shape` has two axes. No drawn x is between eps and 0.
fn operands(shape: &[usize], count: usize) -> Vec<ExampleInput> {
    let normal = || ExampleInput::Normal { shape: shape.to_vec(), scale: 2.0 };
    let number = |low: f64, high: f64| ExampleInput::UniformF32 { shape: vec![1], low, high };
    let learned = |low: f64, high: f64| match shape.len() {
        2 => ExampleInput::Normal { shape: vec![1], scale: 0.5 },
        _ => number(low, high),
    };
    let all = [normal(), learned(0.1, 0.3), learned(-1.1, -0.9), number(0.4, 0.6), number(-2e-6, -1e-6), normal()];
    all.into_iter().take(count).collect()
}

/// y = softplus(p)·x² + beta·x above 0, (beta + softplus(n))·(e^min(x, eps) − 1 − x) + beta·x below
pub static XIELU: Rowwise = Rowwise {
    id: id::XIELU,
    doc: "xIELU: softplus(p)·x² + beta·x where x is above 0, else (beta + softplus(n))·(e^min(x, eps) − 1 − x) + beta·x; nothing \
          flows back to beta and eps. x […, H], p, n, beta and eps [1] → like x.",
    attributes: &[],
    infer: |inputs, _| Ok(vec![check(inputs, 5)?.clone()]),
    form: |_| form(5, vec![(Each, value())]),
    gradient: |call| {
        let inputs: Vec<_> = (0..5).map(|i| call.input(i)).chain([call.dy()]).collect();
        if !call.wanted[1] && !call.wanted[2] {
            let dx = call.wanted(0, id::XIELU_BACKWARD, &inputs, Attrs::new());
            return Gradients::Inputs(vec![dx, None, None, None, None]);
        }
        let all = call.emit.emit(id::XIELU_GRADIENTS, &inputs, Attrs::new());
        let mut of_number = |i: usize| {
            call.wanted[i].then(|| {
                let columns = call.one(id::SPLIT_HEADS, &[all[i]], Attrs::new().with("head_dim", 1));
                call.one(id::SUM_ROWS, &[columns], Attrs::new())
            })
        };
        let [dp, dn] = [of_number(1), of_number(2)];
        Gradients::Inputs(vec![call.wanted[0].then_some(all[0]), dp, dn, None, None])
    },
    examples: || {
        let example = |shape: &[usize]| Example::new(operands(shape, 5), Attrs::new()).differentiate(&[0, 1, 2]);
        vec![example(&[2, 3, 64]), example(&[7, 33])]
    },
};

/// dx of x, p, n, beta, eps, dy
pub static XIELU_BACKWARD: Rowwise = Rowwise {
    id: id::XIELU_BACKWARD,
    doc: "Input gradient of `xielu`. x […, H], p, n, beta and eps [1], dy […, H] → dx like x.",
    attributes: &[],
    infer: |inputs, _| Ok(vec![check(inputs, 6)?.clone()]),
    form: |_| form(6, vec![(Each, gradient())]),
    gradient: |_| Gradients::NoGradient("second derivatives are not supported"),
    examples: || [&[2, 3, 64][..], &[7, 33]].map(|shape| Example::new(operands(shape, 6), Attrs::new())).to_vec(),
};

/// dx, dp, dn of x, p, n, beta, eps, dy
pub static XIELU_GRADIENTS: Rowwise = Rowwise {
    id: id::XIELU_GRADIENTS,
    doc: "All gradients of `xielu`, those of p and n by column: their sums over columns are the gradients. x […, H], p, n, beta \
          and eps [1], dy […, H] → dx like x, dp and dn f32 [H]. With `accumulate`, dp and dn are added to.",
    attributes: &[ACCUMULATE],
    infer: |inputs, _| {
        let x = check(inputs, 6)?;
        let columns = ValueType::new(Element::F32, [x.shape[x.shape.len() - 1].clone()]);
        Ok(vec![x.clone(), columns.clone(), columns])
    },
    form: |_| {
        let of_number = |number: usize, part: Expr| (Column, Expr::Input(5) * part * Expr::Input(number).sigmoid());
        form(6, vec![(Each, gradient()), of_number(1, above() * above()), of_number(2, bend())])
    },
    gradient: |_| Gradients::NoGradient("second derivatives are not supported"),
    examples: || {
        let example = |shape: &[usize], attrs: Attrs| {
            let (dx, columns) = (ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 }, shape[shape.len() - 1]);
            let sums = || ExampleInput::NormalF32 { shape: vec![columns], scale: 1.0 };
            Example::new(operands(shape, 6), attrs).with_state(vec![dx, sums(), sums()])
        };
        vec![example(&[2, 75, 64], Attrs::new()), example(&[7, 300], Attrs::new().with("accumulate", true))]
    },
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Array, apply};

    /// Differences of e^x and 1 + x have no digits left near 0, and e^x of a large x is infinite.
    #[test]
    fn values_of_every_size_keep_their_digits() {
        let (p, n, beta) = (0.3_f64, -1.2_f64, 0.5_f64);
        let softplus = |x: f64| x.exp().ln_1p();
        for x in [-200.0_f32, -3.0, -0.01, -1e-7, 0.0, 1e-4, 2.0, 500.0] {
            let inputs = [x, p as f32, n as f32, beta as f32, -1e-6].map(|number| Array::Real(vec![number]));
            let shaped: Vec<(&[usize], &Array<f32>)> = inputs.iter().map(|of| (&[1][..], of)).collect();
            let mut y = [(vec![1], Array::Real(vec![0.0_f32]))];
            apply(&XIELU, &Attrs::new(), &shaped, &mut y);
            let wide = f64::from(x);
            let expected = match x > 0.0 {
                true => softplus(p) * wide * wide + beta * wide,
                false => (beta + softplus(n)) * (wide.min(-1e-6).exp_m1() - wide) + beta * wide,
            };
            let found = f64::from(y[0].1.real()[0]);
            // The terms of the sum may cancel.
            let size = expected.abs().max(beta * wide.abs()).max(1e-6);
            assert!((found - expected).abs() <= 1e-6 * size, "{x}: {found} instead of {expected}");
        }
    }
}
