//! Dynamic loss scaling: the factor that the next step multiplies its loss with, as PyTorch's `GradScaler` decides it.
//! It is decided on the device, so that the micro-steps of the next step need not wait for the host.

use graph::{Element, OpId, ValueType};
use program::Arg;
use tensor::Attrs;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("loss_scale.cu");

/// scale, count, used ← next_loss_scale(applied)
pub struct NextLossScale;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let interval = call.attrs.int("growth_interval").expect("checked by the shape rule");
    let applied = call.inputs[0].real()[0] != T::default();
    let [scale, count, used] = call.outputs_mut();
    let (scale, count) = (&mut scale.real()[0], &mut count.int()[0]);
    used.real()[0] = *scale;
    let fine = if applied { count.saturating_add(1) } else { 0 };
    let grows = i64::from(fine) >= interval;
    let grown = *scale * T::from_f64(2.0);
    if !applied {
        *scale *= T::from_f64(0.5);
    } else if grows && grown.is_finite() {
        *scale = grown;
    }
    *count = if grows { 0 } else { fine };
}

impl Op for NextLossScale {
    fn id(&self) -> OpId {
        id::NEXT_LOSS_SCALE
    }

    fn class(&self) -> Class {
        Class::Update
    }

    fn doc(&self) -> &'static str {
        "Dynamic loss scaling. used = scale; where applied is 0: scale ← scale/2, count ← 0; else count ← count + 1, and \
         at growth_interval scale ← 2·scale, if that is finite, and count ← 0. applied f32 [1] → scale f32 [1], count \
         i32 [1], used f32 [1]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[Attribute { name: "growth_interval", kind: "int", doc: "steps in a row with finite gradients, from 1" }]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let one = ValueType::new(Element::F32, [1.into()]);
        if inputs != [one.clone()] {
            return Err("takes applied, f32[1]".into());
        }
        if !(1..=i64::from(i32::MAX)).contains(&attrs.int("growth_interval").map_err(|e| e.0)?) {
            return Err("growth_interval counts steps, from 1".into());
        }
        Ok(vec![one.clone(), ValueType::new(Element::I32, [1.into()]), one])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of the update")
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let interval = call.attrs.int("growth_interval").expect("checked by the shape rule");
        Lowered::Kernels(vec![KernelSpec {
            entry: "next_loss_scale",
            source: SOURCE.to_owned(),
            headers: Vec::new(),
            defines: vec![("GROWTH_INTERVAL".to_owned(), interval.to_string())],
            grid: [1, 1, 1],
            block: [1, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Output(0), Arg::Output(1), Arg::Output(2)],
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let one = |value: f32| ExampleInput::F32 { shape: vec![1], values: vec![value] };
        let example = |applied: f32, scale: f32, count: i32| {
            let count = ExampleInput::Ints { shape: vec![1], values: vec![count] };
            Example::new(vec![one(applied)], Attrs::new().with("growth_interval", 2000)).with_state(vec![
                one(scale),
                count,
                one(1.0),
            ])
        };
        vec![
            example(1.0, 65536.0, 7),
            example(1.0, 65536.0, 1999),
            example(0.0, 65536.0, 1999),
            example(1.0, 2f32.powi(127), 1999),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Array, apply};

    /// Scale, count and the scale that was used, after a step.
    fn next(applied: bool, (scale, count): (f32, i32), interval: u64) -> (f32, i32, f32) {
        let attrs = Attrs::new().with("growth_interval", interval);
        let applied = Array::Real(vec![f32::from(u8::from(applied))]);
        let mut outputs = vec![
            (vec![1], Array::Real(vec![scale])),
            (vec![1], Array::Int(vec![count])),
            (vec![1], Array::Real(vec![f32::NAN])),
        ];
        apply::<f32>(&NextLossScale, &attrs, &[(&[1], &applied)], &mut outputs);
        let Array::Int(count) = &outputs[1].1 else { unreachable!("the count is an integer") };
        (outputs[0].1.real()[0], count[0], outputs[2].1.real()[0])
    }

    #[test]
    fn it_halves_at_once_and_doubles_after_an_interval() {
        assert_eq!(next(false, (65536.0, 3), 4), (32768.0, 0, 65536.0));
        assert_eq!(next(true, (65536.0, 2), 4), (65536.0, 3, 65536.0));
        assert_eq!(next(true, (65536.0, 3), 4), (131072.0, 0, 65536.0));
    }

    #[test]
    fn a_scale_that_would_be_infinite_stays() {
        assert_eq!(next(true, (2f32.powi(127), 3), 4), (2f32.powi(127), 0, 2f32.powi(127)));
    }
}
