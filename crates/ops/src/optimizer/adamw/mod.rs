//! AdamW with f32 states (Loshchilov & Hutter 2019), by PyTorch's formula: decoupled decay before the step, √v
//! corrected before epsilon is added. Also its step after the warm-up of 1-bit Adam (Tang et al. 2021), where the first
//! moment is given and the second one is constant.

use graph::{Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use super::rule::{self, Rule};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;
use crate::vector::{Loop, vectorised};

const SOURCE: &str = include_str!("adamw.cu");
const HEADERS: &[(&str, &str)] = &[
    ("types.cuh", include_str!("../../cuda/types.cuh")),
    ("pack.cuh", include_str!("../../cuda/pack.cuh")),
    ("philox.cuh", include_str!("../../cuda/philox.cuh")),
];

const THREADS: u32 = 256;
/// Number of elements in a thread.
const ELEMENTS: usize = 4;

/// Elements of one task on the CPU.
const CHUNK: usize = 4096;

/// weight, first, second ← adamw(gradient, step scalars)
pub struct AdamW;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let rule = Rule::new(call.attrs, call.inputs, call.outputs[0].storage());
    if !rule.applied {
        return;
    }
    let frozen = call.attrs.flag(FROZEN).expect("checked by the shape rule");
    let bound = T::from_f64(longest(call.attrs));
    let gradient = call.inputs[0].real();
    let [weight, first, second] = call.outputs_mut();
    let states = first.real().par_chunks_mut(CHUNK).zip(second.real().par_chunks_mut(CHUNK));
    let chunks = weight.real().par_chunks_mut(CHUNK).zip(states).zip(gradient.par_chunks(CHUNK));
    chunks.enumerate().for_each(|(chunk, ((weight, (first, second)), gradient))| {
        match frozen {
            true => vectorised(Step, ((&rule, bound), &mut *weight, first, second, gradient)),
            false => vectorised(Update, (&rule, &mut *weight, first, second, gradient)),
        }
        rule.round(weight, chunk * CHUNK);
    });
}

/// The attribute that selects the step with a given first moment.
const FROZEN: &str = "frozen";

struct Update;

impl<'a, T: Real> Loop<(&'a Rule<T>, &'a mut [T], &'a mut [T], &'a mut [T], &'a [T])> for Update {
    type Output = ();

    #[inline(always)]
    fn run((rule, weight, first, second, gradient): (&'a Rule<T>, &'a mut [T], &'a mut [T], &'a mut [T], &'a [T])) {
        let kept = T::from_f64(1.0) - rule.learning_rate * rule.weight_decay;
        let size = rule.learning_rate / rule.correction1;
        let root = rule.correction2.sqrt();
        for ((w, (m, v)), g) in weight.iter_mut().zip(first.iter_mut().zip(second)).zip(gradient) {
            let g = *g * rule.gradient_scale;
            *m += (g - *m) * rule.rest1;
            *v = rule.beta2 * *v + rule.rest2 * (g * g);
            *w = *w * kept - size * (*m / (v.sqrt() / root + rule.epsilon));
        }
    }
}

/// Returns the bound of Adam's m/√v for all gradients (Kingma & Ba 2015, section 2.1). A constant second moment bounds
/// nothing by itself: by chance it may be close to 0.
fn longest(attrs: &Attrs) -> f64 {
    let rest = |name: &str| 1.0 - attrs.float(name).expect("checked by the shape rule");
    (rest("beta1") / rest("beta2").sqrt()).max(1.0)
}

/// The step with a given first moment, and with a longest step.
struct Step;

/// The rule with the longest step, weight, both moments, and the first moment that is given.
type OfStep<'a, T> = ((&'a Rule<T>, T), &'a mut [T], &'a mut [T], &'a mut [T], &'a [T]);

impl<'a, T: Real> Loop<OfStep<'a, T>> for Step {
    type Output = ();

    #[inline(always)]
    fn run(((rule, bound), weight, first, second, given): OfStep<'a, T>) {
        let kept = T::from_f64(1.0) - rule.learning_rate * rule.weight_decay;
        let size = rule.learning_rate / rule.correction1;
        let root = rule.correction2.sqrt();
        for ((w, (m, v)), given) in weight.iter_mut().zip(first.iter_mut().zip(second)).zip(given) {
            // Nothing bounds the steps of elements that had no gradient before.
            *m = if *v > T::default() { *given } else { T::default() };
            let ratio = *m / (v.sqrt() / root + rule.epsilon);
            let ratio = if ratio > bound { bound } else { ratio };
            let ratio = if ratio < T::default() - bound { T::default() - bound } else { ratio };
            *w = *w * kept - size * ratio;
        }
    }
}

impl Op for AdamW {
    fn id(&self) -> OpId {
        id::ADAMW
    }

    fn class(&self) -> Class {
        Class::Update
    }

    fn doc(&self) -> &'static str {
        "lr = learning_rate·rate; g = gradient·gradient_scale; w ← w(1 − lr·weight_decay); m ← m + (g − m)(1 − β₁); v ← β₂v + (1 − β₂)g²; \
         w ← w − lr/c₁·m/(√v/√c₂ + epsilon). Frozen: m ← gradient, or 0 where v is 0, v stays, and m/(√v/√c₂ + \
         epsilon) is at most max(1, (1 − β₁)/√(1 − β₂)), as it is for Adam. Nothing changes when applied is 0. gradient f32 [n], learning_rate, \
         bias_correction_1 (c₁), bias_correction_2 (c₂), gradient_scale, applied f32 [1], step i32 [1] → weight [n], \
         first (m) f32 [n], second (v) f32 [n]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        const FROZEN: Attribute = Attribute {
            name: self::FROZEN,
            kind: "bool?",
            doc: "gradient is the first moment of this step, and the second stays",
        };
        const ALL: [Attribute; rule::ATTRIBUTES.len() + 1] = {
            let mut all = [FROZEN; rule::ATTRIBUTES.len() + 1];
            let mut at = 0;
            while at < rule::ATTRIBUTES.len() {
                all[at] = rule::ATTRIBUTES[at];
                at += 1;
            }
            all
        };
        &ALL
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        if inputs.len() != rule::INPUTS {
            return Err("takes the gradient and six step scalars".into());
        }
        attrs.flag(FROZEN)?;
        let count = rule::check(inputs, attrs)?;
        Ok([Element::Float, Element::F32, Element::F32].map(|e| ValueType::new(e, [count.into()])).into())
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of the update")
    }

    fn divides(&self) -> bool {
        true
    }

    /// Weight and states are read and written.
    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let state: usize = outputs.iter().map(TensorRef::bytes).sum();
        Cost { flops: 15.0 * outputs[0].len() as f64, bytes: (inputs[0].bytes() + 2 * state) as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let [weight, first, second] = call.outputs else { unreachable!("the shape rule gives three results") };
        let frozen = call.attrs.flag(FROZEN).expect("checked by the shape rule");
        let mut defines = rule::defines(call.attrs, weight, &[&call.inputs[0], weight, first, second], THREADS);
        defines.push(("FROZEN".to_owned(), u32::from(frozen).to_string()));
        if frozen {
            defines.push(("BOUND".to_owned(), format!("{:e}f", longest(call.attrs) as f32)));
        }
        Lowered::Kernels(vec![KernelSpec {
            entry: "adamw",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines,
            grid: [weight.len().div_ceil(THREADS as usize * ELEMENTS) as u32, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            args: (0..rule::INPUTS)
                .map(Arg::Input)
                .chain((0..3).map(Arg::Output))
                .chain([rule::before(call.attrs)])
                .collect(),
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |n: usize, stochastic: bool, applied: bool| {
            let state = vec![
                ExampleInput::Normal { shape: vec![n], scale: 1.0 },
                ExampleInput::NormalF32 { shape: vec![n], scale: 0.1 },
                ExampleInput::UniformF32 { shape: vec![n], low: 0.0, high: 0.1 },
            ];
            Example::new(rule::example_inputs(n, applied), rule::example_attrs(stochastic)).with_state(state)
        };
        let mut part = example(4096, true, true);
        part.attrs = part.attrs.with("start", 8192u64).with("rate", 16.3);
        let frozen = |mut of: Example| {
            of.attrs = of.attrs.with(FROZEN, true);
            // Some had no gradient before.
            let n = 6000;
            // Of some it is small, so that their steps would be too long.
            let second = |at: usize| if at.is_multiple_of(11) { 1e-6 } else { (at % 7 + 1) as f32 / 70.0 };
            let second = (0..n).map(|at| if at % 5 == 0 { 0.0 } else { second(at) }).collect();
            of.state[2] = ExampleInput::F32 { shape: vec![n], values: second };
            of
        };
        let frozen = [true, false].map(|applied| frozen(example(6000, true, applied)));
        let all = vec![example(4096, false, true), example(10_003, true, true), example(100, false, false), part];
        all.into_iter().chain(frozen).collect()
    }
}
