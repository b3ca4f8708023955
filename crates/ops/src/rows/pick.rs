//! One token of every row: the head of a model needs only the last token of a prompt.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use tensor::Attrs;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, defines_for};
use crate::op::{Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("pick.cu");
const HEADERS: &[(&str, &str)] = &[("types.cuh", include_str!("../cuda/types.cuh"))];

const THREADS: u32 = 256;

/// y = pick_token(x, index)
pub struct PickToken;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let [x, index] = call.inputs else { unreachable!("the shape rule requires two inputs") };
    let (tokens, columns) = (x.shape[1], x.shape[2]);
    let [y] = call.outputs_mut();
    for (row, (y, index)) in y.real().chunks_mut(columns).zip(index.int()).enumerate() {
        let token = usize::try_from(*index).ok().filter(|token| *token < tokens);
        let token = row * tokens + token.unwrap_or_else(|| panic!("row {row} has no token {index} of {tokens}"));
        y.copy_from_slice(&x.real()[token * columns..][..columns]);
    }
}

impl Op for PickToken {
    fn id(&self) -> OpId {
        id::PICK_TOKEN
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "One token of every row, y[b, 0] = x[b, index[b]]. x [B, T, N], index i32 [B], each from 0 to below T → y \
         [B, 1, N]."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, index] = inputs else { return Err("takes x and the index".into()) };
        let [batch, tokens, columns @ Dim::Fixed(_)] = x.shape.as_slice() else {
            return Err("x must be [B, T, N], N known".into());
        };
        if index.dtype != Element::I32 || index.shape != [batch.clone()] || !x.dtype.is_float() {
            return Err(format!("x must be floating point, and the index i32 [{batch}]"));
        }
        Ok(vec![ValueType::new(x.dtype, [batch.clone(), tokens.with_extent(1), columns.clone()])])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("only what generates text picks tokens")
    }

    fn cost(&self, _inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        Cost { flops: 0.0, bytes: 2.0 * outputs[0].bytes() as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (x, y) = (&call.inputs[0], &call.outputs[0]);
        let numbers = [("TOKENS", x.shape[1]), ("COLUMNS", x.shape[2]), ("THREADS", THREADS as usize)];
        let mut defines: Vec<_> = numbers.map(|(name, n)| (name.to_owned(), n.to_string())).to_vec();
        defines.extend(defines_for("X", x).into_iter().chain(defines_for("Y", y)));
        Lowered::Kernels(vec![KernelSpec {
            entry: "pick_token",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines,
            grid: [x.shape[0] as u32, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Input(1), Arg::Output(0)],
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |shape: [usize; 3], index: &[i32]| {
            let x = ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 };
            let index = ExampleInput::Ints { shape: vec![shape[0]], values: index.to_vec() };
            Example::new(vec![x, index], Attrs::new())
        };
        vec![example([1, 5, 24], &[4]), example([3, 2, 300], &[0, 1, 0]), example([2, 1, 7], &[0, 0])]
    }
}
