//! The place of the largest number of every row: the likeliest token of a row of logits.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use tensor::Attrs;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, defines_for};
use crate::layout::row_width;
use crate::op::{Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("likeliest.cu");
const HEADERS: &[(&str, &str)] = &[
    ("types.cuh", include_str!("../cuda/types.cuh")),
    ("pack.cuh", include_str!("../cuda/pack.cuh")),
    device::DEPENDENT_LAUNCH,
];

const THREADS: u32 = 1024;

/// y = likeliest(x)
pub struct Likeliest;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let [x] = call.inputs else { unreachable!("the shape rule requires one input") };
    let [y] = call.outputs_mut();
    for (y, row) in y.int().iter_mut().zip(x.real().chunks(x.columns())) {
        let mut best = (T::negative_infinity(), 0);
        for (index, x) in row.iter().enumerate() {
            if *x > best.0 {
                best = (*x, index);
            }
        }
        *y = best.1 as i32;
    }
}

impl Op for Likeliest {
    fn id(&self) -> OpId {
        id::LIKELIEST
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "The place of the largest number of every row, the first of several; a row without a number above −∞ gives 0. x \
         […, N] → y i32 […]."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x] = inputs else { return Err("takes x".into()) };
        match x.shape.split_last() {
            Some((Dim::Fixed(_), rows)) if !rows.is_empty() && x.dtype.is_float() => {
                Ok(vec![ValueType::new(Element::I32, rows.to_vec())])
            }
            _ => Err("x must be floating point […, N], N known".into()),
        }
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("a place is no function with slopes")
    }

    fn cost(&self, inputs: &[TensorRef], _outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        Cost { flops: 0.0, bytes: inputs[0].bytes() as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (x, y) = (&call.inputs[0], &call.outputs[0]);
        assert!(y.is_dense(), "places lie densely: {y}");
        let columns = x.shape[x.shape.len() - 1];
        let numbers = [("COLUMNS", columns), ("WIDTH", row_width(&[x])), ("THREADS", THREADS as usize)];
        let mut defines: Vec<_> = numbers.map(|(name, n)| (name.to_owned(), n.to_string())).to_vec();
        defines.extend(defines_for("X", x));
        Lowered::Kernels(vec![KernelSpec {
            entry: "likeliest",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines,
            grid: [y.len() as u32, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Output(0)],
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let given = |shape: &[usize], values: Vec<f32>| {
            Example::new(vec![ExampleInput::F32 { shape: shape.to_vec(), values }], Attrs::new())
        };
        let ties: Vec<f32> = (0..9000).map(|i| (i * 7919 % 1000) as f32 / 8.0).collect();
        vec![
            given(&[1, 1, 3000], (0..3000).map(|i| (i * 1237 % 3001) as f32).collect()),
            given(&[3, 3000], ties),
            given(&[2, 5], vec![f32::NEG_INFINITY; 10]),
            given(&[1, 2, 1], vec![-3.0, 4.0]),
        ]
    }
}
