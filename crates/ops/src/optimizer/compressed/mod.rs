//! Gradients in blocks of fewer bytes for a slow link, and the sums of such blocks. Rounding errors are kept and added
//! the next time (error feedback: Seide et al. 2014, Karimireddy et al. 2019), so it arrives later instead of never.

mod sum;

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::{Attrs, DType};

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

pub use sum::SumCompressed;

const SOURCE: &str = include_str!("compressed.cu");
const HEADERS: &[(&str, &str)] = &[("types.cuh", include_str!("../../cuda/types.cuh"))];

/// Number of elements in a block.
pub const BLOCK: usize = 256;

/// A warp takes a block.
const THREADS: u32 = 256;
const WARPS: usize = THREADS as usize / 32;

/// The largest code of a block in eight bits.
const LARGEST: f64 = 127.0;

/// Number of elements that are kept of a block where only the largest are sent.
const KEPT: usize = 16;

/// Number of threads in a warp, and of the sums of magnitudes that are added up pairwise.
const LANES: usize = 32;

/// The compressed form of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocks {
    /// Its scale in f32, and 256 codes of eight bits.
    Int8,
    /// Its 16 largest elements in f32, and then their places in a byte each.
    TopK,
    /// The mean of its magnitudes in f32, and 256 signs of a bit each. What is sent so is the first moment.
    OneBit,
}

impl Blocks {
    /// Returns its name in the attribute `form`.
    pub const fn name(self) -> &'static str {
        match self {
            Blocks::Int8 => "int8",
            Blocks::TopK => "topk",
            Blocks::OneBit => "onebit",
        }
    }

    /// True if first moments are sent, not gradients (1-bit Adam, Tang et al. 2021).
    pub const fn are_of_momentum(self) -> bool {
        matches!(self, Blocks::OneBit)
    }

    /// True if blocks have a few elements each: a sum of several has more.
    pub const fn are_sparse(self) -> bool {
        matches!(self, Blocks::TopK)
    }

    /// Returns the bytes of `elements` elements, a multiple of 256.
    pub const fn bytes(self, elements: usize) -> usize {
        elements / BLOCK * self.block_bytes()
    }

    const fn block_bytes(self) -> usize {
        match self {
            Blocks::Int8 => 4 + BLOCK,
            Blocks::TopK => KEPT * 5,
            Blocks::OneBit => 4 + BLOCK / 8,
        }
    }

    fn of(attrs: &Attrs) -> Result<Blocks, String> {
        match attrs.text("form")? {
            "int8" => Ok(Blocks::Int8),
            "topk" => Ok(Blocks::TopK),
            "onebit" => Ok(Blocks::OneBit),
            other => Err(format!("`form` is `{other}`, expected `int8`, `topk` or `onebit`")),
        }
    }

    /// Writes a block, and leaves in `rest` what was not written.
    fn write<T: Real>(self, rest: &mut [T], bytes: &mut [u8]) {
        let is_finite = rest.iter().all(|value| value.is_finite());
        match self {
            Blocks::Int8 => {
                let largest = rest.iter().fold(T::default(), |most, value| most.max(value.abs()));
                let scale = if is_finite { largest / T::from_f64(LARGEST) } else { T::from_f32(f32::NAN) };
                let scale = T::from_f32(scale.to_f32());
                bytes[..4].copy_from_slice(&scale.to_f32().to_le_bytes());
                for (value, code) in rest.iter_mut().zip(&mut bytes[4..]) {
                    let quotient = if scale > T::default() { *value / scale } else { T::default() };
                    let rounded = quotient.to_f64().round_ties_even().clamp(-LARGEST, LARGEST);
                    *code = rounded as i8 as u8;
                    *value -= T::from_f64(rounded) * scale;
                }
            }
            Blocks::TopK => {
                let mut taken = [false; BLOCK];
                for number in 0..KEPT {
                    // The first of those that are equally large.
                    let larger = |best: Option<usize>, at: usize| match best {
                        _ if taken[at] => best,
                        Some(best) if rest[best].abs() >= rest[at].abs() => Some(best),
                        _ => Some(at),
                    };
                    let at = (0..BLOCK).fold(None, larger).expect("a block has more elements than are left of it");
                    taken[at] = true;
                    let value = if is_finite { rest[at].to_f32() } else { f32::NAN };
                    bytes[4 * number..][..4].copy_from_slice(&value.to_le_bytes());
                    bytes[4 * KEPT + number] = at as u8;
                }
                let sent = taken.iter().zip(rest).filter(|(taken, _)| **taken);
                sent.for_each(|(_, value)| *value = T::default());
            }
            Blocks::OneBit => {
                let scale = if is_finite { mean_magnitude(rest) } else { T::from_f32(f32::NAN) };
                bytes.fill(0);
                bytes[..4].copy_from_slice(&scale.to_f32().to_le_bytes());
                for (at, value) in rest.iter_mut().enumerate() {
                    let is_positive = *value >= T::default();
                    bytes[4 + at / 8] |= u8::from(is_positive) << (at % 8);
                    *value -= if is_positive { scale } else { T::default() - scale };
                }
            }
        }
    }

    /// Adds the values of a block.
    fn add<T: Real>(self, bytes: &[u8], sum: &mut [T]) {
        let number = |at: usize| T::from_f32(f32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes")));
        match self {
            Blocks::Int8 => {
                let scale = number(0);
                let codes = bytes[4..].iter().map(|code| T::from_f32(f32::from(*code as i8)));
                sum.iter_mut().zip(codes).for_each(|(sum, code)| *sum += code * scale);
            }
            Blocks::TopK => (0..KEPT).for_each(|at| sum[usize::from(bytes[4 * KEPT + at])] += number(4 * at)),
            Blocks::OneBit => {
                let signs = [T::default() - number(0), number(0)];
                let bit = |at: usize| usize::from(bytes[4 + at / 8] >> (at % 8) & 1);
                sum.iter_mut().enumerate().for_each(|(at, sum)| *sum += signs[bit(at)]);
            }
        }
    }

    /// Returns the definitions of its kernels.
    fn defines(self) -> Vec<(String, String)> {
        let form = match self {
            Blocks::Int8 => "INT8",
            Blocks::TopK => "TOPK",
            Blocks::OneBit => "ONEBIT",
        };
        let numbers = [("THREADS", THREADS as usize), ("KEPT", KEPT), ("BYTES", self.block_bytes()), (form, 1)];
        numbers.map(|(name, value)| (name.to_owned(), value.to_string())).to_vec()
    }
}

/// The mean of the magnitudes of a block, rounded to f32, in the order of a warp: a lane adds up every 32nd, then lanes
/// are added up pairwise.
fn mean_magnitude<T: Real>(block: &[T]) -> T {
    let mut lanes = [T::default(); LANES];
    block.iter().enumerate().for_each(|(at, value)| lanes[at % LANES] += value.abs());
    for far in [16, 8, 4, 2, 1] {
        let before = lanes;
        lanes.iter_mut().enumerate().for_each(|(lane, sum)| *sum += before[lane ^ far]);
    }
    T::from_f32((lanes[0] / T::from_f64(BLOCK as f64)).to_f32())
}

/// codes, error = compress(x)
pub struct Compress;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let form = Blocks::of(call.attrs).expect("checked by the shape rule");
    let x = call.inputs[0].real();
    let [codes, error] = call.outputs_mut();
    let (codes, error) = (codes.byte(), error.real());
    let (codes, filled) = codes.split_at_mut(form.bytes(x.len()));
    filled.fill(0);
    let blocks = codes.par_chunks_mut(form.block_bytes()).zip(error.par_chunks_mut(BLOCK)).zip(x.par_chunks(BLOCK));
    blocks.for_each(|((codes, error), x)| {
        let mut rest: Vec<T> = x.iter().zip(&*error).map(|(x, error)| *x + *error).collect();
        let is_finite = rest.iter().all(|value| value.is_finite());
        form.write(&mut rest, codes);
        // Values that are not finite suppress the update, and are not sent again.
        if is_finite {
            error.copy_from_slice(&rest);
        }
    });
}

impl Op for Compress {
    fn id(&self) -> OpId {
        id::COMPRESS
    }

    fn class(&self) -> Class {
        Class::Update
    }

    fn doc(&self) -> &'static str {
        "Blocks of 256 elements in fewer bytes, of x and of the error that was left before: x f32 [n] → codes u8 [bytes], \
         error f32 [n], which then has what the codes have not. `int8`: a scale in f32 and codes of eight bits, the nearest. \
         `topk`: the 16 largest elements in f32 and their places. `onebit`: the mean of the magnitudes in f32 and signs of a \
         bit. Codes after those of x are zeros."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "form", kind: "string", doc: "`int8`, `topk` or `onebit`" },
            Attribute { name: "elements", kind: "int", doc: "elements for which there are codes: at least those of x" },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let (form, elements) = (Blocks::of(attrs)?, attrs.size("elements")?);
        match inputs {
            [x] if x.dtype == Element::F32 && x.shape.len() == 1 => {
                let codes = ValueType::new(Element::Fixed(DType::U8), [Dim::from(form.bytes(elements))]);
                Ok(vec![codes, ValueType::new(Element::F32, [x.shape[0].clone()])])
            }
            _ => Err("takes x as f32 [n]".into()),
        }
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of the update")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let bytes = inputs[0].bytes() + outputs[0].bytes() + 2 * outputs[1].bytes();
        Cost { flops: 4.0 * inputs[0].len() as f64, bytes: bytes as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let form = Blocks::of(call.attrs).expect("checked by the shape rule");
        let (x, codes, error) = (&call.inputs[0], &call.outputs[0], &call.outputs[1]);
        assert!(
            [x, codes, error].iter().all(|of| of.is_dense() && of.offset.is_multiple_of(4)),
            "{x}, {codes}, {error}"
        );
        assert!(x.len().is_multiple_of(BLOCK), "{x} has whole blocks");
        let all = codes.len() / form.block_bytes();
        let mut defines = form.defines();
        defines
            .extend([("BLOCKS", x.len() / BLOCK), ("ALL", all)].map(|(name, of)| (name.to_owned(), format!("{of}u"))));
        Lowered::Kernels(vec![KernelSpec {
            entry: "compress",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines,
            grid: [all.div_ceil(WARPS) as u32, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Output(0), Arg::Output(1)],
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let of = |form: Blocks, elements: usize, all: usize| {
            let normal = |scale: f64| ExampleInput::NormalF32 { shape: vec![elements], scale };
            let codes = ExampleInput::Bytes { shape: vec![form.bytes(all)], values: vec![7; form.bytes(all)] };
            let attrs = Attrs::new().with("form", form.name()).with("elements", all as u64);
            Example::new(vec![normal(1.0)], attrs).with_state(vec![codes, normal(0.1)])
        };
        let all = [Blocks::Int8, Blocks::TopK, Blocks::OneBit].into_iter();
        all.flat_map(|form| [of(form, 8192, 8192), of(form, 512, 768)]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Array, apply};

    /// Returns the sum of what arrives of a gradient in `steps` steps, for each element, and the last error.
    fn arrived(form: Blocks, x: &[f32], steps: usize) -> (Vec<f32>, Vec<f32>) {
        let (n, bytes) = (x.len(), form.bytes(x.len()));
        let attrs = Attrs::new().with("form", form.name()).with("elements", n as u64);
        let mut outputs = vec![(vec![bytes], Array::Byte(vec![0; bytes])), (vec![n], Array::Real(vec![0.0f32; n]))];
        let mut total = vec![0.0f32; n];
        for _ in 0..steps {
            apply::<f32>(&Compress, &attrs, &[(&[n], &Array::Real(x.to_vec()))], &mut outputs);
            let mut sum = vec![(vec![n], Array::Real(vec![0.0f32; n]))];
            let attrs = Attrs::new().with("form", form.name());
            apply::<f32>(&SumCompressed, &attrs, &[(&[1, bytes], &outputs[0].1)], &mut sum);
            total.iter_mut().zip(sum[0].1.real()).for_each(|(total, sum)| *total += sum);
        }
        (total, outputs[1].1.real().to_vec())
    }

    /// Everything given has arrived or is kept, and nothing is kept for ever.
    #[test]
    fn what_is_not_sent_arrives_later() {
        let x: Vec<f32> = (0..512).map(|i| ((i * 7919) % 1009) as f32 / 1009.0 - 0.5).collect();
        for (form, steps, bound) in
            [(Blocks::Int8, 20, 0.5 / 127.0), (Blocks::TopK, 200, 20.0), (Blocks::OneBit, 400, 10.0)]
        {
            let (total, error) = arrived(form, &x, steps);
            for ((x, total), error) in x.iter().zip(&total).zip(&error) {
                let given = x * steps as f32;
                assert!((total + error - given).abs() < 1e-3, "{form:?}: {total} + {error} of {given}");
            }
            // No more than the largest elements of the steps within which every element is sent once.
            let most = error.iter().fold(0.0f32, |most, error| most.max(error.abs()));
            assert!(most < bound, "{form:?}: {most}");
            assert!(error.iter().any(|error| *error != 0.0), "{form:?}");
        }
    }

    #[test]
    fn what_is_not_finite_arrives_and_is_not_kept() {
        for form in [Blocks::Int8, Blocks::TopK, Blocks::OneBit] {
            for bad in [f32::NAN, f32::INFINITY] {
                let mut x = vec![0.25f32; 256];
                x[100] = bad;
                let (total, error) = arrived(form, &x, 1);
                assert!(total.iter().any(|value| !value.is_finite()), "{form:?}");
                assert!(error.iter().all(|value| *value == 0.0), "{form:?}");
            }
        }
    }
}
