//! A tensor as codes of eight bits: x·2^k rounded once, with the 2^−k that gives numbers again. k follows from a factor
//! that is kept from step to step, or where there is none from the tensor's own magnitude.
//!
//! Products of eight bits read their operands along the sum: the codes may be written a second time, transposed.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use tensor::{Attrs, DType};

use super::{
    GROUPS, HEADERS, PARTS, TILE, TILE_THREADS, TRANSPOSE_HEADER, check_groups, counts, factor, format_of, groups_of,
    in_packs, larger, matrix,
};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, device_type, row_offset};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("quantise.cu");

/// Rows and columns of a kernel's tile.
/// Neighbours of a row that a thread writes at once: products of eight bits take no other widths either.
const WIDTH: usize = 16;

/// Rows of a tensor as its transposed codes have them: the sum of a product of eight bits has multiples of 16 terms.
pub fn padded_rows(rows: usize) -> usize {
    rows.next_multiple_of(16)
}

/// codes, scale(, transposed)(, amax)(, nonzero, flushed) = quantise(x, parts(, factor))
pub struct Quantise;

/// The attributes of a call, read.
struct Reading {
    format: DType,
    top: i64,
    kept: bool,
    transposed: bool,
    record: bool,
    count: bool,
    groups: usize,
}

impl Reading {
    fn of(attrs: &Attrs) -> Result<Reading, String> {
        let flag = |name: &str| attrs.flag(name).map_err(|e| e.0);
        Ok(Reading {
            format: format_of(attrs)?,
            top: attrs.int("top").map_err(|e| e.0)?,
            kept: flag("factor")?,
            transposed: flag("transposed")?,
            record: flag("record")?,
            count: flag("count")?,
            groups: groups_of(attrs)?,
        })
    }

    fn checked(attrs: &Attrs) -> Reading {
        Self::of(attrs).expect("checked by the shape rule")
    }
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let reading = Reading::checked(call.attrs);
    let x = &call.inputs[0];
    let (rows, columns) = (x.rows() / reading.groups, x.columns());
    let known = if reading.kept { call.inputs[2].real()[0].to_f32() } else { 0.0 };
    let (x, parts) = (x.real(), call.inputs[1].real());
    let mut last = 1.0;
    for group in 0..reading.groups {
        let x = &x[group * rows * columns..(group + 1) * rows * columns];
        let own = &parts[group * parts.len() / reading.groups..(group + 1) * parts.len() / reading.groups];
        let own = || own.iter().fold(0.0, |most, part| larger(most, part.to_f32()));
        let factor = if known == 0.0 { factor(own(), reading.top) } else { known };
        let times = T::from_f32(factor);
        call.outputs[0].real()[group * x.len()..].iter_mut().zip(x).for_each(|(code, x)| *code = *x * times);
        call.outputs[1].real()[group] = T::from_f32(1.0 / factor);
        if reading.transposed {
            let size = columns * padded_rows(rows);
            let transposed = &mut call.outputs[2].real()[group * size..(group + 1) * size];
            transposed.fill(T::default());
            for (row, line) in x.chunks(columns.max(1)).enumerate() {
                for (column, x) in line.iter().enumerate() {
                    transposed[column * padded_rows(rows) + row] = *x * times;
                }
            }
        }
        last = factor;
    }
    let mut next = 2 + usize::from(reading.transposed);
    if reading.record {
        let amax = call.outputs[next].real();
        amax[0] = T::from_f32(x.iter().fold(amax[0].to_f32(), |most, x| larger(most, x.to_f32())));
        next += 1;
    }
    if reading.count && known == 0.0 {
        for (place, count) in counts(x, last).into_iter().enumerate() {
            call.outputs[next + place].real()[0] += T::from_f64(count as f64);
        }
    }
}

impl Op for Quantise {
    fn id(&self) -> OpId {
        id::QUANTISE
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "x·2^k rounded to codes of eight bits, saturating, and 2^−k. With `factor`, 2^k is the factor unless that is 0; \
         else k is the largest with amax·2^k ≤ 1.75·2^top, amax the largest of parts. x […, K], parts f32 [n, 256], \
         factor f32 [1] if `factor` → codes […, K], f32 [1]; if `transposed` codes [K, rows up to a multiple of 16], zeros \
         after them; if `record` f32 [1], raised to the largest magnitude of x; if `count` two f64 [1], where the factor is 0 \
         raised by the number of elements that are not 0 and by that of those among them that become 0 in E4M3. With \
         `groups` each of the G matrices that lie one after another in x has its own power from parts f32 [G, 256]: 2^−k \
         f32 [G], transposed codes [G·K, rows of a matrix]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "format", kind: "string", doc: "`e4m3` or `e5m2`" },
            Attribute { name: "top", kind: "int", doc: "magnitudes are scaled to at most 1.75·2^top" },
            Attribute { name: "factor", kind: "bool?", doc: "the third input is the factor, where it is not 0" },
            Attribute { name: "transposed", kind: "bool?", doc: "the codes are given transposed, too" },
            Attribute { name: "record", kind: "bool?", doc: "the largest magnitude is kept" },
            Attribute {
                name: "count",
                kind: "bool?",
                doc: "elements that become 0 are counted, where the factor is 0",
            },
            GROUPS,
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let reading = Reading::of(attrs)?;
        let expected = if reading.kept { 3 } else { 2 };
        if inputs.len() != expected || inputs[1..].iter().any(|of| of.dtype != Element::F32) {
            return Err("takes x, f32 parts and, with `factor`, an f32 factor".into());
        }
        let x = &inputs[0];
        let (true, Some(shape)) = (x.dtype.is_float(), x.extents().filter(|shape| shape.len() >= 2)) else {
            return Err("x must be floating point, a matrix or more, of known extents".into());
        };
        if inputs[1].last() != Some(PARTS) {
            return Err(format!("parts must be f32 [n, {PARTS}]"));
        }
        let (rows, columns) = matrix(&shape);
        if !columns.is_multiple_of(WIDTH) {
            return Err(format!("x must have a multiple of {WIDTH} columns, not {columns}"));
        }
        let groups = reading.groups;
        check_groups(x, groups)?;
        if groups > 1 && (reading.kept || reading.record || reading.count || inputs[1].shape[0] != groups.into()) {
            return Err(format!("{groups} matrices have a part each of f32 [{groups}, {PARTS}], and nothing is kept"));
        }
        let one = ValueType::new(Element::F32, [1.into()]);
        let codes = |shape: Vec<Dim>| ValueType::new(Element::Fixed(reading.format), shape);
        let mut results = vec![codes(x.shape.clone()), ValueType::new(Element::F32, [groups.into()])];
        if reading.transposed {
            results.push(codes(vec![(groups * columns).into(), padded_rows(rows / groups).into()]));
        }
        if reading.record {
            results.push(one);
        }
        if reading.count {
            let count = ValueType::new(Element::Fixed(DType::F64), [1.into()]);
            results.extend([count.clone(), count]);
        }
        Ok(results)
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of a precision recipe, after differentiation")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let bytes = inputs[0].bytes() + outputs.iter().map(TensorRef::bytes).sum::<usize>();
        Cost { flops: 0.0, bytes: bytes as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let reading = Reading::checked(call.attrs);
        let (x, codes) = (&call.inputs[0], &call.outputs[0]);
        let (groups, (rows, columns)) = (reading.groups, matrix(&x.shape));
        let rows = rows / groups;
        assert!(x.strides.last().is_none_or(|s| *s == 1) && codes.is_dense(), "rows without gaps: {x}, {codes}");
        let mut defines = vec![
            ("X_T".to_owned(), device_type(x.dtype).to_owned()),
            ("X_AT(row)".to_owned(), row_offset(x)),
            ("COLUMNS".to_owned(), columns.to_string()),
            ("ROWS".to_owned(), rows.to_string()),
            ("FORMAT".to_owned(), u32::from(reading.format == DType::E5M2).to_string()),
            ("TOP".to_owned(), reading.top.to_string()),
            ("PARTS".to_owned(), (call.inputs[1].len() / groups).to_string()),
            ("THREADS".to_owned(), TILE_THREADS.to_string()),
        ];
        if in_packs(x) {
            defines.push(("PACKS".to_owned(), "1".to_owned()));
        }
        let mut args = vec![Arg::Input(0), Arg::Input(1), Arg::Output(0), Arg::Output(1)];
        if reading.kept {
            defines.push(("FACTOR".to_owned(), "1".to_owned()));
            args.push(Arg::Input(2));
        }
        if reading.transposed {
            defines.push(("PADDED".to_owned(), padded_rows(rows).to_string()));
            args.push(Arg::Output(2));
        }
        let mut next = 2 + usize::from(reading.transposed);
        if reading.record {
            defines.push(("RECORD".to_owned(), "1".to_owned()));
            args.push(Arg::Output(next));
            next += 1;
        }
        if reading.count {
            defines.push(("COUNT".to_owned(), "1".to_owned()));
            args.extend([Arg::Output(next), Arg::Output(next + 1)]);
        }
        let height = if reading.transposed { padded_rows(rows) } else { rows };
        Lowered::Kernels(vec![KernelSpec {
            entry: "quantise",
            source: SOURCE.to_owned(),
            headers: [HEADERS, &[TRANSPOSE_HEADER]].concat(),
            defines,
            grid: [columns.div_ceil(TILE) as u32, height.div_ceil(TILE).max(1) as u32, groups as u32],
            block: [TILE_THREADS, 1, 1],
            shared_bytes: 0,
            args,
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let normal = |shape: &[usize], scale: f64| ExampleInput::Normal { shape: shape.to_vec(), scale };
        let parts = |most: f32| ExampleInput::F32 {
            shape: vec![1, PARTS],
            values: (0..PARTS).map(|part| if part == 77 { most } else { most / 3.0 }).collect(),
        };
        let factor = |value: f32| ExampleInput::F32 { shape: vec![1], values: vec![value] };
        let attrs = |format: &str, top: i64| Attrs::new().with("format", format).with("top", top);
        let record = |shape: &[usize], transposed: Option<[usize; 2]>, format: DType, amax: f32| {
            let zeros = |shape: &[usize]| ExampleInput::Codes { dtype: format, shape: shape.to_vec(), scale: 0.0 };
            let turned = transposed.iter().map(|shape| zeros(shape));
            [zeros(shape), factor(0.0)].into_iter().chain(turned).chain([factor(amax)]).collect::<Vec<_>>()
        };
        let counted = |kept: f32| {
            // Of these a good part is below 2^-17 of the largest magnitude.
            let count = || ExampleInput::Codes { dtype: DType::F64, shape: vec![1], scale: 0.0 };
            let state = record(&[70, 32], Some([32, 80]), DType::E4M3, 0.0).into_iter().chain([count(), count()]);
            let attrs = attrs("e4m3", 7).with("factor", true).with("transposed", true);
            let inputs = vec![normal(&[70, 32], 1e-4), parts(16.0), factor(kept)];
            Example::new(inputs, attrs.with("record", true).with("count", true)).with_state(state.collect())
        };
        vec![
            Example::new(vec![normal(&[2, 5, 48], 1.0), parts(4.0)], attrs("e4m3", 8)),
            Example::new(
                vec![normal(&[37, 80], 1e-3), parts(1e-3), factor(0.0)],
                attrs("e5m2", 11).with("factor", true).with("transposed", true),
            ),
            // A factor that is too large: what does not fit saturates.
            Example::new(
                vec![normal(&[80, 32], 10.0), parts(1.0), factor(64.0)],
                attrs("e4m3", 7).with("factor", true).with("record", true),
            )
            .with_state(record(&[80, 32], None, DType::E4M3, 0.5)),
            Example::new(
                vec![normal(&[2, 72, 80], 1.0), parts(5.0), factor(64.0)],
                attrs("e4m3", 7).with("factor", true).with("transposed", true).with("record", true),
            )
            .with_state(record(&[2, 72, 80], Some([80, 144]), DType::E4M3, 1e4)),
            // Several tiles, the last of them with few rows and columns.
            Example::new(
                vec![normal(&[270, 176], 1.0), parts(5.0), factor(0.0)],
                attrs("e5m2", 11).with("factor", true).with("transposed", true),
            ),
            // Elements that become 0 are counted where there is no factor, and only there.
            counted(0.0),
            counted(64.0),
            // Several stacked matrices at once.
            Example::new(
                vec![
                    normal(&[3, 80, 48], 1.0),
                    ExampleInput::F32 {
                        shape: vec![3, PARTS],
                        values: (0..3 * PARTS).map(|part| ((part * 37) % 101) as f32 * 0.05).collect(),
                    },
                ],
                attrs("e4m3", 8).with("groups", 3).with("transposed", true),
            ),
        ]
    }
}
