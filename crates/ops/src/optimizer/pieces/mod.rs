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
/// Number of elements in a thread.
const ELEMENTS: usize = 4;

/// Elements of one task on the CPU.
const CHUNK: usize = 4096;

/// sum = sum_pieces(pieces), or sum_pieces(pieces, own)
pub struct SumPieces;

/// The number of the piece that does not lie with the others, on the first rank; none where all do.
fn own(attrs: &Attrs) -> Result<Option<usize>, String> {
    match attrs.get("own") {
        Some(_) => Ok(Some(attrs.size("own")?)),
        None => Ok(attrs.get("own_per_rank").map(|_| 0)),
    }
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
    let own = own(call.attrs).expect("checked by the shape rule");
    let (pieces, apart) = (call.inputs[0].real(), call.inputs.get(1).map(|own| own.real()));
    let [sum] = call.outputs_mut();
    let sum = sum.real();
    let count = sum.len();
    sum.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, sum)| {
        let range = chunk * CHUNK..chunk * CHUNK + sum.len();
        let of = |(number, piece): (usize, &'_ [T])| -> Vec<T> {
            match apart {
                _ if own != Some(number) => piece[range.clone()].to_vec(),
                Some(own) => own[range.clone()].to_vec(),
                None => sum.to_vec(),
            }
        };
        let mut all = pieces.chunks_exact(count).enumerate().map(of);
        let mut total = all.next().expect("there is at least one piece");
        all.for_each(|piece| vectorised(Add, (&mut total, &piece)));
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
         `accumulate`, added to it. With `own`, the piece of that number does not lie there: it is own [n] or, without that, \
         what the result holds."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "accumulate", kind: "bool?", doc: "add to the result instead of overwriting it" },
            Attribute { name: "own", kind: "int?", doc: "the number of the piece that lies elsewhere" },
            Attribute { name: "own_per_rank", kind: "int?", doc: "`own` is so much larger on each next rank" },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let accumulate = attrs.flag("accumulate")?;
        let (x, apart) = match (inputs, own(attrs)?) {
            ([x], None) => (x, None),
            ([x], Some(_)) if !accumulate && x.dtype == Element::F32 => (x, None),
            ([x, apart], Some(_)) => (x, Some(apart)),
            _ => return Err("takes pieces, and one more with `own`, without which it is what the result holds".into()),
        };
        let fits = |apart: &ValueType| apart.dtype == x.dtype && Some(&apart.shape[..]) == x.shape.get(1..);
        match x {
            _ if !apart.is_none_or(fits) => Err("takes an own piece like the others".into()),
            x if [Element::F32, Element::Fixed(DType::BF16)].contains(&x.dtype) && x.shape.len() == 2 => {
                Ok(vec![ValueType::new(Element::F32, [x.shape[1].clone()])])
            }
            _ => Err("takes pieces as f32 or bf16 [count, n]".into()),
        }
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of the update")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], attrs: &Attrs) -> Cost {
        // The own piece has the same number of bytes, wherever it lies.
        let before = if attrs.flag("accumulate").unwrap_or(false) { outputs[0].bytes() } else { 0 };
        Cost { flops: inputs[0].len() as f64, bytes: (inputs[0].bytes() + outputs[0].bytes() + before) as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (pieces, sum) = (&call.inputs[0], &call.outputs[0]);
        assert!(pieces.is_dense() && sum.is_dense(), "pieces lie densely: {pieces}, {sum}");
        let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
        let own = own(call.attrs).expect("checked by the shape rule");
        let (apart, at) = match call.inputs.get(1) {
            Some(apart) => (apart, Arg::Input(1)),
            None => (sum, Arg::Output(0)),
        };
        let aligned = [pieces, sum, apart].iter().all(|t| t.offset.is_multiple_of(16) && t.per_rank.is_multiple_of(16))
            && sum.len().is_multiple_of(ELEMENTS);
        let number = match call.attrs.get("own_per_rank") {
            Some(_) => Arg::PerRank { first: own.unwrap_or(0) as i64, step: 1 },
            None => Arg::I64(own.map_or(-1, |own| own as i64)),
        };
        let defines = [
            ("PIECES", pieces.shape[0].to_string()),
            ("COUNT", format!("{}ull", sum.len())),
            ("ACCUMULATE", u32::from(accumulate).to_string()),
            ("ALIGNED", aligned.to_string()),
            ("THREADS", THREADS.to_string()),
            ("PIECE_T", device_type(pieces.dtype).to_owned()),
            ("OWN_T", device_type(apart.dtype).to_owned()),
        ];
        Lowered::Kernels(vec![KernelSpec {
            entry: "sum_pieces",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines: defines.map(|(name, value)| (name.to_owned(), value)).to_vec(),
            grid: [sum.len().div_ceil(THREADS as usize * ELEMENTS) as u32, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), at, number, Arg::Output(0)],
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
        let own = |number: u64| Attrs::new().with("own", number);
        let held = ExampleInput::NormalF32 { shape: vec![4096], scale: 1.0 };
        let in_place = Example::new(pieces([3, 4096]), own(1)).with_state(vec![held.clone()]);
        let apart = |attrs: Attrs| {
            let all = [pieces([2, 4096]), vec![held.clone()]].concat();
            Example::new(all, attrs).with_state(vec![held.clone()])
        };
        vec![
            in_place,
            apart(own(0)),
            apart(own(1).with("accumulate", true)),
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

    #[test]
    fn the_own_piece_keeps_its_place_in_the_order() {
        let pieces = [1.0f32, 1e8, -1e8];
        let expected = (pieces[0] + pieces[1]) + pieces[2];
        for own in 0..3u64 {
            // What lies in its place is never read.
            let mut shown = pieces;
            shown[own as usize] = f32::NAN;
            let (shown, apart) = (Array::Real(shown.to_vec()), Array::Real(vec![pieces[own as usize]]));
            let attrs = Attrs::new().with("own", own);
            let mut outputs = vec![(vec![1], Array::Real(vec![pieces[own as usize]]))];
            apply::<f32>(&SumPieces, &attrs, &[(&[3, 1], &shown)], &mut outputs);
            assert_eq!(outputs[0].1.real(), [expected]);
            let mut outputs = vec![(vec![1], Array::Real(vec![2.0]))];
            apply::<f32>(&SumPieces, &attrs, &[(&[3, 1], &shown), (&[1], &apart)], &mut outputs);
            assert_eq!(outputs[0].1.real(), [expected]);
        }
    }
}
