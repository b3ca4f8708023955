//! Element types and the conversions between the 16-bit floats and f32.

use std::fmt;
use std::str::FromStr;

use crate::small::Small;

/// The type of one element in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    F64,
    F32,
    BF16,
    F16,
    I64,
    I32,
    U8,
    /// A code of eight bits; a number only with the scale of its tensor.
    E4M3,
    E5M2,
}

impl DType {
    pub const ALL: [DType; 9] =
        [DType::F64, DType::F32, DType::BF16, DType::F16, DType::I64, DType::I32, DType::U8, DType::E4M3, DType::E5M2];

    /// Bytes of one element. Every type here has whole bytes; codes of fewer bits are packed, see [`crate::Storage`].
    pub const fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::BF16 | DType::F16 => 2,
            DType::U8 | DType::E4M3 | DType::E5M2 => 1,
        }
    }

    /// True if an element is a number with a fraction by itself; codes that need a scale are not.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F64 | DType::F32 | DType::BF16 | DType::F16)
    }

    /// The format of a code of eight bits.
    pub const fn small(self) -> Option<Small> {
        match self {
            DType::E4M3 => Some(Small::E4M3),
            DType::E5M2 => Some(Small::E5M2),
            _ => None,
        }
    }

    /// The short name: `f32`, `bf16`, `i64`, …
    pub const fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            DType::I64 => "i64",
            DType::I32 => "i32",
            DType::U8 => "u8",
            DType::E4M3 => "e4m3",
            DType::E5M2 => "e5m2",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is no element type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownDType(pub String);

impl fmt::Display for UnknownDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown element type `{}`", self.0)
    }
}

impl std::error::Error for UnknownDType {}

impl FromStr for DType {
    type Err = UnknownDType;

    /// Accepts the short names, PyTorch's long names (`float32`, `bfloat16`, …), the config
    /// spellings (`fp32`, `fp16`) and those of safetensors headers (`F32`, `BF16`, …).
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Ok(match name.trim_start_matches("torch.").to_ascii_lowercase().as_str() {
            "f64" | "float64" | "fp64" => DType::F64,
            "f32" | "float32" | "fp32" => DType::F32,
            "bf16" | "bfloat16" => DType::BF16,
            "f16" | "float16" | "fp16" => DType::F16,
            "i64" | "int64" => DType::I64,
            "i32" | "int32" => DType::I32,
            "u8" | "uint8" => DType::U8,
            "e4m3" | "float8_e4m3fn" | "f8_e4m3" => DType::E4M3,
            "e5m2" | "float8_e5m2" | "f8_e5m2" => DType::E5M2,
            _ => return Err(UnknownDType(name.to_owned())),
        })
    }
}

/// Converts exactly: every bf16 value is an f32 value.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// Rounds to nearest, ties to even; NaN stays NaN (quiet).
#[inline(always)]
pub fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    (if x.is_nan() { (bits >> 16) | 0x0040 } else { rounded }) as u16
}

/// Rounds up or down with a probability given by the distance: the expectation equals `x`.
/// `random` supplies 16 uniform bits (its low half). Infinities and NaN are kept. Without branches, as [`f32_to_bf16`].
#[inline(always)]
pub fn f32_to_bf16_stochastic(x: f32, random: u32) -> u16 {
    let rounded = (x.to_bits().wrapping_add(random & 0xffff) >> 16) as u16;
    if x.is_finite() { rounded } else { f32_to_bf16(x) }
}

/// Converts the bits of an f16 to an f32 exactly, denormals included.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    // The fields in f32's places; the exponents' biases are 112 apart, and the product is exact for denormals too.
    const REBASE: f32 = f32::from_bits((127 + 112) << 23);
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff) << 13;
    let finite = (f32::from_bits(magnitude) * REBASE).to_bits();
    let special = magnitude | 0x7f80_0000;
    f32::from_bits(sign | if bits & 0x7c00 == 0x7c00 { special } else { finite })
}

/// Rounds to nearest, ties to even; overflow goes to infinity. Without branches: loops over it become vector instructions.
#[inline(always)]
pub fn f32_to_f16(x: f32) -> u16 {
    // One half has the unit of f16's denormals, 2^-24, as its last place: the sum is rounded to it.
    const HALF: f32 = 0.5;
    let bits = x.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let kept = bits & 0x7fff_ffff;
    let magnitude = f32::from_bits(kept);
    let denormal = (magnitude + HALF).to_bits().wrapping_sub(HALF.to_bits());
    let normal = (kept.wrapping_add(0xfff + ((kept >> 13) & 1)) >> 13).wrapping_sub(112 << 10);
    let finite = if magnitude < f32::from_bits((127 - 14) << 23) { denormal } else { normal };
    let ordered = if magnitude >= 65520.0 { 0x7c00 } else { finite };
    (sign | if kept > 0x7f80_0000 { 0x7e00 } else { ordered }) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for dtype in DType::ALL {
            assert_eq!(dtype.name().parse::<DType>(), Ok(dtype));
            assert_eq!(dtype.name().to_uppercase().parse::<DType>(), Ok(dtype));
        }
        assert_eq!("torch.bfloat16".parse(), Ok(DType::BF16));
        assert!("int7".parse::<DType>().is_err());
    }

    #[test]
    fn bf16_rounds_to_nearest_even() {
        assert_eq!(f32_to_bf16(1.0), 0x3f80);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f80_8000)), 0x3f80);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f81_8000)), 0x3f82);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f80_8001)), 0x3f81);
        assert!(bf16_to_f32(f32_to_bf16(f32::NAN)).is_nan());
        assert_eq!(bf16_to_f32(f32_to_bf16(f32::INFINITY)), f32::INFINITY);
    }

    #[test]
    fn halves_of_steps_of_f16_go_to_the_even_neighbor() {
        for bits in 0..0x7bffu16 {
            let middle = (f16_to_f32(bits) + f16_to_f32(bits + 1)) / 2.0;
            let (below, above) = (f32::from_bits(middle.to_bits() - 1), f32::from_bits(middle.to_bits() + 1));
            let even = bits + (bits & 1);
            for sign in [1.0, -1.0] {
                let found = [below, middle, above].map(|x| f32_to_f16(sign * x) & 0x7fff);
                assert_eq!(found, [bits, even, bits + 1], "{bits:#06x}");
                assert_eq!(f32_to_f16(sign * above) >> 15, u16::from(sign < 0.0));
            }
        }
    }

    #[test]
    fn f16_round_trips_every_value() {
        for bits in 0..=u16::MAX {
            let x = f16_to_f32(bits);
            if x.is_nan() {
                assert!(f16_to_f32(f32_to_f16(x)).is_nan());
            } else {
                assert_eq!(f32_to_f16(x), bits, "{bits:#06x}");
            }
        }
        assert_eq!(f32_to_f16(65519.0), 0x7bff);
        assert_eq!(f32_to_f16(65520.0), 0x7c00);
    }

    #[test]
    fn stochastic_rounding_is_unbiased() {
        let x = f32::from_bits(0x3f80_4000);
        let mean = (0..65536u32).map(|r| bf16_to_f32(f32_to_bf16_stochastic(x, r)) as f64).sum::<f64>() / 65536.0;
        assert!((mean - x as f64).abs() < 1e-9);
    }
}
