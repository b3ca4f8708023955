//! The encodings in super-blocks of 256 elements: `Q4_K` and `Q5_K`, eight sub-blocks of 32 with a scale and an offset of six
//! bits each, and `Q6_K`, sixteen sub-blocks of 16 with a scale of eight bits.
//!
//! Q4_K, Q5_K: x = d·scale·q − m·offset; bytes: d and m in f16, 12 bytes of scales and offsets, (Q5_K: 32 bytes of fifth bits,)
//! 128 bytes of four bits. Q6_K: x = d·scale·(q − 32); bytes: 128 of four bits, 64 of two bits, 16 scales, d in f16.
//!
//! Scale and offset of a sub-block are searched for the least sum of squared errors, each trial followed by the least-squares
//! fit to its codes. A value is never further from what stands for it than one step of the plain scale, from the smallest
//! to the largest number, and the rounding of scale and offset.

use tensor::{f16_to_f32, f32_to_f16};

/// Elements of a super-block, in all k-quants.
pub const ELEMENTS: usize = 256;
/// Elements that share a scale: with an offset, without.
const SUB: usize = 32;
const SUB6: usize = 16;
/// Largest scale and offset in six bits.
const SIX_BITS: f32 = 63.0;
/// Bytes in which eight scales and eight offsets lie.
const PACKED: usize = 12;

/// Widths of the range that are tried, each this much wider or narrower than the one before, relative to one step.
const TRIALS: std::ops::RangeInclusive<i32> = -9..=9;
const TRIAL: f32 = 0.1;

pub const Q4_BYTES: usize = 4 + PACKED + ELEMENTS / 2;
pub const Q5_BYTES: usize = Q4_BYTES + ELEMENTS / 8;
pub const Q6_BYTES: usize = ELEMENTS / 2 + ELEMENTS / 4 + ELEMENTS / SUB6 + 2;

fn half(value: f32) -> f32 {
    f16_to_f32(f32_to_f16(value))
}

/// The nearest code of 0 to `most`.
fn code(value: f32, most: f32) -> u8 {
    value.round().clamp(0.0, most) as u8
}

/// x ≈ scale·q − offset, with the sum of squared errors.
#[derive(Clone, Copy, Debug)]
struct Fit {
    scale: f32,
    offset: f32,
    error: f32,
}

impl Fit {
    /// The sum of squared errors and the largest error, with codes of 0 to `most`.
    fn errors(x: &[f32], scale: f32, offset: f32, most: f32) -> (f32, f32) {
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        x.iter().fold((0.0, 0.0f32), |(sum, largest), x| {
            let off = scale * ((x + offset) * inverse).round().clamp(0.0, most) - offset - x;
            (sum + off * off, largest.max(off.abs()))
        })
    }

    /// The least squares of x ≈ scale·q − offset for the codes that a trial gives; none where they do not decide.
    fn refined(x: &[f32], scale: f32, offset: f32, most: f32) -> Option<(f32, f32)> {
        let inverse = if scale > 0.0 { 1.0 / scale } else { return None };
        let (mut q1, mut q2, mut x1, mut xq) = (0.0f32, 0.0, 0.0, 0.0);
        for x in x {
            let q = ((x + offset) * inverse).round().clamp(0.0, most);
            (q1, q2, x1, xq) = (q1 + q, q2 + q * q, x1 + x, xq + x * q);
        }
        let n = x.len() as f32;
        let determinant = n * q2 - q1 * q1;
        if determinant <= 0.0 {
            return None;
        }
        let (scale, offset) = ((n * xq - x1 * q1) / determinant, (q1 * xq - q2 * x1) / determinant);
        // An offset is subtracted and cannot be negative: then the line goes through zero.
        let (scale, offset) = if offset < 0.0 { (if q2 > 0.0 { xq / q2 } else { 0.0 }, 0.0) } else { (scale, offset) };
        (scale > 0.0).then_some((scale, offset))
    }

    /// The best scale and offset found for a sub-block.
    fn of(x: &[f32], most: f32) -> Fit {
        let low = x.iter().fold(0.0f32, |low, x| low.min(*x));
        let high = x.iter().fold(low, |high, x| high.max(*x));
        let plain = (high - low) / most;
        let mut best = Fit { scale: plain, offset: -low, error: Fit::errors(x, plain, -low, most).0 };
        if plain == 0.0 {
            return best;
        }
        for trial in TRIALS {
            let scale = (high - low) / (most + TRIAL * trial as f32);
            let Some((scale, offset)) = Fit::refined(x, scale, -low, most) else { continue };
            let (error, largest) = Fit::errors(x, scale, offset, most);
            if error < best.error && largest <= plain {
                best = Fit { scale, offset, error };
            }
        }
        best
    }
}

/// A super-block with offsets: d, m, scales, offsets, codes.
fn offset_codes(x: &[f32], most: f32) -> ([f32; 2], [u8; 8], [u8; 8], [u8; ELEMENTS]) {
    let mut fits = [Fit { scale: 0.0, offset: 0.0, error: 0.0 }; ELEMENTS / SUB];
    for (fit, x) in fits.iter_mut().zip(x.chunks_exact(SUB)) {
        *fit = Fit::of(x, most);
    }
    let largest = |of: fn(&Fit) -> f32| fits.iter().map(of).fold(0.0, f32::max);
    let (d, m) = (half(largest(|fit| fit.scale) / SIX_BITS), half(largest(|fit| fit.offset) / SIX_BITS));
    let share = |value: f32, unit: f32| if unit > 0.0 { code(value / unit, SIX_BITS) } else { 0 };
    let (mut scales, mut offsets, mut codes) = ([0; 8], [0; 8], [0; ELEMENTS]);
    for (i, x) in x.chunks_exact(SUB).enumerate() {
        (scales[i], offsets[i]) = nearby(x, [d, m], [share(fits[i].scale, d), share(fits[i].offset, m)], most);
        let (scale, offset) = (d * f32::from(scales[i]), m * f32::from(offsets[i]));
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        for (x, q) in x.iter().zip(&mut codes[i * SUB..]) {
            *q = code((x + offset) * inverse, most);
        }
    }
    ([d, m], scales, offsets, codes)
}

/// Returns the pair with the least error among the rounded scale and offset and their neighbors, without moving a value
/// further off.
fn nearby(x: &[f32], [d, m]: [f32; 2], [scale, offset]: [u8; 2], most: f32) -> (u8, u8) {
    let (error, largest) = Fit::errors(x, d * f32::from(scale), m * f32::from(offset), most);
    let mut best = (error, (scale, offset));
    for scale in scale.saturating_sub(1)..=(scale + 1).min(SIX_BITS as u8) {
        for offset in offset.saturating_sub(1)..=(offset + 1).min(SIX_BITS as u8) {
            let (error, most_off) = Fit::errors(x, d * f32::from(scale), m * f32::from(offset), most);
            if error < best.0 && most_off <= largest {
                best = (error, (scale, offset));
            }
        }
    }
    best.1
}

/// Eight scales and eight offsets of six bits: the lower four lie in whole bytes, the upper of the last four in the two upper
/// bits of the first.
fn pack(scales: &[u8; 8], offsets: &[u8; 8]) -> [u8; PACKED] {
    let mut out = [0; PACKED];
    for i in 0..4 {
        out[i] = scales[i] | scales[i + 4] >> 4 << 6;
        out[i + 4] = offsets[i] | offsets[i + 4] >> 4 << 6;
        out[i + 8] = scales[i + 4] & 15 | (offsets[i + 4] & 15) << 4;
    }
    out
}

fn unpack(bytes: &[u8]) -> ([u8; 8], [u8; 8]) {
    let (mut scales, mut offsets) = ([0; 8], [0; 8]);
    for i in 0..4 {
        (scales[i], offsets[i]) = (bytes[i] & 63, bytes[i + 4] & 63);
        scales[i + 4] = bytes[i + 8] & 15 | bytes[i] >> 6 << 4;
        offsets[i + 4] = bytes[i + 8] >> 4 | bytes[i + 4] >> 6 << 4;
    }
    (scales, offsets)
}

/// The place of an element's four bits: byte, and whether they are the upper ones.
fn nibble(element: usize) -> (usize, u32) {
    (element / 64 * 32 + element % 32, (element / 32 % 2 * 4) as u32)
}

/// Encodes 256 elements; `fifth`: codes have five bits.
pub fn encode_offset(x: &[f32], fifth: bool, out: &mut [u8]) {
    let ([d, m], scales, offsets, codes) = offset_codes(x, if fifth { 31.0 } else { 15.0 });
    out.fill(0);
    out[..2].copy_from_slice(&f32_to_f16(d).to_le_bytes());
    out[2..4].copy_from_slice(&f32_to_f16(m).to_le_bytes());
    out[4..4 + PACKED].copy_from_slice(&pack(&scales, &offsets));
    let (bits, nibbles) = out[4 + PACKED..].split_at_mut(if fifth { ELEMENTS / 8 } else { 0 });
    for (element, q) in codes.iter().enumerate() {
        let (byte, shift) = nibble(element);
        nibbles[byte] |= (q & 15) << shift;
        if fifth {
            bits[element % SUB] |= (q >> 4) << (element / SUB);
        }
    }
}

pub fn decode_offset(bytes: &[u8], fifth: bool, out: &mut [f32]) {
    let number = |at: usize| f16_to_f32(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    let (d, m) = (number(0), number(2));
    let (scales, offsets) = unpack(&bytes[4..4 + PACKED]);
    let (bits, nibbles) = bytes[4 + PACKED..].split_at(if fifth { ELEMENTS / 8 } else { 0 });
    for (element, y) in out.iter_mut().enumerate() {
        let (byte, shift) = nibble(element);
        let above = if fifth { (bits[element % SUB] >> (element / SUB) & 1) << 4 } else { 0 };
        let q = nibbles[byte] >> shift & 15 | above;
        let sub = element / SUB;
        *y = d * f32::from(scales[sub]) * f32::from(q) - m * f32::from(offsets[sub]);
    }
}

/// Codes of `Q6_K` are −32 to 31.
fn signed(value: f32) -> f32 {
    value.round().clamp(-32.0, 31.0)
}

/// The best scale of a sub-block without an offset, which may be negative: there is one code more below zero.
fn symmetric(x: &[f32]) -> f32 {
    let extreme = x.iter().fold(0.0f32, |most, x| if x.abs() > most.abs() { *x } else { most });
    let plain = -extreme / 32.0;
    if plain == 0.0 {
        return 0.0;
    }
    let errors = |scale: f32| {
        x.iter().fold((0.0f32, 0.0f32), |(sum, largest), x| {
            let off = scale * signed(x / scale) - x;
            (sum + off * off, largest.max(off.abs()))
        })
    };
    let mut best = (plain, errors(plain).0);
    for trial in TRIALS {
        let scale = -extreme / (32.0 + TRIAL * trial as f32);
        let (xq, q2) = x.iter().fold((0.0f32, 0.0f32), |(xq, q2), x| {
            let q = signed(x / scale);
            (xq + x * q, q2 + q * q)
        });
        let fitted = xq / q2;
        if !fitted.is_finite() || fitted == 0.0 {
            continue;
        }
        let (error, largest) = errors(fitted);
        if error < best.1 && largest <= plain.abs() {
            best = (fitted, error);
        }
    }
    best.0
}

pub fn encode_q6(x: &[f32], out: &mut [u8]) {
    let mut fits = [0.0f32; ELEMENTS / SUB6];
    for (fit, x) in fits.iter_mut().zip(x.chunks_exact(SUB6)) {
        *fit = symmetric(x);
    }
    let extreme = fits.iter().fold(0.0f32, |most, fit| if fit.abs() > most.abs() { *fit } else { most });
    let d = half(-extreme / 128.0);
    let (low, rest) = out.split_at_mut(ELEMENTS / 2);
    let (high, rest) = rest.split_at_mut(ELEMENTS / 4);
    let (scales, unit) = rest.split_at_mut(ELEMENTS / SUB6);
    low.fill(0);
    high.fill(0);
    unit.copy_from_slice(&f32_to_f16(d).to_le_bytes());
    for (i, x) in x.chunks_exact(SUB6).enumerate() {
        let share = if d == 0.0 { 0.0 } else { (fits[i] / d).round().clamp(-128.0, 127.0) };
        scales[i] = share as i8 as u8;
        let scale = d * share;
        for (j, x) in x.iter().enumerate() {
            let q = if scale == 0.0 { 32 } else { (signed(x / scale) + 32.0) as u8 };
            let (byte, shift, bits, above) = six_bits(i * SUB6 + j);
            low[byte] |= (q & 15) << shift;
            high[bits] |= (q >> 4) << above;
        }
    }
}

/// The position of an element's bits: byte and shift of the lower four, byte and shift of the upper two.
fn six_bits(element: usize) -> (usize, u32, usize, u32) {
    let (part, within) = (element / 128, element % 128);
    let (quarter, l) = (within / 32, within % 32);
    (part * 64 + quarter % 2 * 32 + l, (quarter / 2 * 4) as u32, part * 32 + l, (quarter * 2) as u32)
}

pub fn decode_q6(bytes: &[u8], out: &mut [f32]) {
    let (low, rest) = bytes.split_at(ELEMENTS / 2);
    let (high, rest) = rest.split_at(ELEMENTS / 4);
    let (scales, unit) = rest.split_at(ELEMENTS / SUB6);
    let d = f16_to_f32(u16::from_le_bytes([unit[0], unit[1]]));
    for (element, y) in out.iter_mut().enumerate() {
        let (byte, shift, bits, above) = six_bits(element);
        let q = low[byte] >> shift & 15 | (high[bits] >> above & 3) << 4;
        *y = d * f32::from(scales[element / SUB6] as i8) * (f32::from(q) - 32.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_and_offsets_survive_packing() {
        let scales = [0, 63, 17, 32, 63, 1, 48, 15];
        let offsets = [63, 0, 5, 33, 16, 62, 47, 31];
        assert_eq!(unpack(&pack(&scales, &offsets)), (scales, offsets));
    }

    #[test]
    fn every_element_has_a_place_of_its_own() {
        let places = |of: &dyn Fn(usize) -> (usize, u32)| {
            let mut all: Vec<_> = (0..ELEMENTS).map(of).collect();
            all.sort_unstable();
            all.dedup();
            all.len()
        };
        assert_eq!(places(&nibble), ELEMENTS);
        assert_eq!(places(&|i| (six_bits(i).0, six_bits(i).1)), ELEMENTS);
        assert_eq!(places(&|i| (six_bits(i).2, six_bits(i).3)), ELEMENTS);
    }

    #[test]
    fn the_search_is_better_than_the_plain_scale() {
        let x: Vec<f32> = (0..SUB).map(|i| ((i * 7919 % 101) as f32 - 50.0) / 50.0 * (i as f32 / 40.0 + 0.2)).collect();
        let low = x.iter().fold(0.0f32, |low, x| low.min(*x));
        let high = x.iter().fold(0.0f32, |high, x| high.max(*x));
        let plain = Fit::errors(&x, (high - low) / 15.0, -low, 15.0).0;
        assert!(Fit::of(&x, 15.0).error < 0.95 * plain, "{} {plain}", Fit::of(&x, 15.0).error);
        assert_eq!(Fit::of(&[0.0; SUB], 15.0).scale, 0.0);
        assert_eq!(symmetric(&[0.0; SUB6]), 0.0);
        assert!(Fit::of(&[3.0; SUB], 15.0).error < 1e-9, "all alike: codes are the largest");
    }
}
