//! AdamW with moments of one byte each (Dettmers et al. 2022): blocks of 256 elements of the flat
//! tensor share a scale, a code book of 256 values gives the rest. The update uses the moments
//! before they are quantised again; decay comes after the step.

mod cpu;

use graph::{Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use tensor::{Attrs, DType};

use super::dynamic_map::dynamic_map;
use super::rule;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::registry::id;

const SOURCE: &str = include_str!("adamw_8bit.cu");
const HEADERS: &[(&str, &str)] = &[
    ("types.cuh", include_str!("../../cuda/types.cuh")),
    ("pack.cuh", include_str!("../../cuda/pack.cuh")),
    ("philox.cuh", include_str!("../../cuda/philox.cuh")),
];

/// Threads of the one block on each SM: the fastest of 512 to 1024 on an H200, 2026-11-21 (2.85 TB/s of
/// 100 million weights, where the kernel before, which searched with integers, had 1.3).
const THREADS: u32 = 768;
/// Three tables of 3,073 pairs of floats: where in the code books the quotients of a bucket are.
const INDEX_BYTES: usize = 3 * 3073 * 8;
/// Shared memory of the two books.
const BOOKS: usize = 2 * 256 * 4;

/// Elements that share a scale.
pub const BLOCK: usize = 256;

/// weight, first, second, first_scale, second_scale ← adamw_8bit(gradient, step scalars, code books)
pub struct AdamW8bit;

impl Op for AdamW8bit {
    fn id(&self) -> OpId {
        id::ADAMW_8BIT
    }

    fn class(&self) -> Class {
        Class::Update
    }

    fn doc(&self) -> &'static str {
        "AdamW on moments stored as codes of a book times a scale for each 256 elements. g = gradient·gradient_scale; \
         m ← β₁m + (1 − β₁)g; v ← β₂v + (1 − β₂)g²; w ← (w − lr·√c₂/c₁·m/(√v + √c₂·epsilon))(1 − lr·weight_decay); \
         then m and v go to the nearest codes, a negative m never to that of 0. Nothing changes when applied is 0. \
         gradient f32 [n], learning_rate, bias_correction_1 (c₁), bias_correction_2 (c₂), gradient_scale, applied \
         f32 [1], step i32 [1], map_signed, map_unsigned f32 [256] → weight [n], first, second u8 [n], first_scale, \
         second_scale f32 [⌈n/256⌉]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        rule::ATTRIBUTES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let book = ValueType::new(Element::F32, [256.into()]);
        if inputs.len() != rule::INPUTS + 2 || inputs[rule::INPUTS..].iter().any(|t| *t != book) {
            return Err("takes the gradient, six step scalars and two code books f32[256]".into());
        }
        let count = rule::check(inputs, attrs)?;
        let of = |element, n: usize| ValueType::new(element, [n.into()]);
        let (codes, scales) = (of(Element::Fixed(DType::U8), count), of(Element::F32, count.div_ceil(BLOCK)));
        Ok(vec![of(Element::Float, count), codes.clone(), codes, scales.clone(), scales])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of the update")
    }

    /// Weight and states are read and written.
    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let state: usize = outputs.iter().map(TensorRef::bytes).sum();
        Cost { flops: 60.0 * outputs[0].len() as f64, bytes: (inputs[0].bytes() + 2 * state) as f64 }
    }

    /// The index of the code books.
    fn scratch(&self, _call: &LowerCall<'_>) -> usize {
        INDEX_BYTES
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let [weight, first, second, ..] = call.outputs else { unreachable!("the shape rule gives five results") };
        let blocks = weight.len().div_ceil(BLOCK);
        let mut defines = rule::defines(call.attrs, weight, &[&call.inputs[0], weight, first, second], THREADS);
        let in_shared = INDEX_BYTES + BOOKS <= call.machine.arch.shared_per_block();
        if !in_shared {
            defines.push(("INDEX_IN_MEMORY".to_owned(), "1".to_owned()));
        }
        let main = KernelSpec {
            entry: "adamw_8bit",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines: defines.clone(),
            grid: [blocks.div_ceil(THREADS as usize / 32).min(call.machine.units) as u32, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: if in_shared { INDEX_BYTES as u32 } else { 0 },
            args: (0..call.inputs.len())
                .map(Arg::Input)
                .chain((0..5).map(Arg::Output))
                .chain([Arg::Scratch(0), rule::before(call.attrs)])
                .collect(),
        };
        defines.retain(|(name, _)| name == "THREADS");
        defines.push(("INDEX".to_owned(), "1".to_owned()));
        let index = KernelSpec {
            entry: "index_books",
            defines,
            grid: [(INDEX_BYTES / 8).div_ceil(THREADS as usize) as u32, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(7), Arg::Input(8), Arg::Scratch(0)],
            ..main.clone()
        };
        Lowered::Kernels(vec![index, main])
    }

    crate::reference!(cpu::update);

    fn examples(&self) -> Vec<Example> {
        let of = |gradient: Option<ExampleInput>, n: usize, stochastic: bool, applied: bool, most: f64| {
            let codes = |k: usize| ExampleInput::Bytes {
                shape: vec![n],
                values: (0..n).map(|i| (i * k % 251) as u8).collect(),
            };
            let scales = |high: f64| ExampleInput::UniformF32 { shape: vec![n.div_ceil(BLOCK)], low: 0.0, high };
            let book = |signed| ExampleInput::F32 { shape: vec![256], values: dynamic_map(signed) };
            let weight = ExampleInput::Normal { shape: vec![n], scale: 1.0 };
            let mut inputs = rule::example_inputs(n, applied);
            inputs[0] = gradient.unwrap_or_else(|| inputs[0].clone());
            inputs.extend([book(true), book(false)]);
            Example::new(inputs, rule::example_attrs(stochastic)).with_state(vec![
                weight,
                codes(7),
                codes(13),
                scales(most),
                scales(most / 10.0),
            ])
        };
        let example = |n: usize, stochastic: bool, applied: bool| of(None, n, stochastic, applied, 0.5);
        let mut part = example(4096, true, true);
        part.attrs = part.attrs.with("start", 8192u64).with("rate", 16.3);
        // A block without any gradient, blocks whose moments are as good as none, one with zeros among others.
        let faint = |i: usize| [0.0, 1e-33, 3e-20, (i % 3) as f32][i / BLOCK] * (1.0 + i as f32 / 100.0);
        let signed = |i: usize| if i % 5 < 2 { -faint(i) } else { faint(i) };
        let still = ExampleInput::F32 { shape: vec![4 * BLOCK], values: (0..4 * BLOCK).map(signed).collect() };
        let still = of(Some(still), 4 * BLOCK, false, true, 0.0);
        vec![example(4096, false, true), example(5_003, true, true), example(300, false, false), part, still]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The assumption of the kernel's index of the books: one border in a bucket of quotients, none in the first.
    #[test]
    fn a_bucket_holds_one_border_between_codes() {
        for signed in [true, false] {
            let book = dynamic_map(signed);
            let borders: Vec<f32> = book.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect();
            for sign in [1.0, -1.0] {
                let magnitudes = borders.iter().map(|x| x * sign).filter(|x| *x > 0.0);
                let mut buckets: Vec<u32> = magnitudes.map(|x| x.to_bits() >> 16).collect();
                buckets.sort_unstable();
                assert!(buckets.windows(2).all(|pair| pair[0] != pair[1]), "two borders in a bucket");
                assert!(buckets.first().is_none_or(|first| *first > 0x3380), "a border in the first bucket");
            }
        }
    }
}
