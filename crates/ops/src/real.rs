//! The two number types of the CPU references.

/// f32 for running, f64 for checking gradients.
pub trait Real:
    Copy
    + Send
    + Sync
    + Default
    + PartialOrd
    + std::fmt::Debug
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + std::ops::Neg<Output = Self>
    + std::ops::AddAssign
    + std::ops::SubAssign
    + std::ops::MulAssign
    + std::iter::Sum
    + 'static
{
    fn from_f64(x: f64) -> Self;
    fn to_f64(self) -> f64;
    fn from_f32(x: f32) -> Self;
    fn to_f32(self) -> f32;
    fn sqrt(self) -> Self;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    /// ln(1 + x), exact where x is small
    fn ln_1p(self) -> Self;
    /// eˣ − 1, exact where x is small
    fn exp_m1(self) -> Self;
    fn tanh(self) -> Self;
    /// 2/√π · ∫₀ˣ e^−t² dt
    fn erf(self) -> Self;
    fn abs(self) -> Self;
    fn sin(self) -> Self;
    fn cos(self) -> Self;
    fn max(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn is_finite(self) -> bool;
    fn negative_infinity() -> Self;
}

/// e^x in f32 with no more than 2 units in the last place of error, without branches and calls, so that loops
/// over it are vectorised. ∞, 0 and NaN are where they belong; results below 2^−126 are rounded twice.
#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    /// 1.5·2^23: a float added to it is rounded to a whole number, which is in the low bits.
    const WHOLE: f32 = 12_582_912.0;
    // ln 2 in two parts; the first has trailing zeros, so that its product with n is exact.
    const HIGH: f32 = 0.693_359_4;
    const LOW: f32 = -2.121_944_4e-4;
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + WHOLE;
    let n = shifted - WHOLE;
    let r = (x - n * HIGH) - n * LOW;
    let mut p = 1.0 / 5040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = r * p + c;
    }
    // 2^n as a product of two powers: n goes from −150 to 128, an exponent only from −126 to 127.
    let n = (shifted.to_bits() as i32).wrapping_sub(WHOLE.to_bits() as i32);
    let half = n >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    p * power(half) * power(n.wrapping_sub(half))
}

macro_rules! real {
    ($type:ty, $exp:path, $erf:path) => {
        impl Real for $type {
            #[inline(always)]
            fn from_f64(x: f64) -> Self {
                x as $type
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                self as f64
            }
            #[inline(always)]
            fn from_f32(x: f32) -> Self {
                x as $type
            }
            #[inline(always)]
            fn to_f32(self) -> f32 {
                self as f32
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                self.sqrt()
            }
            #[inline(always)]
            fn exp(self) -> Self {
                $exp(self)
            }
            #[inline(always)]
            fn ln(self) -> Self {
                self.ln()
            }
            #[inline(always)]
            fn ln_1p(self) -> Self {
                self.ln_1p()
            }
            #[inline(always)]
            fn exp_m1(self) -> Self {
                self.exp_m1()
            }
            #[inline(always)]
            fn tanh(self) -> Self {
                self.tanh()
            }
            #[inline(always)]
            fn erf(self) -> Self {
                $erf(self)
            }
            #[inline(always)]
            fn abs(self) -> Self {
                self.abs()
            }
            #[inline(always)]
            fn sin(self) -> Self {
                self.sin()
            }
            #[inline(always)]
            fn cos(self) -> Self {
                self.cos()
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                self.max(other)
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                self.min(other)
            }
            #[inline(always)]
            fn is_finite(self) -> bool {
                self.is_finite()
            }
            #[inline(always)]
            fn negative_infinity() -> Self {
                <$type>::NEG_INFINITY
            }
        }
    };
}

real!(f32, exp_f32, libm::erff);
real!(f64, f64::exp, libm::erf);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_exact_to_the_last_place() {
        let mut worst = 0.0f64;
        for i in 0..2_000_000 {
            let x = -87.0 + i as f32 * (175.5 / 2_000_000.0);
            let (found, exact) = (exp_f32(x), (x as f64).exp());
            let unit = (f32::from_bits((exact as f32).to_bits() + 1) - exact as f32) as f64;
            worst = worst.max((found as f64 - exact).abs() / unit);
        }
        assert!(worst < 2.0, "{worst} units in the last place");
        assert_eq!([exp_f32(0.0), exp_f32(f32::NEG_INFINITY), exp_f32(-200.0)], [1.0, 0.0, 0.0]);
        assert_eq!([exp_f32(f32::INFINITY), exp_f32(88.8)], [f32::INFINITY; 2]);
        assert!(exp_f32(f32::NAN).is_nan());
        assert!((exp_f32(-100.0) as f64 - (-100.0f64).exp()).abs() < 2e-45);
    }
}
