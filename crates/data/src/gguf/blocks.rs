//! The encodings in blocks of 32 elements: `Q8_0` and `Q5_0`, a scale in f16 and signed codes, and `Q5_1`, a scale, the least
//! number in f16 and codes from it on. Rounding is ggml's, halves away from zero.

use tensor::{f16_to_f32, f32_to_f16};

/// Elements of a quantized block.
pub const ELEMENTS: usize = 32;

pub const Q8_0_BYTES: usize = 2 + ELEMENTS;
pub const Q5_0_BYTES: usize = 2 + ELEMENTS / 8 + ELEMENTS / 2;
pub const Q5_1_BYTES: usize = 2 + Q5_0_BYTES;

fn number(bytes: &[u8]) -> f32 {
    f16_to_f32(u16::from_le_bytes([bytes[0], bytes[1]]))
}

fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// The largest magnitude over 127 is the scale.
pub fn encode_q8_0(x: &[f32], out: &mut [u8]) {
    let scale = x.iter().fold(0.0f32, |most, x| most.max(x.abs())) / 127.0;
    let inverse = inverse(scale);
    out[..2].copy_from_slice(&f32_to_f16(scale).to_le_bytes());
    for (x, code) in x.iter().zip(&mut out[2..]) {
        *code = (x * inverse).round() as i8 as u8;
    }
}

pub fn decode_q8_0(bytes: &[u8], out: &mut [f32]) {
    let scale = number(bytes);
    for (y, code) in out.iter_mut().zip(&bytes[2..]) {
        *y = f32::from(*code as i8) * scale;
    }
}

/// The number of the largest magnitude becomes the code −16, whatever its sign.
pub fn encode_q5_0(x: &[f32], out: &mut [u8]) {
    let extreme = x.iter().fold(0.0f32, |most, x| if x.abs() > most.abs() { *x } else { most });
    let scale = extreme / -16.0;
    let inverse = inverse(scale);
    out[..2].copy_from_slice(&f32_to_f16(scale).to_le_bytes());
    put_five_bits(x.iter().map(|x| ((x * inverse + 16.5) as u8).min(31)), &mut out[2..]);
}

pub fn decode_q5_0(bytes: &[u8], out: &mut [f32]) {
    let scale = number(bytes);
    for (element, y) in out.iter_mut().enumerate() {
        *y = scale * (f32::from(five_bits(&bytes[2..], element)) - 16.0);
    }
}

pub fn encode_q5_1(x: &[f32], out: &mut [u8]) {
    let (low, high) = x.iter().fold((f32::MAX, f32::MIN), |(low, high), x| (low.min(*x), high.max(*x)));
    let scale = (high - low) / 31.0;
    let inverse = inverse(scale);
    out[..2].copy_from_slice(&f32_to_f16(scale).to_le_bytes());
    out[2..4].copy_from_slice(&f32_to_f16(low).to_le_bytes());
    put_five_bits(x.iter().map(|x| (((x - low) * inverse + 0.5) as u8).min(31)), &mut out[4..]);
}

pub fn decode_q5_1(bytes: &[u8], out: &mut [f32]) {
    let (scale, low) = (number(bytes), number(&bytes[2..]));
    for (element, y) in out.iter_mut().enumerate() {
        *y = scale * f32::from(five_bits(&bytes[4..], element)) + low;
    }
}

/// Four bytes of fifth bits, then the lower four bits: those of element i next to those of element i + 16.
fn put_five_bits(codes: impl Iterator<Item = u8>, out: &mut [u8]) {
    out.fill(0);
    let (fifth, nibbles) = out.split_at_mut(ELEMENTS / 8);
    for (element, code) in codes.enumerate() {
        nibbles[element % 16] |= (code & 15) << (element / 16 * 4);
        fifth[element / 8] |= (code >> 4) << (element % 8);
    }
}

fn five_bits(bytes: &[u8], element: usize) -> u8 {
    let (fifth, nibbles) = bytes.split_at(ELEMENTS / 8);
    nibbles[element % 16] >> (element / 16 * 4) & 15 | (fifth[element / 8] >> (element % 8) & 1) << 4
}
