//! `clamp`: elements within two numbers that a model keeps, such as the bounds of a linear layer's input and output.

use graph::{Dim, ValueType};
use tensor::Attrs;

use super::expression::{Binary, Expr, Unary};
use crate::gradient::Gradients;
use crate::op::{Example, ExampleInput};
use crate::registry::id;
use crate::rowwise::{Extent, Form, Rowwise};

fn infer(inputs: &[ValueType], count: usize, names: &str) -> Result<Vec<ValueType>, String> {
    let [x, low, high, rest @ ..] = inputs else { return Err(format!("takes {names}")) };
    if inputs.len() != count {
        return Err(format!("takes {names}"));
    }
    if !x.dtype.is_float() || x.last().is_none() {
        return Err("x must be floating point with a known last axis".into());
    }
    if [low, high].iter().any(|of| !of.dtype.is_float() || of.shape != [Dim::Fixed(1)]) {
        return Err("the bounds must be floating point [1]".into());
    }
    if rest.iter().any(|dy| dy != x) {
        return Err("dy must be like x".into());
    }
    Ok(vec![x.clone()])
}

/// Returns 1 where a is above b, else 0.
fn above(a: Expr, b: Expr) -> Expr {
    Expr::unary(Unary::Step, a - b)
}

fn examples(tensors: usize) -> Vec<Example> {
    let example = |shape: &[usize]| {
        let bound = |low: f64, high: f64| ExampleInput::UniformF32 { shape: vec![1], low, high };
        // The bounds lie among the drawn numbers, none of which is near them by less than a difference's step.
        let normal = || ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 };
        let inputs = [normal(), bound(-0.51, -0.5), bound(0.7, 0.71), normal()].into_iter().take(tensors).collect();
        Example::new(inputs, Attrs::new())
    };
    vec![example(&[2, 3, 64]), example(&[7, 33])]
}

/// Elements within two bounds: y = min(max(x, low), high).
pub static CLAMP: Rowwise = Rowwise {
    id: id::CLAMP,
    doc: "x, and the bound where it is beyond one; nothing flows back to the bounds. x […, H], low [1], high [1] → like x.",
    attributes: &[],
    infer: |inputs, _| infer(inputs, 3, "x, low and high"),
    form: |_| Form {
        operands: vec![Extent::Element, Extent::Tensor, Extent::Tensor],
        results: vec![(
            Extent::Element,
            Expr::binary(
                Binary::Minimum,
                Expr::binary(Binary::Maximum, Expr::Input(0), Expr::Input(1)),
                Expr::Input(2),
            ),
        )],
    },
    gradient: |call| {
        let inputs = [call.input(0), call.input(1), call.input(2), call.dy()];
        Gradients::Inputs(vec![call.wanted(0, id::CLAMP_BACKWARD, &inputs, Attrs::new()), None, None])
    },
    examples: || examples(3).into_iter().map(|example| example.differentiate(&[0])).collect(),
};

/// The part of dy whose x is not beyond a bound.
pub static CLAMP_BACKWARD: Rowwise = Rowwise {
    id: id::CLAMP_BACKWARD,
    doc: "Gradient of `clamp`: dy where x is within the bounds, else 0. x […, H], low [1], high [1], dy […, H] → like x.",
    attributes: &[],
    infer: |inputs, _| infer(inputs, 4, "x, low, high and dy"),
    form: |_| {
        let one = || Expr::Constant(1.0);
        let within = (one() - above(Expr::Input(0), Expr::Input(2))) * (one() - above(Expr::Input(1), Expr::Input(0)));
        Form {
            operands: vec![Extent::Element, Extent::Tensor, Extent::Tensor, Extent::Element],
            results: vec![(Extent::Element, Expr::Input(3) * within)],
        }
    },
    gradient: |_| Gradients::NoGradient("second derivatives are not supported"),
    examples: || examples(4),
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Array, apply};

    #[test]
    fn bounds_hold_infinities_are_none_and_nan_stays() {
        let x = Array::Real(vec![-2.0, -0.5, 0.25, 3.0, f64::NAN, f64::INFINITY]);
        let clamped = |low: f64, high: f64| {
            let mut y = [(vec![6], Array::Real(vec![0.0; 6]))];
            let [low, high] = [low, high].map(|bound| Array::Real(vec![bound]));
            apply(&CLAMP, &Attrs::new(), &[(&[6], &x), (&[1], &low), (&[1], &high)], &mut y);
            y[0].1.real().to_vec()
        };
        let bounded = clamped(-1.0, 0.5);
        assert_eq!(bounded[..4], [-1.0, -0.5, 0.25, 0.5]);
        assert!(bounded[4].is_nan() && bounded[5] == 0.5);
        let free = clamped(f64::NEG_INFINITY, f64::INFINITY);
        assert_eq!((&free[..4], free[5]), (&[-2.0, -0.5, 0.25, 3.0][..], f64::INFINITY));
    }
}
