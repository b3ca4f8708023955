//! Column sums: the gradient of a bias.

use graph::{Element, OpId, ValueType};
use program::Arg;
use tensor::Attrs;

use super::cpu;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, defines_for};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::registry::id;

const SOURCE: &str = include_str!("sum_rows.cu");
const HEADERS: &[(&str, &str)] = &[("types.cuh", include_str!("../cuda/types.cuh"))];

/// Threads of one block; one thread works on one column.
const THREADS: usize = 128;
/// Rows that one block sums before the partial sums are added in order.
const ROWS_PER_BLOCK: usize = 64;

/// s = Σ over rows of x
pub struct SumRows;

fn rows(call: &LowerCall<'_>) -> usize {
    call.inputs[0].shape.iter().rev().skip(1).product()
}

impl Op for SumRows {
    fn id(&self) -> OpId {
        id::SUM_ROWS
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "s = Σ over rows of x, in f32. x […, N] → s f32 [N]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[Attribute { name: "accumulate", kind: "bool?", doc: "add to the result instead of overwriting it" }]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x] = inputs else { return Err("takes one input".into()) };
        attrs.flag("accumulate")?;
        if !x.dtype.is_float() || x.last().is_none() {
            return Err("the input must be floating point with a known last axis".into());
        }
        Ok(vec![ValueType::new(Element::F32, [x.shape[x.shape.len() - 1].clone()])])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        rows(call).div_ceil(ROWS_PER_BLOCK) * call.outputs[0].len() * 4
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (rows, columns) = (rows(call), call.outputs[0].len());
        let parts = rows.div_ceil(ROWS_PER_BLOCK);
        let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
        let kernel = |entry: &'static str, defines: Vec<(String, String)>, blocks: usize, args: Vec<Arg>| KernelSpec {
            entry,
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines: [("COLUMNS", columns), ("THREADS", THREADS)]
                .map(|(name, n)| (name.to_owned(), n.to_string()))
                .into_iter()
                .chain(defines)
                .collect(),
            grid: [columns.div_ceil(THREADS) as u32, blocks as u32, 1],
            block: [THREADS as u32, 1, 1],
            shared_bytes: 0,
            args,
        };
        let mut input = defines_for("X", &call.inputs[0]);
        input.push(("ROWS".to_owned(), rows.to_string()));
        input.push(("ROWS_PER_BLOCK".to_owned(), ROWS_PER_BLOCK.to_string()));
        let last =
            vec![("PARTS".to_owned(), parts.to_string()), ("ACCUMULATE".to_owned(), (accumulate as u32).to_string())];
        Lowered::Kernels(vec![
            kernel("sum_rows_partial", input, parts, vec![Arg::Input(0), Arg::Scratch(0)]),
            kernel("sum_rows_total", last, 1, vec![Arg::Scratch(0), Arg::Output(0)]),
        ])
    }

    crate::reference!(cpu::sum_rows);

    fn examples(&self) -> Vec<Example> {
        let example = |shape: Vec<usize>, attrs: Attrs| {
            let state = vec![ExampleInput::NormalF32 { shape: vec![shape[shape.len() - 1]], scale: 1.0 }];
            Example::new(vec![ExampleInput::Normal { shape, scale: 1.0 }], attrs).with_state(state)
        };
        vec![example(vec![2, 75, 40], Attrs::new()), example(vec![7, 300], Attrs::new().with("accumulate", true))]
    }
}
