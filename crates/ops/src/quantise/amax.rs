//! The largest magnitudes of parts of a tensor, from which a power of two can be chosen for it where no history gives
//! one. Where a history does, nothing is read.

use graph::{Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use super::{GROUPS, HEADERS, check_groups, groups_of, larger};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, device_type, row_offset};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("amax.cu");

/// Parts that the rows of a tensor are cut into: enough for every multiprocessor, few enough to be looked through by
/// each block of the next kernel.
pub const PARTS: usize = 256;

const THREADS: u32 = 256;

/// parts = own_amax((factor,) x, …)
pub struct OwnAmax;

/// Returns the number of rows in a part.
fn rows_of_part(rows: usize) -> usize {
    rows.div_ceil(PARTS).max(1)
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let kept = call.attrs.flag("factor").expect("checked by the shape rule");
    let groups = groups_of(call.attrs).expect("checked by the shape rule");
    let known = kept && call.inputs[0].real()[0].to_f32() != 0.0;
    let tensors = &call.inputs[usize::from(kept)..];
    let [parts] = call.outputs_mut();
    let parts = parts.real();
    parts.fill(T::default());
    if known {
        return;
    }
    for (x, parts) in tensors.iter().zip(parts.chunks_mut(groups * PARTS)) {
        let (rows, columns) = (x.rows() / groups, x.columns());
        for (x, parts) in x.real().chunks(rows * columns).zip(parts.chunks_mut(PARTS)) {
            parts.par_iter_mut().zip(x.par_chunks(rows_of_part(rows) * columns)).for_each(|(most, x)| {
                *most = T::from_f32(x.iter().fold(0.0, |most, x| larger(most, x.to_f32())));
            });
        }
    }
}

impl Op for OwnAmax {
    fn id(&self) -> OpId {
        id::OWN_AMAX
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "The largest magnitudes of 256 parts of the rows of each x, by bits: NaN above infinity above what is finite. With \
         `factor`, an f32 [1] comes first, and all results are 0 where it is not. x […, K] → f32 [x's, 256]; with `groups` \
         those of each of G matrices that lie one after another in x, f32 [G, 256]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute {
                name: "factor",
                kind: "bool?",
                doc: "the first input is a factor that may make this unnecessary",
            },
            GROUPS,
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let kept = attrs.flag("factor").map_err(|e| e.0)?;
        let tensors = inputs.get(usize::from(kept)..).unwrap_or_default();
        if kept && inputs.first().is_none_or(|factor| factor.dtype != Element::F32) {
            return Err("the factor must be f32 [1]".into());
        }
        if tensors.is_empty() || tensors.iter().any(|x| !x.dtype.is_float() || x.extents().is_none()) {
            return Err("takes floating-point tensors of known extents".into());
        }
        let groups = groups_of(attrs)?;
        if groups > 1 && tensors.len() > 1 {
            return Err("`groups` are those of one tensor".into());
        }
        check_groups(&tensors[0], groups)?;
        Ok(vec![ValueType::new(Element::F32, [(tensors.len() * groups).into(), PARTS.into()])])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of a precision recipe, after differentiation")
    }

    fn cost(&self, inputs: &[TensorRef], _outputs: &[TensorRef], attrs: &Attrs) -> Cost {
        // With a history it reads nothing but in the first steps.
        let reads = !attrs.flag("factor").expect("checked by the shape rule");
        let bytes = if reads { inputs.iter().map(TensorRef::bytes).sum::<usize>() } else { 0 };
        Cost { flops: 0.0, bytes: bytes as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let kept = call.attrs.flag("factor").expect("checked by the shape rule");
        let (first, groups) = (usize::from(kept), groups_of(call.attrs).expect("checked by the shape rule"));
        let spec = |index: usize| {
            let x = &call.inputs[first + index];
            let columns = *x.shape.last().expect("tensors have axes");
            let rows = x.len() / columns.max(1) / groups;
            let dense = x.strides.last().is_none_or(|s| *s == 1);
            assert!(dense, "rows of what is quantised have no gaps: {x}");
            let mut defines = vec![
                ("X_T".to_owned(), device_type(x.dtype).to_owned()),
                ("X_AT(row)".to_owned(), row_offset(x)),
                ("COLUMNS".to_owned(), columns.to_string()),
                ("ROWS".to_owned(), rows.to_string()),
                ("PART".to_owned(), rows_of_part(rows).to_string()),
                ("FIRST".to_owned(), (index * PARTS).to_string()),
                ("THREADS".to_owned(), THREADS.to_string()),
                ("FORMAT".to_owned(), "0".to_owned()),
            ];
            let mut args = vec![Arg::Input(first + index), Arg::Output(0)];
            if kept {
                defines.push(("FACTOR".to_owned(), "1".to_owned()));
                args.push(Arg::Input(0));
            }
            KernelSpec {
                entry: "own_amax",
                source: SOURCE.to_owned(),
                headers: HEADERS.to_vec(),
                defines,
                grid: [PARTS as u32, groups as u32, 1],
                block: [THREADS, 1, 1],
                shared_bytes: 0,
                args,
            }
        };
        Lowered::Kernels((0..call.inputs.len() - first).map(spec).collect())
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let normal = |shape: &[usize]| ExampleInput::Normal { shape: shape.to_vec(), scale: 2.0 };
        let factor = |value: f32| ExampleInput::F32 { shape: vec![1], values: vec![value] };
        let kept = Attrs::new().with("factor", true);
        vec![
            Example::new(vec![normal(&[2, 3, 40])], Attrs::new()),
            Example::new(vec![normal(&[600, 24]), normal(&[17, 7])], Attrs::new()),
            Example::new(vec![factor(0.0), normal(&[5, 16])], kept.clone()),
            Example::new(vec![factor(4.0), normal(&[5, 16])], kept),
            Example::new(vec![normal(&[3, 300, 32])], Attrs::new().with("groups", 3)),
        ]
    }
}
