//! The norms of an adapted weight, one for each output. Computed when weights were written: once a step.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, defines_for};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;
use crate::vector::add_scaled;

const SOURCE: &str = include_str!("norms.cu");
const HEADERS: &[(&str, &str)] = &[("types.cuh", include_str!("../cuda/types.cuh"))];

const THREADS: usize = 256;
/// Outputs of a block: with more of them the first matrix is read fewer times and more is kept in registers.
const ROWS: usize = 8;
/// The second matrix's factors of a block fit into 48 KiB of shared memory.
pub const MOST_RANK: usize = (48 << 10) / 4 / ROWS - THREADS / 32;

/// n[o] = ‖w[o] + scale·b[o]·a‖
pub struct AdaptedNorms;

fn is_transposed(attrs: &Attrs) -> bool {
    attrs.flag("transposed").expect("checked by the shape rule")
}

fn scale_of(attrs: &Attrs) -> f64 {
    attrs.float("scale").expect("checked by the shape rule")
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let [w, a, b] = [0, 1, 2].map(|index| call.inputs[index].real());
    let (inputs, rank) = (call.inputs[1].columns(), call.inputs[2].columns());
    let outputs = b.len() / rank;
    let (scale, transposed) = (T::from_f64(scale_of(call.attrs)), is_transposed(call.attrs));
    let [n] = call.outputs_mut();
    n.real().par_iter_mut().enumerate().for_each(|(output, n)| {
        let mut row: Vec<T> = vec![T::default(); inputs];
        for (factor, values) in b[output * rank..][..rank].iter().zip(a.chunks(inputs)) {
            add_scaled(&mut row, scale * *factor, values);
        }
        let weight = |k: usize| if transposed { w[k * outputs + output] } else { w[output * inputs + k] };
        let square = |(k, delta): (usize, &T)| (weight(k) + *delta).to_f64().powi(2);
        *n = T::from_f64(row.iter().enumerate().map(square).sum::<f64>().sqrt());
    });
}

impl Op for AdaptedNorms {
    fn id(&self) -> OpId {
        id::ADAPTED_NORMS
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "n[o] = ‖w[o] + scale·b[o]·a‖, the norm of each row of an adapted weight, in f32. w [N, K], or [K, N] if \
         `transposed`, a [r, K], b [N, r] → n f32 [N]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "scale", kind: "float", doc: "factor of the adapter" },
            Attribute { name: "transposed", kind: "bool?", doc: "the weight is [K, N]" },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [w, a, b] = inputs else { return Err("takes the weight and the two matrices of an adapter".into()) };
        attrs.float("scale")?;
        let transposed = attrs.flag("transposed")?;
        let matrix = |of: &ValueType| match of.shape.as_slice() {
            [Dim::Fixed(rows), Dim::Fixed(columns)] if of.dtype.is_float() => Some((*rows, *columns)),
            _ => None,
        };
        let (Some((rows, columns)), Some(a), Some(b)) = (matrix(w), matrix(a), matrix(b)) else {
            return Err("weight and matrices must be floating-point matrices".into());
        };
        let (outputs, k) = if transposed { (columns, rows) } else { (rows, columns) };
        if a.1 != k || b != (outputs, a.0) {
            return Err(format!("a must be [r, {k}], b [{outputs}, r]"));
        }
        if a.0 > MOST_RANK {
            return Err(format!("the rank is {}, at most {MOST_RANK} is supported", a.0));
        }
        Ok(vec![ValueType::new(Element::F32, [Dim::Fixed(outputs)])])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("norms of weights are taken as constants")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let rank = inputs[1].shape[0] as f64;
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        Cost { flops: inputs[0].len() as f64 * (2.0 * rank + 3.0), bytes }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let [w, a, b] = [0, 1, 2].map(|index| &call.inputs[index]);
        let n = &call.outputs[0];
        assert!(n.is_dense(), "norms are a vector: {n}");
        let numbers = [("N", n.len()), ("K", a.shape[1]), ("RANK", a.shape[0]), ("THREADS", THREADS), ("ROWS", ROWS)];
        let mut defines: Vec<(String, String)> =
            numbers.map(|(name, number)| (name.to_owned(), number.to_string())).into_iter().collect();
        defines.push(("SCALE".to_owned(), format!("{:e}f", scale_of(call.attrs) as f32)));
        defines.push(("TRANSPOSED".to_owned(), u32::from(is_transposed(call.attrs)).to_string()));
        for (name, tensor) in [("W", w), ("A", a), ("B", b)] {
            defines.extend(defines_for(name, tensor));
        }
        Lowered::Kernels(vec![KernelSpec {
            entry: "adapted_norms",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines,
            grid: [n.len().div_ceil(ROWS) as u32, 1, 1],
            block: [THREADS as u32, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Input(1), Arg::Input(2), Arg::Output(0)],
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |outputs: usize, inputs: usize, rank: usize, transposed: bool| {
            let weight = if transposed { [inputs, outputs] } else { [outputs, inputs] };
            let matrix = |shape: [usize; 2]| ExampleInput::Normal { shape: shape.to_vec(), scale: 0.5 };
            let attrs = Attrs::new().with("scale", 0.75).with("transposed", transposed);
            Example::new(vec![matrix(weight), matrix([rank, inputs]), matrix([outputs, rank])], attrs)
        };
        vec![example(24, 64, 4, false), example(13, 300, 1, false), example(20, 33, 16, true)]
    }
}
