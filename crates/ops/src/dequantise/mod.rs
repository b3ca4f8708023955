//! The values of a packed tensor: what a product reads where a frozen weight is kept in codes. Does not know which
//! tensors are, or how numbers become codes.

use graph::{Axis, Dim, Element, OpId, ValueType};
use program::{Arg, TensorRef};
use rayon::prelude::*;
use tensor::draw::{Sequence, normals};
use tensor::packed::{Packed, Scaled, Stored, Target, nested, normal, nvfp4, scaled, tiles};
use tensor::small::Small;
use tensor::storage::{BOOK, Block, Code, MXFP4, NVFP4, NVFP4_TILES, Packing, Scales};
use tensor::{Attrs, DType};

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, device_type};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::optimizer::dynamic_map;
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("dequantise.cu");
const HEADERS: &[(&str, &str)] =
    &[("types.cuh", include_str!("../cuda/types.cuh")), ("pack.cuh", include_str!("../cuda/pack.cuh"))];

const THREADS: usize = 256;
/// Elements that a thread reads and writes at once: 16 bytes of bf16.
const WIDTH: usize = 8;
/// Number of packs that a thread takes.
const ROUNDS: usize = 4;

/// Elements of one task on the CPU.
const CHUNK: usize = 1 << 14;

/// The operation y = dequantise(packed).
pub struct Dequantise;

fn packing_of(attrs: &Attrs) -> Result<Packing, String> {
    attrs.text("packing").map_err(|e| e.0)?.parse().map_err(|e: tensor::storage::UnknownPacking| e.to_string())
}

fn is_unscaled(attrs: &Attrs) -> Result<bool, String> {
    attrs.flag("unscaled").map_err(|e| e.0)
}

/// The attributes of a call.
pub fn attributes(packing: Packing, shape: &[usize]) -> Attrs {
    Attrs::new().with("packing", packing.to_string()).with("shape", shape.to_vec())
}

/// Returns the attributes of a call for `members` contiguous tensors of this shape.
pub fn of_members(packing: Packing, shape: &[usize], members: usize) -> Attrs {
    attributes(packing, shape).with("members", members)
}

/// Returns the number of contiguous tensors.
fn members(attrs: &Attrs) -> Result<usize, String> {
    match attrs.optional_int("members").map_err(|e| e.0)? {
        None => Ok(1),
        Some(members) => usize::try_from(members).ok().filter(|n| *n > 0).ok_or("`members` is at least 1".into()),
    }
}

/// The attributes of a call that leaves out the tensor's factor, for a tensor whose axes may have names.
pub fn unscaled(packing: Packing, dims: &[Dim]) -> Attrs {
    let shape: Vec<usize> = dims.iter().map(|dim| dim.fixed().expect("flat graphs know their extents")).collect();
    let names: Vec<&str> = dims.iter().map(|dim| dim.axis().map_or(UNNAMED, Axis::symbol)).collect();
    let attrs = attributes(packing, &shape).with("unscaled", true);
    if names.iter().all(|name| *name == UNNAMED) { attrs } else { attrs.with("axes", names.join(" ")) }
}

/// The text that stands for an axis without a name.
const UNNAMED: &str = "-";

/// The extents of the result with the names of its axes.
fn dims(attrs: &Attrs, shape: &[usize]) -> Result<Vec<Dim>, String> {
    let (mut shape, members) = (shape.to_vec(), members(attrs)?);
    match shape.first_mut() {
        Some(rows) => *rows *= members,
        None if members == 1 => {}
        None => return Err("numbers without an axis do not lie one after another".into()),
    }
    let Some(axes) = attrs.optional_text("axes").map_err(|e| e.0)? else {
        return Ok(shape.into_iter().map(Dim::Fixed).collect());
    };
    let axes: Vec<&str> = axes.split(' ').collect();
    let named = |(name, n): (&&str, &usize)| match Axis::of_symbol(name) {
        Some(axis) => Ok(Dim::Named(axis, *n)),
        None if *name == UNNAMED => Ok(Dim::Fixed(*n)),
        None => Err(format!("`{name}` names no axis")),
    };
    if axes.len() != shape.len() {
        return Err(format!("`axes` names {} axes of {}", axes.len(), shape.len()));
    }
    axes.iter().zip(&shape).map(named).collect()
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let packing = packing_of(call.attrs).expect("checked by the shape rule");
    let shape = call.attrs.sizes("shape").expect("checked by the shape rule");
    let unscaled = is_unscaled(call.attrs).expect("checked by the shape rule");
    let (bytes, elements) = (packing.bytes(&shape), shape.iter().product::<usize>());
    let packed = call.inputs[0].byte();
    let [y] = call.outputs_mut();
    for (packed, y) in packed.chunks_exact(bytes).zip(y.real().chunks_exact_mut(elements)) {
        let stored = Stored::new(packing, &shape, packed);
        let stored = if unscaled { stored.unscaled() } else { stored };
        y.par_chunks_mut(CHUNK).enumerate().for_each_init(Vec::new, |values: &mut Vec<f32>, (chunk, y)| {
            values.resize(y.len(), 0.0);
            stored.values(chunk * CHUNK, values);
            y.iter_mut().zip(values).for_each(|(y, value)| *y = T::from_f32(*value));
        });
    }
}

/// The block of element `i` as a C expression, and whether neighbours that begin at multiples of `WIDTH` share one.
fn block_of(packing: Packing, columns: usize) -> (String, bool) {
    let whole = |n: usize| n.is_multiple_of(WIDTH);
    match packing.block {
        Block::Tensor => ("0".to_owned(), true),
        Block::Flat(n) => (format!("(i) / {n}"), whole(n)),
        Block::Row(n) if columns.is_multiple_of(n) => (format!("(i) / {n}"), whole(n)),
        Block::Row(n) => (format!("(i) / {columns} * {} + (i) % {columns} / {n}", columns.div_ceil(n)), false),
        Block::Tile(rows, n) => {
            let (of_row, across) = (rows * columns, columns.div_ceil(n));
            (format!("(i) / {of_row} * {across} + (i) % {columns} / {n}"), whole(n) && whole(columns))
        }
    }
}

fn defines(call: &LowerCall<'_>, packing: Packing, shape: &[usize]) -> Vec<(String, String)> {
    let (planes, y) = (packing.planes(shape), &call.outputs[0]);
    let count: usize = shape.iter().product();
    let (block, whole) = block_of(packing, shape.last().copied().unwrap_or(1));
    let code = match packing.code {
        Code::Nf4 => 0,
        Code::Small(Small::E2M1) => 1,
        Code::Small(Small::E4M3) => 2,
        Code::Small(Small::E5M2) => 3,
    };
    let (scales, outer) = match packing.scales {
        Scales::Single => (0, 1),
        Scales::E8M0 => (1, 1),
        Scales::E4M3 => (2, 1),
        Scales::Mapped(n) => (3, n),
    };
    [
        ("COUNT", format!("{count}ull")),
        ("MEMBER_BYTES", format!("{}ull", packing.bytes(shape))),
        ("BITS", packing.code.bits().to_string()),
        ("CODE", code.to_string()),
        ("SCALES", scales.to_string()),
        ("OUTER_BLOCK", outer.to_string()),
        ("CODES_AT", planes.codes.offset.to_string()),
        ("SCALES_AT", planes.scales.offset.to_string()),
        ("OUTER_AT", planes.outer.offset.to_string()),
        ("TENSOR_AT", planes.tensor.offset.to_string()),
        ("BLOCK_OF(i)", block),
        ("BLOCK_WHOLE", u32::from(whole).to_string()),
        ("WIDTH", WIDTH.to_string()),
        ("ROUNDS", ROUNDS.to_string()),
        ("THREADS", THREADS.to_string()),
        ("Y_T", device_type(y.dtype).to_owned()),
        ("WHOLE", u32::from(!is_unscaled(call.attrs).expect("checked by the shape rule")).to_string()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

/// True where the kernel's accesses of several elements are aligned.
fn is_aligned(at: &TensorRef) -> bool {
    at.is_dense() && at.offset.is_multiple_of(16)
}

impl Op for Dequantise {
    fn id(&self) -> OpId {
        id::DEQUANTISE
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "The values of a tensor that is kept as codes and scales: a code's value times its block's scale, in f32. packed u8 \
         [bytes] → `shape`, or with `members` [bytes·members] → that many times the rows; with `unscaled` without the factor that a tensor has in addition to the scales of its blocks."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute {
                name: "packing",
                kind: "string",
                doc: "code, block and scales, such as `nf4 flat:64 mapped:256`",
            },
            Attribute { name: "shape", kind: "list of int", doc: "of the tensor" },
            Attribute { name: "axes", kind: "string?", doc: "their names, such as `B T -`" },
            Attribute { name: "members", kind: "int?", doc: "number of such tensors, one after another" },
            Attribute { name: "unscaled", kind: "bool?", doc: "the factor of the whole tensor is left out" },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [packed] = inputs else { return Err("takes the packed tensor".into()) };
        is_unscaled(attrs)?;
        let (packing, shape) = (packing_of(attrs)?, attrs.sizes("shape").map_err(|e| e.0)?);
        let members = members(attrs)?;
        if packing.transposed {
            return Err(format!("{packing}: values are as they lie in memory"));
        }
        let wanted = ValueType::new(Element::Fixed(DType::U8), [(members * packing.bytes(&shape)).into()]);
        if *packed != wanted {
            return Err(format!("{members} × a tensor {shape:?} of {packing} is {wanted}"));
        }
        Ok(vec![ValueType::new(Element::Float, dims(attrs, &shape)?)])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("packed weights are frozen")
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (packed, y) = (&call.inputs[0], &call.outputs[0]);
        assert!(is_aligned(packed) && is_aligned(y), "packed weights and their values are dense: {packed}, {y}");
        let packing = packing_of(call.attrs).expect("checked by the shape rule");
        let shape = call.attrs.sizes("shape").expect("checked by the shape rule");
        let (members, elements) =
            (members(call.attrs).expect("checked by the shape rule"), shape.iter().product::<usize>());
        assert!(
            members == 1 || elements.is_multiple_of(WIDTH),
            "each of {members} tensors begins on 16 bytes: {shape:?}"
        );
        Lowered::Kernels(vec![KernelSpec {
            entry: "dequantise",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines: defines(call, packing, &shape),
            grid: [elements.div_ceil(THREADS * WIDTH * ROUNDS) as u32, members as u32, 1],
            block: [THREADS as u32, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Output(0)],
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |packed: Packed| {
            let values = packed.to_bytes();
            let input = ExampleInput::Bytes { shape: vec![values.len()], values };
            let attrs = attributes(packed.packing, &packed.shape);
            let whole = Example::new(vec![input.clone()], attrs.clone());
            let unscaled = Example::new(vec![input], attrs.with("unscaled", true));
            let has_factor = packed.packing.scales == Scales::E4M3;
            [whole].into_iter().chain(has_factor.then_some(unscaled))
        };
        let several = forms().into_iter().filter(|of| of.shape.iter().product::<usize>().is_multiple_of(WIDTH));
        let several = several.map(|mut of| {
            let mut next = || {
                of.codes.rotate_left(5);
                of.to_bytes()
            };
            let values = [next(), next(), next()].concat();
            let input = ExampleInput::Bytes { shape: vec![values.len()], values };
            Example::new(vec![input], of_members(of.packing, &of.shape, 3))
        });
        forms().into_iter().flat_map(example).chain(several).collect()
    }
}

/// Drawn tensors in every form: whole blocks, ragged ones, more than one block of threads.
fn forms() -> Vec<Packed> {
    let x = |elements: usize| {
        let mut values = vec![0.0; elements];
        normals(Sequence { seed: 5, stream: 1, start: 0 }, 0.02, &mut values);
        values
    };
    let (map, wide, odd) = (dynamic_map(true), x(130 * 96), x(7 * 33));
    let codes = |n: usize, of: usize| (0..n).map(|i| (i * 7 % of) as u8).collect::<Vec<u8>>();
    assert_eq!(map.len(), BOOK, "the book of nested scales");
    vec![
        normal(&wide, &[130, 96], 64),
        nested(&wide, &[130, 96], 64, &map),
        nested(&wide, &[130, 96], 512, &map),
        normal(&odd, &[7, 33], 128),
        tiles(&wide, &[130, 96], 64),
        tiles(&x(200 * 150), &[200, 150], 128),
        scaled(Small::E5M2, &odd, &[7, 33], 9),
        nvfp4(NVFP4, &wide, &[130, 96], Target::FourOrSix),
        nvfp4(NVFP4_TILES, &x(40 * 48), &[40, 48], Target::Six),
        Packed {
            packing: MXFP4,
            shape: vec![2, 5, 64],
            codes: codes(640, 16),
            scales: Scaled::E8M0(vec![
                0, 1, 100, 118, 119, 120, 121, 122, 123, 124, 60, 119, 118, 117, 116, 115, 90, 80, 70, 127,
            ]),
        },
        Packed {
            packing: tensor::storage::fp8(Small::E4M3),
            shape: vec![16, 16],
            codes: codes(256, 127),
            scales: Scaled::Single(vec![0.37]),
        },
    ]
}
