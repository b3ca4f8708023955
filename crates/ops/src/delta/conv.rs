//! The convolution over tokens, each channel by itself, and its gradients.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use super::check_starts;
use super::examples::starts;
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, defines_for, device_type};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;
use crate::rowwise::sum_partials;

const SOURCE: &str = include_str!("conv.cu");
const HEADERS: &[(&str, &str)] = &[("types.cuh", include_str!("../cuda/types.cuh"))];

/// Threads of a block, each with one channel.
const THREADS: usize = 128;
/// Tokens that a block convolves one after the other.
pub(super) const STRIP: usize = 32;
/// Tokens of a block of the sums of weight gradients.
const SUMMED: usize = 128;
/// Widest window: a thread holds its tokens in registers.
const MAX_WIDTH: usize = 8;

/// y = causal_conv(x, w, document_start)
pub struct CausalConv;

/// dx = causal_conv_backward(dy, w, document_start)
pub struct CausalConvBackward;

/// dw = causal_conv_weight_gradient(x, dy, document_start)
pub struct CausalConvWeightGradient;

/// Batch, tokens and channels of x.
fn extents(x: &[usize]) -> [usize; 3] {
    x.try_into().expect("the shape rule requires three axes")
}

fn check(x: &ValueType, document_start: &ValueType) -> Result<usize, String> {
    let [batch, tokens, Dim::Fixed(channels)] = x.shape.as_slice() else {
        return Err("x must be [B, T, channels], channels known".into());
    };
    if !x.dtype.is_float() {
        return Err("x must be floating point".into());
    }
    check_starts(document_start, &[batch.clone(), tokens.clone()])?;
    Ok(*channels)
}

fn check_width(width: usize) -> Result<usize, String> {
    match (1..=MAX_WIDTH).contains(&width) {
        true => Ok(width),
        false => Err(format!("the window must be 1 to {MAX_WIDTH} tokens, not {width}")),
    }
}

fn check_with_weight(inputs: &[ValueType]) -> Result<Vec<ValueType>, String> {
    let [x, w, document_start] = inputs else { return Err("takes rows, the weight and document_start".into()) };
    check_weight(w, check(x, document_start)?)?;
    Ok(vec![x.clone()])
}

/// The tokens of the window of a weight.
pub(super) fn check_weight(w: &ValueType, channels: usize) -> Result<usize, String> {
    match w.shape.as_slice() {
        [Dim::Fixed(rows), Dim::Fixed(1), Dim::Fixed(width)] if *rows == channels && w.dtype.is_float() => {
            check_width(*width)
        }
        _ => Err(format!("the weight must be [{channels}, 1, tokens]")),
    }
}

/// A kernel over the channels and strips of tokens of rows like `x`.
pub(super) fn kernel(entry: &'static str, x: &TensorRef, width: usize, strip: usize, args: Vec<Arg>) -> KernelSpec {
    let [batch, tokens, channels] = extents(&x.shape);
    let numbers =
        [("TOKENS", tokens), ("CHANNELS", channels), ("WIDTH", width), ("STRIP", strip), ("THREADS", THREADS)];
    KernelSpec {
        entry,
        source: SOURCE.to_owned(),
        headers: HEADERS.to_vec(),
        defines: numbers.map(|(name, n)| (name.to_owned(), n.to_string())).to_vec(),
        grid: [channels.div_ceil(THREADS) as u32, tokens.div_ceil(strip) as u32, batch as u32],
        block: [THREADS as u32, 1, 1],
        shared_bytes: 0,
        args,
    }
}

/// Either direction: rows, the weight, document_start → rows.
fn convolution(entry: &'static str, call: &LowerCall<'_>) -> Lowered {
    let ([x, w, starts], y) = (call.inputs, &call.outputs[0]) else { unreachable!("checked by the shape rule") };
    assert!(w.is_dense() && starts.is_dense(), "weights and document starts lie without gaps: {w}, {starts}");
    let args = (0..3).map(Arg::Input).chain([Arg::Output(0)]).collect();
    let mut kernel = kernel(entry, x, w.shape[2], STRIP, args);
    kernel.defines.extend(defines_for("X", x).into_iter().chain(defines_for("Y", y)));
    kernel.defines.push(("W_T".to_owned(), device_type(w.dtype).to_owned()));
    Lowered::Kernels(vec![kernel])
}

/// x, w and document_start of examples.
fn example_inputs(batch: usize, documents: &[usize], channels: usize, width: usize) -> Vec<ExampleInput> {
    let row = starts(documents);
    let normal = |shape: Vec<usize>| ExampleInput::Normal { shape, scale: 1.0 };
    let shape = vec![batch, row.len()];
    vec![
        normal(vec![batch, row.len(), channels]),
        normal(vec![channels, 1, width]),
        ExampleInput::Ints { shape, values: row.repeat(batch) },
    ]
}

/// Documents shorter than the window, at and between strips; channels of one block and of several.
fn examples() -> Vec<Example> {
    let example = |batch: usize, documents: &[usize], channels: usize, width: usize| {
        Example::new(example_inputs(batch, documents, channels, width), Attrs::new())
    };
    vec![
        example(2, &[5, 1, 2, 4], 6, 4),
        example(1, &[30, 2, 38], 33, 4),
        example(2, &[64, 35], 200, 3),
        example(1, &[1], 8, 4),
        example(1, &[3, 9], 5, 1),
    ]
}

impl Op for CausalConv {
    fn id(&self) -> OpId {
        id::CAUSAL_CONV
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn mixes_tokens(&self) -> bool {
        true
    }

    fn doc(&self) -> &'static str {
        "Each channel convolved over the last K tokens of its document: y[t, c] = Σ over j of w[c, 0, K − 1 − j]·x[t − j, c], \
         0 ≤ j < K, t − j ≥ document_start[t]. x [B, T, channels], w [channels, 1, K], document_start i32 [B, T] → y like x."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        check_with_weight(inputs)
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let (x, w, starts, dy) = (call.input(0), call.input(1), call.input(2), call.dy());
        let width = *call.emit.value(w).shape.last().expect("checked by the shape rule");
        let dx = call.wanted(0, id::CAUSAL_CONV_BACKWARD, &[dy, w, starts], Attrs::new());
        let attrs = Attrs::new().with("width", width);
        let dw = call.wanted(1, id::CAUSAL_CONV_WEIGHT_GRADIENT, &[x, dy, starts], attrs);
        Gradients::Inputs(vec![dx, dw, None])
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        convolution("causal_conv", call)
    }

    crate::reference!(forward);

    fn examples(&self) -> Vec<Example> {
        examples().into_iter().map(|example| example.differentiate(&[0, 1])).collect()
    }
}

fn forward<T: Real>(call: &mut Call<'_, T>) {
    let [x, w, starts] = call.inputs else { unreachable!("the shape rule requires three inputs") };
    let ([_, tokens, channels], width) = (extents(x.shape), w.columns());
    let (x, w, starts) = (x.real(), w.real(), starts.int());
    let [y] = call.outputs_mut();
    y.real().par_chunks_mut(channels).enumerate().for_each(|(at, y)| {
        let seen = at % tokens - starts[at] as usize; // tokens before it in its document
        y.fill(T::default());
        for j in (0..width.min(seen + 1)).rev() {
            let x = &x[(at - j) * channels..][..channels];
            for (c, (y, x)) in y.iter_mut().zip(x).enumerate() {
                *y += w[c * width + width - 1 - j] * *x;
            }
        }
    });
}

impl Op for CausalConvBackward {
    fn id(&self) -> OpId {
        id::CAUSAL_CONV_BACKWARD
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "Input gradient of `causal_conv`: dx[t, c] = Σ over j of w[c, 0, K − 1 − j]·dy[t + j, c], document_start[t + j] ≤ t. \
         dy [B, T, channels], w [channels, 1, K], document_start i32 [B, T] → dx like dy."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        check_with_weight(inputs)
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        convolution("causal_conv_backward", call)
    }

    crate::reference!(backward);

    fn examples(&self) -> Vec<Example> {
        examples()
    }
}

fn backward<T: Real>(call: &mut Call<'_, T>) {
    let [dy, w, starts] = call.inputs else { unreachable!("the shape rule requires three inputs") };
    let ([_, tokens, channels], width) = (extents(dy.shape), w.columns());
    let (dy, w, starts) = (dy.real(), w.real(), starts.int());
    let [dx] = call.outputs_mut();
    dx.real().par_chunks_mut(channels).enumerate().for_each(|(at, dx)| {
        let t = at % tokens;
        dx.fill(T::default());
        for j in (0..width.min(tokens - t)).filter(|j| starts[at + j] as usize <= t) {
            let dy = &dy[(at + j) * channels..][..channels];
            for (c, (dx, dy)) in dx.iter_mut().zip(dy).enumerate() {
                *dx += w[c * width + width - 1 - j] * *dy;
            }
        }
    });
}

impl Op for CausalConvWeightGradient {
    fn id(&self) -> OpId {
        id::CAUSAL_CONV_WEIGHT_GRADIENT
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "Weight gradient of `causal_conv`: dw[c, 0, K − 1 − j] = Σ over t of dy[t, c]·x[t − j, c], t − j ≥ document_start[t], \
         in f32 and always in the same order. x, dy [B, T, channels], document_start i32 [B, T] → dw f32 [channels, 1, K]. \
         With `accumulate`, added to."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "width", kind: "int", doc: "K: tokens of the window" },
            Attribute { name: "accumulate", kind: "bool?", doc: "add to dw instead of overwriting it" },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, dy, document_start] = inputs else { return Err("takes x, dy and document_start".into()) };
        let (channels, width) = (check(x, document_start)?, check_width(attrs.size("width")?)?);
        attrs.flag("accumulate")?;
        if dy.shape != x.shape || !dy.dtype.is_float() {
            return Err("dy must be shaped like x".into());
        }
        Ok(vec![ValueType::new(Element::F32, [channels, 1, width].map(Dim::Fixed))])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        parts(call.inputs) * call.outputs[0].len() * 4
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let ([x, dy, starts], dw) = (call.inputs, &call.outputs[0]) else { unreachable!("checked by the shape rule") };
        assert!(starts.is_dense() && dw.is_dense(), "document starts and gradients lie without gaps: {starts}, {dw}");
        let args = (0..3).map(Arg::Input).chain([Arg::Scratch(0)]).collect();
        let mut partial = kernel("causal_conv_weight_partial", x, dw.shape[2], SUMMED, args);
        partial.defines.extend(defines_for("X", x).into_iter().chain(defines_for("Y", dy)));
        let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
        let total = sum_partials(dw.len(), parts(call.inputs), accumulate, Arg::Scratch(0), Arg::Output(0));
        Lowered::Kernels(vec![partial, total])
    }

    crate::reference!(weight_gradient);

    fn examples(&self) -> Vec<Example> {
        let example = |batch: usize, documents: &[usize], channels: usize, width: usize, accumulate: bool| {
            let mut inputs = example_inputs(batch, documents, channels, width);
            inputs[1] = inputs[0].clone();
            let state = ExampleInput::NormalF32 { shape: vec![channels, 1, width], scale: 1.0 };
            let attrs = Attrs::new().with("width", width).with("accumulate", accumulate);
            Example::new(inputs, attrs).with_state(vec![state])
        };
        vec![
            example(2, &[5, 1, 2, 4], 6, 4, false),
            example(2, &[130, 3, 200], 140, 4, true),
            example(1, &[1], 8, 3, false),
        ]
    }
}

/// Blocks of tokens, over all rows: each gives a part of the sums.
fn parts(inputs: &[TensorRef]) -> usize {
    let [batch, tokens, _] = extents(&inputs[0].shape);
    batch * tokens.div_ceil(SUMMED)
}

fn weight_gradient<T: Real>(call: &mut Call<'_, T>) {
    let [x, dy, starts] = call.inputs else { unreachable!("the shape rule requires three inputs") };
    let [_, tokens, channels] = extents(x.shape);
    let (width, accumulate) = (call.attrs.size("width"), call.attrs.flag("accumulate"));
    let [width, accumulate] = [width.expect("checked by the shape rule"), accumulate.expect("checked") as usize];
    let (x, dy, starts) = (x.real(), dy.real(), starts.int());
    let [dw] = call.outputs_mut();
    dw.real().par_chunks_mut(width).enumerate().for_each(|(c, dw)| {
        for (k, dw) in dw.iter_mut().enumerate() {
            let j = width - 1 - k;
            let seen = (0..starts.len()).filter(|at| at % tokens >= starts[*at] as usize + j);
            let sum: T = seen.map(|at| dy[at * channels + c] * x[(at - j) * channels + c]).sum();
            *dw = if accumulate == 1 { *dw + sum } else { sum };
        }
    });
}
