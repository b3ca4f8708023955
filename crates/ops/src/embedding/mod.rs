//! Embedding lookup by token id, and the gradient of the table.

mod cpu;
mod noise;

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use tensor::{Attrs, DType};

use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, defines_for};
use crate::layout::row_width;
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::registry::id;

pub use noise::EmbeddingNoise;

const LOOK_UP: &str = include_str!("embedding.cu");
const GRADIENT: &str = include_str!("gradient.cu");
const HEADERS: &[(&str, &str)] =
    &[("types.cuh", include_str!("../cuda/types.cuh")), ("pack.cuh", include_str!("../cuda/pack.cuh"))];

/// Number of threads in a block.
const THREADS: usize = 256;
/// Threads of a block that ranks tokens, and the number of them that share a token.
const RANKING: usize = 1024;
const STRANDS: usize = 8;

const PADDING: Attribute = Attribute {
    name: "padding_idx",
    kind: "int?",
    doc: "the row of the table that gets no gradient, as `nn.Embedding(padding_idx)` has it",
};

/// y = the rows of the table at ids
pub struct Embedding;

/// dw[id] = Σ of dy over the tokens with that id
pub struct EmbeddingBackward;

fn padding_of(attrs: &Attrs, rows: usize) -> Result<Option<usize>, String> {
    match attrs.optional_int("padding_idx")? {
        None => Ok(None),
        Some(id) => match usize::try_from(id) {
            Ok(id) if id < rows => Ok(Some(id)),
            _ => Err(format!("padding_idx {id} is no row of a table of {rows}")),
        },
    }
}

fn check_ids(ids: &ValueType) -> Result<(), String> {
    if ids.dtype == Element::I32 { Ok(()) } else { Err(format!("the ids must be i32, not {}", ids.dtype)) }
}

/// A kernel of `blocks` blocks of `threads` threads.
fn kernel(
    entry: &'static str,
    source: &str,
    call: &LowerCall<'_>,
    (blocks, threads): (usize, usize),
    numbers: &[(&str, usize)],
    args: Vec<Arg>,
) -> KernelSpec {
    let of_all = [("THREADS", threads), ("TOKENS", call.inputs[0].len())];
    KernelSpec {
        entry,
        source: source.to_owned(),
        headers: HEADERS.to_vec(),
        defines: of_all.iter().chain(numbers).map(|(name, n)| ((*name).to_owned(), n.to_string())).collect(),
        grid: [blocks as u32, 1, 1],
        block: [threads as u32, 1, 1],
        shared_bytes: 0,
        args,
    }
}

impl Op for Embedding {
    fn id(&self) -> OpId {
        id::EMBEDDING
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "y = the rows of the table at ids. ids i32 […], table [V, H] → y […, H]. An id outside of the table is refused \
         before the batch reaches the engine; on a GPU its row would be NaN."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[PADDING]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [ids, table] = inputs else { return Err("takes ids and the table".into()) };
        check_ids(ids)?;
        let [Dim::Fixed(rows), Dim::Fixed(columns)] = table.shape.as_slice() else {
            return Err("the table must be [V, H]".into());
        };
        padding_of(attrs, *rows)?;
        let shape: Vec<Dim> = ids.shape.iter().cloned().chain([Dim::Fixed(*columns)]).collect();
        Ok(vec![ValueType::new(table.dtype, shape)])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let (ids, dy) = (call.input(0), call.dy());
        let rows = call.emit.value(call.input(1)).shape[0];
        let mut attrs = Attrs::new().with("rows", rows);
        if let Some(padding) = call.node.attrs.get("padding_idx") {
            attrs = attrs.with("padding_idx", padding.clone());
        }
        Gradients::Inputs(vec![None, call.wanted(1, id::EMBEDDING_BACKWARD, &[ids, dy], attrs)])
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        Cost { flops: 0.0, bytes: (inputs[0].bytes() + 2 * outputs[0].bytes()) as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (ids, table, y) = (&call.inputs[0], &call.inputs[1], &call.outputs[0]);
        let args = vec![Arg::Input(0), Arg::Input(1), Arg::Output(0)];
        let numbers = [("ROWS", table.shape[0]), ("COLUMNS", table.shape[1])];
        let mut kernel = kernel("embedding", LOOK_UP, call, (ids.len(), THREADS), &numbers, args);
        kernel.defines.extend(defines_for("W", table));
        kernel.defines.extend(defines_for("Y", y));
        Lowered::Kernels(vec![kernel])
    }

    crate::reference!(cpu::forward);

    fn examples(&self) -> Vec<Example> {
        let example = |ids: &[usize], values: Vec<i32>, table: &[usize], attrs: Attrs| {
            let ids = ExampleInput::Ints { shape: ids.to_vec(), values };
            Example::new(vec![ids, ExampleInput::Normal { shape: table.to_vec(), scale: 1.0 }], attrs)
        };
        vec![
            example(&[2, 3], vec![4, 0, 6, 4, 4, 1], &[7, 24], Attrs::new()).differentiate(&[1]),
            example(&[300], (0..300).map(|i| i * i % 11).collect(), &[11, 8], Attrs::new()).differentiate(&[1]),
            // The padding row's missing gradient is no derivative of the forward pass: not compared with one.
            example(&[5], vec![2, 0, 1, 0, 2], &[3, 300], Attrs::new().with("padding_idx", 0)),
        ]
    }
}

impl Op for EmbeddingBackward {
    fn id(&self) -> OpId {
        id::EMBEDDING_BACKWARD
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "Table gradient of `embedding`: dw[id] = Σ of dy over the tokens with that id, in the order of the tokens. \
         ids i32 […], dy […, H] → dw f32 [rows, H]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "rows", kind: "int", doc: "V, the rows of the table" },
            PADDING,
            Attribute { name: "accumulate", kind: "bool?", doc: "add to the result instead of overwriting it" },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [ids, dy] = inputs else { return Err("takes ids and dy".into()) };
        check_ids(ids)?;
        let rows = attrs.size("rows")?;
        padding_of(attrs, rows)?;
        attrs.flag("accumulate")?;
        match dy.shape.split_last() {
            Some((columns @ Dim::Fixed(_), tokens)) if tokens == ids.shape.as_slice() => {
                Ok(vec![ValueType::new(Element::F32, [Dim::Fixed(rows), columns.clone()])])
            }
            _ => Err("dy must have one row for each id".into()),
        }
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], attrs: &Attrs) -> Cost {
        let touched = if attrs.flag("accumulate").unwrap_or(false) {
            2 * (inputs[1].len() * 4).min(outputs[0].bytes())
        } else {
            outputs[0].bytes()
        };
        Cost { flops: inputs[1].len() as f64, bytes: (inputs[0].bytes() + inputs[1].bytes() + touched) as f64 }
    }

    /// Four i32 for each token, and one for each row.
    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        4 * (4 * call.inputs[0].len() + call.outputs[0].shape[0])
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (tokens, dy, dw) = (call.inputs[0].len(), &call.inputs[1], &call.outputs[0]);
        assert!(dw.is_dense() && dw.dtype == DType::F32, "table gradients are dense f32: {dw}");
        let (rows, columns) = (dw.shape[0], dw.shape[1]);
        let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
        let padding = padding_of(call.attrs, rows).expect("checked by the shape rule");
        let [rank, total, start, order, first] = [0, 1, 2, 3, 4].map(|n| Arg::Scratch(4 * tokens * n));
        let ids = || Arg::Input(0);
        let make = |entry, shape, numbers: &[(&str, usize)], args| kernel(entry, GRADIENT, call, shape, numbers, args);
        let mut kernels = Vec::with_capacity(5);
        if !accumulate {
            let blocks = dw.len().div_ceil(THREADS * 8).min(4096);
            kernels.push(make("embedding_clear", (blocks, THREADS), &[("CLEAR", dw.len())], vec![Arg::Output(0)]));
        }
        let ranking = (tokens.div_ceil(RANKING / STRANDS), RANKING);
        let args = vec![ids(), rank.clone(), total.clone(), first.clone()];
        kernels.push(make("embedding_rank", ranking, &[("STRANDS", STRANDS), ("ROWS", rows)], args));
        let args = vec![rank.clone(), total.clone(), start.clone()];
        kernels.push(make("embedding_starts", (1, 1024), &[("SCAN", 1)], args));
        let args = vec![ids(), rank.clone(), start.clone(), first, order.clone()];
        let over_tokens = (tokens.div_ceil(THREADS), THREADS);
        kernels.push(make("embedding_order", over_tokens, &[("ORDER", 1), ("ROWS", rows)], args));
        let width = row_width(&[dy, dw]);
        let threads = columns.div_ceil(width).next_multiple_of(32).min(THREADS);
        let numbers = [("ROWS", rows), ("COLUMNS", columns), ("ACCUMULATE", accumulate as usize), ("WIDTH", width)];
        let args = vec![ids(), rank, total, start, order, Arg::Input(1), Arg::Output(0)];
        let mut sum = make("embedding_backward", (tokens, threads), &numbers, args);
        sum.defines.push(("PADDING".to_owned(), padding.map(|id| id as i64).unwrap_or(-1).to_string()));
        sum.defines.extend(defines_for("DY", dy));
        kernels.push(sum);
        Lowered::Kernels(kernels)
    }

    crate::reference!(cpu::backward);

    fn examples(&self) -> Vec<Example> {
        let example = |values: Vec<i32>, columns: usize, rows: usize, attrs: Attrs| {
            let dy = ExampleInput::Normal { shape: vec![values.len(), columns], scale: 1.0 };
            let ids = ExampleInput::Ints { shape: vec![values.len()], values };
            Example::new(vec![ids, dy], attrs.with("rows", rows))
                .with_state(vec![ExampleInput::NormalF32 { shape: vec![rows, columns], scale: 1.0 }])
        };
        let scattered = |n: i32, rows: i32| (0..n).map(|i| (i * i + 3 * i) % rows).collect::<Vec<_>>();
        vec![
            example(scattered(40, 9), 24, 11, Attrs::new()),
            example(scattered(600, 50), 8, 64, Attrs::new().with("padding_idx", 4)),
            example(scattered(20, 5), 300, 6, Attrs::new().with("accumulate", true).with("padding_idx", 0)),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Array, apply};

    #[test]
    fn the_padding_row_gets_no_gradient_and_repeated_ids_add_up() {
        let (ids, dy) = (Array::<f32>::Int(vec![2, 0, 2, 0]), Array::Real(vec![1.0, 2.0, 4.0, 8.0]));
        let run = |attrs: Attrs| {
            let mut out = [(vec![3, 1], Array::Real(vec![0.5; 3]))];
            apply(&EmbeddingBackward, &attrs.with("rows", 3), &[(&[4], &ids), (&[4, 1], &dy)], &mut out);
            out[0].1.real().to_vec()
        };
        assert_eq!(run(Attrs::new()), [10.0, 0.0, 5.0]);
        assert_eq!(run(Attrs::new().with("padding_idx", 0)), [0.0, 0.0, 5.0]);
        assert_eq!(run(Attrs::new().with("padding_idx", 0).with("accumulate", true)), [0.5, 0.5, 5.5]);
    }

    #[test]
    fn shapes_follow_the_ids() {
        let ids = ValueType::new(Element::I32, [Dim::Symbol("B".into()), Dim::Symbol("T".into())]);
        let table = ValueType::new(Element::Float, [Dim::Fixed(100), Dim::Fixed(8)]);
        let y = Embedding.infer(&[ids.clone(), table.clone()], &Attrs::new()).unwrap();
        assert_eq!(y[0].to_string(), "float[B, T, 8]");
        let wrong = Embedding.infer(&[ids, table], &Attrs::new().with("padding_idx", 100)).unwrap_err();
        assert!(wrong.contains("no row of a table of 100"), "{wrong}");
    }
}
