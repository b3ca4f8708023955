//! Keys and values of new tokens into the pages of their sequences.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use tensor::{Attrs, DType};

use super::{CACHE_TYPE, PAGE, PAGES, check_places, cpu, examples, sizes};
use crate::attention::launch::strides;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, device_type};
use crate::op::{Attribute, Class, Example, Op};
use crate::registry::id;

const SOURCE: &str = include_str!("write.cu");
const HEADERS: &[(&str, &str)] = &[
    ("types.cuh", include_str!("../../cuda/types.cuh")),
    ("pages.cuh", include_str!("pages.cuh")),
    device::DEPENDENT_LAUNCH,
];

const THREADS: u32 = 128;

/// key_cache, value_cache ← cache_write(k, v, positions, table)
pub struct CacheWrite;

impl Op for CacheWrite {
    fn id(&self) -> OpId {
        id::CACHE_WRITE
    }

    fn class(&self) -> Class {
        Class::Update
    }

    fn doc(&self) -> &'static str {
        "Puts the keys and values of new tokens into the pages of their sequences: token t of row b, at position p of \
         its sequence, goes to line p mod page of page table[b, p / page]. A position below 0 is padding and goes \
         nowhere. Everything else stays as it is. k [B, T, kv_heads, D], v [B, T, kv_heads, DV], positions i32 [B, T], \
         table i32 [B, M] → key_cache [pages, page, kv_heads, D], value_cache [pages, page, kv_heads, DV]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[PAGES, PAGE, CACHE_TYPE]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [k, v, positions, table] = inputs else { return Err("takes k, v, the positions and the table".into()) };
        let [_, _, Dim::Fixed(heads), Dim::Fixed(_)] = k.shape.as_slice() else {
            return Err("k must be [B, T, kv_heads, D], kv_heads and D known".into());
        };
        let [.., Dim::Fixed(_)] = v.shape.as_slice() else { return Err("v must be [B, T, kv_heads, DV]".into()) };
        if v.shape.len() != 4 || v.shape[..3] != k.shape[..3] || !k.dtype.is_float() || v.dtype != k.dtype {
            return Err("v must have the rows, tokens, heads and type of k, which is floating point".into());
        }
        check_places(k, positions, table)?;
        let (pages, page) = sizes(attrs)?;
        let element = match attrs.get("dtype") {
            None => k.dtype,
            Some(_) => Element::Fixed(attrs.text("dtype")?.parse::<DType>().map_err(|e| format!("`dtype`: {e}"))?),
        };
        if !element.is_float() {
            return Err(format!("`dtype` is {element}, expected a floating-point type"));
        }
        let cache = |of: &ValueType| {
            ValueType::new(element, [Dim::Fixed(pages), Dim::Fixed(page), Dim::Fixed(*heads), of.shape[3].clone()])
        };
        Ok(vec![cache(k), cache(v)])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("only what generates text writes a cache")
    }

    /// The new tokens are read and written, nothing else of the caches.
    fn cost(&self, inputs: &[TensorRef], _outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        Cost { flops: 0.0, bytes: 2.0 * (inputs[0].bytes() + inputs[1].bytes()) as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let [k, v, positions, table] = call.inputs else { unreachable!("the shape rule requires four inputs") };
        for tensor in [positions, table].into_iter().chain(call.outputs) {
            assert!(tensor.is_dense(), "caches, positions and tables lie densely: {tensor}");
        }
        let numbers = [
            ("TOKENS", k.shape[1]),
            ("KV_HEADS", k.shape[2]),
            ("D", k.shape[3]),
            ("DV", v.shape[3]),
            ("PAGE", call.outputs[0].shape[1]),
            ("TABLE", table.shape[1]),
            ("THREADS", THREADS as usize),
        ];
        let mut defines: Vec<_> = numbers.map(|(name, n)| (name.to_owned(), n.to_string())).to_vec();
        defines.extend(strides("K", k).into_iter().chain(strides("V", v)));
        defines.push(("CACHE_T".to_owned(), device_type(call.outputs[0].dtype).to_owned()));
        Lowered::Kernels(vec![KernelSpec {
            entry: "cache_write",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines,
            grid: [(k.shape[0] * k.shape[1]) as u32, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Input(1), Arg::Input(2), Arg::Input(3), Arg::Output(0), Arg::Output(1)],
        }])
    }

    crate::reference!(cpu::write);

    fn examples(&self) -> Vec<Example> {
        examples::of_writing()
    }
}
