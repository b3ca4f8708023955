//! The factor applied to gradients in the update: clip coefficient ÷ weight sum. Gradients are accumulated as sums, so
//! the division of the mean happens here and nowhere else, with that by the loss scale. A non-finite norm suppresses the
//! update.

use graph::{Element, OpId, ValueType};
use program::Arg;
use tensor::Attrs;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("gradient_scale.cu");

/// norm, scale, applied = gradient_scale(sum_squares, weight_sum[, loss_scale])
pub struct GradientScale;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let max_norm = T::from_f64(call.attrs.float("max_norm").expect("checked by the shape rule"));
    let one = T::from_f64(1.0);
    let sum = call.inputs[0].real()[0];
    let weight = call.inputs[1].real()[0] * call.inputs.get(2).map_or(one, |scale| scale.real()[0]);
    let norm = (sum * T::from_f64(parts(call.attrs) as f64)).sqrt() / weight;
    let clipped = if max_norm > T::default() { one.min(max_norm / (norm + T::from_f64(1e-6))) } else { one };
    let (scale, applied) = if norm.is_finite() { (clipped / weight, one) } else { (T::default(), T::default()) };
    let outputs = call.outputs_mut::<3>();
    for (output, value) in outputs.iter_mut().zip([norm, scale, applied]) {
        output.real()[0] = value;
    }
}

fn parts(attrs: &Attrs) -> usize {
    attrs.get("parts").map_or(1, |_| attrs.size("parts").expect("checked by the shape rule"))
}

impl Op for GradientScale {
    fn id(&self) -> OpId {
        id::GRADIENT_SCALE
    }

    fn class(&self) -> Class {
        Class::Update
    }

    fn doc(&self) -> &'static str {
        "W = weight_sum, times loss_scale where it is given. norm = √(parts·sum_squares)/W; scale = min(1, max_norm/(norm + \
         1e-6))/W, without the minimum when max_norm is 0; applied = 1. A norm that is not finite gives scale = applied \
         = 0. sum_squares, weight_sum, loss_scale (optional) → norm, scale, applied, all f32 [1]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "max_norm", kind: "float", doc: "clip the norm to this; 0 for not at all" },
            Attribute {
                name: "parts",
                kind: "int?",
                doc: "sum_squares is that of this number of parts of the gradients: the norm is at least that of their sum; default 1",
            },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let one = ValueType::new(Element::F32, [1.into()]);
        if !(2..=3).contains(&inputs.len()) || inputs.iter().any(|t| *t != one) {
            return Err("takes sum_squares, weight_sum and, where the loss is scaled, loss_scale, all f32[1]".into());
        }
        attrs.float("max_norm")?;
        attrs.get("parts").map(|_| attrs.size("parts")).transpose()?;
        Ok(vec![one; 3])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of the update")
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let max_norm = call.attrs.float("max_norm").expect("checked by the shape rule");
        let inputs = call.inputs.len();
        let args = (0..inputs).map(Arg::Input).chain((0..3).map(Arg::Output)).collect();
        Lowered::Kernels(vec![KernelSpec {
            entry: "gradient_scale",
            source: SOURCE.to_owned(),
            headers: Vec::new(),
            defines: vec![
                ("MAX_NORM".to_owned(), format!("{:e}f", max_norm as f32)),
                ("PARTS".to_owned(), format!("{}.0f", parts(call.attrs))),
                ("SCALED_LOSS".to_owned(), u32::from(inputs == 3).to_string()),
            ],
            grid: [1, 1, 1],
            block: [1, 1, 1],
            shared_bytes: 0,
            args,
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let scalar = |value: f32| ExampleInput::F32 { shape: vec![1], values: vec![value] };
        let example = |sum: f32, weight: f32, max_norm: f64| {
            Example::new(vec![scalar(sum), scalar(weight)], Attrs::new().with("max_norm", max_norm))
        };
        let scaled = |sum: f32, weight: f32, scale: f32| {
            let inputs = [sum, weight, scale].map(scalar).to_vec();
            Example::new(inputs, Attrs::new().with("max_norm", 1.0))
        };
        let mut of_parts = example(900.0, 2.0, 50.0);
        of_parts.attrs = of_parts.attrs.with("parts", 3u64);
        vec![
            of_parts,
            example(4.0, 16.0, 1.0),
            example(900.0, 2.0, 1.0),
            example(900.0, 2.0, 0.0),
            example(f32::INFINITY, 2.0, 1.0),
            example(1.0, 0.0, 0.0),
            scaled(3e12, 16.0, 65536.0),
            scaled(f32::INFINITY, 16.0, 65536.0),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Array, apply};

    fn run(sum: f32, weight: f32, max_norm: f64) -> [f32; 3] {
        let attrs = Attrs::new().with("max_norm", max_norm);
        let (a, b) = (Array::Real(vec![sum]), Array::Real(vec![weight]));
        let mut outputs = vec![(vec![1], Array::Real(vec![9.0])); 3];
        apply::<f32>(&GradientScale, &attrs, &[(&[1], &a), (&[1], &b)], &mut outputs);
        [0, 1, 2].map(|i| outputs[i].1.real()[0])
    }

    #[test]
    fn clips_only_above_the_limit() {
        assert_eq!(run(4.0, 16.0, 1.0), [0.125, 1.0 / 16.0, 1.0]);
        assert_eq!(run(900.0, 2.0, 0.0), [15.0, 0.5, 1.0]);
        let [norm, scale, applied] = run(900.0, 2.0, 1.5);
        assert_eq!((norm, applied), (15.0, 1.0));
        assert!((scale - 0.05).abs() < 1e-7, "{scale}");
    }

    /// The norm of equal parts is the norm of their sum; of others it is at least that.
    #[test]
    fn the_norm_of_parts_bounds_that_of_their_sum() {
        for parts in [[3.0f32, 3.0], [1.0, 2.0], [4.0, -4.0]] {
            let [squares, weight] = [parts.iter().map(|part| part * part).sum(), 4.0].map(|of| Array::Real(vec![of]));
            let attrs = Attrs::new().with("max_norm", 0.0).with("parts", 2u64);
            let mut outputs = vec![(vec![1], Array::Real(vec![9.0f32])); 3];
            apply::<f32>(&GradientScale, &attrs, &[(&[1], &squares), (&[1], &weight)], &mut outputs);
            let (found, sum) = (outputs[0].1.real()[0], parts.iter().sum::<f32>().abs() / 4.0);
            assert!(found >= sum && (found == sum) == (parts[0] == parts[1]), "{found} {sum}");
        }
    }

    #[test]
    fn the_loss_scale_is_divided_out_to_the_bit() {
        for (sum, scale) in [(900.0, 65536.0f32), (0.7, 2f32.powi(-20)), (4.0, 1.0)] {
            let attrs = Attrs::new().with("max_norm", 1.0);
            let [sum_squares, weight, of_loss] =
                [sum * scale * scale, 16.0, scale].map(|value: f32| Array::Real(vec![value]));
            let inputs: [(&[usize], &Array<f32>); 3] = [(&[1], &sum_squares), (&[1], &weight), (&[1], &of_loss)];
            let mut outputs = vec![(vec![1], Array::Real(vec![9.0])); 3];
            apply::<f32>(&GradientScale, &attrs, &inputs, &mut outputs);
            let [norm, factor, applied] = run(sum, 16.0, 1.0);
            assert_eq!([0, 1, 2].map(|i| outputs[i].1.real()[0]), [norm, factor / scale, applied]);
        }
    }

    #[test]
    fn what_is_not_finite_suppresses_the_update() {
        for (sum, weight) in [(f32::NAN, 1.0), (f32::INFINITY, 1.0), (1.0, 0.0), (0.0, 0.0)] {
            let [norm, scale, applied] = run(sum, weight, 1.0);
            assert!(!norm.is_finite());
            assert_eq!((scale, applied), (0.0, 0.0));
        }
    }
}
