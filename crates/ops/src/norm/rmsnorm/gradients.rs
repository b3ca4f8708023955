//! Both gradients of RMS normalisation from one reading of x and dy, alone or joined with the addition of
//! the residual stream's gradient.

use graph::{Element, ValueType};
use program::{Arg, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use super::cpu::{backward_row, write_weight_gradient};
use super::weight::sum_partials;
use super::{ATTRIBUTES, HEADERS, THREADS, check_weight, row_shape, rows_of, spec};
use crate::call::Call;
use crate::elementwise::round_to;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::layout::row_width;
use crate::op::{Attribute, Class, Example, ExampleInput, Fusion, Keeps, Op};
use crate::real::Real;

const SOURCE: &str = include_str!("gradients.cu");

const ACCUMULATE: Attribute =
    Attribute { name: "accumulate", kind: "bool?", doc: "add to dw instead of overwriting it" };

/// Threads that run at once on 132 multiprocessors when each keeps a few packs and its part of dw in registers;
/// every block leaves a part of dw.
const RESIDENT: usize = 132 * 1024;

/// Threads of one row, at most: one pack each is faster than two in half as many (4096 columns: 44 µs, not 52).
const MOST_LANES: usize = 512;

/// How rows are dealt to threads.
struct Deal {
    /// Threads of one row.
    lanes: usize,
    /// Threads of one block: one row, or as many rows as warps.
    threads: usize,
    blocks: usize,
}

impl Deal {
    /// A warp for a short row; for others a block that holds a pack, or few, in each thread.
    fn new(tensors: &[&TensorRef]) -> Deal {
        let (rows, columns) = (rows_of(tensors[0]), *tensors[0].shape.last().expect("the shape rule requires an axis"));
        let lanes = (columns / row_width(tensors)).next_power_of_two().clamp(32, MOST_LANES);
        let threads = if lanes == 32 { THREADS as usize } else { lanes };
        Deal { lanes, threads, blocks: rows.div_ceil(threads / lanes).min(RESIDENT / threads) }
    }
}

fn tensors<'a>(call: &LowerCall<'a>, dx: usize) -> Vec<(&'static str, &'a TensorRef)> {
    let (inputs, outputs): (&'a [TensorRef], &'a [TensorRef]) = (call.inputs, call.outputs);
    let mut tensors = vec![("X", &inputs[0]), ("W", &inputs[1]), ("DY", &inputs[3]), ("DX", &outputs[dx])];
    tensors.extend(inputs.get(4).map(|residual| ("RESIDUAL", residual)));
    tensors
}

fn scratch(call: &LowerCall<'_>, dx: usize) -> usize {
    let tensors: Vec<&TensorRef> = tensors(call, dx).into_iter().map(|(_, tensor)| tensor).collect();
    Deal::new(&tensors).blocks * call.outputs[1 - dx].bytes()
}

/// `dx` is the place of dx among the two results; dw is the other.
fn lower(call: &LowerCall<'_>, dx: usize) -> Lowered {
    let named = tensors(call, dx);
    let all: Vec<&TensorRef> = named.iter().map(|(_, tensor)| *tensor).collect();
    let deal = Deal::new(&all);
    let mut both = spec("rmsnorm_gradients", call, &named, rows_of(&call.inputs[0]));
    both.source = SOURCE.to_owned();
    both.headers = HEADERS.to_vec();
    for (name, value) in &mut both.defines {
        match name.as_str() {
            "LANES" => *value = deal.lanes.to_string(),
            "THREADS" => *value = deal.threads.to_string(),
            _ => {}
        }
    }
    both.grid = [deal.blocks as u32, 1, 1];
    both.block = [deal.threads as u32, 1, 1];
    both.args = (0..call.inputs.len()).map(Arg::Input).chain([Arg::Output(dx), Arg::Scratch(0)]).collect();
    let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
    let columns = call.outputs[1 - dx].len();
    Lowered::Kernels(vec![both, sum_partials(columns, deal.blocks, accumulate, Arg::Scratch(0), Arg::Output(1 - dx))])
}

fn infer(inputs: &[ValueType], attrs: &Attrs) -> Result<(ValueType, ValueType), String> {
    let [x, weight, r, dy, residual @ ..] = inputs else { return Err("takes x, the weight, r and dy".into()) };
    check_weight(x, weight)?;
    if dy.shape != x.shape || r.shape != row_shape(x) || residual.iter().any(|t| t.shape != x.shape) {
        return Err("gradients must be shaped like x, r like its rows".into());
    }
    ["offset", "accumulate"].iter().try_for_each(|name| attrs.flag(name).map(|_| ()).map_err(|e| e.0))?;
    Ok((x.clone(), ValueType::new(Element::F32, weight.shape.clone())))
}

/// Both results; `dx` is the place of dx among them.
fn reference<T: Real>(call: &mut Call<'_, T>, dx: usize) {
    let flag = |name: &str| call.attrs.flag(name).expect("checked by the shape rule");
    let (offset, accumulate) = (flag("offset"), flag("accumulate"));
    let [x, w, r, dy, residual @ ..] = call.inputs else { unreachable!("the shape rule requires x, w, r and dy") };
    let (x, w, r, dy) = (x.real(), w.real(), r.real(), dy.real());
    let columns = w.len();
    let storage = call.outputs[dx].storage();
    let rows = call.outputs[dx].real().par_chunks_mut(columns).zip(x.par_chunks(columns)).zip(dy.par_chunks(columns));
    rows.zip(r).for_each(|(((dx, x), dy), r)| backward_row(x, w, *r, dy, offset, dx));
    if let [residual] = residual {
        let sums = call.outputs[dx].real().par_iter_mut().zip(residual.real());
        sums.for_each(|(dx, residual)| *dx = round_to(storage, *dx) + *residual);
    }
    write_weight_gradient(x, r, dy, call.outputs[1 - dx].real(), accumulate);
}

fn alone<T: Real>(call: &mut Call<'_, T>) {
    reference(call, 0)
}

fn added<T: Real>(call: &mut Call<'_, T>) {
    reference(call, 1)
}

fn examples(dx: usize, residual: bool) -> Vec<Example> {
    let example = |rows: usize, columns: usize, attrs: Attrs| {
        let normal = |shape: &[usize]| ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 };
        let matrix = || normal(&[rows, columns]);
        let r = ExampleInput::UniformF32 { shape: vec![rows], low: 0.5, high: 1.5 };
        let mut inputs = vec![matrix(), normal(&[columns]), r, matrix()];
        inputs.extend(residual.then(matrix));
        let mut state = vec![matrix(), ExampleInput::NormalF32 { shape: vec![columns], scale: 1.0 }];
        state.rotate_left(dx);
        Example::new(inputs, attrs).with_state(state)
    };
    vec![
        example(150, 64, Attrs::new()),
        example(7, 300, Attrs::new().with("accumulate", true).with("offset", true)),
        example(5000, 24, Attrs::new()),
        example(40, 33, Attrs::new()),
        example(600, 2048, Attrs::new()),
    ]
}

/// dx, dw = gradients of `rmsnorm`
pub struct RmsNormGradients;

impl Op for RmsNormGradients {
    fn name(&self) -> &'static str {
        "rmsnorm_gradients"
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "`rmsnorm_backward` and `rmsnorm_weight_gradient` from one reading. x […, H], w [H], r f32 […], dy […, H] → dx \
         like x, dw f32 [H]. With `accumulate`, dw is added to."
    }

    fn attributes(&self) -> &'static [Attribute] {
        const ALL: &[Attribute] = &[ATTRIBUTES[1], ACCUMULATE];
        ALL
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        if inputs.len() != 4 {
            return Err("takes x, the weight, r and dy".into());
        }
        infer(inputs, attrs).map(|(dx, dw)| vec![dx, dw])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        scratch(call, 0)
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        lower(call, 0)
    }

    crate::reference!(alone);

    fn examples(&self) -> Vec<Example> {
        examples(0, false)
    }
}

/// dw, dx = rmsnorm_gradients(x, w, r, dy), dx + residual_gradient
pub struct RmsNormGradientsAdd;

impl Op for RmsNormGradientsAdd {
    fn name(&self) -> &'static str {
        "rmsnorm_gradients_add"
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "`rmsnorm_gradients`, and the gradient of the residual stream added to dx as it would be stored. x […, H], w \
         [H], r f32 […], dy, residual_gradient […, H] → dw f32 [H], dx like x. With `accumulate`, dw is added to."
    }

    fn attributes(&self) -> &'static [Attribute] {
        RmsNormGradients.attributes()
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        if inputs.len() != 5 {
            return Err("takes x, the weight, r, dy and the residual gradient".into());
        }
        infer(inputs, attrs).map(|(dx, dw)| vec![dw, dx])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        scratch(call, 1)
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        lower(call, 1)
    }

    crate::reference!(added);

    fn examples(&self) -> Vec<Example> {
        examples(1, true)
    }

    fn fusions(&self) -> Vec<Fusion> {
        let onto = |operand| Fusion {
            first: "rmsnorm_gradients",
            first_inputs: 4,
            second: "add",
            operand,
            keeps: Keeps::Others,
        };
        vec![onto(0), onto(1)]
    }
}
