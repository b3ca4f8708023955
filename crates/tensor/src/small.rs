//! Numbers of eight and four bits: E4M3, E5M2, E2M1 and the powers of two E8M0, and the exponents by which tensors are
//! scaled into them. Rounding is to nearest, ties to even, and saturates. Knows no blocks and no tensors.

/// A floating-point format without infinities: what does not fit becomes the largest value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Small {
    /// 4 bits of exponent, 3 of mantissa: up to 448.
    E4M3,
    /// 5 bits of exponent, 2 of mantissa: up to 57,344.
    E5M2,
    /// 2 bits of exponent, 1 of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6. Has no NaN: that becomes 6.
    E2M1,
}

impl Small {
    pub const ALL: [Small; 3] = [Small::E4M3, Small::E5M2, Small::E2M1];

    pub const fn bits(self) -> u32 {
        match self {
            Small::E4M3 | Small::E5M2 => 8,
            Small::E2M1 => 4,
        }
    }

    pub const fn largest(self) -> f32 {
        match self {
            Small::E4M3 => 448.0,
            Small::E5M2 => 57_344.0,
            Small::E2M1 => 6.0,
        }
    }

    /// The values of all codes of eight bits.
    pub fn values(self) -> [f32; 256] {
        assert_eq!(self.bits(), 8, "{self:?} has fewer codes");
        std::array::from_fn(|code| self.value(code as u8))
    }

    /// Bits of the mantissa, and the exponent of the smallest normal number.
    const fn mantissa(self) -> (i32, i32) {
        match self {
            Small::E4M3 => (3, -6),
            Small::E5M2 => (2, -14),
            Small::E2M1 => (1, 0),
        }
    }

    const fn sign(self) -> u8 {
        1 << (self.bits() - 1)
    }

    /// The code of the nearest value.
    pub fn code(self, x: f64) -> u8 {
        let (mantissa, least) = self.mantissa();
        let sign = if x.is_sign_negative() { self.sign() } else { 0 };
        if x.is_nan() && self != Small::E2M1 {
            return sign | 0x7f;
        }
        let magnitude = if x.is_nan() { f64::INFINITY } else { x.abs() }.min(f64::from(self.largest()));
        let exponent = exponent_of(magnitude).max(least);
        let units = nearest(magnitude * power(mantissa - exponent)) as i32;
        // Denormals have the exponent field 0 and their number of units in the mantissa; a carry of the mantissa is one
        // of the field.
        sign | (((exponent - least) << mantissa) + units) as u8
    }

    /// The value of a code; exact.
    pub fn value(self, code: u8) -> f32 {
        let (mantissa, least) = self.mantissa();
        let magnitude = i32::from(code & (self.sign() - 1));
        let special = match self {
            Small::E4M3 => magnitude == 0x7f,
            Small::E5M2 => magnitude >= 0x7c,
            Small::E2M1 => false,
        };
        if special {
            return if self == Small::E5M2 && magnitude == 0x7c {
                if code & self.sign() == 0 { f32::INFINITY } else { f32::NEG_INFINITY }
            } else {
                f32::NAN
            };
        }
        let (field, fraction) = (magnitude >> mantissa, magnitude & ((1 << mantissa) - 1));
        let units = if field == 0 { fraction } else { fraction + (1 << mantissa) };
        let value = units as f32 * power(least + field.max(1) - 1 - mantissa) as f32;
        if code & self.sign() == 0 { value } else { -value }
    }
}

/// [`Small::code`] of E4M3 for an f32, on its bits.
#[inline(always)]
pub fn e4m3_code(x: f32) -> u8 {
    let (sign, magnitude) = ((x.to_bits() >> 24) as u8 & 0x80, x.abs());
    let clamped = if magnitude > 448.0 { 448.0 } else { magnitude };
    let bits = clamped.to_bits();
    // The exponent's bias is 120 less; a carry of the mantissa is one of the exponent.
    let normal = (((bits + 0x7_ffff + ((bits >> 20) & 1)) >> 20).wrapping_sub(120 << 3)) as u8;
    // Denormals count units of 2^-9: adding 2^23 rounds them, ties to even.
    let units = (clamped * 512.0 + 8_388_608.0).to_bits() as u8;
    let code = if clamped >= 1.0 / 64.0 { normal } else { units };
    sign | if x.is_nan() { 0x7f } else { code }
}

/// Returns [`Small::code`] of E2M1 for an f32: the number of rounding boundaries below its magnitude, and its sign.
#[inline(always)]
pub fn e2m1_code(x: f32) -> u8 {
    let (sign, a) = ((x.to_bits() >> 28) as u8 & 8, x.abs());
    let above = u8::from(a > 0.25) + u8::from(a > 1.25) + u8::from(a > 2.5) + u8::from(a > 5.0);
    let from = u8::from(a >= 0.75) + u8::from(a >= 1.75) + u8::from(a >= 3.5);
    sign | if x.is_nan() { 7 } else { above + from }
}

/// Returns one of the two E2M1 codes around an f32. The distance from the lower value, as a share of the step between
/// both, is the probability of rounding up: of the 256 values of `random`, 256 times that share round up. Magnitudes
/// beyond 6 become 6.
#[inline(always)]
pub fn e2m1_code_stochastic(x: f32, random: u8) -> u8 {
    let (sign, a) = ((x.to_bits() >> 28) as u8 & 8, x.abs());
    // The last number at or below, and 256 ÷ the step above it.
    let (below, lower, times) = match a {
        a if a < 2.0 => ((a * 2.0) as u8, (a * 2.0).floor() * 0.5, 512.0),
        a if a < 4.0 => (2 + a as u8, a.floor(), 256.0),
        a if a < 6.0 => (6, 4.0, 128.0),
        _ => return sign | 7,
    };
    sign | (below + u8::from((a - lower) * times > f32::from(random) + 0.5))
}

/// The exponent of a number's leading bit; of 0, one below all.
fn exponent_of(x: f64) -> i32 {
    if x == 0.0 { -1074 } else { ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023 }
}

/// Two to an exponent from -1022 to 1023, by its bits.
pub(crate) fn power(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// The nearest whole number, ties to even, of a number from 0 to 2^51. Adding 2^52 leaves no bits below 1; without SSE4.1
/// the library's function is a call.
fn nearest(x: f64) -> f64 {
    const WHOLE: f64 = 4_503_599_627_370_496.0;
    (x + WHOLE) - WHOLE
}

/// The power of two of an E8M0 code.
pub fn e8m0_value(code: u8) -> f32 {
    if code == 0xff { f32::NAN } else { power(i32::from(code) - 127) as f32 }
}

/// The largest integer k, within ±126, for which amax·2^k is at most 1.75·2^`top`; 0 for an amax of 0. The tops of
/// scaled tensors are of this form: 448 has 8, 224 has 7, 3584 has 11.
pub fn scaling_exponent(amax: f32, top: i32) -> i32 {
    if amax == 0.0 || !amax.is_finite() {
        return 0;
    }
    let exponent = exponent_of(f64::from(amax));
    let above = f64::from(amax) > 1.75 * power(exponent);
    (top - exponent - i32::from(above)).clamp(-126, 126)
}

/// Steps of a state's life in which a quantiser without a magnitude of earlier steps takes the tensor's own.
pub const OWN_STEPS: i32 = 2;

/// The factor of a step by the largest magnitude of earlier ones, 0 where there is none, and the steps that the state has
/// lived. 0: the tensor's own magnitude.
pub fn kept_factor(most: f32, top: i32, steps: i32) -> f32 {
    match most > 0.0 {
        true => power(scaling_exponent(most, top)) as f32,
        false if steps < OWN_STEPS => 0.0,
        false => 1.0,
    }
}

/// The largest magnitude, by bit patterns: NaN above infinity above what is finite, in any order of reading.
pub fn amax(x: &[f32]) -> f32 {
    f32::from_bits(x.iter().map(|x| x.to_bits() & 0x7fff_ffff).max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_that_of_its_value() {
        for small in Small::ALL {
            for code in 0..=((1u32 << small.bits()) - 1) as u8 {
                let value = small.value(code);
                if value.is_finite() {
                    assert_eq!(small.code(f64::from(value)), code, "{small:?} {code:#04x}");
                } else if value.is_nan() {
                    assert!(small.value(small.code(f64::from(value))).is_nan());
                }
            }
            let top = f64::from(small.largest());
            assert_eq!(small.value(small.code(f64::INFINITY)), small.largest());
            assert_eq!(small.value(small.code(-top * 1e3)), -small.largest());
            assert_eq!(small.value(small.code(1e-30)), 0.0);
        }
        // Ties go to even.
        assert_eq!(
            [0.25, 0.75, 1.25, 2.5, 5.0].map(|x| Small::E2M1.value(Small::E2M1.code(x))),
            [0.0, 1.0, 1.0, 2.0, 4.0]
        );
    }

    #[test]
    fn codes_by_bits_are_those_by_arithmetic() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                assert_eq!(e4m3_code(x), Small::E4M3.code(f64::from(x)), "{x:e}");
                assert_eq!(e2m1_code(x), Small::E2M1.code(f64::from(x)), "{x:e}");
            }
        }
    }

    #[test]
    fn stochastic_codes_are_unbiased_and_keep_what_is_on_the_grid() {
        for code in 0..16u8 {
            let x = Small::E2M1.value(code);
            assert!((0..=255).all(|random| e2m1_code_stochastic(x, random) == code), "{x}");
        }
        for x in [0.0625, 0.3, 0.75, -1.9, 2.25, 3.5, -4.5, 5.9] {
            let values = (0..=255).map(|random| f64::from(Small::E2M1.value(e2m1_code_stochastic(x, random))));
            let mean = values.sum::<f64>() / 256.0;
            assert!((mean - f64::from(x)).abs() <= 2.0 / 512.0, "{x}: {mean}");
        }
        assert_eq!([7.0, -f32::INFINITY, f32::NAN].map(|x| e2m1_code_stochastic(x, 9) & 7), [7; 3]);
    }

    #[test]
    fn exponents_at_both_ends() {
        assert_eq!(scaling_exponent(448.0, 8), 0);
        assert_eq!(scaling_exponent(f32::from_bits(448f32.to_bits() + 1), 8), -1);
        assert_eq!(scaling_exponent(0.0, 8), 0);
        assert_eq!(scaling_exponent(f32::MIN_POSITIVE / 4.0, 8), 126);
        assert_eq!(scaling_exponent(f32::MAX, 8), -120);
        assert_eq!(amax(&[1.0, -3.0, f32::NEG_INFINITY]), f32::INFINITY);
        assert!(amax(&[f32::INFINITY, f32::NAN]).is_nan());
    }
}
