//! The sum of what several ranks have computed, in f32 whatever type it came in, in the order of the ranks: nothing adds
//! while bytes travel, so the bits depend on the number of ranks alone.

mod largest;

use graph::{Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::{Attrs, DType};

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, device_type};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;
use crate::vector::{Loop, vectorised};

pub use largest::MaxPieces;

const SOURCE: &str = include_str!("sum_pieces.cu");
const HEADERS: &[(&str, &str)] =
    &[("types.cuh", include_str!("../../cuda/types.cuh")), ("pack.cuh", include_str!("../../cuda/pack.cuh"))];

const THREADS: u32 = 256;
/// Elements of one thread.
const ELEMENTS: usize = 4;

/// Elements of one task on the CPU.
const CHUNK: usize = 4096;

/// sum = sum_pieces(pieces)
pub struct SumPieces;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
    let pieces = call.inputs[0].real();
    let [sum] = call.outputs_mut();
    let sum = sum.real();
    let count = sum.len();
    sum.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, sum)| {
        let of = |piece: &'_ [T]| -> Vec<T> { piece[chunk * CHUNK..][..sum.len()].to_vec() };
        let mut all = pieces.chunks_exact(count);
        let mut total = of(all.next().expect("there is at least one piece"));
        all.for_each(|piece| vectorised(Add, (&mut total, &piece[chunk * CHUNK..][..sum.len()])));
        if accumulate {
            vectorised(Add, (sum, &total));
        } else {
            sum.copy_from_slice(&total);
        }
    });
}

struct Add;

impl<'a, T: Real> Loop<(&'a mut [T], &'a [T])> for Add {
    type Output = ();

    #[inline(always)]
    fn run((sum, more): (&'a mut [T], &'a [T])) {
        for (s, m) in sum.iter_mut().zip(more) {
            *s += *m;
        }
    }
}

impl Op for SumPieces {
    fn id(&self) -> OpId {
        id::SUM_PIECES
    }

    fn class(&self) -> Class {
        Class::Update
    }

    fn doc(&self) -> &'static str {
        "The sum of pieces of equal lengths in f32, in their order. pieces f32 or bf16 [count, n] → sum f32 [n]. With \
         `accumulate`, added to it."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[Attribute { name: "accumulate", kind: "bool?", doc: "add to the result instead of overwriting it" }]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        attrs.flag("accumulate")?;
        match inputs {
            [x] if [Element::F32, Element::Fixed(DType::BF16)].contains(&x.dtype) && x.shape.len() == 2 => {
                Ok(vec![ValueType::new(Element::F32, [x.shape[1].clone()])])
            }
            _ => Err("takes pieces as f32 or bf16 [count, n]".into()),
        }
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of the update")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], attrs: &Attrs) -> Cost {
        let before = if attrs.flag("accumulate").unwrap_or(false) { outputs[0].bytes() } else { 0 };
        Cost { flops: inputs[0].len() as f64, bytes: (inputs[0].bytes() + outputs[0].bytes() + before) as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (pieces, sum) = (&call.inputs[0], &call.outputs[0]);
        assert!(pieces.is_dense() && sum.is_dense(), "pieces lie densely: {pieces}, {sum}");
        let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
        let aligned = [pieces, sum].iter().all(|t| t.offset.is_multiple_of(16)) && sum.len().is_multiple_of(ELEMENTS);
        let defines = [
            ("PIECES", pieces.shape[0].to_string()),
            ("COUNT", format!("{}ull", sum.len())),
            ("ACCUMULATE", u32::from(accumulate).to_string()),
            ("ALIGNED", aligned.to_string()),
            ("THREADS", THREADS.to_string()),
            ("PIECE_T", device_type(pieces.dtype).to_owned()),
        ];
        Lowered::Kernels(vec![KernelSpec {
            entry: "sum_pieces",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines: defines.map(|(name, value)| (name.to_owned(), value)).to_vec(),
            grid: [sum.len().div_ceil(THREADS as usize * ELEMENTS) as u32, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Output(0)],
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let pieces = |shape: [usize; 2]| vec![ExampleInput::NormalF32 { shape: shape.to_vec(), scale: 1.0 }];
        let added = |shape: [usize; 2]| {
            let before = ExampleInput::NormalF32 { shape: vec![shape[1]], scale: 1.0 };
            Example::new(pieces(shape), Attrs::new().with("accumulate", true)).with_state(vec![before])
        };
        let alone = |shape: [usize; 2]| Example::new(pieces(shape), Attrs::new());
        let rounded = |shape: [usize; 2], attrs: Attrs| {
            let pieces = ExampleInput::Codes { dtype: DType::BF16, shape: shape.to_vec(), scale: 1.0 };
            let before = ExampleInput::NormalF32 { shape: vec![shape[1]], scale: 1.0 };
            Example::new(vec![pieces], attrs).with_state(vec![before])
        };
        let accumulate = Attrs::new().with("accumulate", true);
        vec![
            alone([3, 8192]),
            alone([2, 7]),
            added([8, 1024]),
            added([1, 33]),
            rounded([4, 4096], Attrs::new()),
            rounded([3, 77], accumulate),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Array, apply};

    #[test]
    fn pieces_are_added_in_their_order() {
        // In another order the small number is not lost.
        let pieces = Array::Real(vec![1.0, 1e8, 1e8, -1e8, -1e8, 1.0]);
        let mut outputs = vec![(vec![2], Array::Real(vec![0.5, 0.5]))];
        let sums = [false, true].map(|accumulate| {
            let attrs = Attrs::new().with("accumulate", accumulate);
            apply::<f32>(&SumPieces, &attrs, &[(&[3, 2], &pieces)], &mut outputs);
            outputs[0].1.real().to_vec()
        });
        assert_eq!(sums, [vec![0.0, 1.0], vec![0.0, 2.0]]);
    }
}
