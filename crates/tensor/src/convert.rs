//! Conversion of element types on slices of bytes, in one pass.
//!
//! Conversions between the three floating-point types of weights are direct loops that the compiler vectorizes; all
//! others go through f64, element by element. Knows no shapes and no threads: callers split long slices.

use crate::dtype::{DType, bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use crate::small::Small;

/// Converts elements, rounding to nearest even, into `out`. The same type is a plain copy.
///
/// # Panics
/// If `bytes` and `out` do not hold the same number of whole elements.
pub fn convert(from: DType, bytes: &[u8], to: DType, out: &mut [u8]) {
    let elements = bytes.len() / from.size();
    assert_eq!((elements * from.size(), elements * to.size()), (bytes.len(), out.len()), "whole elements, one for one");
    let half = |b: [u8; 2]| u16::from_le_bytes(b);
    let single = |b: [u8; 4]| f32::from_le_bytes(b);
    match (from, to) {
        (from, to) if from == to => out.copy_from_slice(bytes),
        (DType::F32, DType::BF16) => each(bytes, out, |b| f32_to_bf16(single(b)).to_le_bytes()),
        (DType::F32, DType::F16) => each(bytes, out, |b| f32_to_f16(single(b)).to_le_bytes()),
        (DType::BF16, DType::F32) => each(bytes, out, |b| bf16_to_f32(half(b)).to_le_bytes()),
        (DType::BF16, DType::F16) => each(bytes, out, |b| f32_to_f16(bf16_to_f32(half(b))).to_le_bytes()),
        (DType::F16, DType::F32) => each(bytes, out, |b| f16_to_f32(half(b)).to_le_bytes()),
        (DType::F16, DType::BF16) => each(bytes, out, |b| f32_to_bf16(f16_to_f32(half(b))).to_le_bytes()),
        (from, to) => {
            for (source, target) in bytes.chunks_exact(from.size()).zip(out.chunks_exact_mut(to.size())) {
                write_f64(to, read_f64(from, source), target);
            }
        }
    }
}

fn each<const N: usize, const M: usize>(bytes: &[u8], out: &mut [u8], f: impl Fn([u8; N]) -> [u8; M]) {
    let (sources, _) = bytes.as_chunks::<N>();
    let (targets, _) = out.as_chunks_mut::<M>();
    for (source, target) in sources.iter().zip(targets) {
        *target = f(*source);
    }
}

/// One element; exact but for large i64.
pub(crate) fn read_f64(dtype: DType, b: &[u8]) -> f64 {
    match dtype {
        DType::F64 => f64::from_le_bytes(b.try_into().expect("eight bytes")),
        DType::F32 => f32::from_le_bytes(b.try_into().expect("four bytes")) as f64,
        DType::BF16 => bf16_to_f32(u16::from_le_bytes(b.try_into().expect("two bytes"))) as f64,
        DType::F16 => f16_to_f32(u16::from_le_bytes(b.try_into().expect("two bytes"))) as f64,
        DType::I64 => i64::from_le_bytes(b.try_into().expect("eight bytes")) as f64,
        DType::I32 => i32::from_le_bytes(b.try_into().expect("four bytes")) as f64,
        DType::U8 => b[0] as f64,
        DType::E4M3 => Small::E4M3.value(b[0]) as f64,
        DType::E5M2 => Small::E5M2.value(b[0]) as f64,
    }
}

fn write_f64(dtype: DType, x: f64, out: &mut [u8]) {
    match dtype {
        DType::F64 => out.copy_from_slice(&x.to_le_bytes()),
        DType::F32 => out.copy_from_slice(&(x as f32).to_le_bytes()),
        DType::BF16 => out.copy_from_slice(&f32_to_bf16(x as f32).to_le_bytes()),
        DType::F16 => out.copy_from_slice(&f32_to_f16(x as f32).to_le_bytes()),
        DType::I64 => out.copy_from_slice(&(x as i64).to_le_bytes()),
        DType::I32 => out.copy_from_slice(&(x as i32).to_le_bytes()),
        DType::U8 => out[0] = x as u8,
        DType::E4M3 => out[0] = Small::E4M3.code(x),
        DType::E5M2 => out[0] = Small::E5M2.code(x),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_direct_ways_give_what_the_way_through_f64_gives() {
        let floats = [DType::F32, DType::BF16, DType::F16];
        let patterns: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for from in floats {
            // Every 16-bit pattern, or for f32 its halves against each other: normal numbers, denormals, infinities,
            // NaN.
            let bytes: Vec<u8> = match from {
                DType::F32 => (0..=u16::MAX)
                    .flat_map(|high| (u32::from(high) << 16 | u32::from(high.rotate_left(7) ^ 0x8000)).to_le_bytes())
                    .collect(),
                _ => patterns.clone(),
            };
            for to in floats {
                let elements = bytes.len() / from.size();
                let mut found = vec![0; elements * to.size()];
                convert(from, &bytes, to, &mut found);
                for (index, source) in bytes.chunks_exact(from.size()).enumerate() {
                    let x = read_f64(from, source);
                    let mut expected = vec![0; to.size()];
                    write_f64(to, x, &mut expected);
                    let found = &found[index * to.size()..(index + 1) * to.size()];
                    let both_nan = x.is_nan() && read_f64(to, found).is_nan();
                    assert!(found == expected || both_nan, "{from} to {to}: {x}");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "one for one")]
    fn a_target_of_another_size_is_refused() {
        convert(DType::F32, &[0; 8], DType::BF16, &mut [0; 2]);
    }
}
