//! The likeliest tokens of each row of logits with their log-probabilities: what a teacher hands on of its distribution.

use graph::{Dim, Element, OpId, ValueType};
use program::{Cost, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use super::cpu::log_sum;
use super::top::MOST;
use super::{IGNORED, TEMPERATURE, check, cost_of, example_targets, literal, row_kernel, temperature};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op, Rows};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("logps.cu");

const ATTRIBUTES: &[Attribute] =
    &[Attribute { name: "count", kind: "int", doc: "the number of tokens, K, up to 1024" }, TEMPERATURE];

/// logps, ids = top_logps(logits, targets)
pub struct TopLogps;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let count = call.attrs.size("count").expect("checked by the shape rule");
    let scale = T::from_f64(1.0 / temperature(call.attrs).expect("checked by the shape rule"));
    let [logits, targets] = call.inputs else { unreachable!("the shape rule requires two inputs") };
    let [logps, ids] = call.outputs_mut();
    let rows = logits.real().par_chunks(logits.columns()).zip(targets.int());
    let results = logps.real().par_chunks_mut(count).zip(ids.int().par_chunks_mut(count));
    rows.zip(results).for_each(|((row, target), (logps, ids))| {
        if *target == IGNORED {
            logps.fill(T::default());
            ids.fill(-1);
            return;
        }
        let lse = log_sum(row, scale);
        let falling = |a: &usize, b: &usize| row[*b].to_f64().total_cmp(&row[*a].to_f64()).then(a.cmp(b));
        let mut order: Vec<usize> = (0..row.len()).collect();
        if count < order.len() {
            order.select_nth_unstable_by(count, falling);
        }
        order.truncate(count);
        order.sort_unstable_by(falling);
        for ((logp, id), at) in logps.iter_mut().zip(ids).zip(order) {
            (*logp, *id) = (row[at] * scale - lse, at as i32);
        }
    });
}

impl Op for TopLogps {
    fn id(&self) -> OpId {
        id::TOP_LOGPS
    }

    fn class(&self) -> Class {
        Class::Loss
    }

    fn doc(&self) -> &'static str {
        "The likeliest tokens of softmax(logits / temperature) in falling order, the first of equal ones before others, with \
         the logarithms of their probabilities; 0 and the id −1 where the target is −100. No gradient. logits […, V], targets \
         i32 […] → logps f32 […, K], ids i32 […, K]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [logits, targets] = inputs else { return Err("takes logits and targets".into()) };
        check(logits, targets)?;
        temperature(attrs)?;
        let (count, columns) = (attrs.size("count")?, logits.last().expect("checked before"));
        if count == 0 || count > MOST || count > columns {
            return Err(format!("`count` is {count}, expected 1 to {MOST} and no more than the {columns} columns"));
        }
        let shape: Vec<Dim> = targets.shape.iter().cloned().chain([Dim::Fixed(count)]).collect();
        Ok([Element::F32, Element::I32].map(|element| ValueType::new(element, shape.clone())).to_vec())
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        Gradients::Inputs(vec![None; call.node.inputs.len()])
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        cost_of(inputs, outputs, 8)
    }

    fn row_by_row(&self, inputs: &[TensorRef], _attrs: &Attrs) -> Option<Rows> {
        Some(Rows { axes: inputs[1].shape.len(), whole: Vec::new() })
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let count = call.attrs.size("count").expect("checked by the shape rule");
        for tensor in call.outputs {
            assert!(tensor.is_dense(), "tokens of a teacher lie densely: {tensor}");
        }
        let constants = [
            ("COUNT", count.to_string()),
            ("SLOTS", count.next_power_of_two().to_string()),
            ("SCALE", literal(1.0 / temperature(call.attrs).expect("checked by the shape rule"))),
        ];
        let matrices = [("LOGITS", &call.inputs[0])];
        Lowered::Kernels(vec![row_kernel("top_logps", SOURCE, &constants, &matrices, call)])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let attrs = |count: u64, temperature: f64| Attrs::new().with("count", count).with("temperature", temperature);
        let example = |columns, count, temperature| {
            let logits = ExampleInput::Normal { shape: vec![2, 2, columns], scale: 3.0 };
            Example::new(vec![logits, example_targets(columns)], attrs(count, temperature))
        };
        // Equal logits at the border: the first of them count.
        let ties = (0..40).map(|i| [1.0, 2.0, 2.0, 0.5, -3.0][i % 5]).collect();
        let ties = vec![
            ExampleInput::F32 { shape: vec![1, 1, 40], values: ties },
            ExampleInput::Ints { shape: vec![1, 1], values: vec![3] },
        ];
        vec![example(64, 8, 1.0), example(37, 37, 2.0), example(32_000, 100, 0.7), Example::new(ties, attrs(11, 1.0))]
    }
}
