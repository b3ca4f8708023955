//! The polynomial of one round of Newton-Schulz, from a matrix and its square.

use graph::{Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use super::matrices;
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, device_type};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("polynomial.cu");
const HEADERS: &[(&str, &str)] = &[("types.cuh", include_str!("../../cuda/types.cuh"))];

const THREADS: usize = 256;

/// p = a·I + b·x + c·x²
pub struct NewtonSchulzPolynomial;

fn factors(attrs: &Attrs) -> Result<[f64; 3], String> {
    let factor = |name: &str| attrs.float(name).map_err(|e| e.0);
    Ok([factor("a")?, factor("b")?, factor("c")?])
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let [a, b, c] = factors(call.attrs).expect("checked by the shape rule").map(T::from_f64);
    let (x, square, n) = (call.inputs[0].real(), call.inputs[1].real(), call.inputs[0].columns().max(1));
    let [p] = call.outputs_mut();
    let rows = p.real().par_chunks_mut(n).zip(x.par_chunks(n).zip(square.par_chunks(n)));
    rows.enumerate().for_each(|(row, (p, (x, square)))| {
        p.iter_mut().zip(x.iter().zip(square)).for_each(|(p, (x, square))| *p = b * *x + c * *square);
        p[row % n] += a;
    });
}

impl Op for NewtonSchulzPolynomial {
    fn id(&self) -> OpId {
        id::NEWTON_SCHULZ_POLYNOMIAL
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "p = a·I + b·x + c·x² for each matrix, I the unit matrix. x [count, n, n], its square x² f32 [count, n, n] → \
         [count, n, n]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "a", kind: "float", doc: "factor of the unit matrix" },
            Attribute { name: "b", kind: "float", doc: "factor of x" },
            Attribute { name: "c", kind: "float", doc: "factor of the square" },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, square] = inputs else { return Err("takes x and its square".into()) };
        let [_, rows, columns] = matrices(x)?;
        factors(attrs)?;
        if rows != columns || x.shape != square.shape || square.dtype != Element::F32 {
            return Err("takes square matrices, and their squares in f32".into());
        }
        Ok(vec![x.clone()])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of the update")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        Cost { flops: 3.0 * outputs[0].len() as f64, bytes }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let [x, square] = call.inputs else { unreachable!("the shape rule requires two inputs") };
        let p = &call.outputs[0];
        for tensor in [x, square, p] {
            assert!(tensor.is_dense(), "matrices of a batch lie densely: {tensor}");
        }
        let [a, b, c] = factors(call.attrs).expect("checked by the shape rule");
        let float = |x: f64| format!("{:e}f", x as f32);
        let defines = [
            ("UNIT", float(a)),
            ("LINEAR", float(b)),
            ("QUADRATIC", float(c)),
            ("SIDE", p.shape[2].to_string()),
            ("COUNT", format!("{}ull", p.len())),
            ("MATRIX_T", device_type(p.dtype).to_owned()),
            ("THREADS", THREADS.to_string()),
        ];
        Lowered::Kernels(vec![KernelSpec {
            entry: "newton_schulz_polynomial",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines: defines.map(|(name, value)| (name.to_owned(), value)).to_vec(),
            grid: [p.len().div_ceil(THREADS) as u32, 1, 1],
            block: [THREADS as u32, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Input(1), Arg::Output(0)],
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |count: usize, n: usize| {
            let shape = vec![count, n, n];
            let x = ExampleInput::Normal { shape: shape.clone(), scale: 0.2 };
            let square = ExampleInput::NormalF32 { shape, scale: 0.2 };
            Example::new(vec![x, square], Attrs::new().with("a", 3.4445).with("b", -4.775).with("c", 2.0315))
        };
        vec![example(3, 5), example(2, 48)]
    }
}
