//! Conversion between storage types and the number types of the references: widening to f32, rounding back, and buffers
//! for operands that cannot be used in place.

use std::marker::PhantomData;

use ops::{Data, Input, Loop, Output, vectorised};
use program::TensorRef;
use rayon::prelude::*;
use tensor::packed::operand;
use tensor::{DType, bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

use crate::arena::{Memory, Plain, Span, SpanMut};
use crate::layout::{Runs, gather, scatter};

/// The number type of the references that a storage type is widened to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Real,
    Int,
    Byte,
}

impl Kind {
    /// `None` for types that the references do not know.
    pub fn of(dtype: DType) -> Option<Kind> {
        match dtype {
            DType::F64 | DType::F32 | DType::BF16 | DType::F16 | DType::E4M3 | DType::E5M2 => Some(Kind::Real),
            DType::I32 => Some(Kind::Int),
            DType::U8 => Some(Kind::Byte),
            DType::I64 => None,
        }
    }
}

/// True if a reference can use the memory as it is.
pub fn is_native(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::I32 | DType::U8)
}

/// Reads a floating-point tensor of any layout as dense f32; f64, which only counts, is rounded; eight-bit elements
/// without their scale.
pub fn widen(memory: &Memory, at: &TensorRef, out: &mut [f32]) {
    let runs = Runs::of(at);
    match at.dtype {
        DType::F64 => gather(memory.read::<f64>(at), &runs, out, |x| x as f32),
        DType::F32 => gather(memory.read::<f32>(at), &runs, out, |x| x),
        DType::BF16 => gather(memory.read::<u16>(at), &runs, out, bf16_to_f32),
        DType::F16 => gather(memory.read::<u16>(at), &runs, out, f16_to_f32),
        DType::E4M3 | DType::E5M2 => {
            let values = at.dtype.small().expect("a code of eight bits").values();
            gather(memory.read::<u8>(at), &runs, out, |code| values[code as usize])
        }
        other => panic!("{other} is not widened to f32: refused when the program is loaded"),
    }
}

/// Writes dense f32 into a floating-point tensor of any layout, rounding to nearest even. Eight-bit elements saturate.
pub fn round(memory: &mut Memory, at: &TensorRef, values: &[f32]) {
    let runs = Runs::of(at);
    match at.dtype {
        DType::F64 => scatter(values, &runs, memory.write::<f64>(at), f64::from),
        DType::F32 => scatter(values, &runs, memory.write::<f32>(at), |x| x),
        DType::BF16 => scatter(values, &runs, memory.write::<u16>(at), f32_to_bf16),
        DType::F16 => scatter(values, &runs, memory.write::<u16>(at), f32_to_f16),
        DType::E4M3 | DType::E5M2 => {
            let small = at.dtype.small().expect("a code of eight bits");
            scatter(values, &runs, memory.write::<u8>(at), |x| small.code(f64::from(x)))
        }
        other => panic!("f32 is not rounded to {other}: refused when the program is loaded"),
    }
}

/// An element type in which rows of a result are stored.
pub trait Stored: Plain {
    /// Widens to f32, exactly.
    fn widen(stored: &[Self], wide: &mut [f32]);

    /// Rounds to nearest, ties to even.
    fn round(wide: &[f32], stored: &mut [Self]);
}

impl Stored for f32 {
    fn widen(stored: &[f32], wide: &mut [f32]) {
        wide.copy_from_slice(stored);
    }

    fn round(wide: &[f32], stored: &mut [f32]) {
        stored.copy_from_slice(wide);
    }
}

/// Storage of bf16 as its bits.
impl Stored for u16 {
    fn widen(stored: &[u16], wide: &mut [f32]) {
        BF16::widen(stored, wide);
    }

    fn round(wide: &[f32], stored: &mut [u16]) {
        BF16::round(wide, stored);
    }
}

/// A type of 16 bits, stored as its bits.
pub trait Narrow: Sized {
    /// Widens to f32, exactly.
    fn wide(bits: u16) -> f32;

    /// Rounds to nearest, ties to even.
    fn narrow(x: f32) -> u16;

    /// Widens as many elements as both sides have.
    fn widen(stored: &[u16], wide: &mut [f32]) {
        vectorised(WidenRow::<Self>(PhantomData), (stored, wide));
    }

    /// Rounds as many elements as both sides have.
    fn round(wide: &[f32], stored: &mut [u16]) {
        vectorised(RoundRow::<Self>(PhantomData), (wide, stored));
    }
}

/// The elements of bfloat16 tensors.
pub struct BF16;
/// The elements of float16 tensors.
pub struct F16;

impl Narrow for BF16 {
    #[inline(always)]
    fn wide(bits: u16) -> f32 {
        bf16_to_f32(bits)
    }

    #[inline(always)]
    fn narrow(x: f32) -> u16 {
        f32_to_bf16(x)
    }
}

impl Narrow for F16 {
    #[inline(always)]
    fn wide(bits: u16) -> f32 {
        f16_to_f32(bits)
    }

    #[inline(always)]
    fn narrow(x: f32) -> u16 {
        f32_to_f16(x)
    }
}

struct WidenRow<N>(PhantomData<N>);

impl<'a, N: Narrow> Loop<(&'a [u16], &'a mut [f32])> for WidenRow<N> {
    type Output = ();

    #[inline(always)]
    fn run((stored, wide): (&'a [u16], &'a mut [f32])) {
        for (to, from) in wide.iter_mut().zip(stored) {
            *to = N::wide(*from);
        }
    }
}

struct RoundRow<N>(PhantomData<N>);

impl<'a, N: Narrow> Loop<(&'a [f32], &'a mut [u16])> for RoundRow<N> {
    type Output = ();

    #[inline(always)]
    fn run((wide, stored): (&'a [f32], &'a mut [u16])) {
        for (to, from) in stored.iter_mut().zip(wide) {
            *to = N::narrow(*from);
        }
    }
}

/// A dense copy of one operand, in the number type of its kind. Grown while a program is loaded,
/// never while it runs.
#[derive(Default)]
pub struct Buffer {
    real: Vec<f32>,
    int: Vec<i32>,
    byte: Vec<u8>,
}

impl Buffer {
    pub fn bytes(&self) -> usize {
        size_of_val(self.real.as_slice()) + size_of_val(self.int.as_slice()) + self.byte.len()
    }

    /// Makes room for a copy of a tensor.
    pub fn reserve(&mut self, at: &TensorRef) {
        match Kind::of(at.dtype) {
            Some(Kind::Real) => grow(&mut self.real, at.len()),
            Some(Kind::Int) => grow(&mut self.int, at.len()),
            Some(Kind::Byte) => grow(&mut self.byte, at.len()),
            None => refused(at),
        }
    }

    /// Makes room for `len` f32 numbers.
    pub fn reserve_real(&mut self, len: usize) {
        grow(&mut self.real, len);
    }

    /// Loads a factor of a product, two four-bit elements in a byte, times the scales of their blocks.
    pub fn load_operand(&mut self, memory: &Memory, codes: &TensorRef, scales: &TensorRef) {
        let (rows, bytes, stride) = codes.as_matrix().expect("checked when the program is loaded");
        let (codes, scales) = (memory.read::<u8>(codes), memory.read::<u8>(scales));
        let lines = self.real[..2 * rows * bytes].par_chunks_mut((2 * bytes).max(1));
        lines.enumerate().for_each(|(row, out)| operand::row_values(&codes[row * stride..], scales, row, out));
    }

    /// Copies a tensor into the buffer, widened.
    pub fn load(&mut self, memory: &Memory, at: &TensorRef) {
        match Kind::of(at.dtype) {
            Some(Kind::Int) => gather(memory.read(at), &Runs::of(at), &mut self.int[..at.len()], |x: i32| x),
            Some(Kind::Byte) => gather(memory.read(at), &Runs::of(at), &mut self.byte[..at.len()], |x: u8| x),
            Some(Kind::Real) => widen(memory, at, &mut self.real[..at.len()]),
            None => refused(at),
        }
    }

    /// Copies back, rounding to the tensor's storage type.
    pub fn store(&self, memory: &mut Memory, at: &TensorRef) {
        match Kind::of(at.dtype) {
            Some(Kind::Int) => scatter(&self.int[..at.len()], &Runs::of(at), memory.write(at), |x: i32| x),
            Some(Kind::Byte) => scatter(&self.byte[..at.len()], &Runs::of(at), memory.write(at), |x: u8| x),
            Some(Kind::Real) => round(memory, at, &self.real[..at.len()]),
            None => refused(at),
        }
    }

    /// The f32 copy of a floating-point tensor of `len` elements.
    pub fn real(&self, len: usize) -> &[f32] {
        &self.real[..len]
    }

    pub fn input<'a>(&'a self, at: &'a TensorRef) -> Input<'a, f32> {
        let data = match Kind::of(at.dtype) {
            Some(Kind::Int) => Data::Int(&self.int[..at.len()]),
            Some(Kind::Byte) => Data::Byte(&self.byte[..at.len()]),
            Some(Kind::Real) => Data::Real(&self.real[..at.len()]),
            None => refused(at),
        };
        Input { shape: &at.shape, data }
    }

    pub fn output<'a>(&'a mut self, at: &'a TensorRef) -> Output<'a, f32> {
        let shape = &at.shape;
        match Kind::of(at.dtype) {
            Some(Kind::Int) => Output::Int { shape, data: &mut self.int[..at.len()] },
            Some(Kind::Byte) => Output::Byte { shape, data: &mut self.byte[..at.len()] },
            Some(Kind::Real) => Output::Real { shape, data: &mut self.real[..at.len()], storage: at.dtype },
            None => refused(at),
        }
    }
}

fn refused(at: &TensorRef) -> ! {
    panic!("{at} has no buffer: refused when the program is loaded")
}

fn grow<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
}

/// An operand used where it is: dense and of a native type.
pub fn input_in_place<'a>(span: &Span<'a>, at: &'a TensorRef) -> Input<'a, f32> {
    let data = match at.dtype {
        DType::I32 => Data::Int(span.slice()),
        DType::U8 => Data::Byte(span.slice()),
        DType::F32 => Data::Real(span.slice()),
        DType::F64 | DType::BF16 | DType::F16 | DType::I64 | DType::E4M3 | DType::E5M2 => {
            panic!("{at} is not used where it lies")
        }
    };
    Input { shape: &at.shape, data }
}

/// A result written where it belongs: dense and of a native type.
pub fn output_in_place<'a>(span: SpanMut<'a>, at: &'a TensorRef) -> Output<'a, f32> {
    let shape = &at.shape;
    match at.dtype {
        DType::I32 => Output::Int { shape, data: span.slice() },
        DType::U8 => Output::Byte { shape, data: span.slice() },
        DType::F32 => Output::Real { shape, data: span.slice(), storage: at.dtype },
        DType::F64 | DType::BF16 | DType::F16 | DType::I64 | DType::E4M3 | DType::E5M2 => {
            panic!("{at} is not written where it lies")
        }
    }
}
