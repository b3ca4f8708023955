//! The dynamic code book of 8-bit optimizer states as a constant of a program.

use graph::{Element, OpId, ValueType};
use tensor::Attrs;
pub use tensor::packed::dynamic_map;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, Op};
use crate::real::Real;
use crate::registry::id;

/// map = dynamic_map()
pub struct DynamicMap;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let signed = call.attrs.flag("signed").expect("checked by the shape rule");
    let [map] = call.outputs_mut();
    for (to, value) in map.real().iter_mut().zip(dynamic_map(signed)) {
        *to = T::from_f32(value);
    }
}

impl Op for DynamicMap {
    fn id(&self) -> OpId {
        id::DYNAMIC_MAP
    }

    fn class(&self) -> Class {
        Class::Constant
    }

    fn doc(&self) -> &'static str {
        "The code book of `adamw_8bit`'s moments, ascending. → f32 [256]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[Attribute { name: "signed", kind: "bool", doc: "with negative values (first moment) or without (second)" }]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        if !inputs.is_empty() {
            return Err("takes nothing".into());
        }
        attrs.get("signed").ok_or("attribute `signed` is missing")?;
        attrs.flag("signed")?;
        Ok(vec![ValueType::new(Element::F32, [256.into()])])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("a constant")
    }

    fn lower(&self, _call: &LowerCall<'_>) -> Lowered {
        unreachable!("constants are evaluated while compiling")
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        [true, false].map(|signed| Example::new(Vec::new(), Attrs::new().with("signed", signed))).into()
    }
}
