//! The plan of a compression: what is written, and what the work holds in memory for its measurements. Reads the headers of
//! files, and the rows of the data; no weights.
//!
//! Knows shapes and types; not how codes are chosen.

use std::collections::BTreeSet;
use std::path::Path;

use data::{Batch, Stop};
use graph::{Item, Model};
use tensor::DType;
use tensor::compressed::Extent;

use super::inputs::OF_EXPERTS;
use super::layers::type_of;
use super::reads::reads;
use super::result::Plan;
use super::rows::Rows;
use super::scaling::Scaling;
use super::{Calibration, formats, notes_on, part, refining, require_room, total_of};
use crate::error::Result;
use crate::files::written::Written;
use crate::model::compression::scheme::{CompressRequest, Method};
use crate::model::folder::handed_on;
use crate::model::source::ModelSource;

/// The result of [`planned`].
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// The number of matrices that become codes, and of tensors that stay.
    pub matrices: usize,
    pub others: usize,
    /// Bytes of all weights, before and in the result.
    pub bytes: (usize, usize),
    /// Elements of a row that share a scale; 0 where it is not groups of a row that do.
    pub group_size: usize,
    pub measuring: Option<Measuring>,
    /// Notes for the user, a sentence each.
    pub notes: Vec<String>,
}

/// Measurements of activations, one layer after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measuring {
    pub tokens: usize,
    pub layers: usize,
    /// Bytes on the host of values of a layer and of the next one, for all rows, at most.
    pub values: usize,
    /// Bytes on the host of the second moments of a layer's activations, at most; 0 for methods that need none.
    pub moments: usize,
}

/// Plans what [`super::compress`] would do with the same arguments. Errors: those that it has before it reads weights, and a disk
/// without room for the result.
pub fn planned(
    source: &ModelSource,
    request: &CompressRequest,
    data: Option<&Calibration<'_>>,
    output: &Path,
    stop: Stop<'_>,
) -> Result<Planned> {
    request.check(data.is_some())?;
    handed_on(&source.folder)?;
    Written::by("quantize").check(output)?;
    let own = source.own(&source.folder)?;
    let (chosen, scheme, mut notes) = formats(source, request, &own)?;
    let saved = source.dtype().unwrap_or(DType::BF16);
    let plan =
        Plan { own: &own, scheme, saved, chosen: &chosen, scaling: Scaling::default(), observer: request.observer };
    notes.extend(notes_on(&plan, request)?);
    let after = plan.groups()?.iter().flatten().map(|of| of.bytes).sum();
    require_room(output, after)?;
    let rows = data.map(|of| Rows::read(of.config, source, of.rows, stop)).transpose()?;
    let measuring = match (data, &rows) {
        (Some(data), Some(rows)) if request.measures(&scheme) => {
            Some(measuring(&plan, request, &source.model, type_of(source, &data.device), rows))
        }
        _ => None,
    };
    let group_size = if let Extent::Group(size) = scheme.form.extent { size } else { 0 };
    let (matrices, others) = (chosen.matrices.len(), chosen.kept.len());
    Ok(Planned { matrices, others, bytes: (total_of(&own), after), group_size, measuring, notes })
}

/// The tokens and bytes that measurements hold. `dtype`: the type of values in the layers.
fn measuring(plan: &Plan<'_>, request: &CompressRequest, model: &Model, dtype: DType, rows: &Rows) -> Measuring {
    let types = part::types(model);
    let refines = request.method == Method::Refine;
    let bytes = |names: &[&String]| -> usize {
        let of_batch = |batch: &Batch| {
            let values = names.iter().filter_map(|name| types.get(*name));
            values.map(|of| part::bytes_of(of, [batch.batch, batch.seq_len], dtype)).sum::<usize>()
        };
        rows.calibration.iter().map(of_batch).sum()
    };
    let mut found = Measuring { tokens: rows.tokens(), layers: 0, values: 0, moments: 0 };
    for item in &model.body {
        let Item::Repeat(stack) = item else { continue };
        let mut is_measured = false;
        for layer in 0..stack.repeat {
            let block = stack.block(layer).expect("the compiler checked the pattern");
            let numbered = |name: &String| name.replace("{i}", &layer.to_string());
            let (mut moments, mut kept): (Vec<usize>, BTreeSet<String>) = (Vec::new(), BTreeSet::new());
            for read in reads(block) {
                let Some(matrix) = read.matrices.iter().find_map(|name| plan.matrix(&numbered(name))) else { continue };
                let one = matrix.shape[1] * matrix.shape[1] * size_of::<f64>();
                moments.push(read.experts.as_ref().map_or(one, |of| (of.count * one).min(OF_EXPERTS.max(one))));
                if read.experts.is_none() {
                    kept.extend(refining::values(block, &read));
                }
            }
            is_measured |= !moments.is_empty();
            // Matrices are refined one after another, each with the deviation of its input and the solved moments.
            let moments = if refines { 3 * moments.iter().max().unwrap_or(&0) } else { moments.iter().sum() };
            found.moments = found.moments.max(if request.method.chooses_codes() { moments } else { 0 });
            let carried: Vec<&String> = block.carry.iter().map(|of| &of.inside).collect();
            let moved = block.carry.iter().filter(|of| of.next != of.inside).map(|of| &of.inside);
            let mut held = bytes(&carried) + bytes(&moved.collect::<Vec<_>>());
            if refines {
                kept.retain(|name| !carried.contains(&name));
                held += bytes(&carried) + 2 * bytes(&kept.iter().collect::<Vec<_>>());
            }
            found.values = found.values.max(held);
        }
        found.layers += if is_measured { stack.repeat } else { 0 };
    }
    found
}
