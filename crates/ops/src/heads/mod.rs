//! One head for all heads of a token: `repeat_heads`, whose gradient is the sum over the heads, `sum_heads`. Keys that all
//! heads share, and gates of whole rows, are repeated with it. Does not know attention.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use crate::call::Call;
use crate::elementwise::{Expr, device_kernel};
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, device_type};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("sum_heads.cu");
const HEADERS: &[(&str, &str)] = &[("types.cuh", include_str!("../cuda/types.cuh"))];

/// Threads of a block, which sums the heads of one token.
const THREADS: usize = 128;

/// y[…, h, d] = x[…, 0, d]
pub struct RepeatHeads;

/// y[…, 0, d] = Σ over h of x[…, h, d]
pub struct SumHeads;

/// The axes of the tokens, heads and columns.
fn heads_of(x: &ValueType) -> Result<(&[Dim], usize, usize), String> {
    match x.shape.as_slice() {
        [tokens @ .., Dim::Fixed(heads), Dim::Fixed(columns)] if x.dtype.is_float() => Ok((tokens, *heads, *columns)),
        _ => Err("x must be floating point […, heads, columns], both known".into()),
    }
}

fn with_heads(x: &ValueType, element: Element, heads: usize) -> Result<Vec<ValueType>, String> {
    let (tokens, _, columns) = heads_of(x)?;
    let shape = tokens.iter().cloned().chain([Dim::Fixed(heads), Dim::Fixed(columns)]).collect::<Vec<_>>();
    Ok(vec![ValueType::new(element, shape)])
}

impl Op for RepeatHeads {
    fn id(&self) -> OpId {
        id::REPEAT_HEADS
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "The one head of a token for each of its heads: y[…, h, d] = x[…, 0, d]. x […, 1, D] → y […, heads, D]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[Attribute { name: "heads", kind: "int", doc: "of the result" }]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x] = inputs else { return Err("takes one input".into()) };
        let heads = attrs.size("heads")?;
        if heads_of(x)?.1 != 1 || heads == 0 {
            return Err("x must have one head, and the result at least one".into());
        }
        with_heads(x, x.dtype, heads)
    }

    fn unchanged(&self, attrs: &Attrs) -> bool {
        attrs.size("heads") == Ok(1)
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let dy = call.dy();
        Gradients::Inputs(vec![call.wanted(0, id::SUM_HEADS, &[dy], Attrs::new())])
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (x, y) = (&call.inputs[0], &call.outputs[0]);
        let axis = x.shape.len() - 2;
        let mut every = x.clone();
        every.shape[axis] = y.shape[axis];
        every.strides[axis] = 0;
        Lowered::Kernels(vec![device_kernel(&[Expr::Input(0)], &[every], call.outputs)])
    }

    crate::reference!(repeat);

    fn examples(&self) -> Vec<Example> {
        let example = |shape: [usize; 4], heads: usize| {
            let x = ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 };
            Example::new(vec![x], Attrs::new().with("heads", heads)).differentiate(&[0])
        };
        vec![example([2, 3, 1, 16], 5), example([1, 7, 1, 5], 3), example([2, 5, 1, 1], 48)]
    }
}

fn repeat<T: Real>(call: &mut Call<'_, T>) {
    let (x, columns) = (call.inputs[0].real(), call.inputs[0].columns());
    let [y] = call.outputs_mut();
    let heads = y.shape()[y.shape().len() - 2];
    y.real().par_chunks_mut(heads * columns).zip(x.par_chunks(columns)).for_each(|(y, x)| {
        y.chunks_mut(columns).for_each(|head| head.copy_from_slice(x));
    });
}

impl Op for SumHeads {
    fn id(&self) -> OpId {
        id::SUM_HEADS
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "The heads of a token added up, in f32 and always in the same order: y[…, 0, d] = Σ over h of x[…, h, d]. x […, \
         heads, D] → y […, 1, D]."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x] = inputs else { return Err("takes one input".into()) };
        with_heads(x, x.dtype, 1)
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let heads = call.emit.value(call.input(0)).shape.iter().rev().nth(1).copied();
        let (dy, attrs) = (call.dy(), Attrs::new().with("heads", heads.expect("checked by the shape rule")));
        Gradients::Inputs(vec![call.wanted(0, id::REPEAT_HEADS, &[dy], attrs)])
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (x, y) = (&call.inputs[0], &call.outputs[0]);
        let [.., heads, columns] = x.shape[..] else { unreachable!("the shape rule requires two axes") };
        // Columns that the threads of a block take at once; the rest of the threads share the heads.
        let wide = columns.next_power_of_two().min(THREADS);
        let numbers = [("HEADS", heads), ("COLUMNS", columns), ("WIDE", wide), ("THREADS", THREADS)];
        let mut defines: Vec<(String, String)> =
            numbers.map(|(name, n)| (name.to_owned(), n.to_string())).into_iter().collect();
        defines.extend(places("X", x).into_iter().chain(places("Y", y)));
        Lowered::Kernels(vec![KernelSpec {
            entry: "sum_heads",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines,
            grid: [(y.len() / columns) as u32, columns.div_ceil(wide) as u32, 1],
            block: [THREADS as u32, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Output(0)],
        }])
    }

    crate::reference!(sum);

    fn examples(&self) -> Vec<Example> {
        let example = |shape: [usize; 4]| {
            let x = ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 };
            Example::new(vec![x], Attrs::new()).differentiate(&[0])
        };
        vec![example([2, 3, 5, 16]), example([1, 7, 3, 5]), example([2, 5, 300, 1]), example([1, 3, 4, 200])]
    }
}

/// The type of a tensor, and where head `h` of a token is.
fn places(name: &str, tensor: &TensorRef) -> [(String, String); 2] {
    let axes = tensor.shape.len();
    let token = TensorRef {
        shape: tensor.shape[..axes - 2].iter().copied().chain([1]).collect(),
        strides: tensor.strides[..axes - 2].iter().copied().chain([1]).collect(),
        ..tensor.clone()
    };
    assert!(tensor.strides[axes - 1] == 1 || tensor.shape[axes - 1] == 1, "the columns of a head have gaps: {tensor}");
    let row = crate::kernel::row_offset(&token);
    let at = format!("({row}+(size_t)(h)*{})", tensor.strides[axes - 2]);
    [(format!("{name}_T"), device_type(tensor.dtype).to_owned()), (format!("{name}_AT(row,h)"), at)]
}

fn sum<T: Real>(call: &mut Call<'_, T>) {
    let x = call.inputs[0];
    let (columns, heads) = (x.columns(), x.shape[x.shape.len() - 2]);
    let x = x.real();
    let [y] = call.outputs_mut();
    y.real().par_chunks_mut(columns).zip(x.par_chunks(heads * columns)).for_each(|(y, x)| {
        y.fill(T::default());
        x.chunks(columns).for_each(|head| y.iter_mut().zip(head).for_each(|(y, x)| *y += *x));
    });
}
