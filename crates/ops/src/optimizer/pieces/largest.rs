//! The largest of what several ranks have found, number by number: magnitudes of a step, which every rank then continues from
//! alike.

use graph::{Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use tensor::Attrs;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::op::{Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("max_pieces.cu");
const HEADERS: &[(&str, &str)] = &[("types.cuh", include_str!("../../cuda/types.cuh"))];

const THREADS: u32 = 256;

/// largest = max_pieces(pieces)
pub struct MaxPieces;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let pieces = call.inputs[0].real();
    let [largest] = call.outputs_mut();
    let largest = largest.real();
    let count = largest.len();
    for (at, most) in largest.iter_mut().enumerate() {
        let of = pieces[at..].iter().step_by(count.max(1)).copied();
        // Values that are not finite are kept.
        let greater = |most: T, next: T| if next > most || !next.is_finite() { next } else { most };
        *most =
            of.reduce(|most, next| if most.is_finite() { greater(most, next) } else { most }).expect("there is one");
    }
}

impl Op for MaxPieces {
    fn id(&self) -> OpId {
        id::MAX_PIECES
    }

    fn class(&self) -> Class {
        Class::Update
    }

    fn doc(&self) -> &'static str {
        "The largest number of each column, where none is negative. pieces f32 [count, n] → largest f32 [n]. A number that \
         is not finite is larger than all that are."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        match inputs {
            [x] if x.dtype == Element::F32 && x.shape.len() == 2 => {
                Ok(vec![ValueType::new(Element::F32, [x.shape[1].clone()])])
            }
            _ => Err("takes pieces as f32 [count, n]".into()),
        }
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of the update")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        Cost { flops: inputs[0].len() as f64, bytes: (inputs[0].bytes() + outputs[0].bytes()) as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (pieces, largest) = (&call.inputs[0], &call.outputs[0]);
        assert!(pieces.is_dense() && largest.is_dense(), "pieces lie densely: {pieces}, {largest}");
        let defines = [
            ("PIECES", pieces.shape[0].to_string()),
            ("COUNT", format!("{}u", largest.len())),
            ("THREADS", THREADS.to_string()),
        ];
        Lowered::Kernels(vec![KernelSpec {
            entry: "max_pieces",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines: defines.map(|(name, value)| (name.to_owned(), value)).to_vec(),
            grid: [largest.len().div_ceil(THREADS as usize) as u32, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Output(0)],
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let of = |shape: [usize; 2]| {
            Example::new(vec![ExampleInput::UniformF32 { shape: shape.to_vec(), low: 0.0, high: 9.0 }], Attrs::new())
        };
        vec![of([3, 700]), of([1, 5]), of([8, 33])]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Array, apply};

    #[test]
    fn the_largest_is_found_and_what_is_not_finite_is_kept() {
        let pieces = Array::Real(vec![1.0, 5.0, f32::NAN, 2.0, 3.0, 0.0, 7.0, 4.0, f32::INFINITY, 1.0]);
        let mut outputs = vec![(vec![5], Array::Real(vec![0.0; 5]))];
        apply::<f32>(&MaxPieces, &Attrs::new(), &[(&[2, 5], &pieces)], &mut outputs);
        let found = outputs[0].1.real();
        assert_eq!((found[0], found[1], found[3], found[4]), (1.0, 7.0, f32::INFINITY, 3.0));
        assert!(found[2].is_nan());
    }
}
