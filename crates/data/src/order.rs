//! The order of documents in an epoch, and the validation split: counter-based, so any position of any epoch can be
//! computed directly.
//!
//! Knows numbers only.

use tensor::philox::{Purpose, word};

/// Streams of the shuffle generator.
const EPOCH: u32 = 0;
const SPLIT: u32 = 1;
const DRAW: u32 = 2;

/// A permutation of 0..n, a function of (seed, epoch).
pub fn permutation(n: usize, seed: u64, epoch: u64) -> Vec<u32> {
    shuffled(n, seed ^ (epoch >> 32), EPOCH, epoch as u32)
}

fn shuffled(n: usize, seed: u64, stream: u32, step: u32) -> Vec<u32> {
    let mut keys: Vec<(u64, u32)> = (0..n as u32)
        .map(|i| {
            let at = 2 * u64::from(i);
            let high = word(seed, Purpose::Shuffle, stream, step, at);
            let low = word(seed, Purpose::Shuffle, stream, step, at + 1);
            (u64::from(high) << 32 | u64::from(low), i)
        })
        .collect();
    keys.sort_unstable();
    keys.into_iter().map(|(_, i)| i).collect()
}

/// A number in 0..1, a function of (seed, number of the draw).
pub(crate) fn drawn(seed: u64, number: u64) -> f64 {
    f64::from(word(seed, Purpose::Shuffle, DRAW, 0, number)) / 4_294_967_296.0
}

/// Splits 0..n into (training, validation), both ascending. `ratio` of them, rounded, are for validation: at least one
/// if the ratio is positive, and never all.
pub fn split(n: usize, ratio: f64, seed: u64) -> (Vec<u32>, Vec<u32>) {
    let wanted = (n as f64 * ratio).round() as usize;
    let count = if ratio > 0.0 { wanted.max(1).min(n.saturating_sub(1)) } else { 0 };
    let order = shuffled(n, seed, SPLIT, 0);
    let (validation, training) = order.split_at(count);
    let sorted = |part: &[u32]| {
        let mut part = part.to_vec();
        part.sort_unstable();
        part
    };
    (sorted(training), sorted(validation))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_epoch_has_its_own_permutation() {
        let first = permutation(1000, 7, 0);
        let mut sorted = first.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..1000).collect::<Vec<u32>>());
        assert_eq!(first, permutation(1000, 7, 0));
        assert_ne!(first, permutation(1000, 7, 1));
        assert_ne!(first, permutation(1000, 8, 0));
        let fixed = first.iter().enumerate().filter(|&(i, &p)| i == p as usize).count();
        assert!(fixed < 8, "{fixed} documents stayed in place");
    }

    #[test]
    fn the_split_is_a_partition() {
        let (training, validation) = split(100, 0.1, 3);
        assert_eq!((training.len(), validation.len()), (90, 10));
        let mut all = [training, validation.clone()].concat();
        all.sort_unstable();
        assert_eq!(all, (0..100).collect::<Vec<u32>>());
        assert_ne!(validation, split(100, 0.1, 4).1);
        assert_eq!(split(100, 0.0, 3).1.len(), 0);
        assert_eq!(split(3, 0.01, 3).1.len(), 1);
        assert_eq!(split(1, 0.5, 3).0.len(), 1);
        assert_eq!(split(0, 0.5, 3), (vec![], vec![]));
    }
}
