//! ln(1 − eˣ) of log-probabilities: the log of the probability of everything else, as odds need it.

use graph::ValueType;
use tensor::Attrs;

use super::expression::{Expr, Unary};
use super::pointwise::{Pointwise, check_operands};
use crate::gradient::Gradients;
use crate::op::{Example, ExampleInput};
use crate::registry::id;

/// The largest log-probability: what is above counts as this, so that odds stay finite.
const LARGEST: f64 = -1.0 / (1 << 24) as f64;

/// The first operand, at most [`LARGEST`].
fn below_zero() -> Expr {
    Expr::Constant(LARGEST) - Expr::unary(Unary::Relu, Expr::Constant(LARGEST) - Expr::Input(0))
}

fn minus(x: Expr) -> Expr {
    Expr::unary(Unary::Negate, x)
}

fn like_first(inputs: &[ValueType], count: usize, names: &str) -> Result<Vec<ValueType>, String> {
    check_operands(inputs, count, names)?;
    Ok(vec![inputs[0].clone()])
}

fn examples(operands: usize) -> Vec<Example> {
    let x = ExampleInput::UniformF32 { shape: vec![7, 33], low: -6.0, high: -0.01 };
    let dy = ExampleInput::UniformF32 { shape: vec![7, 33], low: -1.0, high: 1.0 };
    vec![Example::new([x, dy].into_iter().take(operands).collect(), Attrs::new())]
}

/// ln(1 − eˣ)
pub static LOG_COMPLEMENT: Pointwise = Pointwise {
    id: id::LOG_COMPLEMENT,
    doc: "ln(1 − eˣ), element by element, for x below 0; above −2⁻²⁴ x counts as that. x […] → like x.",
    attributes: &[],
    infer: |inputs, _| like_first(inputs, 1, "one operand"),
    expressions: |_| vec![Expr::unary(Unary::Log, minus(Expr::unary(Unary::ExpMinusOne, below_zero())))],
    gradient: |call| {
        let (x, dy) = (call.input(0), call.dy());
        Gradients::Inputs(vec![call.wanted(0, id::LOG_COMPLEMENT_BACKWARD, &[x, dy], Attrs::new())])
    },
    examples: || examples(1).into_iter().map(|example| example.differentiate(&[0])).collect(),
};

/// −dy ÷ (e⁻ˣ − 1)
pub static LOG_COMPLEMENT_BACKWARD: Pointwise = Pointwise {
    id: id::LOG_COMPLEMENT_BACKWARD,
    doc: "Gradient of `log_complement`: −dy ÷ (e⁻ˣ − 1). x, dy […] → like x.",
    attributes: &[],
    infer: |inputs, _| like_first(inputs, 2, "x and dy"),
    expressions: |_| vec![minus(Expr::Input(1)) / Expr::unary(Unary::ExpMinusOne, minus(below_zero()))],
    gradient: |_| Gradients::NoGradient("second derivatives are not supported"),
    examples: || examples(2),
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Array, apply};

    #[test]
    fn log_complements_are_exact_near_zero_and_finite_at_it() {
        for (x, expected) in [(-1e-4_f64, -9.210390371559516), (-4.0, -0.01848544682588656), (0.0, -16.63553236324101)]
        {
            let mut y = [(vec![1], Array::Real(vec![0.0]))];
            apply(&LOG_COMPLEMENT, &Attrs::new(), &[(&[1], &Array::Real(vec![x]))], &mut y);
            let found = y[0].1.real()[0];
            assert!((found - expected).abs() <= 1e-9 * expected.abs(), "{x}: {found}");
        }
    }
}
