//! The decay of the gated delta rule: g = −e^a·softplus(x + b) (Gu & Dao 2024, arXiv 2405.21060), in logarithm, for each
//! token and head. Rows of a table, as [`crate::rowwise`] has it.

use graph::{Element, ValueType};
use tensor::Attrs;

use crate::elementwise::{Expr, Unary};
use crate::gradient::Gradients;
use crate::op::{Attribute, Example, ExampleInput};
use crate::registry::id;
use crate::rowwise::{Extent, Form, Rowwise};

use Extent::{Column, Element as Each};

const ACCUMULATE: Attribute =
    Attribute { name: "accumulate", kind: "bool?", doc: "add to da and db instead of overwriting them" };

fn check([x, a, b]: [&ValueType; 3]) -> Result<ValueType, String> {
    if !x.dtype.is_float() || x.last().is_none() || [a, b].iter().any(|t| t.shape != x.shape[x.shape.len() - 1..]) {
        return Err("x must be floating point […, heads], heads known, a and b [heads]".into());
    }
    Ok(ValueType::new(Element::F32, x.shape.clone()))
}

fn check_gradient([x, a, b, dg]: [&ValueType; 4]) -> Result<(), String> {
    check([x, a, b])?;
    if dg.shape == x.shape { Ok(()) } else { Err("dg must be shaped like x".into()) }
}

/// Returns −e^a, the rate of the decay.
fn rate() -> Expr {
    Expr::unary(Unary::Negate, Expr::unary(Unary::Exp, Expr::Input(1)))
}

fn sum() -> Expr {
    Expr::Input(0) + Expr::Input(2)
}

fn decay() -> Expr {
    rate() * Expr::unary(Unary::Softplus, sum())
}

/// Returns the gradient of x, which is that of b before it is summed over rows.
fn slope() -> Expr {
    Expr::Input(3) * rate() * sum().sigmoid()
}

/// x, a and b: biases at which softplus is neither 0 nor its operand.
fn operands(shape: &[usize]) -> Vec<ExampleInput> {
    let heads = &shape[shape.len() - 1..];
    let normal = |shape: &[usize], scale: f64| ExampleInput::Normal { shape: shape.to_vec(), scale };
    vec![normal(shape, 2.0), normal(heads, 1.0), normal(heads, 1.0)]
}

/// g = −e^a·softplus(x + b)
pub static DELTA_DECAY: Rowwise = Rowwise {
    id: id::DELTA_DECAY,
    doc: "Logarithms of decays: g = −e^a·softplus(x + b), softplus(y) = ln(1 + e^y). x […, heads], a and b [heads] → g f32 \
          […, heads].",
    attributes: &[],
    infer: |inputs, _| {
        let [x, a, b] = inputs else { return Err("takes x, a and b".into()) };
        Ok(vec![check([x, a, b])?])
    },
    form: |_| Form { operands: vec![Each, Column, Column], results: vec![(Each, decay())] },
    gradient: |call| {
        let inputs = [call.input(0), call.input(1), call.input(2), call.dy()];
        if call.wanted[1..].contains(&true) {
            let all = call.emit.emit(id::DELTA_DECAY_GRADIENTS, &inputs, Attrs::new());
            return Gradients::Inputs(
                all.into_iter().zip(call.wanted).map(|(d, wanted)| wanted.then_some(d)).collect(),
            );
        }
        Gradients::Inputs(vec![call.wanted(0, id::DELTA_DECAY_BACKWARD, &inputs, Attrs::new()), None, None])
    },
    examples: || {
        let example = |shape: &[usize]| Example::new(operands(shape), Attrs::new()).differentiate(&[0, 1, 2]);
        vec![example(&[2, 3, 4]), example(&[1, 7, 48]), example(&[5, 1])]
    },
};

/// dx of x, a, b, dg
pub static DELTA_DECAY_BACKWARD: Rowwise = Rowwise {
    id: id::DELTA_DECAY_BACKWARD,
    doc: "Input gradient of `delta_decay`: dx = −dg·e^a·σ(x + b). x, a, b, dg → dx like x.",
    attributes: &[],
    infer: |inputs, _| {
        let [x, a, b, dg] = inputs else { return Err("takes x, a, b and dg".into()) };
        check_gradient([x, a, b, dg])?;
        Ok(vec![x.clone()])
    },
    form: |_| Form { operands: vec![Each, Column, Column, Each], results: vec![(Each, slope())] },
    gradient: |_| Gradients::NoGradient("second derivatives are not supported"),
    examples: || {
        let example = |shape: &[usize]| {
            let dg = ExampleInput::NormalF32 { shape: shape.to_vec(), scale: 1.0 };
            Example::new(operands(shape).into_iter().chain([dg]).collect(), Attrs::new())
        };
        vec![example(&[2, 3, 4]), example(&[1, 7, 48])]
    },
};

/// dx, da, db of x, a, b, dg
pub static DELTA_DECAY_GRADIENTS: Rowwise = Rowwise {
    id: id::DELTA_DECAY_GRADIENTS,
    doc: "All gradients of `delta_decay`: dx = −dg·e^a·σ(x + b), da = Σ rows dg·g, db = Σ rows dx. x, a, b, dg → dx like x, \
          da and db f32 [heads]. With `accumulate`, da and db are added to.",
    attributes: &[ACCUMULATE],
    infer: |inputs, _| {
        let [x, a, b, dg] = inputs else { return Err("takes x, a, b and dg".into()) };
        check_gradient([x, a, b, dg])?;
        let sums = ValueType::new(Element::F32, a.shape.clone());
        Ok(vec![x.clone(), sums.clone(), sums])
    },
    form: |_| Form {
        operands: vec![Each, Column, Column, Each],
        results: vec![(Each, slope()), (Column, Expr::Input(3) * decay()), (Column, slope())],
    },
    gradient: |_| Gradients::NoGradient("second derivatives are not supported"),
    examples: || {
        let example = |shape: &[usize], attrs: Attrs| {
            let f32s = |shape: &[usize]| ExampleInput::NormalF32 { shape: shape.to_vec(), scale: 1.0 };
            let inputs = operands(shape).into_iter().chain([f32s(shape)]).collect();
            let (dx, heads) = (ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 }, &shape[shape.len() - 1..]);
            Example::new(inputs, attrs).with_state(vec![dx, f32s(heads), f32s(heads)])
        };
        vec![example(&[2, 75, 4], Attrs::new()), example(&[1, 700, 32], Attrs::new().with("accumulate", true))]
    },
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Array, apply};

    /// 1 + e^y has no digits of a small e^y left, and e^y of a large y is infinite.
    #[test]
    fn decays_of_every_size_keep_their_digits() {
        for x in [-80.0_f32, -12.0, -1.0, 0.0, 3.0, 40.0, 200.0] {
            let [x, a, b] = [x, 0.5, 0.25].map(|value| Array::Real(vec![value]));
            let mut g = [(vec![1], Array::Real(vec![0.0_f32]))];
            apply(&DELTA_DECAY, &Attrs::new(), &[(&[1], &x), (&[1], &a), (&[1], &b)], &mut g);
            let sum = x.real()[0] as f64 + 0.25;
            let expected = -0.5_f64.exp() * (sum.max(0.0) + (-sum.abs()).exp().ln_1p());
            let found = g[0].1.real()[0] as f64;
            assert!((found - expected).abs() <= 1e-6 * expected.abs(), "{found} instead of {expected}");
        }
    }
}
