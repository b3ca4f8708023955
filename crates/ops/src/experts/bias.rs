//! A bias for each group of rows, and its gradient: the sums of the groups' rows.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use super::{PACK, example_groups, ints, kernel, normal, vector};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered, defines_for};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("bias.cu");

const THREADS: usize = 256;

const GROUPS: Attribute = Attribute { name: "groups", kind: "int", doc: "G, the number of biases" };

/// y = x + b[group]
pub struct GroupedBias;

/// db[group] = Σ over the rows of the group of dy
pub struct GroupedRowSums;

fn columns(t: &ValueType) -> Result<usize, String> {
    t.last().filter(|_| t.dtype.is_float()).ok_or_else(|| "x must be floating point, its last axis known".into())
}

fn check_offsets(offsets: &ValueType, groups: usize) -> Result<(), String> {
    let fits = offsets.dtype == Element::I32 && offsets.shape == [Dim::Fixed(groups + 1)];
    fits.then_some(()).ok_or_else(|| format!("the offsets must be i32 [{}]", groups + 1))
}

fn numbers(x: &TensorRef, groups: usize) -> Vec<(&'static str, usize)> {
    let columns = x.shape[x.shape.len() - 1];
    vec![("ROWS", x.len() / columns.max(1)), ("COLUMNS", columns), ("GROUPS", groups)]
}

impl Op for GroupedBias {
    fn id(&self) -> OpId {
        id::GROUPED_BIAS
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "y = x + b[g] for the rows of each group g, those from offsets[g] to offsets[g + 1]. x […, N], whose rows are all \
         axes but the last, b [G, N], offsets i32 [G + 1] → like x."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[GROUPS]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, b, offsets] = inputs else { return Err("takes x, the biases and the offsets".into()) };
        let (groups, columns) = (attrs.size("groups")?, columns(x)?);
        check_offsets(offsets, groups)?;
        if !b.dtype.is_float() || b.shape != [Dim::Fixed(groups), Dim::Fixed(columns)] {
            return Err(format!("the biases must be [{groups}, {columns}]"));
        }
        Ok(vec![x.clone()])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let (dy, offsets, attrs) = (call.dy(), call.input(2), call.node.attrs.clone());
        let dx = call.wanted[0].then_some(dy);
        let db = call.wanted(1, id::GROUPED_ROW_SUMS, &[dy, offsets], attrs);
        Gradients::Inputs(vec![dx, db, None])
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (x, b, y) = (&call.inputs[0], &call.inputs[1], &call.outputs[0]);
        let mut numbers = numbers(x, call.inputs[2].len() - 1);
        numbers.push(("VECTOR", vector(&[x, b, y])));
        let args = vec![Arg::Input(0), Arg::Input(1), Arg::Input(2), Arg::Output(0)];
        let mut kernel = kernel("grouped_bias", SOURCE, [numbers[0].1, 1, 1], THREADS, &numbers, args);
        kernel.headers.push(PACK);
        kernel.defines.extend([("X", x), ("B", b), ("Y", y)].iter().flat_map(|(name, t)| defines_for(name, t)));
        Lowered::Kernels(vec![kernel])
    }

    crate::reference!(bias);

    fn examples(&self) -> Vec<Example> {
        let example = |tokens: usize, k: usize, groups: usize, columns: usize| {
            let (_, _, offsets) = example_groups(tokens, k, groups);
            let inputs =
                vec![normal(&[1, tokens, k, columns]), normal(&[groups, columns]), ints(&[groups + 1], offsets)];
            Example::new(inputs, Attrs::new().with("groups", groups)).differentiate(&[0, 1])
        };
        vec![example(6, 2, 4, 8), example(20, 3, 5, 300)]
    }
}

fn bias<T: Real>(call: &mut Call<'_, T>) {
    let [x, b, offsets] = call.inputs else { unreachable!("the shape rule requires three inputs") };
    let (columns, offsets, x, b) = (x.columns(), offsets.int(), x.real(), b.real());
    let [y] = call.outputs_mut();
    y.real().par_chunks_mut(columns).zip(x.par_chunks(columns)).enumerate().for_each(|(row, (y, x))| {
        let group = offsets.partition_point(|first| *first as usize <= row) - 1;
        let own = &b[group * columns..(group + 1) * columns];
        y.iter_mut().zip(x.iter().zip(own)).for_each(|(y, (x, b))| *y = *x + *b);
    });
}

impl Op for GroupedRowSums {
    fn id(&self) -> OpId {
        id::GROUPED_ROW_SUMS
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "db[g] = Σ over the rows of group g of dy, in f32 and always in the same order; 0 for a group without rows. dy […, \
         N], offsets i32 [G + 1] → f32 [G, N]. With `accumulate`, added to."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[GROUPS, Attribute { name: "accumulate", kind: "bool?", doc: "add to db instead of overwriting it" }]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [dy, offsets] = inputs else { return Err("takes dy and the offsets".into()) };
        let groups = attrs.size("groups")?;
        attrs.flag("accumulate")?;
        check_offsets(offsets, groups)?;
        Ok(vec![ValueType::new(Element::F32, [Dim::Fixed(groups), Dim::Fixed(columns(dy)?)])])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (dy, db) = (&call.inputs[0], &call.outputs[0]);
        assert!(db.is_dense(), "gradients of biases are dense: {db}");
        let mut numbers = numbers(dy, call.inputs[1].len() - 1);
        numbers.push(("ACCUMULATE", call.attrs.flag("accumulate").expect("checked by the shape rule") as usize));
        let grid = [numbers[1].1.div_ceil(32), numbers[2].1, 1];
        let args = vec![Arg::Input(0), Arg::Input(1), Arg::Output(0)];
        let mut kernel = kernel("grouped_row_sums", SOURCE, grid, THREADS, &numbers, args);
        kernel.headers.push(PACK);
        kernel.defines.extend(defines_for("DY", dy));
        Lowered::Kernels(vec![kernel])
    }

    crate::reference!(row_sums);

    fn examples(&self) -> Vec<Example> {
        let example = |tokens: usize, groups: usize, columns: usize, accumulate: bool| {
            let (_, _, offsets) = example_groups(tokens, 2, groups);
            let attrs = Attrs::new().with("groups", groups).with("accumulate", accumulate);
            let state = ExampleInput::NormalF32 { shape: vec![groups, columns], scale: 1.0 };
            let inputs = vec![normal(&[1, tokens, 2, columns]), ints(&[groups + 1], offsets)];
            Example::new(inputs, attrs).with_state(vec![state])
        };
        vec![example(6, 4, 8, false), example(60, 3, 70, true)]
    }
}

fn row_sums<T: Real>(call: &mut Call<'_, T>) {
    let [dy, offsets] = call.inputs else { unreachable!("the shape rule requires two inputs") };
    let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
    let (columns, offsets, dy) = (dy.columns(), offsets.int(), dy.real());
    let [db] = call.outputs_mut();
    db.real().par_chunks_mut(columns).enumerate().for_each(|(group, db)| {
        let mut sum = vec![T::default(); columns];
        for row in offsets[group] as usize..offsets[group + 1] as usize {
            sum.iter_mut().zip(&dy[row * columns..(row + 1) * columns]).for_each(|(sum, dy)| *sum += *dy);
        }
        db.iter_mut().zip(sum).for_each(|(db, sum)| *db = if accumulate { *db + sum } else { sum });
    });
}
