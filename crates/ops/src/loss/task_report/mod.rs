//! The report of a task on a micro-batch, as sums that may be added up: the numerator and the denominator of each metric.

use std::fmt::Write;

use graph::{Dim, Element, OpId, ValueType};
use tensor::Attrs;

use super::{batch_kernel, check_alike};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const HEADERS: &[(&str, &str)] =
    &[("types.cuh", include_str!("../../cuda/types.cuh")), ("reduce.cuh", include_str!("../../cuda/reduce.cuh"))];
const THREADS: usize = 256;

/// report = task_report(value, weight, value, weight, …)
pub struct TaskReport;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
    let inputs = call.inputs;
    let [report] = call.outputs_mut();
    for (sums, pair) in report.real().chunks_exact_mut(2).zip(inputs.chunks_exact(2)) {
        let weights = pair[1].real();
        let of_values = pair[0].real().iter().zip(weights).map(|(value, weight)| match weight.to_f64() {
            0.0 => 0.0,
            weight => value.to_f64() * weight,
        });
        let found = [of_values.sum::<f64>(), weights.iter().map(|w| w.to_f64()).sum()];
        for (sum, found) in sums.iter_mut().zip(found) {
            *sum = T::from_f64(if accumulate { sum.to_f64() + found } else { found });
        }
    }
}

/// Returns the kernel for n metrics, with one block for each metric.
fn source(metrics: usize) -> String {
    let mut operands = String::new();
    let mut choice = String::new();
    for i in 0..metrics {
        let _ = write!(operands, "const float* value{i}, const float* weight{i}, ");
        let _ = writeln!(choice, "  if (blockIdx.x == {i}) value = value{i}, weight = weight{i};");
    }
    format!(
        r#"#include "types.cuh"
#include "reduce.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) task_report({operands}float* report) {{
  const float *value = value0, *weight = weight0;
{choice}  float sum = 0.0f, all = 0.0f;
  for (size_t i = threadIdx.x; i < COUNT; i += THREADS) {{
    if (weight[i] != 0.0f) sum = fmaf(weight[i], value[i], sum);
    all += weight[i];
  }}
  sum = block_sum<THREADS>(sum);
  all = block_sum<THREADS>(all);
  if (threadIdx.x == 0) {{
    float* to = report + 2 * blockIdx.x;
    to[0] = ACCUMULATE ? to[0] + sum : sum;
    to[1] = ACCUMULATE ? to[1] + all : all;
  }}
}}
"#
    )
}

impl Op for TaskReport {
    fn id(&self) -> OpId {
        id::TASK_REPORT
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "Of each value and its weight Σ weight·value and Σ weight: a metric is their quotient over all micro-batches. Where \
         the weight is 0 the value does not count, whatever it is. value, weight, value, weight, … f32 […], all of one shape \
         → f32 [2·metrics]. With `accumulate`, added to."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[Attribute { name: "accumulate", kind: "bool?", doc: "add to the result instead of overwriting it" }]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        attrs.flag("accumulate")?;
        if inputs.is_empty() || !inputs.len().is_multiple_of(2) {
            return Err("takes values, each with its weight".into());
        }
        check_alike(inputs, inputs.len(), "values and weights")?;
        Ok(vec![ValueType::new(Element::F32, [Dim::Fixed(inputs.len())])])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("a report is not trained")
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let metrics = call.inputs.len() / 2;
        let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
        let numbers = [("COUNT", call.inputs[0].len()), ("ACCUMULATE", usize::from(accumulate)), ("THREADS", THREADS)];
        Lowered::Kernels(vec![batch_kernel(
            "task_report",
            &source(metrics),
            HEADERS,
            [metrics, THREADS],
            &numbers,
            call,
        )])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |shape: &[usize], metrics: usize, attrs: Attrs| {
            let value = ExampleInput::NormalF32 { shape: shape.to_vec(), scale: 1.0 };
            let weight = ExampleInput::UniformF32 { shape: shape.to_vec(), low: 0.0, high: 1.0 };
            let inputs = (0..metrics).flat_map(|_| [value.clone(), weight.clone()]).collect();
            let state = ExampleInput::NormalF32 { shape: vec![2 * metrics], scale: 1.0 };
            Example::new(inputs, attrs).with_state(vec![state])
        };
        vec![example(&[2, 700], 3, Attrs::new()), example(&[3, 5], 9, Attrs::new().with("accumulate", true))]
    }
}
