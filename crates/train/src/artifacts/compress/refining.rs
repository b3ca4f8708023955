//! A layer by `--method refine`: its matrices one after another in the order of its graph, each with what it is multiplied with once
//! those before it are in codes, next to what the model as it was multiplies it with. What is lost before a matrix is part of what
//! it is wanted to give: the difference of what it reads, and where its results are added to a value, the difference of that.
//!
//! Knows the graph's nodes by name; not how codes are chosen.

use std::collections::BTreeMap;

use data::Stop;
use graph::Block;
use tensor::HostTensor;
use tensor::compressed::Range;

use super::cross::Cross;
use super::encode::range;
use super::inputs::{OF_EXPERTS, inputs_of_experts};
use super::layers::{Layers, rows_of_tokens};
use super::moments::Moments;
use super::reads::{LINEAR, Read, readers, reads};
use super::record::Record;
use super::refine::{Refined, Solved};
use super::result::Plan;
use crate::error::{Result, go_on};

/// The share of what is lost before a matrix that it is wanted to make up for.
const MADE_UP: f64 = 1.0;

/// Decides everything about the layer. Its weights are those of the codes afterwards.
pub fn decide(plan: &Plan<'_>, now: &mut Layers<'_>, exact: &mut Layers<'_>, stop: Stop<'_>) -> Result<Record> {
    let mut record = Record::default();
    let place = now.place();
    let is_coded = |name: &String| plan.matrix(&place.numbered(name)).is_some();
    let block = now.block().clone();
    let all: Vec<Read> = reads(&block).into_iter().filter(|of| of.matrices.iter().any(is_coded)).collect();
    let added: BTreeMap<String, String> =
        all.iter().flat_map(|of| &of.matrices).filter_map(|name| added_to(&block, name)).collect();
    let of_tokens: Vec<String> =
        all.iter().filter(|of| of.experts.is_none()).flat_map(|of| values(&block, of)).collect();
    go_on(stop)?;
    exact.keep_values(&of_tokens)?;
    for read in &all {
        let coded: Vec<&String> = read.matrices.iter().filter(|name| is_coded(name)).collect();
        if read.experts.is_some() {
            decide_experts(plan, read, now, &mut record, stop)?;
            continue;
        }
        go_on(stop)?;
        now.keep_values(&values(&block, read))?;
        let width = plan.width_of(&place.numbered(coded[0]));
        let mut sums = Sums::new(width);
        let outputs =
            coded.iter().find_map(|name| Some((added.get(*name)?, plan.matrix(&place.numbered(name))?.shape[0])));
        let mut of_sum = outputs.map(|(_, outputs)| Cross::new([width, outputs]));
        for (index, batch) in now.batches.iter().enumerate() {
            go_on(stop)?;
            let rows = |layers: &Layers<'_>, name: &str| rows_of_tokens(&at(layers, name)[index], batch);
            let x = rows(now, &read.value);
            sums.add(&x, &difference(&rows(exact, &read.value), &x));
            if let (Some(cross), Some((name, _))) = (&mut of_sum, outputs) {
                cross.add(&x, &difference(&rows(exact, name), &rows(now, name)));
            }
        }
        let solved = Solved::new(&sums.moments);
        for name in coded {
            go_on(stop)?;
            let parameter = place.numbered(name);
            let of = plan.matrix(&parameter).expect("it becomes codes");
            let mut wanted = vec![0.0; of.shape[0] * width];
            sums.lost.times(&plan.numbers(of)?.0, &mut wanted);
            if let Some(cross) = of_sum.as_ref().filter(|_| added.contains_key(name)) {
                cross.turned(&mut wanted);
            }
            wanted.iter_mut().for_each(|x| *x *= MADE_UP);
            let refined = plan.refined(of, &sums.moments, &solved, Some(wanted))?;
            now.replace(&parameter, plan.values_of(of, &refined)?);
            keep(&mut record, parameter, refined, sums.range);
        }
    }
    Ok(record)
}

/// Sums over a value's rows.
struct Sums {
    moments: Moments,
    /// Products of the rows with their differences from those of the model as it was.
    lost: Cross,
    range: Range,
}

impl Sums {
    fn new(width: usize) -> Sums {
        Sums { moments: Moments::new(width), lost: Cross::new([width, width]), range: Range::default() }
    }

    fn add(&mut self, x: &[f32], lost: &[f32]) {
        self.moments.add(x);
        self.lost.add(x, lost);
        self.range = self.range.with(range(x));
    }
}

fn difference(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a - b).collect()
}

fn at<'l>(layers: &'l Layers<'_>, name: &str) -> &'l [HostTensor] {
    layers.value(name).expect("it was kept")
}

fn keep(record: &mut Record, parameter: String, refined: Refined, range: Range) {
    record.codes.insert(parameter.clone(), refined.codes);
    record.scales.insert(parameter.clone(), refined.scales);
    record.ranges.insert(parameter, range);
}

/// The matrices of experts: each by the moments of the tokens that reach it.
fn decide_experts(
    plan: &Plan<'_>,
    read: &Read,
    now: &mut Layers<'_>,
    record: &mut Record,
    stop: Stop<'_>,
) -> Result<()> {
    let place = now.place();
    let count = read.experts.as_ref().expect("it is of experts").count;
    let each = read.matrices.len() / count;
    let width = plan.width_of(&place.numbered(&read.matrices[0]));
    let at_once = (OF_EXPERTS / (8 * width * width)).max(1);
    let mut whole = Range::default();
    let mut decided: Vec<(String, Refined)> = Vec::new();
    let mut waiting: Vec<String> = Vec::new();
    for first in (0..count).step_by(at_once) {
        let last = count.min(first + at_once);
        for (expert, inputs) in (first..last).zip(inputs_of_experts(plan, read, first..last, now, true, stop)?) {
            let names = read.matrices[expert * each..][..each].iter().map(|name| place.numbered(name));
            let Some(inputs) = inputs else {
                waiting.extend(names);
                continue;
            };
            whole = whole.with(inputs.range);
            let moments = inputs.moments.expect("they are summed");
            let solved = Solved::new(&moments);
            for name in names {
                go_on(stop)?;
                let Some(of) = plan.matrix(&name) else { continue };
                let refined = plan.refined(of, &moments, &solved, None)?;
                record.ranges.insert(name.clone(), inputs.range);
                decided.push((name, refined));
            }
        }
    }
    // Weights change once all experts are measured: those of gate and up are read by what down is multiplied with.
    for (name, refined) in decided {
        let of = plan.matrix(&name).expect("it becomes codes");
        now.replace(&name, plan.values_of(of, &refined)?);
        let range = record.ranges[&name];
        keep(record, name, refined, range);
    }
    for name in waiting {
        record.ranges.insert(name.clone(), whole);
        record.unreached.push(name);
    }
    Ok(())
}

/// The values that are kept for the matrices of a read: what they are multiplied with, and what their results are added to.
pub(super) fn values(block: &Block, read: &Read) -> Vec<String> {
    let sums = read.matrices.iter().filter_map(|name| Some(added_to(block, name)?.1));
    std::iter::once(read.value.clone()).chain(sums).collect()
}

/// The value that the results of a matrix are added to, where one sum alone reads them; with the matrix.
fn added_to(block: &Block, matrix: &str) -> Option<(String, String)> {
    let product = readers(block, matrix).next().filter(|node| node.op == LINEAR)?;
    let result = &product.outputs[0];
    let mut of = readers(block, result);
    let sum = of.next().filter(|node| node.op == "add" && of.next().is_none())?;
    let other = sum.inputs.iter().find(|name| *name != result)?;
    Some((matrix.to_owned(), other.clone()))
}
