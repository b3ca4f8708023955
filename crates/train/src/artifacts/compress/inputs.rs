//! The inputs of matrices, as far as methods know them: moments and ranges; those of experts by the rows that a router gave each.

use data::Stop;
use tensor::HostTensor;
use tensor::compressed::Range;

use super::encode::range;
use super::layers::Layers;
use super::moments::Moments;
use super::reads::{Experts, Read};
use super::result::Plan;
use crate::error::{Result, go_on};

/// Bytes of moments of experts that are summed in one pass over the rows.
pub(super) const OF_EXPERTS: usize = 4 << 30;

/// The inputs of a matrix over all rows.
#[derive(Default)]
pub(super) struct Inputs {
    pub moments: Option<Moments>,
    pub range: Range,
}

/// The inputs of the matrices of some experts; none for those that no token reached.
pub(super) fn inputs_of_experts(
    plan: &Plan<'_>,
    read: &Read,
    experts: std::ops::Range<usize>,
    layers: &mut Layers<'_>,
    gptq: bool,
    stop: Stop<'_>,
) -> Result<Vec<Option<Inputs>>> {
    let place = layers.place();
    let Experts { count, offsets, order } = read.experts.as_ref().expect("it is of experts");
    let each = read.matrices.len() / count;
    let name_of = |expert: usize| place.numbered(&read.matrices[expert * each]);
    let mut found: Vec<Option<Inputs>> = experts.clone().map(|_| None).collect();
    let batches = layers.batches;
    layers.run(&[read.value.clone(), offsets.clone(), order.clone()], &mut |index, values| {
        go_on(stop)?;
        let (x, offsets, order) = (values[0].to_f32(), ints(&values[1]), ints(&values[2]));
        let present = &batches[index].present;
        let (width, choices) = (x.len() / order.len(), order.len() / present.len());
        for (expert, inputs) in experts.clone().zip(&mut found) {
            let name = name_of(expert);
            let places = offsets[expert] as usize..offsets[expert + 1] as usize;
            let is_there = |place: &usize| present[order[*place] as usize / choices] != 0.0;
            let rows: Vec<f32> =
                places.filter(is_there).flat_map(|place| x[place * width..][..width].iter().copied()).collect();
            if !rows.is_empty() {
                add(plan, inputs.get_or_insert_with(|| fresh(width, gptq)), &name, &rows);
            }
        }
        Ok(())
    })?;
    Ok(found)
}

fn ints(tensor: &HostTensor) -> Vec<i32> {
    tensor.bytes.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect()
}

/// Adds rows to what is known of a matrix's inputs: divided by the factors that its columns have.
pub(super) fn add(plan: &Plan<'_>, inputs: &mut Inputs, matrix: &str, x: &[f32]) {
    inputs.range = inputs.range.with(match plan.scaling.of_columns(matrix) {
        Some(factors) => {
            let of_row = |row: &[f32]| {
                let scaled: Vec<f32> = row.iter().zip(factors).map(|(x, factor)| x / factor).collect();
                Range::of(&scaled)
            };
            x.chunks(factors.len()).map(of_row).fold(Range::default(), Range::with)
        }
        None => range(x),
    });
    inputs.moments.iter_mut().for_each(|moments| moments.add(x));
}

/// Returns the inputs of a matrix of this width of which nothing is known yet.
pub(super) fn fresh(width: usize, gptq: bool) -> Inputs {
    Inputs { moments: gptq.then(|| Moments::new(width)), range: Range::default() }
}
