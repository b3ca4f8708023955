//! `zeros`: a constant of numbers that sums begin with.

use graph::{Dim, Element, OpId, ValueType};
use tensor::Attrs;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, Op};
use crate::real::Real;
use crate::registry::id;

/// The operation that writes 0 everywhere.
pub struct Zeros;

impl Op for Zeros {
    fn id(&self) -> OpId {
        id::ZEROS
    }

    fn class(&self) -> Class {
        Class::Constant
    }

    fn doc(&self) -> &'static str {
        "0 everywhere. → f32 `shape`."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[Attribute { name: "shape", kind: "list of int", doc: "of the result" }]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        if !inputs.is_empty() {
            return Err("takes no input".into());
        }
        let shape = attrs.sizes("shape")?;
        Ok(vec![ValueType::new(Element::F32, shape.into_iter().map(Dim::Fixed).collect::<Vec<_>>())])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("a constant has no inputs")
    }

    fn lower(&self, _call: &LowerCall<'_>) -> Lowered {
        unreachable!("a constant is evaluated while compiling")
    }

    crate::reference!(zeros);

    fn examples(&self) -> Vec<Example> {
        vec![Example::new(Vec::new(), Attrs::new().with("shape", vec![2, 3]))]
    }
}

fn zeros<T: Real>(call: &mut Call<'_, T>) {
    let [y] = call.outputs_mut();
    y.real().fill(T::default());
}
