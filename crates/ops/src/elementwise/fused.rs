//! `elementwise`: several elementwise operations as one, and how a pair of nodes becomes it.
//!
//! A value that no longer reaches memory is rounded in the expression to the type in which it would
//! have been stored, so that fusing never changes bits. Which pairs are worth it is not decided here.

use graph::{Element, Graph, Node, ValueId, ValueType};
use program::{Cost, TensorRef};
use tensor::{Attrs, DType};

use super::convert::element_named;
use super::expression::Expr;
use super::pointwise::{cost_of, evaluate};
use super::{expressions, kernel};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op, Rows};

/// Attributes of the operation for these results.
fn attrs_of(results: &[(Expr, Element)]) -> Attrs {
    let texts: Vec<String> = results.iter().map(|(e, _)| e.to_string()).collect();
    let types: Vec<String> = results.iter().map(|(_, t)| t.to_string()).collect();
    Attrs::new().with("expressions", texts).with("dtypes", types)
}

fn texts(attrs: &Attrs, name: &str) -> Result<Vec<String>, String> {
    let list = attrs.get(name).and_then(|v| v.as_array()).ok_or(format!("attribute `{name}` must be a list"))?;
    let text = |v: &serde_json::Value| v.as_str().map(str::to_owned);
    list.iter().map(|v| text(v).ok_or(format!("attribute `{name}` must hold strings"))).collect()
}

fn parse(attrs: &Attrs) -> Result<Vec<Expr>, String> {
    let list = texts(attrs, "expressions")?;
    list.iter().map(|text| text.parse::<Expr>().map_err(|e| e.0)).collect()
}

fn parsed(attrs: &Attrs) -> Vec<Expr> {
    parse(attrs).expect("checked by the shape rule")
}

/// A node of `elementwise` that replaces two.
#[derive(Clone, Debug, PartialEq)]
pub struct Composed {
    pub inputs: Vec<ValueId>,
    /// First those of the producer that are kept, then those of the consumer.
    pub outputs: Vec<ValueId>,
    pub attrs: Attrs,
}

/// `producer`, then `consumer`, as one node. `keep` names the producer's results that others read:
/// they are written as well. `None` when one of the two has no expressions, when `consumer` does not
/// read `producer`, when the shapes differ, or when a result's storage is still the recipe's choice.
pub fn compose(graph: &Graph, producer: &Node, consumer: &Node, keep: &[ValueId]) -> Option<Composed> {
    let first = expressions(&producer.op, &producer.attrs)?;
    let second = expressions(&consumer.op, &consumer.attrs)?;
    let made = |id: ValueId| producer.outputs.iter().position(|o| *o == id);
    if !consumer.inputs.iter().any(|id| made(*id).is_some()) {
        return None;
    }
    let shape = &graph.value(producer.outputs[0]).shape;
    let values = [&producer.inputs, &consumer.inputs, &consumer.outputs];
    if values.into_iter().flatten().any(|id| graph.value(*id).shape != *shape) {
        return None;
    }
    let mut inputs: Vec<ValueId> = Vec::new();
    let read = |id: ValueId, inputs: &mut Vec<ValueId>| {
        Expr::Input(inputs.iter().position(|i| *i == id).unwrap_or_else(|| {
            inputs.push(id);
            inputs.len() - 1
        }))
    };
    let operands: Vec<Expr> = producer.inputs.iter().map(|id| read(*id, &mut inputs)).collect();
    let first: Vec<Expr> = first.iter().map(|e| e.substitute(&|i| operands[i].clone())).collect();
    let mut operands = Vec::new();
    for id in &consumer.inputs {
        operands.push(match made(*id) {
            Some(result) => first[result].clone().stored_as(storage(graph, *id)?),
            None => read(*id, &mut inputs),
        });
    }
    let second = second.iter().map(|e| e.substitute(&|i| operands[i].clone()));
    let kept = producer.outputs.iter().zip(&first).filter(|(id, _)| keep.contains(id));
    let results: Vec<(ValueId, Expr)> =
        kept.map(|(id, e)| (*id, e.clone())).chain(consumer.outputs.iter().copied().zip(second)).collect();
    let typed: Vec<(Expr, Element)> = results.iter().map(|(id, e)| (simplified(e), graph.value(*id).element)).collect();
    let outputs = results.into_iter().map(|(id, _)| id).collect();
    let (inputs, typed) = without_unread(inputs, typed);
    Some(Composed { inputs, outputs, attrs: attrs_of(&typed) })
}

fn storage(graph: &Graph, id: ValueId) -> Option<DType> {
    match graph.value(id).element {
        Element::Fixed(dtype) => Some(dtype),
        Element::Float => None,
    }
}

/// Without roundings that change nothing: to f32, the type of the arithmetic.
fn simplified(expr: &Expr) -> Expr {
    use super::expression::Unary;
    match expr {
        Expr::Unary(Unary::Round(DType::F32), x) => simplified(x),
        Expr::Unary(function, x) => Expr::unary(*function, simplified(x)),
        Expr::Binary(function, a, b) => Expr::binary(*function, simplified(a), simplified(b)),
        other => other.clone(),
    }
}

/// Drops operands that no expression reads; the first stays, it gives the shape.
fn without_unread(inputs: Vec<ValueId>, results: Vec<(Expr, Element)>) -> (Vec<ValueId>, Vec<(Expr, Element)>) {
    let read = |index: usize| index == 0 || results.iter().any(|(e, _)| e.reads(index));
    let kept: Vec<usize> = (0..inputs.len()).filter(|i| read(*i)).collect();
    let place = |old: usize| Expr::Input(kept.iter().position(|k| *k == old).expect("a read operand is kept"));
    let results = results.iter().map(|(e, t)| (e.substitute(&place), *t)).collect();
    (kept.iter().map(|i| inputs[*i]).collect(), results)
}

/// Any expressions over equally shaped operands.
pub struct Elementwise;

impl Op for Elementwise {
    fn name(&self) -> &'static str {
        "elementwise"
    }

    fn class(&self) -> Class {
        Class::Elementwise
    }

    fn doc(&self) -> &'static str {
        "One result for each expression over the operands in0, in1, …; made by fusing. operands […] → dtypes […]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
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
        let (expressions, types) = (parse(attrs)?, texts(attrs, "dtypes")?);
        if expressions.is_empty() || expressions.len() != types.len() {
            return Err(format!("{} expressions with {} types", expressions.len(), types.len()));
        }
        super::pointwise::check_operands(inputs, inputs.len().max(1), "at least one operand")?;
        if let Some(e) = expressions.iter().find(|e| e.operands() > inputs.len()) {
            return Err(format!("`{e}` reads more than {} operands", inputs.len()));
        }
        types.iter().map(|t| Ok(ValueType::new(element_named(t)?, inputs[0].shape.clone()))).collect()
    }

    fn expressions(&self, attrs: &Attrs) -> Option<Vec<Expr>> {
        Some(parsed(attrs))
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("operations are fused after differentiation")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], attrs: &Attrs) -> Cost {
        cost_of(&parsed(attrs), inputs, outputs)
    }

    fn row_by_row(&self, inputs: &[TensorRef]) -> Option<Rows> {
        Some(Rows { axes: inputs[0].shape.len().checked_sub(1)?, whole: &[] })
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        Lowered::Kernels(vec![kernel::kernel(&parsed(call.attrs), call.inputs, call.outputs)])
    }

    fn reference_f32(&self, call: &mut Call<'_, f32>) {
        evaluate(&parsed(call.attrs), call)
    }

    fn reference_f64(&self, call: &mut Call<'_, f64>) {
        evaluate(&parsed(call.attrs), call)
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
