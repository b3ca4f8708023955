//! The encoding `MXFP4`: 32 floating-point numbers of four bits times a power of two, whose exponent is a byte.

use super::blocks::ELEMENTS;

pub const BYTES: usize = 1 + ELEMENTS / 2;

/// The numbers that the codes from 0 to 7 stand for; those from 8 on are their negatives.
const NUMBERS: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The least power of two that this encoder uses; smaller blocks become zeros.
pub const LEAST: f32 = 1.0 / (1u128 << 120) as f32;

/// The power of two of an exponent's byte.
fn scale(exponent: u8) -> f32 {
    2.0f32.powi(i32::from(exponent) - 127)
}

/// The code of the number that is nearest to `x`.
fn code(x: f32) -> u8 {
    let most = NUMBERS.windows(2).take_while(|pair| x.abs() > (pair[0] + pair[1]) / 2.0).count() as u8;
    if x < 0.0 && most > 0 { most | 8 } else { most }
}

fn number(code: u8) -> f32 {
    let magnitude = NUMBERS[usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// Encodes 32 numbers. What four bits can hold is held exactly; else the power of two is the one of two whose squared error
/// is the lesser.
pub fn encode(x: &[f32], out: &mut [u8]) {
    out.fill(0);
    let largest = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    if largest < LEAST {
        return;
    }
    // 4 ≤ largest / scale < 8.
    let least = (largest.log2().floor() as i32 - 2 + 127).clamp(1, 253) as u8;
    let error = |exponent: u8| {
        let unit = scale(exponent);
        x.iter().map(|x| f64::from(x - unit * number(code(x / unit))).powi(2)).sum::<f64>()
    };
    let exponent = if error(least + 1) < error(least) { least + 1 } else { least };
    out[0] = exponent;
    for (element, x) in x.iter().enumerate() {
        out[1 + element % 16] |= code(x / scale(exponent)) << (element / 16 * 4);
    }
}

pub fn decode(bytes: &[u8], out: &mut [f32]) {
    let unit = scale(bytes[0]);
    for (element, y) in out.iter_mut().enumerate() {
        *y = unit * number(bytes[1 + element % 16] >> (element / 16 * 4) & 15);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_the_encoding_are_kept_exactly() {
        for codes in 0..64usize {
            for exponent in [20, 127, 140] {
                // Some blocks without the larger codes.
                let of = |i: usize| (i * 7 + codes * 13) as u8 % if codes % 3 == 0 { 4 } else { 16 };
                let x: Vec<f32> = (0..ELEMENTS).map(|i| scale(exponent) * number(of(i))).collect();
                let mut bytes = [0; BYTES];
                encode(&x, &mut bytes);
                let mut y = [0.0; ELEMENTS];
                decode(&bytes, &mut y);
                assert_eq!(x, y);
            }
        }
    }

    #[test]
    fn the_better_of_two_powers_of_two_is_chosen() {
        let error = |x: &[f32]| {
            let mut bytes = [0; BYTES];
            encode(x, &mut bytes);
            let mut y = [0.0; ELEMENTS];
            decode(&bytes, &mut y);
            (bytes[0], x.iter().zip(y).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max))
        };
        let mut x = [0.0; ELEMENTS];
        x[3] = 7.9;
        assert_eq!(error(&x).0, 128, "8 is nearer than 6");
        x[3] = 6.5;
        assert_eq!(error(&x).0, 127);
    }
}
