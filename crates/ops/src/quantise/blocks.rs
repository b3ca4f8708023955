//! A tensor as codes of four bits: NVFP4, E2M1 with an E4M3 scale for 16 neighbours of a row or for a tile of 16 by 16,
//! and one f32 for the tensor, from its own largest magnitude. Rounds to nearest, or stochastically. Codes and scales
//! lie in one packed tensor, or apart as units of four bits read them ([`operand`]); of tiles also as those of the
//! transpose. Each of several stacked matrices becomes a packed tensor.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use tensor::packed::operand;
use tensor::storage::{NVFP4, NVFP4_TILES, Packing};
use tensor::{Attrs, DType};

use super::rounding::{BLOCK, Dice, Rounding};
use super::{GROUPS, OPERAND_HEADERS, PARTS, SMALL_HEADERS, check_groups, groups_of, in_packs, matrix};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, device_type, row_offset};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;
use crate::seed::seed_of;

const SOURCE: &str = include_str!("blocks.cu");

const THREADS: u32 = 256;

/// packed, g = quantise_blocks(x, parts(, micro_step)), or codes, scales, g
pub struct QuantiseBlocks;

/// The layout of codes and scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Packed,
    /// In the layout in which units of four bits read a factor along the sum, of the matrix or of its transpose.
    Operand {
        transposed: bool,
    },
}

/// The attributes of a call, read.
struct Reading {
    tiles: bool,
    form: Form,
    groups: usize,
    dice: Option<Dice>,
}

impl Reading {
    fn of(attrs: &Attrs) -> Result<Reading, String> {
        let flag = |name: &str| attrs.flag(name).map_err(|e| e.0);
        let (tiles, transposed) = (flag("tiles")?, flag("transposed")?);
        let form = if flag("operand")? { Form::Operand { transposed } } else { Form::Packed };
        if transposed && (!tiles || form == Form::Packed) {
            return Err("only tiles that are an operand have codes that are those of the transpose".into());
        }
        let groups = groups_of(attrs)?;
        if groups != 1 && (!tiles || form != Form::Packed) {
            return Err("only packed tiles are those of several matrices".into());
        }
        if attrs.get("stream").is_none() {
            return Ok(Reading { tiles, form, groups, dice: None });
        }
        let number = |name: &str| attrs.int(name).map_err(|e| e.0);
        let stream = number("stream")?;
        let stream = u32::try_from(stream).map_err(|_| format!("`stream` is {stream}, expected u32"))?;
        let [first, width] = [number("first")?, number("width")?].map(|n| n as usize);
        if tiles || !first.is_multiple_of(BLOCK) || !width.is_multiple_of(BLOCK) {
            return Err(format!("random numbers are for blocks of rows, in multiples of {BLOCK}: {first}, {width}"));
        }
        Ok(Reading { tiles, form, groups, dice: Some(Dice { seed: seed_of(attrs)?, stream, first, width }) })
    }

    fn checked(attrs: &Attrs) -> Reading {
        Self::of(attrs).expect("checked by the shape rule")
    }

    fn packing(&self) -> Packing {
        if self.tiles { NVFP4_TILES } else { NVFP4 }
    }
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let reading = Reading::checked(call.attrs);
    let (x, columns) = (call.inputs[0].real(), call.inputs[0].columns());
    let step = reading.dice.map_or(0, |_| call.inputs[2].int()[0]);
    let dice = reading.dice.map(|dice| (dice, step));
    let rounding = |parts: &[T]| Rounding::new(reading.tiles, dice, parts);
    let (parts, last) = (call.inputs[1].real(), call.outputs.len() - 1);
    let (results, factors) = call.outputs.split_at_mut(last);
    let factors = factors[0].real();
    let Form::Operand { transposed } = reading.form else {
        let rows = x.len().checked_div(columns).unwrap_or(0);
        let planes = reading.packing().planes(&[rows / reading.groups, columns]);
        let [x, parts] = [x, parts].map(|of| of.chunks((of.len() / reading.groups).max(1)));
        let packed = results[0].byte();
        let packed = packed.chunks_mut(packed.len() / reading.groups);
        for (((x, parts), packed), factor) in x.zip(parts).zip(packed).zip(factors) {
            let rounding = rounding(parts);
            *factor = T::from_f32(rounding.g);
            rounding.pack(x, columns, &planes, packed);
        }
        return;
    };
    let rounding = rounding(parts);
    factors[0] = T::from_f32(rounding.g);
    let rows = x.len().checked_div(columns).unwrap_or(0);
    let height = rounding.height();
    let (mut codes, mut scales) = (vec![0; x.len() / 2], vec![0; x.len() / (height * BLOCK)]);
    rounding.quantise(x, columns, &mut codes, &mut scales);
    let source = |row: usize, column: usize| if transposed { (column, row) } else { (row, column) };
    let (height_out, columns_out) = if transposed { (columns, rows) } else { (rows, columns) };
    let (packed, tiles) = results.split_at_mut(1);
    let (packed, tiles) = (packed[0].byte(), tiles[0].byte());
    packed.fill(0);
    tiles.fill(0);
    let (line, blocks) = (operand::width(columns_out) / 2, operand::width(columns_out) / BLOCK);
    for row in 0..height_out {
        for column in 0..columns_out {
            let (r, c) = source(row, column);
            let at = r * columns + c;
            let code = codes[at / 2] >> (4 * (at % 2)) & 15;
            packed[row * line + column / 2] |= code << (4 * (column % 2));
            if column % BLOCK == 0 {
                tiles[operand::scale_at(row, column / BLOCK, blocks)] =
                    scales[r / height * (columns / BLOCK) + c / BLOCK];
            }
        }
    }
}

impl Op for QuantiseBlocks {
    fn id(&self) -> OpId {
        id::QUANTISE_BLOCKS
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "x as NVFP4: codes of four bits in blocks of 16 of a row, or in tiles of 16 by 16, with E4M3 scales; the factor g \
         of the tensor follows from the largest of parts. With `stream` codes are rounded stochastically, by random bytes \
         of (seed, stream, micro_step, place in a matrix of `width` columns in which x begins at element `first`). \
         x […, K], parts f32 [n, 256], micro_step i32 [1] if `stream` → u8 [bytes], g f32 [1]. With `operand` codes and scales \
         apart, as units of four bits read them: codes u8 […, K up to a multiple of 32 / 2], scales u8 [bytes] in tiles of 128 \
         rows by 4 blocks; with `transposed` those of xᵀ, whose tiles are the same. With `groups` each of G matrices that lie \
         one after another has a part of f32 [G, 256], a packed tensor of u8 [bytes·G] and a factor of f32 [G]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "tiles", kind: "bool?", doc: "blocks are 16 rows high" },
            Attribute {
                name: "operand",
                kind: "bool?",
                doc: "codes and scales apart, as units of four bits read them",
            },
            Attribute { name: "transposed", kind: "bool?", doc: "of the transpose; for tiles that are an operand" },
            GROUPS,
            Attribute { name: "stream", kind: "int?", doc: "of the random numbers; rounds to nearest if absent" },
            Attribute { name: "seed", kind: "int?", doc: "of the random numbers" },
            Attribute { name: "first", kind: "int?", doc: "place of the first element among the random numbers" },
            Attribute { name: "width", kind: "int?", doc: "random numbers from row to row" },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let reading = Reading::of(attrs)?;
        let step = ValueType::new(Element::I32, [1.into()]);
        let (x, parts) = match inputs {
            [x, parts] if reading.dice.is_none() => (x, parts),
            [x, parts, of] if reading.dice.is_some() && *of == step => (x, parts),
            _ => return Err("takes x, f32 parts and, with `stream`, the micro-step".into()),
        };
        let (true, Some(shape)) = (x.dtype.is_float(), x.extents().filter(|shape| shape.len() >= 2)) else {
            return Err("x must be floating point, a matrix or more, of known extents".into());
        };
        if parts.dtype != Element::F32 || parts.last() != Some(PARTS) {
            return Err(format!("parts must be f32 [n, {PARTS}]"));
        }
        let (rows, columns) = matrix(&shape);
        if !columns.is_multiple_of(BLOCK) || reading.tiles && !rows.is_multiple_of(BLOCK) {
            return Err(format!("extents must be multiples of {BLOCK}, not {rows} by {columns}"));
        }
        let groups = reading.groups;
        check_groups(x, groups)?;
        if groups > 1 && (parts.shape[0] != groups.into() || !(rows / groups).is_multiple_of(BLOCK)) {
            return Err(format!(
                "{groups} matrices have a multiple of {BLOCK} rows each, and parts f32 [{groups}, {PARTS}]"
            ));
        }
        let bytes = |shape: Vec<Dim>| ValueType::new(Element::Fixed(DType::U8), shape);
        let factors = ValueType::new(Element::F32, [groups.into()]);
        let Form::Operand { transposed } = reading.form else {
            let each = reading.packing().bytes(&[rows / groups, columns]);
            return Ok(vec![bytes(vec![(groups * each).into()]), factors]);
        };
        let (leading, height, width) = match transposed {
            true => (vec![columns.into()], columns, operand::width(rows)),
            false => (x.shape[..shape.len() - 1].to_vec(), rows, operand::width(columns)),
        };
        let codes = leading.into_iter().chain([(width / 2).into()]).collect();
        let scales = operand::scale_bytes(height, width / BLOCK);
        Ok(vec![bytes(codes), bytes(vec![scales.into()]), factors])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of a precision recipe, after differentiation")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], attrs: &Attrs) -> Cost {
        // A block of random words costs about 60 integer operations.
        let random = if attrs.get("stream").is_some() { 4.0 * inputs[0].len() as f64 } else { 0.0 };
        Cost { flops: random, bytes: inputs[..1].iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let reading = Reading::checked(call.attrs);
        let (x, packed) = (&call.inputs[0], &call.outputs[0]);
        let (groups, (rows, columns)) = (reading.groups, matrix(&x.shape));
        let rows = rows / groups;
        let dense = x.strides.last().is_none_or(|s| *s == 1) && packed.is_dense();
        assert!(dense && packed.offset.is_multiple_of(16), "rows without gaps: {x}, {packed}");
        let transposed = reading.form == Form::Operand { transposed: true };
        // The numbers of the result.
        let (height, width) = if transposed { (columns, rows) } else { (rows, columns) };
        let packed_form = reading.form == Form::Packed;
        let (threads_high, threads_wide) = match packed_form {
            true => (height, width / BLOCK),
            false => operand::scale_extents(height, operand::width(width) / BLOCK),
        };
        let mut defines = vec![
            ("X_T".to_owned(), device_type(x.dtype).to_owned()),
            ("X_AT(row)".to_owned(), row_offset(x)),
            ("COLUMNS".to_owned(), width.to_string()),
            ("ROWS".to_owned(), height.to_string()),
            ("SPAN_ROWS".to_owned(), threads_high.to_string()),
            ("SPAN_BLOCKS".to_owned(), threads_wide.to_string()),
            ("TILES".to_owned(), u32::from(reading.tiles).to_string()),
            ("PARTS".to_owned(), (call.inputs[1].len() / groups).to_string()),
            ("THREADS".to_owned(), THREADS.to_string()),
            ("FORMAT".to_owned(), "0".to_owned()),
        ];
        if packed_form {
            let planes = reading.packing().planes(&[rows, columns]);
            defines.push(("SCALES_AT".to_owned(), planes.scales.offset.to_string()));
            defines.push(("TENSOR_AT".to_owned(), planes.tensor.offset.to_string()));
            defines.push(("GROUP_BYTES".to_owned(), format!("{}ull", packed.bytes() / groups)));
        } else {
            defines.push(("OPERAND".to_owned(), "1".to_owned()));
            defines.push(("LINE".to_owned(), format!("{}u", operand::width(width) / 2)));
        }
        if transposed {
            defines.push(("TRANSPOSED".to_owned(), "1".to_owned()));
        }
        if in_packs(x) {
            defines.push(("PACKS".to_owned(), "1".to_owned()));
        }
        let results = (0..call.outputs.len()).map(Arg::Output);
        let mut args: Vec<Arg> = [Arg::Input(0), Arg::Input(1)].into_iter().chain(results).collect();
        if let Some(dice) = reading.dice {
            defines.push(("SEED".to_owned(), format!("{}ull", dice.seed)));
            defines.push(("FIRST".to_owned(), format!("{}ull", dice.first)));
            defines.push(("WIDTH".to_owned(), format!("{}ull", dice.width)));
            args.extend([Arg::Input(2), Arg::U32(dice.stream)]);
        }
        Lowered::Kernels(vec![KernelSpec {
            entry: "quantise_blocks",
            source: SOURCE.to_owned(),
            headers: if packed_form { SMALL_HEADERS.to_vec() } else { OPERAND_HEADERS.to_vec() },
            defines,
            grid: [(threads_high * threads_wide).div_ceil(THREADS as usize).max(1) as u32, groups as u32, 1],
            block: [THREADS, 1, 1],
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
        let step = |step: i32| ExampleInput::Ints { shape: vec![1], values: vec![step] };
        let dice = |stream: u64, first: usize, width: usize| {
            Attrs::new().with("stream", stream).with("seed", u64::MAX).with("first", first).with("width", width)
        };
        let apart = || Attrs::new().with("operand", true);
        vec![
            Example::new(vec![normal(&[2, 5, 48], 1.0), parts(4.0)], Attrs::new()),
            // No magnitude of the tensor is large enough for a scale.
            Example::new(vec![normal(&[7, 16], 0.0), parts(0.0)], Attrs::new()),
            Example::new(vec![normal(&[64, 80], 1e-3), parts(4e-3)], Attrs::new().with("tiles", true)),
            Example::new(vec![normal(&[3, 24, 32], 1e-6), parts(3.5e-6), step(3)], dice(7, 48, 96)),
            Example::new(vec![normal(&[80, 272], 10.0), parts(42.0), step(0)], dice(u64::from(u32::MAX), 0, 272)),
            // Rows and blocks that are filled up, and matrices of more than one tile of scales.
            Example::new(vec![normal(&[2, 5, 48], 1.0), parts(4.0)], apart()),
            Example::new(vec![normal(&[96, 176], 1e-3), parts(4e-3)], apart().with("tiles", true)),
            Example::new(
                vec![normal(&[144, 80], 1.0), parts(4.0)],
                apart().with("tiles", true).with("transposed", true),
            ),
            Example::new(vec![normal(&[144, 208], 10.0), parts(42.0), step(5)], dice(3, 0, 208).with("operand", true)),
            // Several stacked matrices at once.
            Example::new(
                vec![
                    normal(&[3, 80, 48], 1.0),
                    ExampleInput::F32 {
                        shape: vec![3, PARTS],
                        values: (0..3 * PARTS)
                            .map(|part| ((part * 37) % 101 * (part / PARTS + 1)) as f32 * 0.04)
                            .collect(),
                    },
                ],
                Attrs::new().with("tiles", true).with("groups", 3),
            ),
        ]
    }
}
