//! `clip`: elements within two constant bounds, such as the ratio of two policies.

use tensor::Attrs;

use super::arithmetic::examples_of;
use super::expression::{Binary, Expr, Unary};
use super::pointwise::{Pointwise, check_operands};
use crate::gradient::Gradients;
use crate::op::Attribute;
use crate::registry::id;

const ATTRIBUTES: &[Attribute] = &[
    Attribute { name: "low", kind: "float", doc: "the smallest result" },
    Attribute { name: "high", kind: "float", doc: "the largest result, at least `low`" },
];

fn bounds(attrs: &Attrs) -> Result<[f64; 2], String> {
    let [low, high] = [attrs.float("low")?, attrs.float("high")?];
    if low <= high { Ok([low, high]) } else { Err(format!("`low` is {low} and `high` {high}, expected low ≤ high")) }
}

fn known(attrs: &Attrs) -> [Expr; 2] {
    bounds(attrs).expect("checked by the shape rule").map(Expr::Constant)
}

fn attrs() -> Attrs {
    Attrs::new().with("low", -0.505).with("high", 0.705)
}

/// Elements within two bounds: y = min(max(x, low), high).
pub static CLIP: Pointwise = Pointwise {
    id: id::CLIP,
    doc: "x, and the bound where it is beyond one. x […] → like x.",
    attributes: ATTRIBUTES,
    infer: |inputs, attrs| {
        check_operands(inputs, 1, "one operand")?;
        bounds(attrs)?;
        Ok(inputs.to_vec())
    },
    expressions: |attrs| {
        let [low, high] = known(attrs);
        vec![Expr::binary(Binary::Minimum, Expr::binary(Binary::Maximum, Expr::Input(0), low), high)]
    },
    gradient: |call| {
        let (x, dy, attrs) = (call.input(0), call.dy(), call.node.attrs.clone());
        Gradients::Inputs(vec![call.wanted(0, id::CLIP_BACKWARD, &[x, dy], attrs)])
    },
    examples: || examples_of(1, &attrs()),
};

/// The part of dy whose x is not beyond a bound.
pub static CLIP_BACKWARD: Pointwise = Pointwise {
    id: id::CLIP_BACKWARD,
    doc: "Gradient of `clip`: dy where x is within the bounds, else 0. x, dy […] → like x.",
    attributes: ATTRIBUTES,
    infer: |inputs, attrs| {
        check_operands(inputs, 2, "x and dy")?;
        bounds(attrs)?;
        Ok(vec![inputs[0].clone()])
    },
    expressions: |attrs| {
        let [low, high] = known(attrs);
        let beyond = |a: Expr, b: Expr| Expr::Constant(1.0) - Expr::unary(Unary::Step, a - b);
        vec![Expr::Input(1) * beyond(Expr::Input(0), high) * beyond(low, Expr::Input(0))]
    },
    gradient: |_| Gradients::NoGradient("second derivatives are not supported"),
    examples: || {
        let mut examples = examples_of(2, &attrs());
        examples.iter_mut().for_each(|example| example.differentiable.clear());
        examples
    },
};
