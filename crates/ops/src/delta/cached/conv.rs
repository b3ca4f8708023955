//! The convolution over tokens, whose window reaches back to tokens of earlier batches.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::{Attrs, DType};

use super::{SLOTS, check_places, checked_slots, places, slot_of};
use crate::call::Call;
use crate::delta::conv::{STRIP, check_weight, kernel};
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, defines_for, device_type};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("conv.cu");
const HEADERS: &[(&str, &str)] = &[("types.cuh", include_str!("../../cuda/types.cuh")), device::DEPENDENT_LAUNCH];

/// y, kept ← cached_conv(x, w, positions, slots)
pub struct CachedConv;

impl Op for CachedConv {
    fn id(&self) -> OpId {
        id::CACHED_CONV
    }

    fn class(&self) -> Class {
        Class::Update
    }

    fn doc(&self) -> &'static str {
        "`causal_conv` of new tokens, whose sequences' last K tokens are kept: the one at position p of the sequence in slot s \
         in kept[s, p mod K]. Token t of row b, at position p, is convolved with those at max(0, p + 1 − K) … p, of this batch \
         or kept, and then kept itself. Tokens of a row follow one another; a position below 0, after them, is padding, and \
         its result 0. x [B, T, channels], w [channels, 1, K], positions i32 [B, T], slots i32 [B], each another one → y like \
         x, kept [slots, K, channels]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        const KEPT_TYPE: Attribute =
            Attribute { name: "dtype", kind: "string?", doc: "element type of what is kept; absent for that of x" };
        &[SLOTS, KEPT_TYPE]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, w, positions, slots] = inputs else { return Err("takes rows, the weight, positions and slots".into()) };
        let [_, _, Dim::Fixed(channels)] = x.shape.as_slice() else {
            return Err("x must be [B, T, channels], channels known".into());
        };
        if !x.dtype.is_float() {
            return Err("x must be floating point".into());
        }
        let width = check_weight(w, *channels)?;
        check_places(x, positions, slots)?;
        let element = match attrs.get("dtype") {
            None => x.dtype,
            Some(_) => Element::Fixed(attrs.text("dtype")?.parse::<DType>().map_err(|e| format!("`dtype`: {e}"))?),
        };
        if !element.is_float() {
            return Err(format!("`dtype` is {element}, expected a floating-point type"));
        }
        let shape = [checked_slots(attrs.size("slots")?)?, Dim::Fixed(width), Dim::Fixed(*channels)];
        Ok(vec![x.clone(), ValueType::new(element, shape)])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("only what generates text goes on where sequences were")
    }

    /// Returns the cost, which counts only the windows of the rows of what is kept.
    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let window = inputs[0].shape[0] * outputs[1].shape[1] * outputs[1].shape[2] * outputs[1].dtype.size();
        Cost { flops: 0.0, bytes: (inputs[0].bytes() + inputs[1].bytes() + outputs[0].bytes() + 2 * window) as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let ([x, w, positions, slots], [y, kept]) = (call.inputs, call.outputs) else {
            unreachable!("checked by the shape rule")
        };
        for tensor in [w, positions, slots, kept] {
            assert!(tensor.is_dense(), "weights, places and what is kept lie densely: {tensor}");
        }
        let args = (0..4).map(Arg::Input).chain([0, 1].map(Arg::Output)).collect();
        let mut convolve = kernel("cached_conv", x, w.shape[2], STRIP, args);
        (convolve.source, convolve.headers) = (SOURCE.to_owned(), HEADERS.to_vec());
        convolve.defines.extend(defines_for("X", x).into_iter().chain(defines_for("Y", y)));
        for (name, tensor) in [("W_T", w), ("KEPT_T", kept)] {
            convolve.defines.push((name.to_owned(), device_type(tensor.dtype).to_owned()));
        }
        if x.shape[1] <= STRIP {
            return Lowered::Kernels(vec![convolve]);
        }
        // What one strip keeps is read by another.
        let [channels, _, rows] = convolve.grid;
        let args = [0, 2, 3].map(Arg::Input).into_iter().chain([Arg::Output(1)]).collect();
        let keep = KernelSpec { entry: "cached_conv_keep", grid: [channels, 1, rows], args, ..convolve.clone() };
        Lowered::Kernels(vec![convolve, keep])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |tokens: usize, rows: &[(usize, usize)], channels: usize, width: usize, dtype: Option<&str>| {
            let (where_, slots) = places(tokens, rows);
            let normal = |shape: Vec<usize>| ExampleInput::Normal { shape, scale: 1.0 };
            let inputs = [normal(vec![rows.len(), tokens, channels]), normal(vec![channels, 1, width])];
            let kept = vec![slots, width, channels];
            let kept = match dtype {
                Some(_) => ExampleInput::NormalF32 { shape: kept, scale: 1.0 },
                None => normal(kept),
            };
            let attrs = Attrs::new().with("slots", slots);
            let attrs = dtype.into_iter().fold(attrs, |attrs, dtype| attrs.with("dtype", dtype));
            let state = vec![normal(vec![rows.len(), tokens, channels]), kept];
            Example::new(inputs.into_iter().chain(where_).collect(), attrs).with_state(state)
        };
        vec![
            example(1, &[(0, 1), (7, 1), (2, 1)], 6, 4, None),
            example(1, &[(1, 1), (9, 0), (300, 1)], 200, 4, Some("f32")),
            example(3, &[(2, 2), (0, 3)], 33, 4, None),
            example(50, &[(0, 50), (5, 33), (90, 2), (4, 0)], 140, 4, None),
            example(70, &[(1, 64)], 130, 3, Some("f32")),
            example(5, &[(3, 4)], 8, 1, None),
        ]
    }
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let [x, w, positions, slots] = call.inputs else { unreachable!("the shape rule requires four inputs") };
    let ([_, tokens, channels], width) =
        (x.shape[..].try_into().expect("the shape rule requires three axes"), w.columns());
    let (x, w, positions, slots): (_, _, _, _) = (x.real(), w.real(), positions.int(), slots.int());
    let [y, kept] = call.outputs_mut();
    let count = kept.shape()[0];
    let kept = kept.real();
    let line = |row: usize, position: usize| (slot_of(slots, row, count) * width + position % width) * channels;
    y.real().par_chunks_mut(channels).enumerate().for_each(|(at, y)| {
        y.fill(T::default());
        let Ok(position) = usize::try_from(positions[at]) else { return };
        for j in (0..width.min(position + 1)).rev() {
            let x = match at % tokens >= j {
                true => &x[(at - j) * channels..][..channels],
                false => &kept[line(at / tokens, position - j)..][..channels],
            };
            for (c, (y, x)) in y.iter_mut().zip(x).enumerate() {
                *y += w[c * width + width - 1 - j] * *x;
            }
        }
    });
    for (at, x) in x.chunks(channels).enumerate() {
        if let Ok(position) = usize::try_from(positions[at]) {
            kept[line(at / tokens, position)..][..channels].copy_from_slice(x);
        }
    }
}
