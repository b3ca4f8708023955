//! The operations `cast`, which keeps the value and changes the type, and `fill`, which keeps the type and changes the
//! value.

use graph::{Element, ValueType};
use tensor::{Attrs, DType};

use super::arithmetic::examples_of;
use super::expression::Expr;
use super::pointwise::{Pointwise, check_operands};
use crate::gradient::Gradients;
use crate::op::Attribute;
use crate::registry::id;

/// An element type by the name that attributes carry: `float` or a concrete one.
pub(crate) fn element_named(name: &str) -> Result<Element, String> {
    match name {
        "float" => Ok(Element::Float),
        _ => match name.parse::<DType>() {
            Ok(dtype) if dtype.is_float() => Ok(Element::Fixed(dtype)),
            _ => Err(format!("`{name}` is no floating-point type: float, f32, bf16, f16")),
        },
    }
}

/// The same values in another floating-point type.
pub static CAST: Pointwise = Pointwise {
    id: id::CAST,
    doc: "x as another floating-point type, rounded to nearest even. x […] → dtype […].",
    attributes: &[Attribute {
        name: "dtype",
        kind: "string",
        doc: "the type: `f32`, `bf16`, `f16`, or `float` for the activation type",
    }],
    infer: |inputs, attrs| {
        check_operands(inputs, 1, "one operand")?;
        let element = element_named(attrs.text("dtype")?)?;
        Ok(vec![ValueType::new(element, inputs[0].shape.clone())])
    },
    expressions: |_| vec![Expr::Input(0)],
    gradient: |call| {
        let (dy, element) = (call.dy(), call.emit.value(call.input(0)).element);
        let attrs = Attrs::new().with("dtype", element.to_string());
        Gradients::Inputs(vec![call.wanted(0, id::CAST, &[dy], attrs)])
    },
    examples: || ["f32", "bf16"].iter().flat_map(|t| examples_of(1, &Attrs::new().with("dtype", *t))).collect(),
};

/// The operation that writes one value everywhere.
pub static FILL: Pointwise = Pointwise {
    id: id::FILL,
    doc: "`value` everywhere, in the type and shape of x. x […] → like x.",
    attributes: &[Attribute { name: "value", kind: "float", doc: "the value of every element" }],
    infer: |inputs, attrs| {
        check_operands(inputs, 1, "one operand")?;
        attrs.float("value")?;
        Ok(inputs.to_vec())
    },
    expressions: |attrs| vec![Expr::Constant(attrs.float("value").expect("checked by the shape rule"))],
    gradient: |_| Gradients::NoGradient("the result does not depend on x"),
    examples: || {
        let mut examples = examples_of(1, &Attrs::new().with("value", 0.5));
        examples.iter_mut().for_each(|e| e.differentiable.clear());
        examples
    },
};
