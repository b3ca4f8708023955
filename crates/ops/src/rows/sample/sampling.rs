//! A token drawn from one row of logits. The order of the steps is that of transformers: temperature, top-k, top-p, min-p.

use std::cmp::Ordering;

use crate::real::Real;
use crate::vector::{Loop, vectorised};

/// The distribution that a token is drawn from, and the number that draws it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// Divides the logits. 0: the likeliest token, the first of several.
    pub temperature: f32,
    /// Number of the likeliest tokens to draw from. 0: all.
    pub top_k: usize,
    /// Sum of probabilities that the likeliest tokens to draw from reach. 1: all.
    pub top_p: f32,
    /// Lowest probability of a token to draw, as a multiple of the highest. 0: all.
    pub min_p: f32,
    /// A number in [0, 1).
    pub number: f32,
}

impl Draw {
    /// A token of the whole distribution.
    pub const ALL: Draw = Draw { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, number: 0.0 };

    /// The factor of the logits.
    fn scale<T: Real>(&self) -> T {
        T::from_f64(if self.temperature > 0.0 { 1.0 / f64::from(self.temperature) } else { 1.0 })
    }

    /// Returns the factor of the logits: 1 ÷ temperature, 1 for a temperature of 0.
    pub fn logit_factor(&self) -> f32 {
        self.scale()
    }
}

/// Weights that are summed by themselves before the sums are.
const BLOCK: usize = 1024;

/// Candidates that are sorted at first where a sum decides how many are wanted.
const FIRST: usize = 1024;

/// A token and exp((its logit − the largest) ÷ temperature).
type Candidate = (f64, u32);

/// exp((x − top) · scale) of a row.
struct Weights;

impl<'a, T: Real> Loop<(&'a [T], T, T)> for Weights {
    type Output = Vec<T>;

    #[inline(always)]
    fn run((row, top, scale): (&'a [T], T, T)) -> Vec<T> {
        row.iter().map(|x| ((*x - top) * scale).exp()).collect()
    }
}

/// Returns a token in order of its place in the cumulative sum of probabilities, in which the number of `how` lies, and
/// the natural logarithm of its probability: that among all tokens at the temperature, 1 in place of 0, before any bound.
pub fn sample<T: Real>(logits: &[T], how: &Draw) -> (u32, T) {
    let best = likeliest(logits);
    let top = logits[best as usize];
    let scale = how.scale();
    let weights = vectorised(Weights, (logits, top, scale));
    let sums = sums_of(&weights);
    let total: f64 = sums.iter().sum();
    let id = match how {
        Draw { temperature: 0.0, .. } => None,
        Draw { top_k: 0, top_p: 1.0, min_p: 0.0, .. } => draw_of_all(&weights, &sums, f64::from(how.number) * total),
        _ => draw(&kept(&weights, how), how.number),
    };
    let id = id.unwrap_or(best);
    (id, (logits[id as usize] - top) * scale - T::from_f64(total.ln()))
}

/// The natural logarithm of a token's probability among all at the temperature, 1 in place of 0.
pub fn log_probability<T: Real>(logits: &[T], how: &Draw, id: u32) -> T {
    let (top, scale) = (logits[likeliest(logits) as usize], how.scale());
    let total: f64 = sums_of(&vectorised(Weights, (logits, top, scale))).iter().sum();
    (logits[id as usize] - top) * scale - T::from_f64(total.ln())
}

/// The sum of each block of weights.
fn sums_of<T: Real>(weights: &[T]) -> Vec<f64> {
    weights.chunks(BLOCK).map(|block| block.iter().map(|weight| weight.to_f64()).sum()).collect()
}

/// The place of the largest number, the first of several; 0 where none is above −∞.
fn likeliest<T: Real>(logits: &[T]) -> u32 {
    let mut best = (T::negative_infinity(), 0);
    for (id, logit) in logits.iter().enumerate() {
        if *logit > best.0 {
            best = (*logit, id);
        }
    }
    best.1 as u32
}

/// The token in whose stretch of the sum of all weights a number lies.
fn draw_of_all<T: Real>(weights: &[T], sums: &[f64], mut rest: f64) -> Option<u32> {
    let mut last = None;
    for (block, sum) in sums.iter().enumerate() {
        if *sum > 0.0 {
            last = Some((block, rest));
            if rest < *sum {
                break;
            }
        }
        rest -= sum;
    }
    let (block, rest) = last?;
    let candidates = weights[block * BLOCK..].iter().take(BLOCK).zip((block * BLOCK) as u32..);
    pick(candidates.map(|(weight, id)| (weight.to_f64(), id)), rest)
}

/// The candidate in whose stretch of the sum of their weights the number lies.
fn draw(candidates: &[Candidate], number: f32) -> Option<u32> {
    let total: f64 = candidates.iter().map(|(weight, _)| weight).sum();
    pick(candidates.iter().copied(), f64::from(number) * total)
}

/// Draws a token by its weight; the remainder that rounding leaves belongs to the last token with a weight.
fn pick(candidates: impl Iterator<Item = Candidate>, mut rest: f64) -> Option<u32> {
    let mut last = None;
    for (weight, id) in candidates.filter(|(weight, _)| *weight > 0.0) {
        last = Some(id);
        rest -= weight;
        if rest < 0.0 {
            break;
        }
    }
    last
}

/// The likelier first, then the lower id.
fn order(a: &Candidate, b: &Candidate) -> Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// The tokens that the bounds leave, with their weights, in order of ids.
pub(super) fn kept<T: Real>(weights: &[T], how: &Draw) -> Vec<Candidate> {
    let mut all: Vec<Candidate> = weights.iter().zip(0..).map(|(weight, id)| (weight.to_f64(), id)).collect();
    if (1..all.len()).contains(&how.top_k) {
        all.select_nth_unstable_by(how.top_k - 1, order);
        all.truncate(how.top_k);
    }
    if how.top_p < 1.0 {
        keep_sum(&mut all, how.top_p);
    }
    all.retain(|(weight, _)| *weight >= f64::from(how.min_p));
    all.sort_unstable_by_key(|(_, id)| *id);
    all
}

/// The likeliest whose weights reach a share of the sum of all, at least one.
fn keep_sum(all: &mut Vec<Candidate>, share: f32) {
    let wanted = f64::from(share) * all.iter().map(|(weight, _)| weight).sum::<f64>();
    let mut sorted = FIRST.min(all.len());
    loop {
        if sorted < all.len() {
            all.select_nth_unstable_by(sorted, order);
        }
        all[..sorted].sort_unstable_by(order);
        let mut sum = 0.0;
        let reached = all[..sorted].iter().position(|(weight, _)| {
            sum += weight;
            sum >= wanted
        });
        match reached {
            Some(last) => return all.truncate(last + 1),
            None if sorted == all.len() => return,
            None => sorted = (sorted * 8).min(all.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Draw = Draw::ALL;

    /// The shares of 20 000 draws with evenly spread numbers.
    fn shares(logits: &[f32], how: Draw) -> Vec<f64> {
        let mut counts = vec![0.0; logits.len()];
        for i in 0..20_000 {
            let number = (i as f32 + 0.5) / 20_000.0;
            counts[sample(logits, &Draw { number, ..how }).0 as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    fn near(found: &[f64], expected: &[f64]) {
        assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 2e-4), "{found:?} {expected:?}");
        assert!(found.iter().zip(expected).all(|(a, b)| *b > 0.0 || *a == 0.0), "{found:?} {expected:?}");
    }

    #[test]
    fn draws_follow_the_probabilities_and_their_bounds() {
        // Probabilities 0.25, 0.5, 0.125, 0.125.
        let logits = [2f32.ln(), 4f32.ln(), 1f32.ln(), 1f32.ln()];
        near(&shares(&logits, ALL), &[0.25, 0.5, 0.125, 0.125]);
        near(&shares(&logits, Draw { temperature: 0.5, ..ALL }), &[4.0 / 22.0, 16.0 / 22.0, 1.0 / 22.0, 1.0 / 22.0]);
        near(&shares(&logits, Draw { top_k: 2, ..ALL }), &[1.0 / 3.0, 2.0 / 3.0, 0.0, 0.0]);
        near(&shares(&logits, Draw { top_p: 0.6, ..ALL }), &[1.0 / 3.0, 2.0 / 3.0, 0.0, 0.0]);
        near(&shares(&logits, Draw { top_p: 0.5, ..ALL }), &[0.0, 1.0, 0.0, 0.0]);
        near(&shares(&logits, Draw { min_p: 0.3, ..ALL }), &[1.0 / 3.0, 2.0 / 3.0, 0.0, 0.0]);
        near(&shares(&logits, Draw { top_k: 3, top_p: 0.99, ..ALL }), &[2.0 / 7.0, 4.0 / 7.0, 1.0 / 7.0, 0.0]);
        near(&shares(&logits, Draw { temperature: 0.0, ..ALL }), &[0.0, 1.0, 0.0, 0.0]);
    }

    /// Sampling from a vocabulary whose probability mass needs more than the first block picks the tokens that a full
    /// sort would.
    #[test]
    fn a_sum_of_many_tokens_takes_the_likeliest() {
        let weights: Vec<f64> = (0..5000).map(|i| (f64::from(i * 37 % 5000) * 1e-4).exp()).collect();
        let found = kept(&weights, &Draw { top_p: 0.5, ..ALL });
        let mut sorted: Vec<Candidate> = weights.iter().zip(0..).map(|(x, id)| (*x, id)).collect();
        sorted.sort_unstable_by(order);
        sorted.truncate(found.len());
        sorted.sort_unstable_by_key(|(_, id)| *id);
        assert!(found.len() > FIRST && found.len() < 2500, "{}", found.len());
        assert_eq!(found, sorted);
    }

    #[test]
    fn equal_tokens_at_the_last_place_are_kept_in_order_of_ids() {
        let weights = [0.5, 1.0, 0.5, 0.5, 0.25];
        let ids = |how: &Draw| kept(&weights, how).iter().map(|(_, id)| *id).collect::<Vec<_>>();
        assert_eq!(ids(&Draw { top_k: 3, ..ALL }), [0, 1, 2]);
        assert_eq!(ids(&Draw { top_p: 0.4, ..ALL }), [0, 1]);
    }

    #[test]
    fn log_probabilities_are_of_all_tokens_at_the_temperature() {
        let logits = [2.0, 4.0, 0.0];
        let total = 1f64.exp() + 2f64.exp() + 1.0;
        for top_k in [0, 1, 2] {
            let (id, logp) = sample(&logits, &Draw { temperature: 2.0, top_k, number: 0.3, ..ALL });
            let expected: f64 = logits[id as usize] / 2.0 - total.ln();
            assert!((logp - expected).abs() < 1e-12, "{top_k}");
        }
        let (id, logp) = sample(&logits, &Draw { temperature: 0.0, ..ALL });
        let total = (-2f64).exp() + 1.0 + (-4f64).exp();
        assert!(id == 1 && (logp + total.ln()).abs() < 1e-12);
    }

    #[test]
    fn tokens_without_a_probability_are_never_drawn() {
        let masked = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY];
        for number in [0.0, 0.5, 1.0 - f32::EPSILON / 2.0] {
            for how in [ALL, Draw { top_k: 2, ..ALL }, Draw { top_p: 0.9, ..ALL }] {
                assert_eq!(sample(&masked, &Draw { number, ..how }).0, 1);
            }
        }
        let logits: Vec<f32> = (0..5000).map(|i| if i == 4000 { 3.0 } else { -((i % 7) as f32) }).collect();
        assert_eq!(sample(&logits, &ALL).0, 0);
        assert!(sample(&logits, &Draw { number: 1.0 - f32::EPSILON / 2.0, ..ALL }).0 >= 4990);
    }
}
