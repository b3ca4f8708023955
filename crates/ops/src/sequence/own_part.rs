//! The part of a tensor that belongs to a rank's part of a sequence, where every rank has the whole: numbers of heads,
//! positions of a batch. The gradient is 0 elsewhere, so that the sum over the ranks is that of the whole.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use tensor::{Attrs, DType};

use crate::call::{Call, Data, Output};
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, device_type};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;
use crate::sequence::{FIRST_PER_PART, rows_of};

const SOURCE: &str = include_str!("own_part.cu");
const HEADERS: &[(&str, &str)] = &[("types.cuh", include_str!("../cuda/types.cuh"))];

const THREADS: usize = 256;

/// y = x[first, first + N/S)
pub struct OwnPart;

/// The gradient dx of `own_part`.
pub struct OwnPartBackward;

const PARTS: Attribute = Attribute { name: "parts", kind: "int", doc: "S" };
const FIRST: Attribute =
    Attribute { name: "first", kind: "int?", doc: "index of the part's first element; 0 if absent" };
const ACCUMULATE: Attribute =
    Attribute { name: "accumulate", kind: "bool?", doc: "add to the result instead of overwriting it" };

/// The number of parts. Errors: a part that begins before the tensor.
fn parts(attrs: &Attrs) -> Result<usize, String> {
    for name in ["first", "first_per_part"] {
        if attrs.optional_int(name)?.is_some_and(|first| first < 0) {
            return Err(format!("`{name}` is negative"));
        }
    }
    match attrs.size("parts")? {
        0 => Err("there must be at least one part".into()),
        parts => Ok(parts),
    }
}

fn first(attrs: &Attrs) -> usize {
    attrs.optional_int("first").expect("checked by the shape rule").unwrap_or(0) as usize
}

fn accumulates(attrs: &Attrs) -> bool {
    attrs.flag("accumulate").expect("checked by the shape rule")
}

/// One kernel over the larger of both tensors.
fn lowered(entry: &'static str, call: &LowerCall<'_>, accumulate: bool) -> Lowered {
    let (x, y) = (&call.inputs[0], &call.outputs[0]);
    assert!(x.is_dense() && y.is_dense(), "a part lies without gaps: {x}, {y}");
    let numbers = [("COUNT", y.len()), ("PART", x.len().min(y.len())), ("ACCUMULATE", accumulate as usize)];
    let mut defines: Vec<_> = numbers.map(|(name, n)| (name.to_owned(), n.to_string())).to_vec();
    let types = [("X_T", x.dtype), ("Y_T", y.dtype)];
    defines.extend(types.map(|(name, dtype)| (name.to_owned(), device_type(dtype).to_owned())));
    defines.push(("INTEGERS".to_owned(), ((x.dtype == DType::I32) as usize).to_string()));
    defines.push(("THREADS".to_owned(), THREADS.to_string()));
    let first = match call.attrs.optional_int("first_per_part").expect("checked by the shape rule") {
        Some(step) => Arg::PerPart { step },
        None => Arg::I64(first(call.attrs) as i64),
    };
    Lowered::Kernels(vec![KernelSpec {
        entry,
        source: SOURCE.to_owned(),
        headers: HEADERS.to_vec(),
        defines,
        grid: [y.len().div_ceil(THREADS) as u32, 1, 1],
        block: [THREADS as u32, 1, 1],
        shared_bytes: 0,
        args: vec![Arg::Input(0), Arg::Output(0), first],
    }])
}

impl Op for OwnPart {
    fn id(&self) -> OpId {
        id::OWN_PART
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "One of S equal parts, the elements from `first` on. x [N] → y [N/S], or x [B, T] → y [1, B·T/S]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[PARTS, FIRST, FIRST_PER_PART]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x] = inputs else { return Err("takes one input".into()) };
        let parts = parts(attrs)?;
        let part = |whole: usize| match whole.is_multiple_of(parts) {
            true => Ok(whole / parts),
            false => Err(format!("{whole} elements have no {parts} equal parts")),
        };
        if !x.dtype.is_float() && x.dtype != Element::I32 {
            return Err("x must be floating point or i32".into());
        }
        let shape = match x.shape.as_slice() {
            [Dim::Fixed(n)] => vec![Dim::Fixed(part(*n)?)],
            [rows, tokens] => match (rows.fixed(), tokens.fixed()) {
                (Some(wide), Some(long)) => vec![rows_of(tokens, 1), tokens.with_extent(part(wide * long)?)],
                _ => return Err("the extents of x must be known".into()),
            },
            _ => return Err("x must be [N] or [B, T]".into()),
        };
        Ok(vec![ValueType::new(x.dtype, shape)])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        if call.emit.value(call.input(0)).shape.len() > 1 {
            return Gradients::NoGradient("only parts of one axis are trained");
        }
        let (dy, attrs) = (call.dy(), call.node.attrs.clone());
        Gradients::Inputs(vec![call.wanted(0, id::OWN_PART_BACKWARD, &[dy], attrs)])
    }

    fn cost(&self, _inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        Cost { flops: 0.0, bytes: 2.0 * outputs[0].bytes() as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        lowered("own_part", call, false)
    }

    crate::reference!(own);

    fn examples(&self) -> Vec<Example> {
        let attrs = |parts: u64, first: u64| Attrs::new().with("parts", parts).with("first", first);
        let heads = |n: usize| ExampleInput::Normal { shape: vec![n], scale: 1.0 };
        let positions = ExampleInput::Ints { shape: vec![3, 4], values: (0..12).map(|i| i * 5 % 7).collect() };
        vec![
            Example::new(vec![heads(12)], attrs(3, 4)).differentiate(&[0]),
            Example::new(vec![heads(8)], attrs(1, 0)).differentiate(&[0]),
            Example::new(vec![heads(600)], attrs(2, 300)),
            Example::new(vec![positions], attrs(2, 6)),
        ]
    }
}

fn own<T: Real>(call: &mut Call<'_, T>) {
    let first = first(call.attrs);
    match (&mut call.outputs[0], call.inputs[0].data) {
        (Output::Real { data, .. }, Data::Real(x)) => data.copy_from_slice(&x[first..][..data.len()]),
        (Output::Int { data, .. }, Data::Int(x)) => data.copy_from_slice(&x[first..][..data.len()]),
        _ => unreachable!("the shape rule keeps the type"),
    }
}

impl Op for OwnPartBackward {
    fn id(&self) -> OpId {
        id::OWN_PART_BACKWARD
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "Gradient of `own_part`: dy where the part is, 0 elsewhere, in f32. dy [N/S] → dx f32 [N]. With `accumulate`, added to."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[PARTS, FIRST, FIRST_PER_PART, ACCUMULATE]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let parts = parts(attrs)?;
        attrs.flag("accumulate")?;
        match inputs {
            [dy] if dy.dtype.is_float() && dy.shape.len() == 1 => {
                let n = dy.last().ok_or("the extent of dy must be known")?;
                Ok(vec![ValueType::new(Element::F32, [Dim::Fixed(n * parts)])])
            }
            _ => Err("takes dy, floating point [N]".into()),
        }
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        lowered("own_part_backward", call, accumulates(call.attrs))
    }

    crate::reference!(backward);

    fn examples(&self) -> Vec<Example> {
        let example = |n: usize, parts: u64, first: u64, accumulate: bool| {
            let attrs = Attrs::new().with("parts", parts).with("first", first);
            let attrs = if accumulate { attrs.with("accumulate", true) } else { attrs };
            Example::new(vec![ExampleInput::Normal { shape: vec![n], scale: 1.0 }], attrs)
                .with_state(vec![ExampleInput::NormalF32 { shape: vec![n * parts as usize], scale: 1.0 }])
        };
        vec![example(4, 3, 8, false), example(300, 2, 0, false), example(5, 2, 5, true)]
    }
}

fn backward<T: Real>(call: &mut Call<'_, T>) {
    let (dy, first, accumulate) = (call.inputs[0].real(), first(call.attrs), accumulates(call.attrs));
    let [dx] = call.outputs_mut();
    let dx = dx.real();
    if !accumulate {
        dx.fill(T::default());
    }
    dx[first..].iter_mut().zip(dy).for_each(|(dx, dy)| *dx += *dy);
}
