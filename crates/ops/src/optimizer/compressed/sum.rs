//! The sum of compressed pieces, in f32 and in their order.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::{Attrs, DType};

use super::{BLOCK, Blocks, HEADERS, SOURCE, THREADS, WARPS};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

/// sum = sum_compressed(pieces)
pub struct SumCompressed;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let form = Blocks::of(call.attrs).expect("checked by the shape rule");
    let (count, pieces) = (call.inputs[0].shape[0], call.inputs[0].byte());
    let each = pieces.len() / count;
    let [sum] = call.outputs_mut();
    sum.real().par_chunks_mut(BLOCK).enumerate().for_each(|(block, sum)| {
        sum.fill(T::default());
        for piece in 0..count {
            let start = piece * each + block * form.block_bytes();
            form.add(&pieces[start..start + form.block_bytes()], sum);
        }
    });
}

impl Op for SumCompressed {
    fn id(&self) -> OpId {
        id::SUM_COMPRESSED
    }

    fn class(&self) -> Class {
        Class::Update
    }

    fn doc(&self) -> &'static str {
        "The sum of pieces that `compress` made, in their order. pieces u8 [count, bytes] → sum f32 [n]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[Attribute { name: "form", kind: "string", doc: "`int8`, `topk` or `onebit`" }]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let form = Blocks::of(attrs)?;
        match inputs {
            [x] if x.dtype == Element::Fixed(DType::U8) && x.shape.len() == 2 => {
                let bytes = x.shape[1].fixed().ok_or("takes pieces of known sizes")?;
                Ok(vec![ValueType::new(Element::F32, [Dim::from(bytes / form.block_bytes() * BLOCK)])])
            }
            _ => Err("takes pieces as u8 [count, bytes]".into()),
        }
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of the update")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let flops = (inputs[0].shape[0] * outputs[0].len()) as f64;
        Cost { flops, bytes: (inputs[0].bytes() + outputs[0].bytes()) as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let form = Blocks::of(call.attrs).expect("checked by the shape rule");
        let (pieces, sum) = (&call.inputs[0], &call.outputs[0]);
        assert!([pieces, sum].iter().all(|of| of.is_dense() && of.offset.is_multiple_of(4)), "{pieces}, {sum}");
        let blocks = sum.len() / BLOCK;
        let mut defines = form.defines();
        let numbers = [("BLOCKS", blocks), ("PIECES", pieces.shape[0]), ("EACH", pieces.shape[1])];
        defines.extend(numbers.map(|(name, of)| (name.to_owned(), format!("{of}u"))));
        Lowered::Kernels(vec![KernelSpec {
            entry: "sum_compressed",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines: defines.into_iter().chain([("SUM".to_owned(), "1".to_owned())]).collect(),
            grid: [blocks.div_ceil(WARPS) as u32, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Output(0)],
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let of = |form: Blocks, count: usize, blocks: usize| {
            // Numbers are small powers of two, codes and places all there are.
            let number = |at: usize| (2.0f32.powi(at as i32 % 7 - 3)).to_le_bytes();
            let block = |block: usize| -> Vec<u8> {
                let byte = |at: usize| (at * 37 + block * 11) as u8;
                match form {
                    Blocks::Int8 => number(block).into_iter().chain((0..BLOCK).map(byte)).collect(),
                    Blocks::OneBit => number(block).into_iter().chain((0..BLOCK / 8).map(byte)).collect(),
                    Blocks::TopK => {
                        let numbers = (0..super::KEPT).flat_map(|at| number(at + block));
                        numbers.chain((0..super::KEPT).map(byte)).collect()
                    }
                }
            };
            let values: Vec<u8> = (0..count * blocks).flat_map(block).collect();
            let shape = vec![count, blocks * form.block_bytes()];
            let pieces = ExampleInput::Bytes { shape, values };
            Example::new(vec![pieces], Attrs::new().with("form", form.name()))
        };
        let all = [Blocks::Int8, Blocks::TopK, Blocks::OneBit].into_iter();
        all.flat_map(|form| [of(form, 3, 33), of(form, 1, 5)]).collect()
    }
}
