//! A result against the model that it was made from, on the same rows: perplexity of both, and the divergence of their
//! distributions of tokens.

use std::sync::Arc;

use data::{Batch, IGNORE};
use options::Setting;
use rayon::prelude::*;
use tensor::HostTensor;

use crate::engine::device::Device;
use crate::error::{Result, go_on};
use crate::inference::model::Model;
use crate::model::source::ModelSource;

/// Losses and divergence in nats, means over the targets of all rows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Compared {
    pub tokens: usize,
    /// Cross entropy of the model that was quantised.
    pub before: f64,
    /// Cross entropy of the result.
    pub after: f64,
    /// KL divergence of the result's distributions from the model's.
    pub divergence: f64,
    /// The rows are of the validation data; else others of the run's.
    pub are_held_out: bool,
}

/// The rise of the perplexity that a result is said to have lost much at.
const MUCH: f64 = 1.05;

impl Compared {
    /// The factor by which the perplexity is larger.
    pub fn factor(&self) -> f64 {
        (self.after - self.before).exp()
    }

    pub fn is_much(&self) -> bool {
        self.factor() > MUCH || self.factor().is_nan()
    }
}

/// Compares both on every target of the rows.
pub fn compare(
    device: &Arc<Device>,
    [before, after]: [&ModelSource; 2],
    batches: &[Batch],
    are_held_out: bool,
    stop: &dyn Fn() -> bool,
) -> Result<Compared> {
    let open = |source: &ModelSource| Model::load(device.clone(), Arc::new(source.clone()), None, Setting::Auto);
    let (mut before, mut after) = (open(before)?, open(after)?);
    let mut sums = [0.0f64; 4];
    for batch in batches {
        go_on(stop)?;
        let logits = [before.forward(batch, false)?.logits, after.forward(batch, false)?.logits];
        let vocabulary = logits[0].len() / batch.targets.len();
        let places: Vec<usize> = (0..batch.targets.len()).filter(|place| batch.targets[*place] != IGNORE).collect();
        let of = |place: &usize| {
            let row = |of: &HostTensor| {
                let size = vocabulary * of.dtype.size();
                let bytes = of.bytes[place * size..][..size].to_vec();
                HostTensor::new(of.dtype, [vocabulary], bytes).to_f32()
            };
            of_target([&row(&logits[0]), &row(&logits[1])], batch.targets[*place] as usize)
        };
        let found: Vec<[f64; 4]> = places.par_iter().map(of).collect();
        found.iter().for_each(|of| sums.iter_mut().zip(of).for_each(|(sum, x)| *sum += x));
    }
    let mean = |index: usize| sums[index] / sums[0];
    Ok(Compared { tokens: sums[0] as usize, before: mean(1), after: mean(2), divergence: mean(3), are_held_out })
}

/// 1, the losses of two rows of logits, and the divergence of the second's distribution from the first's.
fn of_target(logits: [&[f32]; 2], target: usize) -> [f64; 4] {
    // Exponentials of both, in f32: sums of them, and of their products with differences, are in f64.
    let most = logits.map(|row| row.iter().fold(f32::NEG_INFINITY, |most, x| most.max(*x)));
    let (mut sums, mut lost) = ([0.0f64; 2], 0.0f64);
    for (x, y) in logits[0].iter().zip(logits[1]) {
        let p = f64::from((x - most[0]).exp());
        sums[0] += p;
        sums[1] += f64::from((y - most[1]).exp());
        // A token that the first never takes counts nothing, and may be −∞.
        lost += if p > 0.0 { p * (f64::from(*x) - f64::from(*y)) } else { 0.0 };
    }
    let whole = [0, 1].map(|row| f64::from(most[row]) + sums[row].ln());
    let divergence = lost / sums[0] - whole[0] + whole[1];
    [1.0, whole[0] - f64::from(logits[0][target]), whole[1] - f64::from(logits[1][target]), divergence]
}

/// Returns the log-probabilities of all tokens in f64.
pub fn distribution(logits: &[f32]) -> Vec<f64> {
    let most = logits.iter().fold(f32::NEG_INFINITY, |most, x| most.max(*x));
    let sum: f64 = logits.iter().map(|x| f64::from(x - most).exp()).sum();
    let whole = f64::from(most) + sum.ln();
    logits.iter().map(|x| f64::from(*x) - whole).collect()
}
