//! Philox4x32-10, the counter-based generator (Salmon et al., "Parallel random numbers: as easy as
//! 1, 2, 3", SC'11). The CUDA kernels compute the same words: a random number is a function of
//! (seed, stream, position), never of thread timing.

const M0: u32 = 0xD251_1F53;
const M1: u32 = 0xCD9E_8D57;
const W0: u32 = 0x9E37_79B9;
const W1: u32 = 0xBB67_AE85;

/// Four uniform 32-bit words for one counter under one key.
#[inline(always)]
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..10 {
        if round > 0 {
            key = [key[0].wrapping_add(W0), key[1].wrapping_add(W1)];
        }
        let p0 = M0 as u64 * counter[0] as u64;
        let p1 = M1 as u64 * counter[2] as u64;
        counter =
            [(p1 >> 32) as u32 ^ counter[1] ^ key[0], p1 as u32, (p0 >> 32) as u32 ^ counter[3] ^ key[1], p0 as u32];
    }
    counter
}

/// The use of a random number: it keeps the sequences of different uses apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Purpose {
    Dropout = 1,
    StochasticRounding = 2,
    Initialisation = 3,
    Shuffle = 4,
    /// Rounding to codes of four bits.
    Codes = 5,
    /// Drawing the next token of a text.
    Generation = 6,
    /// Noise that is added to embeddings.
    EmbeddingNoise = 7,
}

/// One 32-bit word at `position` of the sequence (`seed`, `purpose`, `stream`, `step`).
///
/// The counter is (position / 4 low, position / 4 high, step, stream); the key is the seed with the
/// purpose folded into its high half. Word `position % 4` of the block is returned.
#[inline]
pub fn word(seed: u64, purpose: Purpose, stream: u32, step: u32, position: u64) -> u32 {
    words(seed, purpose, stream, step, position / 4)[(position % 4) as usize]
}

/// The four words at positions `4 · block` and following: [`word`] for sequences read in order.
#[inline(always)]
pub fn words(seed: u64, purpose: Purpose, stream: u32, step: u32, block: u64) -> [u32; 4] {
    let key = [seed as u32, (seed >> 32) as u32 ^ ((purpose as u32) << 24)];
    philox4x32([block as u32, (block >> 32) as u32, step, stream], key)
}

/// Number of blocks that [`run_of_words`] computes at once.
pub const BLOCKS: usize = 16;

/// The words of [`BLOCKS`] blocks from `first` on, in order: those of [`words`]. Its loops become vector instructions where
/// the caller has them.
#[inline(always)]
pub fn run_of_words(seed: u64, purpose: Purpose, stream: u32, step: u32, first: u64) -> [u32; 4 * BLOCKS] {
    let mut key = [seed as u32, (seed >> 32) as u32 ^ ((purpose as u32) << 24)];
    let (mut a, mut b, mut c, mut d) = ([0; BLOCKS], [0; BLOCKS], [step; BLOCKS], [stream; BLOCKS]);
    for lane in 0..BLOCKS {
        let block = first + lane as u64;
        (a[lane], b[lane]) = (block as u32, (block >> 32) as u32);
    }
    for round in 0..10 {
        if round > 0 {
            key = [key[0].wrapping_add(W0), key[1].wrapping_add(W1)];
        }
        for lane in 0..BLOCKS {
            let p0 = M0 as u64 * a[lane] as u64;
            let p1 = M1 as u64 * c[lane] as u64;
            a[lane] = (p1 >> 32) as u32 ^ b[lane] ^ key[0];
            b[lane] = p1 as u32;
            c[lane] = (p0 >> 32) as u32 ^ d[lane] ^ key[1];
            d[lane] = p0 as u32;
        }
    }
    let mut words = [0; 4 * BLOCKS];
    for lane in 0..BLOCKS {
        words[4 * lane] = a[lane];
        words[4 * lane + 1] = b[lane];
        words[4 * lane + 2] = c[lane];
        words[4 * lane + 3] = d[lane];
    }
    words
}

/// Uniform in [0, 1): the top 24 bits of a word.
#[inline(always)]
pub fn unit(word: u32) -> f32 {
    (word >> 8) as f32 * (1.0 / 16_777_216.0)
}

/// Two independent standard normal values from two words: Box–Muller in f64 with polynomials of our own, which have
/// the same bits with every compiler and vector width. Within 1e-9 of the exact values before they are rounded.
#[inline(always)]
pub fn normal_pair(a: u32, b: u32) -> (f32, f32) {
    let u = (a as f64 + 1.0) * (1.0 / 4_294_967_297.0);
    let radius = (-2.0 * logarithm(u)).sqrt();
    let (cos, sin) = cos_sin_of_turn(b);
    ((radius * cos) as f32, (radius * sin) as f32)
}

/// ln x of a normal positive number: x = m·2ᵏ with m from √½ to √2, and ln m = 2·artanh((m − 1)/(m + 1)) as a series.
#[inline(always)]
fn logarithm(x: f64) -> f64 {
    /// The bits of √½ in the upper half.
    const LEAST: u64 = 0x3fe6_a09e_0000_0000;
    let shifted = x.to_bits() + (0x3ff0_0000_0000_0000 - LEAST);
    let k = (shifted >> 52) as i32 - 0x3ff;
    let m = f64::from_bits((shifted & 0x000f_ffff_ffff_ffff) + LEAST);
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let series = 1.0 / 13.0 + z * (1.0 / 15.0);
    let series = 1.0 / 9.0 + z * (1.0 / 11.0 + z * series);
    let series = 1.0 / 5.0 + z * (1.0 / 7.0 + z * series);
    let series = 2.0 + z * (2.0 / 3.0 + z * (2.0 * series));
    f64::from(k) * std::f64::consts::LN_2 + s * series
}

/// Cosine and sine of `b`/2³² of a turn: the nearest quarter exactly, the rest as a series.
#[inline(always)]
fn cos_sin_of_turn(b: u32) -> (f64, f64) {
    let quarter = b.wrapping_add(1 << 29) >> 30;
    let rest = b.wrapping_sub(quarter << 30) as i32;
    let x = f64::from(rest) * (std::f64::consts::TAU / 4_294_967_296.0);
    let z = x * x;
    let sin = 1.0 / 120.0 + z * (-1.0 / 5040.0 + z * (1.0 / 362_880.0 + z * (-1.0 / 39_916_800.0)));
    let sin = x + x * z * (-1.0 / 6.0 + z * sin);
    let cos = -1.0 / 720.0 + z * (1.0 / 40_320.0 + z * (-1.0 / 3_628_800.0 + z * (1.0 / 479_001_600.0)));
    let cos = 1.0 + z * (-0.5 + z * (1.0 / 24.0 + z * cos));
    let odd = quarter & 1 == 1;
    let (c, s) = if odd { (sin, cos) } else { (cos, sin) };
    let c = if matches!(quarter, 1 | 2) { -c } else { c };
    let s = if quarter >= 2 { -s } else { s };
    (c, s)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_has_the_words_of_its_blocks() {
        for first in [0, 5, u64::from(u32::MAX) - 3] {
            let run = run_of_words(7 << 40, Purpose::Dropout, 3, 2, first);
            for (lane, four) in run.chunks(4).enumerate() {
                assert_eq!(four, words(7 << 40, Purpose::Dropout, 3, 2, first + lane as u64));
            }
        }
    }

    /// Known answers of the Random123 distribution (kat_vectors, philox4x32 10).
    #[test]
    fn matches_random123_vectors() {
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox4x32([u32::MAX; 4], [u32::MAX; 2]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        assert_eq!(
            philox4x32([0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344], [0xa4093822, 0x299f31d0]),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }

    #[test]
    fn normal_values_are_those_of_the_formula() {
        let edges = [0, 1, 2, 1 << 29, (1 << 29) - 1, 1 << 30, 3 << 29, 1 << 31, 3 << 30, u32::MAX - 1, u32::MAX];
        let drawn = (0..20_000u64).map(|i| word(3, Purpose::Initialisation, 1, 0, i));
        let words: Vec<u32> = edges.into_iter().chain(drawn).collect();
        for (i, a) in words.iter().enumerate() {
            for b in edges.into_iter().chain([words[words.len() - 1 - i]]) {
                let radius = (-2.0 * ((*a as f64 + 1.0) / 4_294_967_297.0).ln()).sqrt();
                let angle = std::f64::consts::TAU * b as f64 / 4_294_967_296.0;
                let (x, y) = normal_pair(*a, b);
                for (found, exact) in [(x, radius * angle.cos()), (y, radius * angle.sin())] {
                    let error = (found as f64 - exact).abs();
                    assert!(error <= 1e-9 + 6e-8 * exact.abs(), "{a} {b}: {found}, not {exact}");
                }
            }
        }
    }

    #[test]
    fn normal_values_have_the_right_moments() {
        let n = 20_000u64;
        let values: Vec<f64> = (0..n)
            .flat_map(|i| {
                let a = word(7, Purpose::Initialisation, 0, 0, 2 * i);
                let b = word(7, Purpose::Initialisation, 0, 0, 2 * i + 1);
                let (x, y) = normal_pair(a, b);
                [x as f64, y as f64]
            })
            .collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / values.len() as f64;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
    }
}
