//! Products of codes in which every group of rows has a matrix of its own: those of the numbers that the codes stand for.
//! Codes of eight bits come as they are, those of four bits as code times scale of the block, numbers of the compute type. A
//! matrix has its own scale, the rows of all groups have one.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arithmetic, Cost, TensorRef};
use rayon::prelude::*;
use tensor::{Attrs, DType};

use super::grouped::{self, ACROSS, Factors, GROUPS, TRANSPOSED, flag, groups_of};
use super::{example_groups, ints, normal};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::quantise::is_codes;
use crate::real::Real;
use crate::registry::id;

/// The input at which the factors of a second product begin.
const SECOND: usize = 5;

/// y = sx·sw[group]·x·w[group]ᵀ, or with a second product in the same sum.
pub struct GroupedCodes;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let inputs = call.inputs;
    let group_of = groups_of(inputs[2].int());
    let codes = Factors::of(&inputs[0], &inputs[1], flag(call.attrs, "transposed"));
    let second = inputs.get(SECOND).map(|t| Factors::of(t, &inputs[SECOND + 1], flag(call.attrs, "across")));
    let (of_x, of_w) = (inputs[3].real()[0], inputs[4].real());
    let [y] = call.outputs_mut();
    let n = *y.shape().last().expect("y has columns");
    y.real().par_chunks_mut(n).zip(&group_of).enumerate().for_each(|(r, (y, group))| {
        y.fill(T::default());
        codes.add(y, r, *group);
        let scale = of_x * of_w[*group];
        y.iter_mut().for_each(|y| *y = scale * *y);
        second.iter().for_each(|factors| factors.add(y, r, *group));
    });
}

impl Op for GroupedCodes {
    fn id(&self) -> OpId {
        id::GROUPED_CODES
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn multiplies(&self) -> bool {
        true
    }

    fn doc(&self) -> &'static str {
        "y = sx·sw[g]·x·w[g]ᵀ for the rows of each group g, those from offsets[g] to offsets[g + 1]. x […, K] and w [G·N, K] \
         or [G, N, K] ([G·K, N] if `transposed`) codes of eight bits, or numbers, offsets i32 [G + 1], sx f32 [1], sw f32 [G] \
         → […, N]. Two more inputs t […, R], b [G·N, R] ([G·R, N] if `across`) add t·b[g]ᵀ before the sum is rounded."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            GROUPS,
            TRANSPOSED,
            ACROSS,
            Attribute { name: "fast_sum", kind: "bool?", doc: "the sum may keep fewer bits than f32 has" },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let (x, w, offsets, scales, second) = match inputs {
            [x, w, offsets, of_x, of_w] => (x, w, offsets, [of_x, of_w], None),
            [x, w, offsets, of_x, of_w, t, b] => (x, w, offsets, [of_x, of_w], Some([t, b])),
            _ => return Err("takes x, the matrices, the offsets, both scales, and nothing or a second product".into()),
        };
        let (groups, across) = (attrs.size("groups")?, attrs.flag("across")?);
        attrs.flag("fast_sum")?;
        grouped::check_offsets(offsets, groups)?;
        let alike = is_codes(x) && is_codes(w) || x.dtype.is_float() && x.dtype == w.dtype;
        if !alike {
            return Err("x and the matrices must be codes of eight bits, or numbers of one type".into());
        }
        let factors = |count: usize| ValueType::new(Element::F32, [count.into()]);
        if *scales[0] != factors(1) || *scales[1] != factors(groups) {
            return Err(format!("the scales must be f32 [1] and f32 [{groups}]"));
        }
        if across && second.is_none() {
            return Err("`across` is of the second product, which is missing".into());
        }
        let n = grouped::columns_of_product(x, w, groups, attrs.flag("transposed")?)?;
        if let Some(second) = second {
            grouped::check_second(x, n, second, groups, across)?;
        }
        let mut shape = x.shape.clone();
        *shape.last_mut().expect("x has columns") = Dim::Fixed(n);
        Ok(vec![ValueType::new(Element::Float, shape)])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of a precision recipe, after differentiation")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        let terms: usize = inputs.iter().step_by(SECOND).map(|x| x.shape[x.shape.len() - 1]).sum();
        Cost { flops: 2.0 * outputs[0].len() as f64 * terms as f64, bytes }
    }

    fn arithmetic(&self, call: &LowerCall<'_>) -> Arithmetic {
        grouped::products(call, &grouped::factors(call, SECOND), false)
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        grouped::lowered(call, SECOND, true)
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let e4m3 = |of: (usize, usize, usize), k_n: [usize; 2]| {
            let Example { inputs, attrs, .. } = example(of, k_n, Some(DType::E4M3));
            Example::new(inputs, attrs.with("fast_sum", true))
        };
        let e5m2 = |of: (usize, usize, usize), k_n: [usize; 2]| example(of, k_n, Some(DType::E5M2));
        let numbers = |of: (usize, usize, usize), k_n: [usize; 2]| example(of, k_n, None);
        vec![
            e4m3((6, 2, 4), [16, 32]),
            e5m2((5, 2, 3), [32, 16]),
            transposed(e5m2((90, 2, 5), [48, 144])),
            // Few columns; several tiles of a group, more groups than a warp reads at once, and one step, two or three.
            e4m3((300, 2, 3), [144, 48]),
            e4m3((530, 2, 3), [80, 320]),
            e5m2((530, 2, 3), [208, 320]),
            e5m2((300, 4, 70), [272, 80]),
            with_second(e4m3((80, 4, 3), [80, 160]), 18, true),
            with_second(e4m3((530, 2, 3), [144, 320]), 16, false),
            with_second(e5m2((300, 4, 70), [272, 80]), 72, true),
            numbers((6, 2, 4), [16, 32]),
            numbers((300, 2, 3), [144, 48]),
            transposed(numbers((300, 4, 70), [272, 80])),
            with_second(numbers((80, 4, 3), [80, 160]), 18, true),
            with_second(numbers((530, 2, 3), [144, 320]), 16, false),
            with_second(transposed(numbers((300, 4, 70), [272, 80])), 72, true),
        ]
    }
}

/// Returns a call for a number of tokens, each of which goes to some of the groups, of codes of x in a format or of
/// numbers.
fn example((tokens, each, groups): (usize, usize, usize), [k, n]: [usize; 2], format: Option<DType>) -> Example {
    let (_, _, offsets) = example_groups(tokens, each, groups);
    let (x, w) = ([1, tokens, each, k], [groups, n, k]);
    let codes = |dtype, shape: &[usize]| ExampleInput::Codes { dtype, shape: shape.to_vec(), scale: 20.0 };
    let scales = |count: usize| ExampleInput::F32 {
        shape: vec![count],
        values: (0..count).map(|group| 0.25 / (1 << (group % 3)) as f32).collect(),
    };
    let [x, w] = match format {
        Some(format) => [codes(format, &x), codes(DType::E4M3, &w)],
        None => [normal(&x), normal(&w)],
    };
    let inputs = vec![x, w, ints(&[groups + 1], offsets), scales(1), scales(groups)];
    Example::new(inputs, Attrs::new().with("groups", groups))
}

/// The extents of a drawn operand.
fn shape(of: &mut ExampleInput) -> &mut Vec<usize> {
    match of {
        ExampleInput::Codes { shape, .. } | ExampleInput::Normal { shape, .. } => shape,
        _ => unreachable!("factors are drawn"),
    }
}

fn transposed(mut of: Example) -> Example {
    shape(&mut of.inputs[1]).swap(1, 2);
    of.attrs = of.attrs.with("transposed", true);
    of
}

/// Adds a second product of r terms, with matrices in one orientation or the other.
fn with_second(mut of: Example, r: usize, across: bool) -> Example {
    let x = shape(&mut of.inputs[0]);
    let rows = [&x[..x.len() - 1], &[r]].concat();
    let (turned, w) = (flag(&of.attrs, "transposed"), shape(&mut of.inputs[1]));
    let (groups, n) = (w[0], if turned { w[2] } else { w[1] });
    let b = if across { [groups, r, n] } else { [groups, n, r] };
    of.inputs.extend([normal(&rows), normal(&b)]);
    of.attrs = of.attrs.with("across", across);
    of
}
