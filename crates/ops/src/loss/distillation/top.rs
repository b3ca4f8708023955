//! Distillation from a teacher's likeliest tokens: the forward KL divergence over these, with one more class for all others
//! or without.

use graph::{Dim, Element, OpId, ValueType};
use program::{Cost, TensorRef};
use tensor::Attrs;

use super::top_cpu::{self, LEAST};
use super::{TEMPERATURE, check, check_rows, cost_of, example_targets, literal, row_kernel, temperature};
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op, Rows};
use crate::registry::id;

const SOURCE: &str = include_str!("top.cu");

/// Tokens of a teacher for each row at most: a block keeps their logits.
pub(super) const MOST: usize = 1024;

const ATTRIBUTES: &[Attribute] = &[
    Attribute {
        name: "tail",
        kind: "bool?",
        doc: "true: all other tokens are one more class; false: both distributions are renormalized over the tokens",
    },
    TEMPERATURE,
];

fn check_top(
    logits: &ValueType,
    ids: &ValueType,
    logps: &ValueType,
    targets: &ValueType,
    attrs: &Attrs,
) -> Result<(), String> {
    check(logits, targets)?;
    let (count, rows) = ids.shape.split_last().ok_or("the ids need an axis")?;
    if ids.dtype != Element::I32 || rows != targets.shape || !matches!(count, Dim::Fixed(1..=MOST)) {
        return Err(format!("ids are {ids}, expected i32 […, K] of the rows of the logits, K from 1 to {MOST}"));
    }
    if logps.dtype != Element::F32 || logps.shape != ids.shape {
        return Err(format!("logps are {logps}, expected f32 in the shape of the ids, {ids}"));
    }
    attrs.flag("tail")?;
    temperature(attrs).map(|_| ())
}

/// Returns whether all other tokens are a class, and the factor of the logits.
pub(super) fn settings(attrs: &Attrs) -> (bool, f64) {
    let known = (attrs.flag("tail"), temperature(attrs));
    (known.0.expect("checked by the shape rule"), 1.0 / known.1.expect("checked by the shape rule"))
}

fn constants(half: &'static str, call: &LowerCall<'_>) -> Vec<(&'static str, String)> {
    let (tail, scale) = settings(call.attrs);
    let count = call.inputs[1].shape.last().copied().expect("the shape rule requires an axis");
    for tensor in &call.inputs[1..3] {
        assert!(tensor.is_dense(), "tokens of a teacher lie densely: {tensor}");
    }
    vec![
        (half, "1".into()),
        ("COUNT", count.to_string()),
        ("TAIL", usize::from(tail).to_string()),
        ("LEAST", literal(LEAST)),
        ("SCALE", literal(scale)),
    ]
}

fn attrs(tail: bool, temperature: f64) -> Attrs {
    Attrs::new().with("tail", tail).with("temperature", temperature)
}

/// Logits of four rows and three tokens of each, one row with fewer.
fn example_inputs(columns: usize) -> Vec<ExampleInput> {
    let last = columns as i32 - 1;
    let ids = vec![0, 5, last, 1, 2, 3, 7, -1, last, 4, 0, 9];
    let logps = [0.4, 0.3, 0.2, 0.5, 0.2, 0.1, 0.6, 0.3, 0.05, 0.25, 0.25, 0.125].map(|p: f32| p.ln()).to_vec();
    vec![
        ExampleInput::Normal { shape: vec![2, 2, columns], scale: 3.0 },
        ExampleInput::Ints { shape: vec![2, 2, 3], values: ids },
        ExampleInput::F32 { shape: vec![2, 2, 3], values: logps },
        example_targets(columns),
    ]
}

/// divergence, entropy, lse = distillation_top(logits, ids, logps, targets)
pub struct TopDistillation;

impl Op for TopDistillation {
    fn id(&self) -> OpId {
        id::DISTILLATION_TOP
    }

    fn class(&self) -> Class {
        Class::Loss
    }

    fn doc(&self) -> &'static str {
        "KL(t ‖ s) of each token over the tokens that a teacher names with their log-probabilities ln t, s = softmax(logits / \
         temperature): with tail also over one class of all others, whose probability counts as 1e-7 at least, else both \
         renormalized. An id below 0 is none. entropy: −Σ s·ln s over all; lse: log Σ exp of the scaled logits. All 0 where the \
         target is −100. logits […, V], ids i32 […, K], logps f32 […, K], targets i32 […] → three of f32 […]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [logits, ids, logps, targets] = inputs else { return Err("takes logits, ids, logps and targets".into()) };
        check_top(logits, ids, logps, targets, attrs)?;
        Ok(vec![ValueType::new(Element::F32, targets.shape.clone()); 3])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let mut operands: Vec<_> = (0..4).map(|index| call.input(index)).collect();
        operands.extend([call.output(2), call.dy()]);
        let d_logits = call.wanted(0, id::DISTILLATION_TOP_BACKWARD, &operands, call.node.attrs.clone());
        Gradients::Inputs(vec![d_logits, None, None, None])
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        cost_of(inputs, outputs, 5)
    }

    fn row_by_row(&self, inputs: &[TensorRef], _attrs: &Attrs) -> Option<Rows> {
        Some(Rows { axes: inputs[3].shape.len(), whole: Vec::new() })
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let matrices = [("LOGITS", &call.inputs[0])];
        let constants = constants("FORWARD", call);
        Lowered::Kernels(vec![row_kernel("distillation_top", SOURCE, &constants, &matrices, call)])
    }

    crate::reference!(top_cpu::forward);

    fn examples(&self) -> Vec<Example> {
        let example = |columns, tail, temperature| {
            Example::new(example_inputs(columns), attrs(tail, temperature)).differentiate(&[0])
        };
        vec![
            example(64, true, 1.0),
            example(64, false, 1.0),
            example(37, true, 2.0),
            example(37, false, 0.7),
            example(32_000, true, 1.0),
        ]
    }
}

/// d_logits of `distillation_top`
pub struct TopDistillationBackward;

impl Op for TopDistillationBackward {
    fn id(&self) -> OpId {
        id::DISTILLATION_TOP_BACKWARD
    }

    fn class(&self) -> Class {
        Class::Loss
    }

    fn doc(&self) -> &'static str {
        "Gradient of `distillation_top` in the logits, 0 where the target is −100. logits […, V], ids i32 […, K], logps f32 \
         […, K], targets i32 […], lse, d_divergence f32 […] → like logits. May take the place of the logits."
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [logits, ids, logps, targets, lse, d] = inputs else {
            return Err("takes logits, ids, logps, targets, lse and d_divergence".into());
        };
        check_top(logits, ids, logps, targets, attrs)?;
        check_rows(&[lse, d], targets, "lse and d_divergence")?;
        Ok(vec![logits.clone()])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        cost_of(inputs, outputs, 4)
    }

    fn row_by_row(&self, inputs: &[TensorRef], _attrs: &Attrs) -> Option<Rows> {
        Some(Rows { axes: inputs[3].shape.len(), whole: Vec::new() })
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let matrices = [("LOGITS", &call.inputs[0]), ("D_LOGITS", &call.outputs[0])];
        let constants = constants("BACKWARD", call);
        Lowered::Kernels(vec![row_kernel("distillation_top_backward", SOURCE, &constants, &matrices, call)])
    }

    fn in_place(&self) -> Option<(usize, usize)> {
        Some((0, 0))
    }

    crate::reference!(top_cpu::backward);

    fn examples(&self) -> Vec<Example> {
        let example = |columns: usize, tail, temperature| {
            let lse = ExampleInput::Computed {
                op: id::DISTILLATION_TOP,
                inputs: vec![0, 1, 2, 3],
                result: 2,
                element: Element::F32,
                shape: vec![2, 2],
            };
            let d = ExampleInput::UniformF32 { shape: vec![2, 2], low: -0.5, high: 1.5 };
            Example::new(example_inputs(columns).into_iter().chain([lse, d]).collect(), attrs(tail, temperature))
        };
        vec![example(64, true, 1.0), example(37, false, 2.0), example(32_000, true, 1.0)]
    }
}
