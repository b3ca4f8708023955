//! A gated product whose operands are clamped: g = min(gate, limit), u = up within ±limit, y = g·σ(alpha·g)·(u + 1)
//! (OpenAI, GPT-OSS 2025). Gradients stop where a clamp holds its operand.

use tensor::Attrs;

use super::arithmetic::examples_of;
use super::expression::{Expr, Unary};
use super::pointwise::{Pointwise, check_operands};
use crate::gradient::Gradients;
use crate::op::{Attribute, Example};
use crate::registry::id;

const ATTRIBUTES: &[Attribute] = &[
    Attribute { name: "limit", kind: "float", doc: "the largest gate, and the largest size of up" },
    Attribute { name: "alpha", kind: "float", doc: "of the sigmoid's operand" },
];

fn number(x: f64) -> Expr {
    Expr::Constant(x)
}

/// 1 where x is above the limit, else 0.
fn above(x: Expr, limit: f64) -> Expr {
    Expr::unary(Unary::Step, x - number(limit))
}

/// min(x, limit), without rounding.
fn at_most(x: &dyn Fn() -> Expr, limit: f64) -> Expr {
    let over = || above(x(), limit);
    x() * (number(1.0) - over()) + number(limit) * over()
}

/// max(x, -limit), without rounding.
fn at_least(x: &dyn Fn() -> Expr, limit: f64) -> Expr {
    let under = || below(x(), limit);
    x() * (number(1.0) - under()) - number(limit) * under()
}

/// 1 where x is below -limit, else 0.
fn below(x: Expr, limit: f64) -> Expr {
    Expr::unary(Unary::Step, number(-limit) - x)
}

fn numbers(attrs: &Attrs) -> (f64, f64) {
    let read = |name| attrs.float(name).expect("checked by the shape rule");
    (read("limit"), read("alpha"))
}

fn check(attrs: &Attrs) -> Result<(), String> {
    attrs.float("alpha")?;
    let limit = attrs.float("limit")?;
    if limit.is_finite() && limit > 0.0 { Ok(()) } else { Err(format!("`limit` is {limit}, expected above 0")) }
}

/// g, u and σ(alpha·g).
fn operands(attrs: &Attrs) -> (Expr, Expr, Expr) {
    let (limit, alpha) = numbers(attrs);
    let gate = at_most(&|| Expr::Input(0), limit);
    let up = at_least(&|| at_most(&|| Expr::Input(1), limit), limit);
    let sigmoid = (number(alpha) * gate.clone()).sigmoid();
    (gate, up, sigmoid)
}

fn examples(count: usize) -> Vec<Example> {
    // The limit lies among the drawn numbers, none of which is near it by less than a difference's step.
    examples_of(count, &Attrs::new().with("limit", 0.75).with("alpha", 1.702))
}

/// g·σ(alpha·g)·(u + 1)
pub static CLAMPED_SWIGLU: Pointwise = Pointwise {
    id: id::CLAMPED_SWIGLU,
    doc: "g·σ(alpha·g)·(u + 1) with g = min(gate, limit) and u = up clamped to ±limit. gate, up […] → like gate.",
    attributes: ATTRIBUTES,
    infer: |inputs, attrs| {
        check_operands(inputs, 2, "gate and up")?;
        check(attrs)?;
        Ok(vec![inputs[0].clone()])
    },
    expressions: |attrs| {
        let (gate, up, sigmoid) = operands(attrs);
        vec![gate * sigmoid * (up + number(1.0))]
    },
    gradient: |call| {
        let inputs = [call.input(0), call.input(1), call.dy()];
        if !call.wanted.contains(&true) {
            return Gradients::Inputs(vec![None, None]);
        }
        let both = call.emit.emit(id::CLAMPED_SWIGLU_BACKWARD, &inputs, call.node.attrs.clone());
        Gradients::Inputs(both.into_iter().zip(call.wanted).map(|(d, wanted)| wanted.then_some(d)).collect())
    },
    examples: || examples(2),
};

/// Both gradients of the operation `clamped_swiglu`.
pub static CLAMPED_SWIGLU_BACKWARD: Pointwise = Pointwise {
    id: id::CLAMPED_SWIGLU_BACKWARD,
    doc: "Gradients of `clamped_swiglu`: with σ = σ(alpha·g), d_gate = dy·(u + 1)·σ·(1 + alpha·g·(1 − σ)) where gate is \
          not above the limit, d_up = dy·g·σ where up is within ±limit, else 0. gate, up, dy […] → d_gate, d_up.",
    attributes: ATTRIBUTES,
    infer: |inputs, attrs| {
        check_operands(inputs, 3, "gate, up and dy")?;
        check(attrs)?;
        Ok(vec![inputs[0].clone(), inputs[1].clone()])
    },
    expressions: |attrs| {
        let ((limit, alpha), (gate, up, sigmoid)) = (numbers(attrs), operands(attrs));
        let (one, dy) = (|| number(1.0), || Expr::Input(2));
        let slope = sigmoid.clone() * (one() + number(alpha) * gate.clone() * (one() - sigmoid.clone()));
        let free_gate = one() - above(Expr::Input(0), limit);
        let free_up = (one() - above(Expr::Input(1), limit)) * (one() - below(Expr::Input(1), limit));
        vec![dy() * (up + one()) * slope * free_gate, dy() * (gate * sigmoid) * free_up]
    },
    gradient: |_| Gradients::NoGradient("second derivatives are not supported"),
    examples: || {
        let mut examples = examples(3);
        examples.iter_mut().for_each(|e| e.differentiable.clear());
        examples
    },
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Array, apply};

    #[test]
    fn clamps_hold_the_gate_above_and_up_on_both_sides() {
        let value = |gate: f64, up: f64| {
            let (gate, up) = (Array::Real(vec![gate]), Array::Real(vec![up]));
            let mut y = [(vec![1], Array::Real(vec![0.0]))];
            let attrs = Attrs::new().with("limit", 7.0).with("alpha", 1.702);
            apply(&CLAMPED_SWIGLU, &attrs, &[(&[1], &gate), (&[1], &up)], &mut y);
            y[0].1.real()[0]
        };
        let silu = |x: f64| x / (1.0 + (-1.702 * x).exp());
        for (gate, up, expected) in
            [(2.0, 0.5, silu(2.0) * 1.5), (9.0, -9.0, silu(7.0) * -6.0), (-9.0, 9.0, silu(-9.0) * 8.0)]
        {
            assert!((value(gate, up) - expected).abs() < 1e-12, "{gate}, {up}: {}", value(gate, up));
        }
    }
}
