//! `rowwise`: several operations on the same rows as one.

use std::sync::Arc;

use graph::{Dim, Element, OpId, ValueType};
use program::TensorRef;
use tensor::{Attrs, DType};

use super::declared::{reference, rows_of};
use super::form::{Extent, Form, texts};
use super::kernel;
use crate::call::Call;
use crate::elementwise::{Expr, element_named};
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, Op, Rows};
use crate::registry::id;

/// The type of numbers of elements: sums of them are exact in any order.
const COUNTED: Element = Element::Fixed(DType::F64);

/// The operation that computes any form.
pub struct Composed;

fn form(attrs: &Attrs) -> Arc<Form> {
    Form::of(attrs).expect("checked by the shape rule")
}

/// The shape of an operand or result over rows of `x`.
fn shape_of(extent: Extent, x: &ValueType) -> Vec<Dim> {
    let rows = x.shape.len() - 1;
    match extent {
        Extent::Tensor => vec![1.into()],
        Extent::Element => x.shape.clone(),
        Extent::Row => x.shape[..rows].to_vec(),
        Extent::Column => x.shape[rows..].to_vec(),
    }
}

/// The element type of a result: a floating-point one, or codes of eight bits.
fn stored_element(name: &str) -> Result<Element, String> {
    let codes = name.parse::<DType>().ok().filter(|dtype| dtype.small().is_some());
    codes.map_or_else(|| element_named(name), |dtype| Ok(Element::Fixed(dtype)))
}

impl Op for Composed {
    fn id(&self) -> OpId {
        id::ROWWISE
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "One result for each expression over the operands in0, in1, … of a row; made by fusing. Operands and results \
         have a value for each `element` […, H], for each `row` […], for each `column` [H]: a weight, or a sum over \
         the rows in f32, or for the `tensor` [1]: a factor, a scale, a magnitude that is raised, a number of elements \
         that is added in f64. Elements may be codes of eight bits."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "of", kind: "list of string", doc: "the operations that it was made of, for people" },
            Attribute {
                name: "expressions",
                kind: "list of string",
                doc: "one for each result, as those of `elementwise`, and `mean(x)`: over the row; `relaxed(x)`: a \
                      device may contract and gather inside; `amax(x, …)`: the largest magnitude in the tensors; \
                      `power(factor, amax, top)`: the factor, or where that is 0 the largest 2^k with amax·2^k ≤ 1.75·2^top; \
                      `nonzero(power, x, …)`, `flushed(power, x, …)`: how many elements are not 0, and how many of these \
                      become 0 in E4M3 after the power, counted only where its factor is 0",
            },
            Attribute {
                name: "operands",
                kind: "list of string",
                doc: "`element`, `row`, `column` or `tensor` for each operand",
            },
            Attribute { name: "results", kind: "list of string", doc: "the same for each result" },
            Attribute { name: "dtypes", kind: "list of string", doc: "element type of each result" },
            Attribute {
                name: "accumulate",
                kind: "bool?",
                doc: "add sums over rows to the result instead of overwriting it",
            },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let (form, types) = (Form::of(attrs)?, texts(attrs, "dtypes")?);
        texts(attrs, "of")?;
        attrs.flag("accumulate")?;
        if form.operands.len() != inputs.len() || form.results.len() != types.len() {
            return Err(format!("takes {} operands and gives {} results", form.operands.len(), form.results.len()));
        }
        let x = &inputs[0];
        if x.shape.is_empty() {
            return Err("x must have rows".into());
        }
        for (index, (input, extent)) in inputs.iter().zip(&form.operands).enumerate() {
            if !input.dtype.is_float() || input.shape != shape_of(*extent, x) {
                return Err(format!("operand {index} must be floating point, one value for each {extent:?} of x"));
            }
        }
        let results = form.results.iter().zip(&types);
        let typed = results.map(|((extent, _), t)| Ok(ValueType::new(stored_element(t)?, shape_of(*extent, x))));
        let typed: Vec<ValueType> = typed.collect::<Result<_, String>>()?;
        let sums = typed.iter().zip(&form.results).filter(|(_, (extent, _))| *extent == Extent::Column);
        if !sums.into_iter().all(|(t, _)| t.dtype == Element::F32) {
            return Err("sums over rows are f32".into());
        }
        let of = |e: &Expr| if matches!(e, Expr::Count(..)) { COUNTED } else { Element::F32 };
        let mut single = typed.iter().zip(&form.results).filter(|(_, (extent, _))| *extent == Extent::Tensor);
        match single.all(|(t, (_, e))| t.dtype == of(e)) {
            true => Ok(typed),
            false => Err("what a tensor has one of is f32, numbers of elements are f64".into()),
        }
    }

    fn form(&self, _operands: usize, attrs: &Attrs) -> Option<Form> {
        Some((*form(attrs)).clone())
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("operations are fused after differentiation")
    }

    fn row_by_row(&self, inputs: &[TensorRef], attrs: &Attrs) -> Option<Rows> {
        rows_of(&form(attrs), inputs)
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        kernel::scratch(&form(call.attrs), call)
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        Lowered::Kernels(kernel::kernels(&form(call.attrs), call))
    }

    fn reference_f32(&self, call: &mut Call<'_, f32>) {
        reference(&form(call.attrs), call)
    }

    fn reference_f64(&self, call: &mut Call<'_, f64>) {
        reference(&form(call.attrs), call)
    }

    fn examples(&self) -> Vec<Example> {
        super::examples::examples()
    }
}
