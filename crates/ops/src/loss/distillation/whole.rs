//! The divergence of a student's logits from a teacher's, over the whole vocabulary.

use graph::{Element, OpId, ValueType};
use program::{Cost, TensorRef};
use tensor::Attrs;

use super::{TEMPERATURE, check, check_rows, cost_of, cpu, example_targets, literal, row_kernel, temperature};
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op, Rows};
use crate::registry::id;

const SOURCE: &str = include_str!("distillation.cu");

const ATTRIBUTES: &[Attribute] = &[
    Attribute {
        name: "beta",
        kind: "float",
        doc: "0: KL(teacher ‖ student); 1: KL(student ‖ teacher); between: the generalized Jensen-Shannon divergence",
    },
    TEMPERATURE,
];

/// Returns the weight of the teacher's divergence and the temperature.
pub(super) fn settings(attrs: &Attrs) -> Result<[f64; 2], String> {
    let beta = attrs.float("beta")?;
    if !(0.0..=1.0).contains(&beta) {
        return Err(format!("`beta` is {beta}, expected a number from 0 to 1"));
    }
    Ok([beta, temperature(attrs)?])
}

fn check_pair(logits: &ValueType, teacher: &ValueType, targets: &ValueType) -> Result<(), String> {
    check(logits, targets)?;
    match teacher.dtype.is_float() && teacher.shape == logits.shape {
        true => Ok(()),
        false => Err(format!("the teacher's logits are {teacher}, expected the shape of the student's, {logits}")),
    }
}

/// Constants of both kernels: the divergence, its weights and the factor of the logits.
fn constants(half: &'static str, attrs: &Attrs) -> Vec<(&'static str, String)> {
    let [beta, temperature] = settings(attrs).expect("checked by the shape rule");
    let kind = if beta == 0.0 { 0 } else { 1 + usize::from(beta < 1.0) };
    vec![
        (half, "1".into()),
        ("KIND", kind.to_string()),
        ("BETA", literal(beta)),
        ("REST", literal(1.0 - beta)),
        ("SCALE", literal(1.0 / temperature)),
    ]
}

fn attrs(beta: f64, temperature: f64) -> Attrs {
    Attrs::new().with("beta", beta).with("temperature", temperature)
}

fn example_inputs(columns: usize) -> Vec<ExampleInput> {
    let logits = ExampleInput::Normal { shape: vec![2, 2, columns], scale: 3.0 };
    let teacher = ExampleInput::NormalF32 { shape: vec![2, 2, columns], scale: 3.0 };
    vec![logits, teacher, example_targets(columns)]
}

/// divergence, entropy, lse, teacher_lse, mean = distillation(logits, teacher, targets)
pub struct Distillation;

impl Op for Distillation {
    fn id(&self) -> OpId {
        id::DISTILLATION
    }

    fn class(&self) -> Class {
        Class::Loss
    }

    fn doc(&self) -> &'static str {
        "Of s = softmax(logits / temperature) and t = softmax(teacher / temperature) of each token the divergence: beta 0 \
         KL(t ‖ s), 1 KL(s ‖ t), else beta·KL(t ‖ m) + (1 − beta)·KL(s ‖ m), m = beta·t + (1 − beta)·s. entropy: −Σ s·ln s. \
         lse, teacher_lse: log Σ exp of either's scaled logits; mean: of s and the slopes in ln s, which the gradient reads. \
         All 0 where the target is −100. No gradient for the teacher. logits […, V], teacher […, V], targets i32 […] → five \
         of f32 […]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [logits, teacher, targets] = inputs else { return Err("takes logits, teacher and targets".into()) };
        check_pair(logits, teacher, targets)?;
        settings(attrs)?;
        Ok(vec![ValueType::new(Element::F32, targets.shape.clone()); 5])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let operands = [0, 1, 2].map(|index| call.input(index)).into_iter();
        let kept = [2, 3, 4].map(|index| call.output(index));
        let operands: Vec<_> = operands.chain(kept).chain([call.dy()]).collect();
        let d_logits = call.wanted(0, id::DISTILLATION_BACKWARD, &operands, call.node.attrs.clone());
        Gradients::Inputs(vec![d_logits, None, None])
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        cost_of(inputs, outputs, 14)
    }

    fn row_by_row(&self, inputs: &[TensorRef], _attrs: &Attrs) -> Option<Rows> {
        Some(Rows { axes: inputs[2].shape.len(), whole: Vec::new() })
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let matrices = [("LOGITS", &call.inputs[0]), ("TEACHER", &call.inputs[1])];
        Lowered::Kernels(vec![row_kernel("distillation", SOURCE, &constants("FORWARD", call.attrs), &matrices, call)])
    }

    crate::reference!(cpu::forward);

    fn examples(&self) -> Vec<Example> {
        let example = |columns, beta, temperature| Example::new(example_inputs(columns), attrs(beta, temperature));
        let mut examples = vec![
            example(64, 0.0, 1.0),
            example(64, 1.0, 1.0),
            example(64, 0.5, 1.0),
            example(37, 0.1, 2.0),
            example(37, 0.0, 0.7),
            example(37, 1.0, 3.0),
            example(32_000, 0.5, 1.0),
        ];
        // Slopes of single tokens among many are below what differences tell.
        examples.iter_mut().take(6).for_each(|of| of.differentiable = vec![0]);
        examples
    }
}

/// d_logits of `distillation`
pub struct DistillationBackward;

impl Op for DistillationBackward {
    fn id(&self) -> OpId {
        id::DISTILLATION_BACKWARD
    }

    fn class(&self) -> Class {
        Class::Loss
    }

    fn doc(&self) -> &'static str {
        "Gradient of `distillation` in the student's logits: d_divergence/temperature times s − t for beta 0, s·(ln s − ln t − \
         mean) for 1, else s·((1 − beta)·(ln s − ln m) − mean); 0 where the target is −100. logits, teacher […, V], targets \
         i32 […], lse, teacher_lse, mean, d_divergence f32 […] → like logits. May take the place of the logits."
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [logits, teacher, targets, lse, teacher_lse, mean, d] = inputs else {
            return Err("takes logits, teacher, targets, lse, teacher_lse, mean and d_divergence".into());
        };
        check_pair(logits, teacher, targets)?;
        check_rows(&[lse, teacher_lse, mean, d], targets, "lse, teacher_lse, mean and d_divergence")?;
        settings(attrs)?;
        Ok(vec![logits.clone()])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        cost_of(inputs, outputs, 12)
    }

    fn row_by_row(&self, inputs: &[TensorRef], _attrs: &Attrs) -> Option<Rows> {
        Some(Rows { axes: inputs[2].shape.len(), whole: Vec::new() })
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let matrices = [("LOGITS", &call.inputs[0]), ("TEACHER", &call.inputs[1]), ("D_LOGITS", &call.outputs[0])];
        let constants = constants("BACKWARD", call.attrs);
        Lowered::Kernels(vec![row_kernel("distillation_backward", SOURCE, &constants, &matrices, call)])
    }

    fn in_place(&self) -> Option<(usize, usize)> {
        Some((0, 0))
    }

    crate::reference!(cpu::backward);

    fn examples(&self) -> Vec<Example> {
        let example = |columns: usize, beta, temperature| {
            let computed = |result| ExampleInput::Computed {
                op: id::DISTILLATION,
                inputs: vec![0, 1, 2],
                result,
                element: Element::F32,
                shape: vec![2, 2],
            };
            let d = ExampleInput::UniformF32 { shape: vec![2, 2], low: -0.5, high: 1.5 };
            let rows = [computed(2), computed(3), computed(4), d];
            Example::new(example_inputs(columns).into_iter().chain(rows).collect(), attrs(beta, temperature))
        };
        vec![example(64, 0.0, 1.0), example(64, 1.0, 1.0), example(37, 0.5, 2.0), example(32_000, 0.1, 1.0)]
    }
}
