//! `add`, `mul`, `scale`, `shift`, `detach`: arithmetic on equally shaped operands.

use graph::ValueType;
use tensor::Attrs;

use super::expression::Expr;
use super::pointwise::{Pointwise, check_operands};
use crate::gradient::Gradients;
use crate::op::{Attribute, Example, ExampleInput};
use crate::registry::id;

fn like_first(inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
    check_operands(inputs, 2, "two operands")?;
    Ok(vec![inputs[0].clone()])
}

/// Examples with `count` operands: a round shape, and one that no vector access divides.
pub(super) fn examples_of(count: usize, attrs: &Attrs) -> Vec<Example> {
    let all: Vec<usize> = (0..count).collect();
    [vec![2, 3, 64], vec![7, 33]]
        .into_iter()
        .map(|shape| {
            let input = ExampleInput::Normal { shape, scale: 1.0 };
            Example::new(vec![input; count], attrs.clone()).differentiate(&all)
        })
        .collect()
}

/// a + b
pub static ADD: Pointwise = Pointwise {
    id: id::ADD,
    doc: "a + b, element by element. a, b […] → like a.",
    attributes: &[],
    infer: like_first,
    expressions: |_| vec![Expr::Input(0) + Expr::Input(1)],
    gradient: |call| {
        let dy = call.dy();
        Gradients::Inputs(call.wanted.iter().map(|wanted| wanted.then_some(dy)).collect())
    },
    examples: || examples_of(2, &Attrs::new()),
};

/// a · b
pub static MUL: Pointwise = Pointwise {
    id: id::MUL,
    doc: "a·b, element by element. a, b […] → like a.",
    attributes: &[],
    infer: like_first,
    expressions: |_| vec![Expr::Input(0) * Expr::Input(1)],
    gradient: |call| {
        let (a, b, dy) = (call.input(0), call.input(1), call.dy());
        let da = call.wanted(0, id::MUL, &[dy, b], Attrs::new());
        let db = call.wanted(1, id::MUL, &[dy, a], Attrs::new());
        Gradients::Inputs(vec![da, db])
    },
    examples: || examples_of(2, &Attrs::new()),
};

/// factor · x
pub static SCALE: Pointwise = Pointwise {
    id: id::SCALE,
    doc: "factor·x, element by element. x […] → like x.",
    attributes: &[
        Attribute { name: "factor", kind: "float", doc: "the number to multiply with" },
        Attribute { name: "rounded", kind: "bool?", doc: "the factor is rounded to the type of x first" },
    ],
    infer: |inputs, attrs| {
        check_operands(inputs, 1, "one operand")?;
        attrs.float("factor")?;
        attrs.flag("rounded")?;
        Ok(inputs.to_vec())
    },
    expressions: |attrs| {
        let factor = attrs.float("factor").expect("checked by the shape rule");
        vec![Expr::Input(0) * Expr::Constant(factor)]
    },
    gradient: |call| {
        let dy = call.dy();
        let attrs = call.node.attrs.clone();
        Gradients::Inputs(vec![call.wanted(0, id::SCALE, &[dy], attrs)])
    },
    examples: || examples_of(1, &Attrs::new().with("factor", -0.3)),
};

/// The sum of each element and a constant offset.
pub static SHIFT: Pointwise = Pointwise {
    id: id::SHIFT,
    doc: "x + offset, element by element. x […] → like x.",
    attributes: &[Attribute { name: "offset", kind: "float", doc: "the number to add" }],
    infer: |inputs, attrs| {
        check_operands(inputs, 1, "one operand")?;
        attrs.float("offset")?;
        Ok(inputs.to_vec())
    },
    expressions: |attrs| {
        let offset = attrs.float("offset").expect("checked by the shape rule");
        vec![Expr::Input(0) + Expr::Constant(offset)]
    },
    gradient: |call| {
        let dy = call.dy();
        Gradients::Inputs(vec![call.wanted[0].then_some(dy)])
    },
    examples: || examples_of(1, &Attrs::new().with("offset", -0.3)),
};

/// The elements as constants, through which no gradient flows.
pub static DETACH: Pointwise = Pointwise {
    id: id::DETACH,
    doc: "x as a constant: no gradient flows through it. x […] → like x.",
    attributes: &[],
    infer: |inputs, _| {
        check_operands(inputs, 1, "one operand")?;
        Ok(inputs.to_vec())
    },
    expressions: |_| vec![Expr::Input(0)],
    gradient: |_| Gradients::Inputs(vec![None]),
    examples: || {
        let mut examples = examples_of(1, &Attrs::new());
        examples.iter_mut().for_each(|e| e.differentiable.clear());
        examples
    },
};
