//! Matrices written layer by layer with what is measured of their activations: codes of GPTQ, factors of AWQ and SmoothQuant,
//! ranges.
//!
//! Knows the order of the work in a layer; not how files are laid out.

use std::collections::{BTreeMap, BTreeSet};

use data::Stop;
use data::safetensors::PlacedWriter;
use graph::ValueType;
use tensor::compressed::Range;

use super::encode::Decided;
use super::gptq;
use super::inputs::{Inputs, OF_EXPERTS, add, fresh, inputs_of_experts};
use super::layers::{Layers, rows_of_tokens};
use super::mapping::{Mapping, mappings};
use super::moments::Moments;
use super::part;
use super::reads::{Read, reads};
use super::record::{Journal, Record};
use super::refining;
use super::result::{Digests, Job, Keep, Plan, Ranges};
use super::smooth;
use super::solver::Solver;
use crate::error::{Result, TrainError, go_on};
use crate::model::compression::chosen::Matrix;
use crate::model::compression::scheme::{CompressRequest, Method};

/// The model at a layer: with the layers before it in codes, and for a method that compares with it as it was.
pub struct Streams<'b> {
    pub now: Layers<'b>,
    pub exact: Option<Layers<'b>>,
}

impl<'b> Streams<'b> {
    /// Opens what a method reads.
    pub fn open(method: Method, open: &dyn Fn() -> Result<Layers<'b>>) -> Result<Streams<'b>> {
        Ok(Streams { now: open()?, exact: (method == Method::Refine).then(open).transpose()? })
    }
}

/// Writes all matrices, each layer once the layers before it are decided. Notes on what was not measured.
pub fn calibrated(
    plan: &mut Plan<'_>,
    request: &CompressRequest,
    streams: Streams<'_>,
    journal: &Journal,
    writer: &mut PlacedWriter,
    digests: &mut Digests<'_>,
    stop: Stop<'_>,
) -> Result<Vec<String>> {
    let Streams { now: mut layers, mut exact } = streams;
    let chosen = plan.chosen;
    let types = part::types(layers.model());
    let (mut notes, fused) = (Vec::new(), Ranges::default());
    let mut solver = layers.solver().filter(|_| request.method == Method::Gptq);
    let (mut written, mut unmeasured, mut unreached) = (BTreeSet::new(), Vec::new(), Vec::new());
    let (mut mapped, mut resumed) = (0, 0);
    for layer in 0..layers.count() {
        let place = layers.place();
        let own: BTreeSet<String> = layers.block().parameters.iter().map(|of| place.numbered(&of.name)).collect();
        let found = of_method(plan, request, &layers, &types);
        mapped += found.len();
        let record = match journal.read(layer)? {
            Some(record) => {
                resumed += 1;
                record
            }
            None => {
                let record = match &mut exact {
                    Some(exact) => refining::decide(plan, &mut layers, exact, stop)?,
                    None => decide(plan, request, &found, &mut layers, &mut solver, stop)?,
                };
                journal.write(layer, &record)?;
                record
            }
        };
        for mapping in &found {
            if let Some(factors) = record.factors.get(&mapping.value) {
                plan.scaling.add(mapping, place, factors);
            }
        }
        let mut jobs = Vec::new();
        for of in chosen.matrices.iter().filter(|of| own.contains(&of.parameter)) {
            let activations = record.ranges.get(&of.parameter).copied();
            if plan.scheme.measures_activations() && activations.is_none() {
                return Err(not_measured(&of.module));
            }
            let codes = record.codes.get(&of.parameter).cloned();
            let is_decided = codes.is_some() || record.unreached.contains(&of.parameter);
            if request.method.chooses_codes() && !is_decided {
                unmeasured.push(of.module.clone());
            }
            let decided = Decided { codes, scales: record.scales.get(&of.parameter).cloned() };
            written.insert(of.parameter.clone());
            jobs.push(Job { of, decided, activations });
        }
        let dtype = layers.dtype();
        let mut take = |of: &Matrix, values| layers.replace(&of.parameter, values);
        let keep: Option<Keep<'_>> = request.method.chooses_codes().then_some((dtype, &mut take));
        plan.write_matrices(jobs, writer, digests, &fused, stop, keep)?;
        unreached.extend(record.unreached);
        layers.advance()?;
        exact.as_mut().map_or(Ok(true), Layers::advance)?;
    }
    if request.method.scales_channels() && mapped == 0 {
        let text = format!(
            "--method {}: no value of the model's layers can be scaled\n  hint: take --method gptq",
            request.method.name()
        );
        return Err(TrainError::Usage(text));
    }
    let others = chosen.matrices.iter().filter(|of| !written.contains(&of.parameter));
    let jobs: Vec<Job<'_>> = others.map(|of| Job { of, decided: Decided::default(), activations: None }).collect();
    if request.method.chooses_codes() {
        unmeasured.extend(jobs.iter().map(|job| job.of.module.clone()));
    }
    plan.write_matrices(jobs, writer, digests, &fused, stop, None)?;
    if let Some(width) = solver.and_then(|solver| solver.refused) {
        notes.push(format!(
            "the device has no room for the moments of {width} columns: the host chose codes of such matrices"
        ));
    }
    if resumed > 0 {
        let of = layers.count();
        notes.push(format!("{resumed} of {of} layers were done by a command that ended early"));
    }
    if let Some(listed) = listed(&unmeasured) {
        notes.push(format!("{listed}: the nearest codes, since what it is multiplied with is not measured"));
    }
    if let Some(listed) = listed(&unreached) {
        notes.push(format!("{listed}: the nearest codes, since no token reached the expert: more --samples may"));
    }
    Ok(notes)
}

/// The first of some names, and how many more there are.
fn listed(names: &[String]) -> Option<String> {
    let first = names.first()?;
    Some(match names.len() {
        1 => format!("`{first}`"),
        count => format!("`{first}` and {} more", count - 1),
    })
}

fn not_measured(module: &str) -> TrainError {
    let text = format!(
        "`{module}`: what it is multiplied with is not measured\n  hint: take a scheme without scales of activations, such as \
         fp8-dynamic or nvfp4a16"
    );
    TrainError::Usage(text)
}

/// The mappings of the layer that the method has factors for.
fn of_method(
    plan: &Plan<'_>,
    request: &CompressRequest,
    layers: &Layers<'_>,
    types: &BTreeMap<String, ValueType>,
) -> Vec<Mapping> {
    if !request.method.scales_channels() {
        return Vec::new();
    }
    let place = layers.place();
    let mut found = mappings(layers.block(), types, &|name| plan.matrix(&place.numbered(name)).is_some());
    // Factors of a weight of several matrices in one tensor, or of another shape, have no place in files.
    let fits = |name: &String| plan.can_scale(&place.numbered(name));
    found.retain(|of| of.others.iter().all(fits) && of.weights().all(fits));
    if request.method == Method::SmoothQuant {
        found.retain(Mapping::is_of_norm);
    }
    found
}

/// Decides everything about the layer.
fn decide(
    plan: &mut Plan<'_>,
    request: &CompressRequest,
    found: &[Mapping],
    layers: &mut Layers<'_>,
    solver: &mut Option<Solver>,
    stop: Stop<'_>,
) -> Result<Record> {
    let mut record = Record::default();
    for mapping in found {
        let factors = match request.method {
            Method::SmoothQuant => Some(smooth::even(layers, plan, mapping, request.strength(), stop)?),
            _ => smooth::searched(layers, plan, mapping, stop)?,
        };
        record.factors.extend(factors.map(|factors| (mapping.value.clone(), factors)));
    }
    let gptq = request.method == Method::Gptq;
    if !gptq && !plan.scheme.measures_activations() {
        return Ok(record);
    }
    let place = layers.place();
    for mapping in found {
        if let Some(factors) = record.factors.get(&mapping.value) {
            plan.scaling.add(mapping, place, factors);
        }
    }
    let is_coded = |name: &String| plan.matrix(&place.numbered(name)).is_some();
    let all: Vec<Read> = reads(layers.block()).into_iter().filter(|of| of.matrices.iter().any(is_coded)).collect();
    let (of_experts, of_tokens): (Vec<&Read>, Vec<&Read>) = all.iter().partition(|of| of.experts.is_some());
    let all: Vec<String> = of_tokens.iter().map(|read| read.value.clone()).collect();
    let on_device = match solver.as_mut().filter(|_| gptq) {
        Some(solver) => layers.bytes_of_moments(&all).is_some_and(|bytes| solver.has_room(bytes)),
        None => false,
    };
    let plan = &*plan;
    let coded = |matrices: &[String]| -> Vec<String> {
        matrices.iter().filter(|name| is_coded(name)).map(|name| place.numbered(name)).collect()
    };
    let mut take = |matrices: &[String], inputs: &Inputs| -> Result<()> {
        let names = coded(matrices);
        if let Some(moments) = inputs.moments.as_ref().filter(|_| !names.is_empty()) {
            go_on(stop)?;
            check_finite(moments, &names[0])?;
            let mut scaled = plan.scaled(&names)?;
            let codes = gptq::codes(&plan.scheme.form, &mut scaled, moments, solver.as_mut())?;
            record.codes.extend(names.iter().cloned().zip(codes));
        }
        record.ranges.extend(names.into_iter().map(|name| (name, inputs.range)));
        Ok(())
    };
    for (read, inputs) in of_tokens.iter().zip(inputs_of_tokens(plan, &of_tokens, layers, gptq, on_device, stop)?) {
        take(&read.matrices, &inputs)?;
    }
    let mut unreached = Vec::new();
    for read in of_experts {
        let experts = read.experts.as_ref().expect("it is of experts");
        let each = read.matrices.len() / experts.count;
        let width = plan.width_of(&place.numbered(&read.matrices[0]));
        let at_once = if gptq { (OF_EXPERTS / (8 * width * width)).max(1) } else { experts.count };
        let mut whole = Range::default();
        let mut waiting: Vec<String> = Vec::new();
        for first in (0..experts.count).step_by(at_once) {
            let last = experts.count.min(first + at_once);
            for (expert, inputs) in (first..last).zip(inputs_of_experts(plan, read, first..last, layers, gptq, stop)?) {
                let matrices = &read.matrices[expert * each..][..each];
                match inputs {
                    Some(inputs) => {
                        whole = whole.with(inputs.range);
                        take(matrices, &inputs)?;
                    }
                    None => waiting.extend(matrices.iter().cloned()),
                }
            }
        }
        // Experts that no token reached get the range of what the others read.
        take(&waiting, &Inputs { moments: None, range: whole })?;
        unreached.extend(waiting.iter().filter(|_| gptq).map(|name| place.numbered(name)));
    }
    record.unreached = unreached;
    Ok(record)
}

/// Errors: moments that are no numbers.
fn check_finite(moments: &Moments, parameter: &str) -> Result<()> {
    if (0..moments.size).all(|column| moments.at(column, column).is_finite()) {
        return Ok(());
    }
    let text = format!(
        "`{parameter}`: squares of what it is multiplied with in the rows of --calibration are not finite in f32\n  hint: the model is damaged, \
         diverged in training, or computes numbers beyond its type"
    );
    Err(TrainError::Usage(text))
}

/// The inputs of the matrices of all tokens. `on_device`: their moments are summed there.
fn inputs_of_tokens(
    plan: &Plan<'_>,
    reads: &[&Read],
    layers: &mut Layers<'_>,
    gptq: bool,
    on_device: bool,
    stop: Stop<'_>,
) -> Result<Vec<Inputs>> {
    let place = layers.place();
    let first = |read: &Read| -> String {
        let coded = read.matrices.iter().map(|name| place.numbered(name)).find(|name| plan.matrix(name).is_some());
        coded.expect("one of them becomes codes")
    };
    let names: Vec<String> = reads.iter().map(|read| first(read)).collect();
    let mut found: Vec<Inputs> = names.iter().map(|name| fresh(plan.width_of(name), gptq)).collect();
    let wanted: Vec<String> = reads.iter().map(|read| read.value.clone()).collect();
    let batches = layers.batches;
    if gptq && on_device {
        layers.moments(&wanted, &mut |index, values| {
            go_on(stop)?;
            let rows = batches[index].present.iter().filter(|present| **present != 0.0).count();
            for (made, inputs) in values.iter().zip(&mut found) {
                inputs.moments.iter_mut().for_each(|moments| moments.add_products(made, rows));
            }
            Ok(())
        })?;
        if plan.scheme.measures_activations() {
            let ranges = inputs_of_tokens(plan, reads, layers, false, on_device, stop)?;
            found.iter_mut().zip(ranges).for_each(|(inputs, of)| inputs.range = of.range);
        }
        return Ok(found);
    }
    layers.run(&wanted, &mut |index, values| {
        go_on(stop)?;
        for ((value, inputs), name) in values.iter().zip(&mut found).zip(&names) {
            add(plan, inputs, name, &rows_of_tokens(value, &batches[index]));
        }
        Ok(())
    })?;
    Ok(found)
}
