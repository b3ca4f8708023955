//! The common part of all elementwise operations: an operation given by its expressions. Evaluation on the CPU, the
//! CUDA kernel and the cost follow from them.

use graph::{OpId, ValueType};
use program::{Cost, TensorRef};
use tensor::Attrs;

use super::expression::Expr;
use super::kernel;
use super::tape::Tape;
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, Op, Rows};
use crate::real::Real;
use crate::rowwise::Form;

/// One elementwise operation as a row: all operands and results have the same shape.
pub struct Pointwise {
    pub id: OpId,
    pub doc: &'static str,
    pub attributes: &'static [Attribute],
    pub infer: fn(&[ValueType], &Attrs) -> Result<Vec<ValueType>, String>,
    /// One expression for each result. Attributes were checked by the shape rule.
    pub expressions: fn(&Attrs) -> Vec<Expr>,
    pub gradient: fn(&mut GradientCall<'_>) -> Gradients,
    pub examples: fn() -> Vec<Example>,
}

/// The rule that operands are floating point and shaped alike.
pub fn check_operands(inputs: &[ValueType], count: usize, names: &str) -> Result<(), String> {
    if inputs.len() != count {
        return Err(format!("takes {names}"));
    }
    if let Some(wrong) = inputs.iter().find(|t| !t.dtype.is_float()) {
        return Err(format!("{wrong} is not floating point"));
    }
    if inputs.iter().any(|t| t.shape != inputs[0].shape) {
        return Err("operands must have the same shape".into());
    }
    Ok(())
}

fn reference<T: Real>(op: &Pointwise, call: &mut Call<'_, T>) {
    evaluate(&(op.expressions)(call.attrs), call);
}

/// Runs expressions over the operands of a call.
pub fn evaluate<T: Real>(expressions: &[Expr], call: &mut Call<'_, T>) {
    let inputs: Vec<&[T]> = call.inputs.iter().map(|i| i.real()).collect();
    let outputs = call.outputs.iter_mut().map(|o| o.real()).collect();
    Tape::new(expressions).run(&inputs, outputs);
}

/// Functions times elements, and every operand once.
pub fn cost_of(expressions: &[Expr], inputs: &[TensorRef], outputs: &[TensorRef]) -> Cost {
    let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
    let elements = outputs.first().map_or(0, TensorRef::len);
    Cost { flops: (Tape::new(expressions).functions() * elements) as f64, bytes }
}

impl Op for Pointwise {
    fn id(&self) -> OpId {
        self.id
    }

    fn class(&self) -> Class {
        Class::Elementwise
    }

    fn doc(&self) -> &'static str {
        self.doc
    }

    fn attributes(&self) -> &'static [Attribute] {
        self.attributes
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        (self.infer)(inputs, attrs)
    }

    fn form(&self, operands: usize, attrs: &Attrs) -> Option<Form> {
        Some(Form::of_elements(operands, (self.expressions)(attrs)))
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        (self.gradient)(call)
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], attrs: &Attrs) -> Cost {
        cost_of(&(self.expressions)(attrs), inputs, outputs)
    }

    fn row_by_row(&self, inputs: &[TensorRef], _attrs: &Attrs) -> Option<Rows> {
        Some(Rows { axes: inputs[0].shape.len().checked_sub(1)?, whole: Vec::new() })
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        Lowered::Kernels(vec![kernel::kernel(&(self.expressions)(call.attrs), call.inputs, call.outputs)])
    }

    fn reference_f32(&self, call: &mut Call<'_, f32>) {
        reference(self, call)
    }

    fn reference_f64(&self, call: &mut Call<'_, f64>) {
        reference(self, call)
    }

    fn examples(&self) -> Vec<Example> {
        (self.examples)()
    }
}
