//! The values of a tensor's codes in a number format of compressed-tensors, in the place of the tensor: what a model computes
//! with once it is quantized. Scales follow from the tensor itself, or from largest magnitudes that are given.
//!
//! Scales and codes are those of [`tensor::compressed`], so the values are those of the files, to the bit.

use graph::{Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::compressed::{Codes, Extent, Form, Range, global_scale, round_to};
use tensor::{Attrs, DType};

use super::forms::{BLOCK, CODES, FORMS_HEADER, form_defines, form_of};
use super::{GROUPS, PARTS, check_groups, groups_of, larger, matrix};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, device_type, row_offset};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("fake.cu");
const HEADERS: &[(&str, &str)] = &[super::HEADERS[0], super::HEADERS[1], FORMS_HEADER];

const THREADS: usize = 256;

/// Elements of a block up to which a warp has it; larger ones have all threads.
const OF_WARP: usize = 256;

/// y = fake_quantise(x(, parts, …))
pub struct FakeQuantise;

/// The attributes of a call, read.
struct Reading {
    form: Form,
    scales: DType,
    groups: usize,
    transposed: bool,
}

/// Returns the attributes of a call. `scales`: the type that scales are rounded to.
pub fn attributes(form: Form, scales: DType) -> Attrs {
    form.attrs().with("scales", scales.name())
}

/// True if scales follow from the largest magnitudes of whole tensors, which are given.
pub fn needs_parts(form: Form) -> bool {
    form.extent == Extent::Tensor || form.codes == Codes::Nvfp4
}

impl Reading {
    fn of(attrs: &Attrs) -> Result<Reading, String> {
        let form = form_of(attrs)?;
        let name = attrs.text("scales").map_err(|e| e.0)?;
        let scales = name.parse::<DType>().ok().filter(|dtype| matches!(dtype, DType::F32 | DType::BF16 | DType::F16));
        let scales = scales.ok_or_else(|| format!("`scales` is `{name}`, expected f32, bf16 or f16"))?;
        let transposed = attrs.flag("transposed").map_err(|e| e.0)?;
        Ok(Reading { form, scales, groups: groups_of(attrs)?, transposed })
    }

    fn checked(attrs: &Attrs) -> Reading {
        Self::of(attrs).expect("checked by the shape rule")
    }

    /// Rows and columns of each matrix, as its blocks lie.
    fn matrix(&self, shape: &[usize]) -> [usize; 2] {
        let (rows, columns) = matrix(shape);
        let rows = rows / self.groups;
        if self.transposed { [columns, rows] } else { [rows, columns] }
    }
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let reading = Reading::checked(call.attrs);
    let [rows, columns] = reading.matrix(call.inputs[0].shape);
    let x = call.inputs[0].real();
    let parts: Vec<&[T]> = call.inputs[1..].iter().map(|of| of.real()).collect();
    let most = |group: usize| {
        let of_group = |parts: &&[T]| {
            let each = parts.len() / reading.groups;
            parts[group * each..(group + 1) * each].iter().fold(0.0, |most, part| larger(most, part.to_f32()))
        };
        parts.iter().map(of_group).fold(0.0, larger)
    };
    let [y] = call.outputs_mut();
    let size = (rows * columns).max(1);
    for (group, (x, y)) in x.chunks(size).zip(y.real().chunks_mut(size)).enumerate() {
        let most = most(group);
        match reading.transposed {
            false => {
                let x: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
                let values = values(&reading, &x, columns, most);
                y.iter_mut().zip(values).for_each(|(y, value)| *y = T::from_f32(value));
            }
            true => {
                let turned: Vec<f32> = (0..x.len()).map(|i| x[i % columns * rows + i / columns].to_f32()).collect();
                let values = values(&reading, &turned, columns, most);
                for (i, value) in values.into_iter().enumerate() {
                    y[i % columns * rows + i / columns] = T::from_f32(value);
                }
            }
        }
    }
}

/// The values of the codes of a matrix; `most`: the largest magnitude that is given.
fn values(reading: &Reading, x: &[f32], columns: usize, most: f32) -> Vec<f32> {
    let (form, dtype) = (reading.form, reading.scales);
    let height = if let Extent::Tile(rows, _) = form.extent { rows } else { 1 };
    let most = round_to(dtype, most);
    let (whole, global) = (Range { least: -most, most }, global_scale(most, dtype));
    let of_band = |x: &[f32]| {
        let x: Vec<f32> = x.iter().map(|x| round_to(dtype, *x)).collect();
        let scales = form.scales(&x, columns, dtype, whole);
        let mut values = form.values(&form.encode(&x, columns, &scales), columns, &scales, global);
        // What is not finite has no code, and stays.
        values.iter_mut().zip(x).filter(|(_, x)| !x.is_finite()).for_each(|(value, _)| *value = f32::NAN);
        values
    };
    x.par_chunks((height * columns).max(1)).flat_map_iter(of_band).collect()
}

impl Op for FakeQuantise {
    fn id(&self) -> OpId {
        id::FAKE_QUANTISE
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "The values of the codes of x in a number format of compressed-tensors: x […, K], rounded to the type of `scales` first, → \
         float […, K]. Elements of a `block` share a scale, which follows from their range; without `block`, and for the scale of scales of `nvfp4`, from the \
         largest of all parts: f32 [n, 256] each, of `own_amax`. With `groups` each of G matrices that lie one after \
         another is scaled by itself, and parts are f32 [G, 256]. What is not finite becomes NaN. The gradient goes straight \
         through."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            CODES,
            Attribute { name: "scales", kind: "string", doc: "the element type that scales are rounded to" },
            BLOCK,
            Attribute { name: "transposed", kind: "bool?", doc: "rows of blocks lie along the columns of x" },
            GROUPS,
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let reading = Reading::of(attrs)?;
        let Some((x, parts)) = inputs.split_first() else { return Err("takes a tensor".into()) };
        let Some(shape) = x.extents().filter(|shape| x.dtype.is_float() && !shape.is_empty()) else {
            return Err("takes a floating-point tensor of known extents".into());
        };
        check_groups(x, reading.groups)?;
        let is_part = |of: &ValueType| of.dtype == Element::F32 && of.last() == Some(PARTS) && of.shape.len() == 2;
        if parts.is_empty() == needs_parts(reading.form) || !parts.iter().all(is_part) {
            return Err(format!(
                "a scale of the whole tensor, and no other, follows from parts, f32 [n, {PARTS}]: there are {}",
                parts.len()
            ));
        }
        if reading.groups > 1 && parts.iter().any(|of| of.shape[0] != reading.groups.into()) {
            return Err(format!("{} matrices have parts f32 [{}, {PARTS}]", reading.groups, reading.groups));
        }
        let [_, columns] = reading.matrix(&shape);
        if !reading.form.extent.fits(columns) {
            return Err(format!("{columns} columns are no whole blocks of {:?}", reading.form.extent));
        }
        Ok(vec![ValueType::new(Element::Float, x.shape.clone())])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let parts = std::iter::repeat_n(None, call.node.inputs.len() - 1);
        Gradients::Inputs(std::iter::once(Some(call.dy())).chain(parts).collect())
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        // A block is read for its range and again for its codes, the second time from the cache.
        Cost { flops: 0.0, bytes: (inputs[0].bytes() + outputs[0].bytes()) as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let reading = Reading::checked(call.attrs);
        let (x, y) = (&call.inputs[0], &call.outputs[0]);
        let dense = x.strides.last().is_none_or(|s| *s == 1) && y.is_dense() && (!reading.transposed || x.is_dense());
        assert!(dense, "rows without gaps: {x}, {y}");
        let [rows, columns] = reading.matrix(&x.shape);
        let [block_rows, block_columns] = match reading.form.extent {
            // A row has a block of threads, whatever shares its scale.
            Extent::Tensor => [1, columns],
            extent => extent.block([rows, columns]),
        };
        let across = columns.div_ceil(block_columns.max(1));
        let blocks = rows.div_ceil(block_rows.max(1)) * across;
        let team = if block_rows * block_columns <= OF_WARP { 32 } else { THREADS };
        let mut defines = vec![
            ("X_T".to_owned(), device_type(x.dtype).to_owned()),
            ("Y_T".to_owned(), device_type(y.dtype).to_owned()),
            ("SCALE_T".to_owned(), device_type(reading.scales).to_owned()),
            ("ROWS".to_owned(), format!("{rows}ull")),
            ("COLUMNS".to_owned(), format!("{columns}ull")),
            ("BLOCK_ROWS".to_owned(), format!("{block_rows}u")),
            ("BLOCK_COLUMNS".to_owned(), format!("{block_columns}u")),
            ("ACROSS".to_owned(), format!("{across}ull")),
            ("BLOCKS".to_owned(), format!("{blocks}ull")),
            ("TEAM".to_owned(), team.to_string()),
            ("THREADS".to_owned(), THREADS.to_string()),
        ];
        defines.extend(form_defines(reading.form.codes));
        match reading.transposed {
            true => defines.push(("TRANSPOSED".to_owned(), "1".to_owned())),
            false => defines.push(("X_AT(row)".to_owned(), row_offset(x))),
        }
        if reading.form.extent == Extent::Tensor {
            defines.push(("OF_TENSOR".to_owned(), "1".to_owned()));
        }
        let mut args = vec![Arg::Input(0), Arg::Output(0)];
        let lists = call.inputs.len() - 1;
        if lists > 0 {
            let of = |list: usize| format!(", const u32* __restrict__ parts{list}");
            defines.push(("PARTS_OF".to_owned(), (0..lists).map(of).collect()));
            let of = |list: usize| {
                let each = call.inputs[1 + list].len() / reading.groups;
                format!("most = most_of(most, parts{list} + blockIdx.y * {each}u, {each}u);")
            };
            defines.push(("MOST_OF_PARTS".to_owned(), (0..lists).map(of).collect()));
            args.extend((0..lists).map(|list| Arg::Input(1 + list)));
        }
        Lowered::Kernels(vec![KernelSpec {
            entry: "fake_quantise",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines,
            grid: [blocks.div_ceil(THREADS / team).max(1) as u32, reading.groups as u32, 1],
            block: [THREADS as u32, 1, 1],
            shared_bytes: 0,
            args,
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let normal = |shape: &[usize], scale: f64| ExampleInput::Normal { shape: shape.to_vec(), scale };
        let parts = |lists: usize, most: f32| ExampleInput::F32 {
            shape: vec![lists, PARTS],
            values: (0..lists * PARTS).map(|part| if part % 97 == 50 { most } else { most / 3.0 }).collect(),
        };
        let of = |codes: &str, extent: Extent, dtype: DType| {
            attributes(Form { codes: Codes::named(codes).expect("a name of the list"), extent }, dtype)
        };
        let (f32, bf16) = (DType::F32, DType::BF16);
        vec![
            Example::new(vec![normal(&[2, 5, 48], 1.0)], of("int4", Extent::Group(16), f32)),
            Example::new(vec![normal(&[37, 100], 0.02)], of("int4", Extent::Row, bf16)),
            Example::new(vec![normal(&[9, 384], 0.02)], of("int4_asymmetric", Extent::Group(128), bf16)),
            Example::new(vec![normal(&[5, 40], 3.0)], of("int8_asymmetric", Extent::Group(8), f32)),
            Example::new(vec![normal(&[3, 7, 600], 3.0)], of("int8", Extent::Row, DType::F16)),
            Example::new(vec![normal(&[130, 70], 1e-3)], of("fp8", Extent::Tile(64, 32), f32)),
            Example::new(vec![normal(&[6, 130], 1.0)], of("fp8", Extent::Row, bf16)),
            Example::new(vec![normal(&[6, 130], 1.0), parts(1, 4.0)], of("fp8", Extent::Tensor, bf16)),
            Example::new(vec![normal(&[2, 5, 48], 1.0), parts(2, 4.0)], of("nvfp4", Extent::Group(16), bf16)),
            // Zeros only, and groups far below the tensor's magnitude.
            Example::new(vec![normal(&[7, 16], 0.0), parts(1, 0.0)], of("nvfp4", Extent::Group(16), f32)),
            Example::new(vec![normal(&[8, 32], 1e-6), parts(1, 4.0)], of("nvfp4", Extent::Group(16), f32)),
            Example::new(vec![normal(&[4, 64], 0.5)], of("mxfp4", Extent::Group(32), bf16)),
            Example::new(vec![normal(&[7, 32], 0.0)], of("mxfp4", Extent::Group(32), f32)),
            // Matrices that are their transposes, several matrices, and magnitudes of two tensors.
            Example::new(vec![normal(&[48, 33], 1.0)], of("int4", Extent::Group(16), f32).with("transposed", true)),
            Example::new(
                vec![normal(&[3, 20, 32], 1.0), parts(3, 4.0), parts(3, 5.0)],
                of("nvfp4", Extent::Group(16), f32).with("groups", 3),
            ),
            Example::new(
                vec![normal(&[2, 30, 48], 1.0)],
                of("fp8", Extent::Tile(16, 32), bf16).with("groups", 2).with("transposed", true),
            ),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Array, apply};

    fn of(values: Vec<f32>, shape: &[usize], attrs: &Attrs) -> Vec<f32> {
        let mut outputs = [(shape.to_vec(), Array::Real(vec![0.0f32; values.len()]))];
        apply(&FakeQuantise, attrs, &[(shape, &Array::Real(values))], &mut outputs);
        outputs[0].1.real().to_vec()
    }

    #[test]
    fn what_is_not_finite_is_not_hidden() {
        let attrs =
            attributes(Form { codes: Codes::Int { bits: 4, symmetric: true }, extent: Extent::Group(4) }, DType::F32);
        let x = vec![1.0, f32::NAN, -7.5, 0.0, f32::INFINITY, 1.0, 0.0, 2.0, 7.5, 1.0, 2.2, 0.0];
        let y = of(x, &[1, 12], &attrs);
        assert!(y[1].is_nan() && y[4].is_nan(), "{y:?}");
        assert_eq!((y[0], y[2], &y[8..]), (1.0, -8.0, &[7.0, 1.0, 2.0, 0.0][..]));
    }
}
