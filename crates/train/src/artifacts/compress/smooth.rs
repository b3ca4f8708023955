//! Factors of channels: AWQ (Lin et al. 2023, 2306.00978) takes those with which the results of a module change least once its
//! matrices are codes, SmoothQuant (Xiao et al. 2022, 2211.10438) evens out the ranges of activations and weights.
//!
//! Knows the arithmetic and the search; weights and values come from a layer that runs.

use data::Stop;
use rayon::prelude::*;
use tensor::HostTensor;
use tensor::compressed::{Codes, Range};

use super::layers::{Given, Layers, rows_of_tokens};
use super::mapping::Mapping;
use super::result::{Plan, transpose};
use crate::error::{Result, go_on};
use crate::model::compression::chosen::Matrix;

/// Ratios between activations and weights that AWQ tries: 0, 1/18, … 1, besides no factors at all.
const RATIOS: usize = 19;

/// The least factor, and what keeps divisions by magnitudes finite.
const LEAST: f64 = 1e-4;

/// The least factor of SmoothQuant.
const LEAST_OF_RANGES: f32 = 1e-5;

/// Measurements of each channel of a value over all tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Channels {
    /// Mean magnitudes of each channel over all tokens.
    pub magnitude: Vec<f64>,
    pub least: Vec<f32>,
    pub most: Vec<f32>,
}

impl Channels {
    /// Measures a value's rows, batch by batch.
    fn of(values: &[HostTensor], layers: &Layers<'_>) -> Channels {
        let mut found = Channels::default();
        let mut rows = 0usize;
        for (value, batch) in values.iter().zip(layers.batches) {
            let width = *value.shape.last().expect("values have channels");
            if found.magnitude.is_empty() {
                (found.magnitude, found.least, found.most) =
                    (vec![0.0; width], vec![f32::INFINITY; width], vec![f32::NEG_INFINITY; width]);
            }
            for row in rows_of_tokens(value, batch).chunks(width) {
                rows += 1;
                for (channel, x) in row.iter().enumerate() {
                    found.magnitude[channel] += f64::from(x.abs());
                    found.least[channel] = found.least[channel].min(*x);
                    found.most[channel] = found.most[channel].max(*x);
                }
            }
        }
        found.magnitude.iter_mut().for_each(|sum| *sum /= rows as f64);
        found
    }
}

/// A balanced matrix: its place in the result and its numbers [outputs, inputs].
struct Balanced<'p> {
    of: &'p Matrix,
    x: Vec<f32>,
}

fn balanced<'p>(plan: &'p Plan<'_>, layers: &Layers<'_>, mapping: &Mapping) -> Result<Vec<Balanced<'p>>> {
    let names = mapping.balanced.iter().map(|name| layers.place().numbered(name));
    names
        .map(|name| {
            let of = plan.matrix(&name).expect("balanced matrices become codes");
            Ok(Balanced { of, x: plan.numbers(of)?.0 })
        })
        .collect()
}

/// The values of a mapping for all batches.
fn values(layers: &mut Layers<'_>, mapping: &Mapping, stop: Stop<'_>) -> Result<Vec<HostTensor>> {
    let mut found = Vec::new();
    layers.run(std::slice::from_ref(&mapping.value), &mut |_, mut values| {
        go_on(stop)?;
        found.push(values.remove(0));
        Ok(())
    })?;
    Ok(found)
}

/// The factors of SmoothQuant; `strength`: the share of the ranges of activations, 0 to 1.
pub fn even(
    layers: &mut Layers<'_>,
    plan: &Plan<'_>,
    mapping: &Mapping,
    strength: f64,
    stop: Stop<'_>,
) -> Result<Vec<f32>> {
    let values = values(layers, mapping, stop)?;
    let channels = Channels::of(&values, layers);
    let mut largest = vec![0.0f32; channels.least.len()];
    for matrix in balanced(plan, layers, mapping)? {
        for row in matrix.x.chunks(largest.len()) {
            largest.iter_mut().zip(row).for_each(|(largest, x)| *largest = largest.max(x.abs()));
        }
    }
    let ranges = channels.most.iter().zip(&channels.least).map(|(most, least)| most - least);
    Ok(ranges.zip(largest).map(|(range, weight)| even_of(range, weight, strength)).collect())
}

fn even_of(range: f32, weight: f32, strength: f64) -> f32 {
    let factor = match weight > 0.0 {
        true => f64::from(range).powf(strength) / (2.0 * f64::from(weight)).powf(1.0 - strength),
        false => f64::from(range),
    };
    (factor as f32).max(LEAST_OF_RANGES)
}

/// The factors of AWQ; none where the module changes least without.
pub fn searched(
    layers: &mut Layers<'_>,
    plan: &Plan<'_>,
    mapping: &Mapping,
    stop: Stop<'_>,
) -> Result<Option<Vec<f32>>> {
    let values = values(layers, mapping, stop)?;
    let channels = Channels::of(&values, layers);
    let given = Given::from([(mapping.value.clone(), values)]);
    let output = std::slice::from_ref(&mapping.output);
    let mut exact = Vec::new();
    layers.run_from(&given, output, &mut |_, mut values| {
        exact.push(values.remove(0));
        Ok(())
    })?;
    let matrices = balanced(plan, layers, mapping)?;
    let weights = magnitudes(plan, &matrices);
    let mut best: (f64, Option<Vec<f32>>) = (f64::INFINITY, None);
    let ratios = (0..RATIOS).map(|step| Some(step as f64 / (RATIOS - 1) as f64));
    for ratio in std::iter::once(None).chain(ratios) {
        go_on(stop)?;
        let factors = ratio.map(|ratio| factors(&channels.magnitude, &weights, ratio));
        for matrix in &matrices {
            let values = rounded(plan, matrix, &matrices, factors.as_deref())?;
            layers.replace(&matrix.of.parameter, values);
        }
        let (mut sum, mut index) = (0.0, 0);
        let batches = layers.batches;
        layers.run_from(&given, output, &mut |_, values| {
            let rows = |value| rows_of_tokens(value, &batches[index]);
            let (a, b) = (rows(&exact[index]), rows(&values[0]));
            sum += a.iter().zip(&b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
            index += 1;
            Ok(())
        })?;
        if sum < best.0 {
            best = (sum, factors);
        }
    }
    matrices.iter().for_each(|matrix| layers.restore(&matrix.of.parameter));
    Ok(best.1)
}

/// The mean of the magnitudes of each column, those of elements that share a scale relative to the largest of them.
fn magnitudes(plan: &Plan<'_>, matrices: &[Balanced<'_>]) -> Vec<f64> {
    let columns = matrices[0].of.shape[1];
    let mut sums = vec![0.0f64; columns];
    let mut rows = 0usize;
    for matrix in matrices {
        let size = plan.scheme.form.extent.block(matrix.of.shape)[1];
        for row in matrix.x.chunks(columns) {
            rows += 1;
            for (group, sums) in row.chunks(size).zip(sums.chunks_mut(size)) {
                let largest = f64::from(group.iter().fold(0.0f32, |most, x| most.max(x.abs()))) + 1e-6;
                sums.iter_mut().zip(group).for_each(|(sum, x)| *sum += f64::from(x.abs()) / largest);
            }
        }
    }
    sums.iter().map(|sum| sum / rows as f64).collect()
}

/// The factors of a ratio, around 1.
fn factors(activations: &[f64], weights: &[f64], ratio: f64) -> Vec<f32> {
    let of = |(x, w): (&f64, &f64)| (x.powf(ratio) / (w.powf(1.0 - ratio) + LEAST)).max(LEAST);
    let raw: Vec<f64> = activations.iter().zip(weights).map(of).collect();
    let (least, most) = raw.iter().fold((f64::INFINITY, 0.0f64), |(least, most), x| (least.min(*x), most.max(*x)));
    let middle = (least * most).sqrt();
    raw.iter().map(|x| (x / middle) as f32).map(|x| if x.is_finite() { x } else { 1.0 }).collect()
}

/// A matrix as it is with its columns scaled, in codes, and scaled back: in the shape that the model has it in.
fn rounded(
    plan: &Plan<'_>,
    matrix: &Balanced<'_>,
    all: &[Balanced<'_>],
    factors: Option<&[f32]>,
) -> Result<HostTensor> {
    let columns = matrix.of.shape[1];
    let scaled = |x: &[f32]| -> Vec<f32> {
        let mut x = x.to_vec();
        if let Some(factors) = factors {
            let rows = x.par_chunks_mut(columns);
            rows.for_each(|row| row.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor));
        }
        x
    };
    let x = scaled(&matrix.x);
    // Matrices that share the scale of scales are balanced together.
    let whole = match plan.scheme.form.codes {
        Codes::Nvfp4 => all
            .iter()
            .map(|of| plan.observed(of.of, &scaled(&of.x)))
            .try_fold(Range::default(), |whole, range| range.map(|range| whole.with(range)))?,
        _ => plan.observed(matrix.of, &x)?,
    };
    let mut values = plan.values(matrix.of, &x, whole)?;
    if let Some(factors) = factors {
        let rows = values.par_chunks_mut(columns);
        rows.for_each(|row| row.iter_mut().zip(factors).for_each(|(x, factor)| *x /= factor));
    }
    let [outputs, inputs] = matrix.of.shape;
    Ok(match matrix.of.transposed {
        true => HostTensor::from_f32([inputs, outputs], &transpose(&values, inputs)),
        false => HostTensor::from_f32([outputs, inputs], &values),
    })
}
