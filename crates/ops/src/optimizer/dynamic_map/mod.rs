//! The dynamic code book of 8-bit optimizer states (Dettmers et al. 2022): seven decades, each with
//! twice the values of the one below, evenly spaced inside a decade; and 0 and 1.

use graph::{Element, OpId, ValueType};
use tensor::Attrs;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, Op};
use crate::real::Real;
use crate::registry::id;

/// Decades of the book.
const DECADES: i32 = 7;

/// `points` values from 0.1 to 1 in f32, counted from the nearer end and rounded once: the values that the
/// published books were made of.
fn spaced(points: usize) -> Vec<f32> {
    let step = (1.0f32 - 0.1) / (points - 1) as f32;
    let at = |i: usize| {
        if i < points / 2 { step.mul_add(i as f32, 0.1) } else { (-step).mul_add((points - 1 - i) as f32, 1.0) }
    };
    (0..points).map(at).collect()
}

/// The 256 values, ascending. Signed: both signs of every value but 0 and 1. Unsigned: twice as many.
pub fn dynamic_map(signed: bool) -> Vec<f32> {
    let mut values = vec![0.0, 1.0];
    for decade in 0..DECADES {
        let points = (1usize << (decade + if signed { 0 } else { 1 })) + 1;
        let unit = 10f64.powi(decade - (DECADES - 1)) as f32;
        for pair in spaced(points).windows(2) {
            let value = unit * ((pair[0] + pair[1]) / 2.0);
            values.push(value);
            if signed {
                values.push(-value);
            }
        }
    }
    values.sort_by(f32::total_cmp);
    values
}

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
        attrs.flag("signed").map_err(|e| e.0)?;
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
