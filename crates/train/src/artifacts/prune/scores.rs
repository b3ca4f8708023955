//! The importance of channels, heads and layers by the activations over rows of a run's data (Muralidharan et al. 2024,
//! 2407.14679). All sums are in f64.
//!
//! Knows values of layers and how they are summed; not what is removed.

use std::collections::BTreeSet;
use std::sync::Arc;

use data::{Batch, IGNORE, Stop};
use graph::Model;
use rayon::prelude::*;
use tensor::HostTensor;

use super::axes::mlp_size;
use super::axes::{Axes, Experts, LayerAxes, names};
use crate::artifacts::compress::compared::distribution;
use crate::artifacts::compress::layers::Layers;
use crate::engine::device::Device;
use crate::error::{Result, go_on};
use crate::model::source::ModelSource;

/// The summing of scores over tokens of a row, or over rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Over {
    #[default]
    Mean,
    /// The root of the sum of squares.
    L2,
}

/// The summing of scores over both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summing {
    pub tokens: Over,
    pub rows: Over,
}

/// Scores by layer; the larger, the more important.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores {
    /// Scores of each head of each layer; empty for layers without attention.
    pub heads: Vec<Vec<f64>>,
    /// Scores of each channel of the feed-forward layer.
    pub mlp: Vec<Vec<f64>>,
    /// Scores of each channel of the residual stream.
    pub hidden: Vec<f64>,
    /// Scores of each expert: weight times norm of what it makes, a mean over the tokens that reach it; empty for layers without.
    pub experts: Vec<Vec<f64>>,
    /// The rise of the loss without the layer; empty where it was not measured.
    pub losses: Vec<f64>,
    /// 1 - the cosine between what a layer reads and makes, the mean over all tokens.
    pub influence: Vec<f64>,
}

impl Scores {
    /// Scores by which the first of all stay.
    pub fn even(axes: &Axes, model: &Model) -> Scores {
        let zeros = |count: usize| vec![0.0; count];
        let each = |of: &dyn Fn(&LayerAxes) -> usize| axes.layers.iter().map(|layer| zeros(of(layer))).collect();
        let mlp = mlp_size(axes, model);
        Scores {
            heads: each(&|of| of.heads.as_ref().map_or(0, |of| of.count)),
            mlp: each(&|of| of.mlp.as_ref().map_or(0, |_| mlp)),
            hidden: zeros(axes.hidden_size),
            experts: each(&|of| of.experts.as_ref().map_or(0, |of| of.count)),
            losses: Vec::new(),
            influence: zeros(axes.layers.len()),
        }
    }
}

/// A sum of magnitudes over the tokens of rows, and over rows.
struct Sum {
    how: Summing,
    sums: Vec<f64>,
    rows: usize,
}

impl Sum {
    fn new(how: Summing) -> Sum {
        Sum { how, sums: Vec::new(), rows: 0 }
    }

    /// Adds a batch's magnitudes, [B, T, width], of tokens that are present.
    fn add(&mut self, magnitudes: &[f64], batch: &Batch) {
        let width = magnitudes.len() / batch.present.len();
        self.sums.resize(width, 0.0);
        let rows = magnitudes.chunks(width * batch.seq_len).zip(batch.present.chunks(batch.seq_len));
        for (tokens, present) in rows {
            let mut of_row = vec![0.0; width];
            let mut count = 0usize;
            for (token, _) in tokens.chunks(width).zip(present).filter(|(_, present)| **present != 0.0) {
                count += 1;
                let add = |(sum, x): (&mut f64, &f64)| *sum += if self.how.tokens == Over::L2 { x * x } else { *x };
                of_row.iter_mut().zip(token).for_each(add);
            }
            if count == 0 {
                continue;
            }
            self.rows += 1;
            for (sum, x) in self.sums.iter_mut().zip(of_row) {
                let x = if self.how.tokens == Over::L2 { x.sqrt() } else { x / count as f64 };
                *sum += if self.how.rows == Over::L2 { x * x } else { x };
            }
        }
    }

    fn scores(self) -> Vec<f64> {
        let rows = self.rows.max(1) as f64;
        let of = |sum: f64| if self.how.rows == Over::L2 { sum.sqrt() } else { sum / rows };
        self.sums.into_iter().map(of).collect()
    }
}

/// Measures a model over rows. `by_loss`: also without each of its layers.
pub fn measure(
    device: Arc<Device>,
    source: &ModelSource,
    axes: &Axes,
    batches: &[Batch],
    how: Summing,
    by_loss: bool,
    stop: Stop<'_>,
) -> Result<Scores> {
    let mut parameters: BTreeSet<&str> = names(&axes.hidden);
    parameters.extend(axes.layers.iter().flat_map(|of| &of.mlp).flat_map(|(_, axes)| names(axes)));
    let mut layers = Layers::open(device, source, &parameters, batches)?.reaching_the_end();
    let mut found = Scores::default();
    let mut add_hidden = |sum: Sum| {
        let scores = sum.scores();
        found.hidden.resize(scores.len(), 0.0);
        found.hidden.iter_mut().zip(scores).for_each(|(sum, score)| *sum += score);
    };
    let (mut of_heads, mut of_mlp, mut influence) = (Vec::new(), Vec::new(), Vec::new());
    let mut of_experts = Vec::new();
    for _ in 0..layers.count() {
        let place = layers.place();
        let of = axes.layers.iter().find(|of| of.place == place).expect("axes were found for every layer");
        let block = layers.block();
        let stream = 0;
        let mut wanted = vec![block.carry[stream].next.clone()];
        wanted.extend(of.heads.iter().map(|of| of.value.clone()));
        wanted.extend(of.mlp.iter().map(|(value, _)| value.clone()));
        wanted.extend(of.norms.iter().cloned());
        let mut sums: Vec<Sum> = wanted.iter().map(|_| Sum::new(how)).collect();
        let mut cosines = (0.0, 0usize);
        let inputs: Vec<HostTensor> =
            (0..batches.len()).filter_map(|batch| layers.carried(stream, batch).cloned()).collect();
        layers.run(&wanted, &mut |index, values| {
            go_on(stop)?;
            let batch = &batches[index];
            cosines = added(cosines, &inputs[index], &values[0], batch);
            for (number, (value, sum)) in values.iter().zip(&mut sums).enumerate().skip(1) {
                let x = value.to_f32();
                let head_dim = of.heads.as_ref().filter(|_| number == 1).map(|of| of.head_dim);
                let magnitudes: Vec<f64> = match head_dim {
                    Some(size) => x.chunks(size).map(norm).collect(),
                    None => x.iter().map(|x| f64::from(x.abs())).collect(),
                };
                sum.add(&magnitudes, batch);
            }
            Ok(())
        })?;
        influence.push(1.0 - cosines.0 / cosines.1.max(1) as f64);
        let mut sums = sums.into_iter().skip(1);
        of_heads.push(of.heads.as_ref().and_then(|_| sums.next()).map(Sum::scores).unwrap_or_default());
        of_mlp.push(of.mlp.as_ref().and_then(|_| sums.next()).map(Sum::scores).unwrap_or_default());
        sums.for_each(&mut add_hidden);
        of_experts.push(match &of.experts {
            Some(experts) => experts_of(&mut layers, experts, batches, stop)?,
            None => Vec::new(),
        });
        layers.advance()?;
    }
    if let Some(name) = &axes.last_norm {
        let mut sum = Sum::new(how);
        layers.after(std::slice::from_ref(name), &mut |index, values| {
            let magnitudes: Vec<f64> = values[0].to_f32().iter().map(|x| f64::from(x.abs())).collect();
            sum.add(&magnitudes, &batches[index]);
            Ok(())
        })?;
        add_hidden(sum);
    }
    (found.heads, found.mlp, found.influence) = (of_heads, of_mlp, influence);
    found.experts = of_experts;
    if by_loss {
        let whole = loss_of(&mut layers, None, batches, stop)?;
        for layer in 0..layers.count() {
            found.losses.push(loss_of(&mut layers, Some(layer), batches, stop)? - whole);
        }
    }
    Ok(found)
}

/// The scores of the experts of a layer.
fn experts_of(layers: &mut Layers<'_>, of: &Experts, batches: &[Batch], stop: Stop<'_>) -> Result<Vec<f64>> {
    let wanted = [&of.rows, &of.order, &of.offsets, &of.weights].map(String::clone);
    let mut sums = vec![(0.0f64, 0usize); of.count];
    layers.run(&wanted, &mut |index, values| {
        go_on(stop)?;
        let (rows, weights) = (values[0].to_f32(), values[3].to_f32());
        let (order, offsets) = (ints(&values[1]), ints(&values[2]));
        let present = &batches[index].present;
        let (width, choices) = (rows.len() / order.len(), order.len() / present.len());
        for (expert, (sum, count)) in sums.iter_mut().enumerate() {
            for place in offsets[expert] as usize..offsets[expert + 1] as usize {
                let choice = order[place] as usize;
                if present[choice / choices] != 0.0 {
                    *sum += f64::from(weights[choice].abs()) * norm(&rows[place * width..][..width]);
                    *count += 1;
                }
            }
        }
        Ok(())
    })?;
    Ok(sums.into_iter().map(|(sum, count)| sum / count.max(1) as f64).collect())
}

fn ints(tensor: &HostTensor) -> Vec<i32> {
    tensor.bytes.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect()
}

/// The mean cross entropy of all targets without a layer, or with all.
fn loss_of(layers: &mut Layers<'_>, without: Option<usize>, batches: &[Batch], stop: Stop<'_>) -> Result<f64> {
    layers.restart()?;
    for layer in 0..layers.count() {
        go_on(stop)?;
        if without == Some(layer) {
            layers.pass_over()?
        } else {
            layers.advance()?
        };
    }
    let logits = layers.model().outputs.iter().find(|of| of.name == "logits").map(|of| of.value.clone());
    let logits = logits.expect("a language model has logits");
    let (mut sum, mut count) = (0.0f64, 0usize);
    layers.after(&[logits], &mut |index, values| {
        let (logits, targets) = (values[0].to_f32(), &batches[index].targets);
        let vocabulary = logits.len() / targets.len();
        let of = |(row, target): (&[f32], &i32)| (*target != IGNORE).then(|| -distribution(row)[*target as usize]);
        let losses: Vec<f64> = logits.par_chunks(vocabulary).zip(targets).filter_map(of).collect();
        sum += losses.iter().sum::<f64>();
        count += losses.len();
        Ok(())
    })?;
    Ok(sum / count.max(1) as f64)
}

fn norm(x: &[f32]) -> f64 {
    x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt()
}

/// Adds the cosines between two values of each token.
fn added((mut sum, mut count): (f64, usize), a: &HostTensor, b: &HostTensor, batch: &Batch) -> (f64, usize) {
    let (a, b) = (a.to_f32(), b.to_f32());
    let width = a.len() / batch.present.len();
    for ((a, b), _) in a.chunks(width).zip(b.chunks(width)).zip(&batch.present).filter(|(_, present)| **present != 0.0)
    {
        let product: f64 = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        sum += product / (norm(a) * norm(b)).max(f64::MIN_POSITIVE);
        count += 1;
    }
    (sum, count)
}
