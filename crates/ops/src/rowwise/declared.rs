//! One operation on rows as a row of a table: its shape rule, its form, its gradient rule.

use graph::{OpId, ValueType};
use program::TensorRef;
use tensor::Attrs;

use super::form::Form;
use super::{kernel, tape};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, Op, Rows};
use crate::real::Real;

/// An operation on rows. The attribute `accumulate`, where it is declared, adds sums over rows to what is there.
pub struct Rowwise {
    pub id: OpId,
    pub doc: &'static str,
    pub attributes: &'static [Attribute],
    pub infer: fn(&[ValueType], &Attrs) -> Result<Vec<ValueType>, String>,
    /// Attributes were checked by the shape rule.
    pub form: fn(&Attrs) -> Form,
    pub gradient: fn(&mut GradientCall<'_>) -> Gradients,
    pub examples: fn() -> Vec<Example>,
}

/// Returns the rows of an operation with this form, if they are independent.
pub(super) fn rows_of(form: &Form, inputs: &[TensorRef]) -> Option<Rows> {
    let axes = inputs[0].shape.len().checked_sub(1)?;
    (!form.sums_rows() && !form.spans_tensor()).then(|| Rows { axes, whole: form.whole() })
}

/// Runs a form over the operands of a call.
pub(super) fn reference<T: Real>(form: &Form, call: &mut Call<'_, T>) {
    let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
    tape::evaluate(form, accumulate, call);
}

impl Op for Rowwise {
    fn id(&self) -> OpId {
        self.id
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        self.doc
    }

    fn attributes(&self) -> &'static [Attribute] {
        self.attributes
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        attrs.flag("accumulate")?;
        (self.infer)(inputs, attrs)
    }

    fn form(&self, _operands: usize, attrs: &Attrs) -> Option<Form> {
        Some((self.form)(attrs))
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        (self.gradient)(call)
    }

    fn row_by_row(&self, inputs: &[TensorRef], attrs: &Attrs) -> Option<Rows> {
        rows_of(&(self.form)(attrs), inputs)
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        kernel::scratch(&(self.form)(call.attrs), call)
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        Lowered::Kernels(kernel::kernels(&(self.form)(call.attrs), call))
    }

    fn reference_f32(&self, call: &mut Call<'_, f32>) {
        reference(&(self.form)(call.attrs), call)
    }

    fn reference_f64(&self, call: &mut Call<'_, f64>) {
        reference(&(self.form)(call.attrs), call)
    }

    fn examples(&self) -> Vec<Example> {
        (self.examples)()
    }
}
