//! The gradient of attention's sinks. An operation of its own: only a run that trains them reads o and d_o once more
//! for it.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arch, Arg};
use rayon::prelude::*;
use tensor::Attrs;

use super::launch::strides;
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, device_type};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;
use crate::rowwise::sum_partials;
use crate::vector::dot;

const SOURCE: &str = include_str!("sink.cu");

/// Number of tokens in a block.
const ROWS: usize = 256;

/// d_sink = attention_sink_gradient(o, d_o, lse, sink)
pub struct AttentionSinkGradient;

impl Op for AttentionSinkGradient {
    fn id(&self) -> OpId {
        id::ATTENTION_SINK_GRADIENT
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "Gradient of the sinks of `attention`: d_sink = −Σ over the queries of exp(sink − lse)·(d_o·o), in f32. o and \
         d_o [B, T, heads, DV], lse f32 [B, heads, T], sink [heads] → d_sink f32 [heads]. With `accumulate`, added to."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[Attribute { name: "accumulate", kind: "bool?", doc: "add to the result instead of overwriting it" }]
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [o, d_o, lse, sink] = inputs else { return Err("takes o, d_o, lse and sink".into()) };
        let [batch, tokens, Dim::Fixed(heads), Dim::Fixed(_)] = o.shape.as_slice() else {
            return Err("o must be [B, T, heads, DV], heads and DV known".into());
        };
        let like_lse = ValueType::new(Element::F32, [batch.clone(), Dim::Fixed(*heads), tokens.clone()]);
        if d_o.shape != o.shape || *lse != like_lse || sink.shape != [Dim::Fixed(*heads)] {
            return Err(format!("d_o must be shaped like o, lse must be {like_lse}, the sink [{heads}]"));
        }
        Ok(vec![ValueType::new(Element::F32, [Dim::Fixed(*heads)])])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        if call.machine.arch == Arch::Cpu { 0 } else { parts(call) * call.outputs[0].len() * 4 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let [o, d_o, lse, sink] = call.inputs else { unreachable!("the shape rule requires four inputs") };
        assert!(lse.is_dense() && sink.is_dense(), "row statistics and sinks lie without gaps: {lse}, {sink}");
        let [batch, tokens, heads, value_dim] = o.shape[..] else { unreachable!("checked by the shape rule") };
        let numbers = [("BATCH", batch), ("TOKENS", tokens), ("HEADS", heads), ("DV", value_dim), ("ROWS", ROWS)];
        let mut defines: Vec<_> = numbers.map(|(name, n)| (name.to_owned(), n.to_string())).to_vec();
        defines.push(("SINK_T".to_owned(), device_type(sink.dtype).to_owned()));
        defines.extend(strides("O", o));
        defines.extend(strides("DO", d_o));
        let partial = KernelSpec {
            entry: "attention_sink_partial",
            source: SOURCE.to_owned(),
            headers: vec![
                ("types.cuh", include_str!("../cuda/types.cuh")),
                ("reduce.cuh", include_str!("../cuda/reduce.cuh")),
            ],
            defines,
            grid: [parts(call) as u32, heads as u32, 1],
            block: [256, 1, 1],
            shared_bytes: 0,
            args: (0..4).map(Arg::Input).chain([Arg::Scratch(0)]).collect(),
        };
        let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
        Lowered::Kernels(vec![partial, sum_partials(heads, parts(call), accumulate, Arg::Scratch(0), Arg::Output(0))])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |[batch, tokens, heads, columns]: [usize; 4], attrs: Attrs| {
            let normal = |shape: &[usize]| ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 };
            let rows = [batch, tokens, heads, columns];
            let lse = ExampleInput::UniformF32 { shape: vec![batch, heads, tokens], low: 0.5, high: 3.0 };
            Example::new(vec![normal(&rows), normal(&rows), lse, normal(&[heads])], attrs)
                .with_state(vec![ExampleInput::NormalF32 { shape: vec![heads], scale: 1.0 }])
        };
        vec![
            example([2, 5, 3, 16], Attrs::new()),
            example([1, 600, 2, 64], Attrs::new()),
            example([3, 33, 4, 40], Attrs::new().with("accumulate", true)),
        ]
    }
}

/// Blocks of tokens: each gives a row of partial sums.
fn parts(call: &LowerCall<'_>) -> usize {
    (call.inputs[0].shape[0] * call.inputs[0].shape[1]).div_ceil(ROWS)
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let [o, d_o, lse, sink] = call.inputs else { unreachable!("the shape rule requires four inputs") };
    let [batch, tokens, heads, columns] = o.shape[..] else { unreachable!("checked by the shape rule") };
    let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
    let (o, d_o, lse, sink) = (o.real(), d_o.real(), lse.real(), sink.real());
    let [out] = call.outputs_mut();
    out.real().par_iter_mut().enumerate().for_each(|(h, out)| {
        let mut sum = T::default();
        for (b, i) in (0..batch * tokens).map(|row| (row / tokens, row % tokens)) {
            let at = ((b * tokens + i) * heads + h) * columns;
            let delta = dot(&o[at..at + columns], &d_o[at..at + columns]);
            sum += (sink[h] - lse[(b * heads + h) * tokens + i]).exp() * delta;
        }
        *out = if accumulate { *out - sum } else { T::default() - sum };
    });
}
