//! ln(1 − eˣ) of log-probabilities: the log of the probability of everything else, as odds need it.

use graph::ValueType;
use tensor::Attrs;

use super::expression::{Expr, Unary};
use super::pointwise::{Pointwise, check_operands};
use crate::gradient::Gradients;
use crate::op::{Example, ExampleInput};
use crate::registry::id;

/// The exponential of an operand, a probability where the operand is its logarithm.
fn exponential(x: usize) -> Expr {
    Expr::unary(Unary::Exp, Expr::Input(x))
}

fn like_first(inputs: &[ValueType], count: usize, names: &str) -> Result<Vec<ValueType>, String> {
    check_operands(inputs, count, names)?;
    Ok(vec![inputs[0].clone()])
}

fn examples(operands: usize) -> Vec<Example> {
    let x = ExampleInput::UniformF32 { shape: vec![7, 33], low: -4.0, high: -0.2 };
    let dy = ExampleInput::UniformF32 { shape: vec![7, 33], low: -1.0, high: 1.0 };
    vec![Example::new([x, dy].into_iter().take(operands).collect(), Attrs::new())]
}

/// ln(1 − eˣ)
pub static LOG_COMPLEMENT: Pointwise = Pointwise {
    id: id::LOG_COMPLEMENT,
    doc: "ln(1 − eˣ), element by element, for x below 0; x = 0 gives −∞. x […] → like x.",
    attributes: &[],
    infer: |inputs, _| like_first(inputs, 1, "one operand"),
    expressions: |_| vec![Expr::unary(Unary::Log, Expr::Constant(1.0) - exponential(0))],
    gradient: |call| {
        let (x, dy) = (call.input(0), call.dy());
        Gradients::Inputs(vec![call.wanted(0, id::LOG_COMPLEMENT_BACKWARD, &[x, dy], Attrs::new())])
    },
    examples: || examples(1).into_iter().map(|example| example.differentiate(&[0])).collect(),
};

/// −dy · eˣ ÷ (1 − eˣ)
pub static LOG_COMPLEMENT_BACKWARD: Pointwise = Pointwise {
    id: id::LOG_COMPLEMENT_BACKWARD,
    doc: "Gradient of `log_complement`: −dy·eˣ ÷ (1 − eˣ). x, dy […] → like x.",
    attributes: &[],
    infer: |inputs, _| like_first(inputs, 2, "x and dy"),
    expressions: |_| {
        vec![Expr::Constant(-1.0) * Expr::Input(1) * exponential(0) / (Expr::Constant(1.0) - exponential(0))]
    },
    gradient: |_| Gradients::NoGradient("second derivatives are not supported"),
    examples: || examples(2),
};
