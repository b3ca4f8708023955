//! `elementwise`: several elementwise operations as one.

use std::sync::Arc;

use graph::{Element, OpId, ValueType};
use program::{Cost, TensorRef};
use tensor::{Attrs, DType, Parsed};

use super::convert::element_named;
use super::expression::Expr;
use super::kernel;
use super::pointwise::{cost_of, evaluate};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op, Rows};
use crate::registry::id;
use crate::rowwise::{Form, texts};

/// Attributes of the operation for these results.
fn attrs_of(results: &[(Expr, Element)]) -> Attrs {
    let texts: Vec<String> = results.iter().map(|(e, _)| e.to_string()).collect();
    let types: Vec<String> = results.iter().map(|(_, t)| t.to_string()).collect();
    Attrs::new().with("expressions", texts).with("dtypes", types)
}

/// The expressions of the results.
struct Expressions(Vec<Expr>);

impl Parsed for Expressions {
    fn parse(attrs: &Attrs) -> Result<Self, String> {
        let list = texts(attrs, "expressions")?;
        list.iter().map(|text| text.parse::<Expr>().map_err(|e| e.0)).collect::<Result<_, _>>().map(Expressions)
    }
}

fn parsed(attrs: &Attrs) -> Arc<Expressions> {
    attrs.parsed().expect("checked by the shape rule")
}

/// The operation that computes any expressions over equally shaped operands.
pub struct Elementwise;

impl Op for Elementwise {
    fn id(&self) -> OpId {
        id::ELEMENTWISE
    }

    fn class(&self) -> Class {
        Class::Elementwise
    }

    fn doc(&self) -> &'static str {
        "One result for each expression over the operands in0, in1, …; made by fusing. operands […] → dtypes […]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "of", kind: "list of string?", doc: "the operations that it was made of, for people" },
            Attribute {
                name: "expressions",
                kind: "list of string",
                doc: "one for each result: `mul(silu(in0), in1)`; functions: add, sub, mul, div, neg, exp, tanh, \
                      sigmoid, silu, round_bf16, round_f16, round_f32",
            },
            Attribute { name: "dtypes", kind: "list of string", doc: "element type of each result" },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let (parsed, types) = (attrs.parsed::<Expressions>()?, texts(attrs, "dtypes")?);
        let expressions = &parsed.0;
        if expressions.is_empty() || expressions.len() != types.len() {
            return Err(format!("{} expressions with {} types", expressions.len(), types.len()));
        }
        super::pointwise::check_operands(inputs, inputs.len().max(1), "at least one operand")?;
        if let Some(e) = expressions.iter().find(|e| e.operands() > inputs.len()) {
            return Err(format!("`{e}` reads more than {} operands", inputs.len()));
        }
        if !Form::of_elements(inputs.len(), expressions.clone()).is_elementwise() {
            return Err("an element-wise operation reduces nothing".into());
        }
        types.iter().map(|t| Ok(ValueType::new(element_named(t)?, inputs[0].shape.clone()))).collect()
    }

    fn form(&self, operands: usize, attrs: &Attrs) -> Option<Form> {
        Some(Form::of_elements(operands, parsed(attrs).0.clone()))
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("operations are fused after differentiation")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], attrs: &Attrs) -> Cost {
        cost_of(&parsed(attrs).0, inputs, outputs)
    }

    fn row_by_row(&self, inputs: &[TensorRef], _attrs: &Attrs) -> Option<Rows> {
        Some(Rows { axes: inputs[0].shape.len().checked_sub(1)?, whole: Vec::new() })
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        Lowered::Kernels(vec![kernel::kernel(&parsed(call.attrs).0, call.inputs, call.outputs)])
    }

    fn reference_f32(&self, call: &mut Call<'_, f32>) {
        evaluate(&parsed(call.attrs).0, call)
    }

    fn reference_f64(&self, call: &mut Call<'_, f64>) {
        evaluate(&parsed(call.attrs).0, call)
    }

    fn examples(&self) -> Vec<Example> {
        let chain = (Expr::Input(0).silu() * Expr::Input(1)).stored_as(DType::BF16) + Expr::Input(2);
        let other = Expr::unary(super::expression::Unary::Tanh, Expr::Input(2) / Expr::Constant(2.0));
        let attrs = attrs_of(&[(chain, Element::Float), (other, Element::F32)]);
        let example = |shape: &[usize]| {
            Example::new(vec![ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 }; 3], attrs.clone())
        };
        vec![example(&[3, 5, 32]), example(&[5, 31])]
    }
}
