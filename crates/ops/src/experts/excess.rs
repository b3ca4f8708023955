//! The excess of each expert's load over an even one, which moves the biases of loss-free balancing.

use graph::{Dim, Element, OpId, ValueType};
use program::Arg;
use tensor::Attrs;

use super::kernel;
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("excess.cu");
const THREADS: usize = 256;

/// The operation excess = load_excess(load).
pub struct LoadExcess;

impl Op for LoadExcess {
    fn id(&self) -> OpId {
        id::LOAD_EXCESS
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "How much more than an even load each of E experts has, E times: E·load[0, e] − Σ load[0]. Whole numbers, so sums over \
         micro-steps and ranks are exact up to 2²⁴. load f32 [3, E] of `expert_load` → f32 [E]. With `accumulate`, added to."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[Attribute { name: "accumulate", kind: "bool?", doc: "add to the result instead of overwriting it" }]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        attrs.flag("accumulate")?;
        match inputs {
            [load] if load.dtype == Element::F32 => match load.shape.as_slice() {
                [Dim::Fixed(3), Dim::Fixed(experts)] => Ok(vec![ValueType::new(Element::F32, [Dim::Fixed(*experts)])]),
                _ => Err("the load must be [3, E]".into()),
            },
            _ => Err("takes the load, f32".into()),
        }
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("numbers of choices have none")
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (load, excess) = (&call.inputs[0], &call.outputs[0]);
        assert!(load.is_dense() && excess.is_dense(), "loads lie densely: {load}, {excess}");
        let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule") as usize;
        let numbers = [("EXPERTS", excess.len()), ("ACCUMULATE", accumulate)];
        let args = vec![Arg::Input(0), Arg::Output(0)];
        Lowered::Kernels(vec![kernel("load_excess", SOURCE, [1, 1, 1], THREADS, &numbers, args)])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |experts: usize, attrs: Attrs| {
            let values = (0..3 * experts).map(|i| (i * 7 % 13) as f32).collect();
            let state = ExampleInput::NormalF32 { shape: vec![experts], scale: 1.0 };
            Example::new(vec![ExampleInput::F32 { shape: vec![3, experts], values }], attrs).with_state(vec![state])
        };
        vec![example(5, Attrs::new()), example(300, Attrs::new().with("accumulate", true))]
    }
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
    let load = call.inputs[0].real();
    let [excess] = call.outputs_mut();
    let excess = excess.real();
    let (experts, counts) = (excess.len() as f64, load[..excess.len()].iter().map(|n| n.to_f64()));
    let sum: f64 = counts.clone().sum();
    for (excess, count) in excess.iter_mut().zip(counts) {
        let own = T::from_f64(experts * count - sum);
        *excess = if accumulate { *excess + own } else { own };
    }
}
