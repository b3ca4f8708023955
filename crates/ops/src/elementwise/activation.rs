//! Unary activation functions, by name, and their gradients. Does not know which names models use for them.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use graph::ValueType;
use tensor::Attrs;

use super::arithmetic::examples_of;
use super::expression::{Expr, Unary};
use super::pointwise::{Pointwise, check_operands};
use crate::gradient::Gradients;
use crate::op::{Attribute, Example, ExampleInput};
use crate::registry::id;

/// A function as (value, slope) of the operand.
type Rule = fn(x: &dyn Fn() -> Expr) -> (Expr, Expr);

fn number(x: f64) -> Expr {
    Expr::Constant(x)
}

/// Factor of x² in the cubic of the tanh form of GELU (Hendrycks & Gimpel 2016).
const CUBIC: f64 = 0.044715;

/// Factor of x in the sigmoid form of GELU.
const QUICK: f64 = 1.702;

const FUNCTIONS: &[(&str, Rule)] = &[
    ("exp", |x| (Expr::unary(Unary::Exp, x()), Expr::unary(Unary::Exp, x()))),
    ("gelu", gelu),
    ("gelu_tanh", gelu_tanh),
    ("quick_gelu", quick_gelu),
    ("reciprocal", |x| (number(1.0) / x(), number(-1.0) / (x() * x()))),
    ("relu", |x| (Expr::unary(Unary::Relu, x()), Expr::unary(Unary::Step, x()))),
    ("sigmoid", |x| (x().sigmoid(), x().sigmoid() * (number(1.0) - x().sigmoid()))),
    ("softplus", |x| (Expr::unary(Unary::Softplus, x()), x().sigmoid())),
    ("silu", |x| (x().silu(), x().sigmoid() * (number(1.0) + x() * (number(1.0) - x().sigmoid())))),
    ("step", |x| (Expr::unary(Unary::Step, x()), number(0.0))),
    ("tanh", |x| {
        let y = || Expr::unary(Unary::Tanh, x());
        (y(), number(1.0) - y() * y())
    }),
];

/// x·Φ(x) with the normal distribution Φ.
fn gelu(x: &dyn Fn() -> Expr) -> (Expr, Expr) {
    let below = || number(0.5) * (number(1.0) + Expr::unary(Unary::Erf, x() * number(FRAC_1_SQRT_2)));
    let density = Expr::unary(Unary::Exp, x() * x() * number(-0.5)) * number(1.0 / (2.0 * PI).sqrt());
    (x() * below(), below() + x() * density)
}

/// x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³)))
fn gelu_tanh(x: &dyn Fn() -> Expr) -> (Expr, Expr) {
    let root = (2.0 / PI).sqrt();
    let inner = x() * (number(root) + x() * x() * number(root * CUBIC));
    let t = || Expr::unary(Unary::Tanh, inner.clone());
    let value = number(0.5) * x() * (number(1.0) + t());
    let inner_slope = number(root) + x() * x() * number(3.0 * root * CUBIC);
    let slope = number(0.5) * (number(1.0) + t()) + number(0.5) * x() * (number(1.0) - t() * t()) * inner_slope;
    (value, slope)
}

/// x·σ(1.702·x)
fn quick_gelu(x: &dyn Fn() -> Expr) -> (Expr, Expr) {
    let s = || (x() * number(QUICK)).sigmoid();
    (x() * s(), s() + number(QUICK) * x() * s() * (number(1.0) - s()))
}

fn rule(attrs: &Attrs) -> Result<Rule, String> {
    let name = attrs.text("function")?;
    let found = FUNCTIONS.iter().find(|(known, _)| *known == name).map(|(_, rule)| *rule);
    found.ok_or_else(|| {
        let known: Vec<&str> = FUNCTIONS.iter().map(|(name, _)| *name).collect();
        format!("function `{name}` is not known; known are {}", known.join(", "))
    })
}

fn parts(attrs: &Attrs) -> (Expr, Expr) {
    rule(attrs).expect("checked by the shape rule")(&|| Expr::Input(0))
}

fn like_first(inputs: &[ValueType], count: usize, names: &str, attrs: &Attrs) -> Result<Vec<ValueType>, String> {
    check_operands(inputs, count, names)?;
    rule(attrs)?;
    Ok(vec![inputs[0].clone()])
}

/// A function of numbers between 0.5 and 3.
fn away_from_zero(operands: usize, function: &str) -> Example {
    let x = ExampleInput::UniformF32 { shape: vec![7, 33], low: 0.5, high: 3.0 };
    let all: Vec<usize> = (0..operands).collect();
    Example::new(vec![x; operands], Attrs::new().with("function", function)).differentiate(&all)
}

fn examples(operands: usize) -> Vec<Example> {
    // Near 0 the reciprocal has no slope that differences find.
    let everywhere = FUNCTIONS.iter().filter(|(name, _)| *name != "reciprocal");
    let of_normal = everywhere.flat_map(|(name, _)| examples_of(operands, &Attrs::new().with("function", *name)));
    let mut all: Vec<Example> = of_normal.chain([away_from_zero(operands, "reciprocal")]).collect();
    // The slope of a step is 0, and relative differences have no size to compare with.
    let steps = all.iter_mut().filter(|example| example.attrs.text("function").is_ok_and(|name| name == "step"));
    steps.for_each(|example| example.differentiable.clear());
    all
}

const ATTRIBUTES: &[Attribute] = &[Attribute {
    name: "function",
    kind: "string",
    doc: "exp, gelu, gelu_tanh, quick_gelu, reciprocal, relu, sigmoid, silu, softplus, step or tanh",
}];

/// f(x)
pub static ACTIVATION: Pointwise = Pointwise {
    id: id::ACTIVATION,
    doc: "f(x), element by element: gelu is x·Φ(x) with the normal distribution Φ, gelu_tanh x/2·(1 + tanh(√(2/π)·(x + \
          0.044715·x³))), quick_gelu x·σ(1.702·x), reciprocal 1/x, relu max(x, 0), sigmoid σ(x), silu x·σ(x), softplus \
          ln(1 + eˣ), step 1 above 0 and 0 elsewhere, with slope 0. x […] → like x.",
    attributes: ATTRIBUTES,
    infer: |inputs, attrs| like_first(inputs, 1, "one operand", attrs),
    expressions: |attrs| vec![parts(attrs).0],
    gradient: |call| {
        let (x, dy, attrs) = (call.input(0), call.dy(), call.node.attrs.clone());
        Gradients::Inputs(vec![call.wanted(0, id::ACTIVATION_BACKWARD, &[x, dy], attrs)])
    },
    examples: || examples(1),
};

/// dy · f′(x)
pub static ACTIVATION_BACKWARD: Pointwise = Pointwise {
    id: id::ACTIVATION_BACKWARD,
    doc: "Gradient of `activation`: dy·f′(x). x, dy […] → like x.",
    attributes: ATTRIBUTES,
    infer: |inputs, attrs| like_first(inputs, 2, "x and dy", attrs),
    expressions: |attrs| vec![Expr::Input(1) * parts(attrs).1],
    gradient: |_| Gradients::NoGradient("second derivatives are not supported"),
    examples: || {
        let mut examples = examples(2);
        examples.iter_mut().for_each(|e| e.differentiable.clear());
        examples
    },
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Array, apply};

    fn value(function: &str, x: f64) -> f64 {
        let x = Array::Real(vec![x]);
        let mut y = [(vec![1], Array::Real(vec![0.0]))];
        apply(&ACTIVATION, &Attrs::new().with("function", function), &[(&[1], &x)], &mut y);
        y[0].1.real()[0]
    }

    #[test]
    fn values_are_those_of_the_definitions() {
        for (function, x, expected) in [
            ("gelu", 1.0, 0.841344746068543),
            ("gelu_tanh", 1.0, 0.8411919906082768),
            ("gelu_tanh", -0.5, -0.15428599017485606),
            ("quick_gelu", 1.0, 0.8457957659328212),
            ("relu", -2.0, 0.0),
            ("relu", 2.0, 2.0),
            ("sigmoid", 1.0, 0.731058578630005),
            ("silu", 1.0, 0.731058578630005),
            ("exp", -1.0, 0.36787944117144233),
            ("reciprocal", -4.0, -0.25),
            ("softplus", -2.0, 0.1269280110429725),
            ("softplus", 60.0, 60.0),
            ("step", 0.0, 0.0),
            ("step", 0.5, 1.0),
            ("tanh", 1.0, 0.761594155955765),
        ] {
            assert!((value(function, x) - expected).abs() < 1e-9, "{function}({x}) = {}", value(function, x));
        }
    }

    #[test]
    fn unknown_functions_are_named() {
        let x = ValueType::new(graph::Element::Float, [graph::Dim::Fixed(3)]);
        let error = (ACTIVATION.infer)(&[x], &Attrs::new().with("function", "mish")).unwrap_err();
        assert!(error.contains("`mish`") && error.contains("quick_gelu"), "{error}");
    }
}
