//! A draw from the whole vocabulary, with the log-probability of the token: one pass over the scores for their weights, and a
//! search among sums of blocks. Vocabularies have 150 000 tokens and many sequences are drawn for at once.

/// Scores whose weights are summed by themselves before the sums are.
const BLOCK: usize = 1024;

/// The weights of all tokens at a temperature: exp((score − the largest) ÷ temperature).
pub(super) struct Weights<'a> {
    logits: &'a [f32],
    top: f32,
    temperature: f32,
    weights: Vec<f32>,
    /// The sum of each block of weights.
    sums: Vec<f64>,
    total: f64,
}

impl Weights<'_> {
    pub fn new(logits: &[f32], temperature: f32) -> Weights<'_> {
        let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let scale = 1.0 / temperature;
        let weights: Vec<f32> = logits.iter().map(|logit| exp((logit - top) * scale)).collect();
        let sum = |block: &[f32]| {
            // Lanes of their own, so that they are added at once.
            let (lanes, rest) = block.as_chunks::<16>();
            let mut sums = [0f32; 16];
            for values in lanes {
                sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
            }
            sums.iter().chain(rest).map(|value| f64::from(*value)).sum::<f64>()
        };
        let sums: Vec<f64> = weights.chunks(BLOCK).map(sum).collect();
        let total = sums.iter().sum();
        Weights { logits, top, temperature, weights, sums, total }
    }

    /// The token in whose stretch of the sum of all weights the number lies, from 0 to 1.
    pub fn draw(&self, u: f32) -> u32 {
        let mut rest = f64::from(u) * self.total;
        let mut first = 0;
        for (block, sum) in self.sums.iter().enumerate() {
            if rest < *sum {
                first = block * BLOCK;
                break;
            }
            rest -= sum;
            first = (block + 1) * BLOCK;
        }
        let mut likely = None;
        for (id, weight) in self.weights.iter().enumerate().skip(first) {
            rest -= f64::from(*weight);
            if *weight > 0.0 {
                if rest < 0.0 {
                    return id as u32;
                }
                likely = Some(id);
            }
            if likely.is_some() && id + 1 == first + BLOCK {
                break;
            }
        }
        // What rounding leaves over belongs to the last token that has a weight.
        likely.or_else(|| self.weights.iter().rposition(|weight| *weight > 0.0)).unwrap_or(0) as u32
    }

    /// The natural logarithm of a token's probability.
    pub fn log_probability(&self, id: u32) -> f32 {
        (f64::from(self.logits[id as usize] - self.top) / f64::from(self.temperature) - self.total.ln()) as f32
    }
}

/// e^x for x ≤ 0, within 2 units of the last place; 0 below −87. Without a call, so that several are computed at once.
fn exp(x: f32) -> f32 {
    /// Adding it leaves the nearest whole number in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    let x = x.max(-200.0);
    let scaled = x * std::f32::consts::LOG2_E + ROUND;
    let whole = scaled - ROUND;
    // ln 2 in two parts, the first exact for the whole numbers here.
    let f = (x - whole * 0.693_359_4) + whole * 2.121_944_4e-4;
    let series = [1.388_889e-3, 8.333_334e-3, 4.166_666_8e-2, 1.666_666_7e-1, 0.5, 1.0, 1.0];
    let power = series.iter().fold(0.0, |sum, of| sum * f + of);
    let exponent = (scaled.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let scale = f32::from_bits(((exponent.max(-126) + 127) as u32) << 23);
    if x < -87.0 { 0.0 } else { power * scale }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_close_for_all_that_counts() {
        for step in 0..87_000 {
            let x = -(step as f32) * 1e-3;
            let expected = f64::from(x).exp();
            assert!((f64::from(exp(x)) / expected - 1.0).abs() < 3e-7, "{x}: {} {expected}", exp(x));
        }
        assert_eq!((exp(0.0), exp(f32::NEG_INFINITY), exp(-87.5)), (1.0, 0.0, 0.0));
    }

    #[test]
    fn draws_over_blocks_follow_the_weights() {
        let logits: Vec<f32> = (0..5000).map(|i| if i == 4000 { 3.0 } else { -((i % 7) as f32) }).collect();
        let of = Weights::new(&logits, 2.0);
        let expected: f64 = logits.iter().map(|logit| f64::from((logit - 3.0) / 2.0).exp()).sum();
        assert!((of.total / expected - 1.0).abs() < 1e-6);
        let before: f64 = logits[..4000].iter().map(|logit| f64::from((logit - 3.0) / 2.0).exp()).sum();
        let within = ((before + 0.5) / expected) as f32;
        assert_eq!((of.draw(0.0), of.draw(within)), (0, 4000));
        assert!((f64::from(of.log_probability(4000)) + expected.ln()).abs() < 1e-6);
        assert!(of.draw(1.0 - f32::EPSILON / 2.0) >= 4990);
        let masked = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY];
        let of = Weights::new(&masked, 1.0);
        assert_eq!((of.draw(0.0), of.draw(0.999_999_9)), (1, 1));
    }
}
