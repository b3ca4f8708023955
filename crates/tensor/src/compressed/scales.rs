//! The scale of a block by the range of its numbers.

use super::{Codes, round_to};
use crate::dtype::DType;
use crate::small::{Small, e4m3_code, e8m0_value};

/// The smallest and the largest of some numbers and 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Range {
    pub least: f32,
    pub most: f32,
}

impl Range {
    pub fn of(x: &[f32]) -> Range {
        x.iter().fold(Range::default(), |range, x| Range { least: range.least.min(*x), most: range.most.max(*x) })
    }

    /// Returns the range of the numbers of both together.
    #[must_use]
    pub fn with(self, other: Range) -> Range {
        Range { least: self.least.min(other.least), most: self.most.max(other.most) }
    }

    /// Returns the largest magnitude of the numbers.
    pub fn magnitude(self) -> f32 {
        self.most.max(-self.least)
    }

    /// Returns the range with both ends nearer to 0, rounded to a type.
    #[must_use]
    pub fn shrunk(self, share: f32, dtype: DType) -> Range {
        Range { least: round_to(dtype, self.least * share), most: round_to(dtype, self.most * share) }
    }
}

/// The factor of a block's codes, with the parts of it that are stored by themselves.
pub(super) struct Scale {
    pub factor: f32,
    pub zero: Option<i8>,
    pub code: Option<u8>,
}

/// The scale of NVFP4 in the place of one that is rounded to 0.
const LEAST_OF_NVFP4: f32 = 0.125;

/// The product of the largest values of E4M3 and E2M1.
const TOP: f32 = 448.0 * 6.0;

/// The scale of the scales of NVFP4: they are divided by it. Rounded twice in the type of the weights.
pub fn global_scale(magnitude: f32, dtype: DType) -> f32 {
    if magnitude == 0.0 {
        return 1.0;
    }
    let scale = round_to(dtype, round_to(dtype, 1.0 / magnitude) * TOP);
    // Of numbers near the least of the type the reciprocal is infinite.
    if scale.is_finite() { scale } else { f32::MAX }
}

/// Returns the scale in the place of 0: the distance of 1 to the next number of the type.
fn least(dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => 2f32.powi(-7),
        DType::F16 => 2f32.powi(-10),
        _ => f32::EPSILON,
    }
}

/// The factor of a block of FP4, rounded to the type of the weight.
pub(super) fn plain_factor(range: Range, dtype: DType) -> f32 {
    let factor = round_to(dtype, range.magnitude() / Small::E2M1.largest());
    if factor == 0.0 { least(dtype) } else { factor }
}

pub(super) fn scale(codes: Codes, range: Range, dtype: DType, whole: Range) -> Scale {
    let round = |x| round_to(dtype, x);
    let or_least = |x: f32| if x == 0.0 { least(dtype) } else { x };
    match codes {
        Codes::Int { bits, symmetric: true } => {
            let half = (2f32.powi(bits as i32) - 1.0) / 2.0;
            Scale { factor: or_least(round(range.magnitude() / half)), zero: None, code: None }
        }
        Codes::Int { bits, symmetric: false } => {
            let (lowest, highest) = codes.range();
            let steps = 2f32.powi(bits as i32) - 1.0;
            let spread = round(round(range.most - range.least) / steps);
            let factor = or_least(spread);
            let zero = round(lowest - round(range.least / factor)).clamp(lowest, highest).round_ties_even();
            // A block of zeros has the zero point 0, as in the package.
            let zero = if spread == 0.0 { 0.0 } else { zero };
            Scale { factor, zero: Some(zero as i8), code: None }
        }
        Codes::Fp8 => {
            let factor = or_least(round(range.magnitude() / Small::E4M3.largest()));
            Scale { factor, zero: None, code: None }
        }
        Codes::Nvfp4 => {
            let global = global_scale(whole.magnitude(), dtype);
            let code = e4m3_code(global * round(range.magnitude() / Small::E2M1.largest()));
            let code = if code == 0 { e4m3_code(LEAST_OF_NVFP4) } else { code };
            Scale { factor: Small::E4M3.value(code) / global, zero: None, code: Some(code) }
        }
        Codes::Mxfp4 => {
            let code = exponent_code(range.magnitude());
            Scale { factor: e8m0_value(code), zero: None, code: Some(code) }
        }
    }
}

/// The exponent of a block of MXFP4: that of its largest magnitude, less that of 4; one more where it would round up to 8
/// times the power.
fn exponent_code(magnitude: f32) -> u8 {
    if magnitude == 0.0 {
        return 0;
    }
    let bits = magnitude.to_bits();
    let up = i32::from(bits & 0x7f_ffff >= 0x60_0000);
    ((bits >> 23) as i32 - 2 + up).clamp(0, 254) as u8
}
