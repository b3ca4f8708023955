//! Models in the number formats of compressed-tensors, from folder to folder: `surogate quantize`. Some matrices are in memory
//! at a time; what was written is read back and compared before the folder gets its name.
//!
//! Knows the order of the work. Which matrices become codes `model/compression/chosen.rs` says, in which format `scheme.rs` there.

mod calibrated;
mod card;
pub(crate) mod compared;
mod cross;
mod encode;
mod factor;
mod gptq;
mod inputs;
pub(crate) mod layers;
mod mapping;
mod moments;
pub(crate) mod part;
mod planned;
mod reads;
mod record;
mod refine;
mod refining;
mod result;
pub(crate) mod rows;
mod scaling;
mod smooth;
mod solver;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use data::Stop;
use data::safetensors::{PlacedWriter, Weights};
use program::Arch;
use rayon::prelude::*;
use tensor::DType;
use tensor::compressed::Extent;

pub use crate::model::compression::chosen::IncludedPart;
pub use crate::model::compression::observer::RangeObserver;
pub use crate::model::compression::scheme::{CompressRequest, Method};
pub use compared::Compared;
pub(crate) use part::same_layer;
pub use planned::{Measuring, Planned, planned};
pub use result::Compressed;

use self::calibrated::{Streams, calibrated};
use self::encode::Decided;
use self::layers::Layers;
use self::record::Journal;
use self::result::Progress;
use self::result::{Digests, Job, Plan, Ranges};
use self::rows::Rows;
use self::scaling::Scaling;
use crate::config::Config;
use crate::engine::device::Device;
use crate::error::{Result, TrainError, go_on};
use crate::files::room;
use crate::files::staged::{Staged, write_synced};
use crate::files::written::Written;
use crate::model::compression::chosen::{Chosen, Kept, Matrix, choose};
use crate::model::compression::scheme::Scheme;
use crate::model::folder::{SHARD_BYTES, handed_on, write_companions};
use crate::model::hf_config;
use crate::model::json_files::pretty;
use crate::model::quantized_checkpoint;
use crate::model::source::ModelSource;

/// The note on a model whose matrices are [inputs, outputs].
const TRANSPOSED: &str =
    "the model's matrices are stored as their transposes, which only Surogate reads: other engines have no such layer";

/// Data for measuring activations, and for comparing the result.
pub struct Calibration<'a> {
    /// A run whose rows these are.
    pub config: &'a Config,
    /// Rows for measuring, at most.
    pub rows: usize,
    pub device: Arc<Device>,
}

/// Writes a model with its matrices in a number format of compressed-tensors. The folder appears whole. Asked to stop, or killed,
/// a command that measures activations leaves its decisions in a hidden folder, from which the same command goes on; what else a
/// killed process left is removed first. `name`: the model as the user calls it.
///
/// Errors: options that the scheme does not have, a method or scheme that needs data without them, a model without a matrix that
/// fits, numbers that are not finite, and anything that stands at `output` already.
pub fn compress(
    source: &ModelSource,
    name: &str,
    request: &CompressRequest,
    data: Option<&Calibration<'_>>,
    output: &Path,
    progress: Progress<'_>,
    stop: Stop<'_>,
) -> Result<Compressed> {
    request.check(data.is_some())?;
    let folder = &source.folder;
    handed_on(folder)?;
    let mut written = Written::by("quantize");
    written.check(output)?;
    let own = source.own(folder)?;
    let (chosen, scheme, mut notes) = formats(source, request, &own)?;
    let saved = source.dtype().unwrap_or(DType::BF16);
    let mut plan =
        Plan { own: &own, scheme, saved, chosen: &chosen, scaling: Scaling::default(), observer: request.observer };
    let groups = plan.groups()?;
    let dtype = plan.dtype()?;
    let transposed = chosen.transposed();
    notes.extend(notes_on(&plan, request)?);
    Staged::clear_abandoned(&written.owner, output)?;
    let staged = Staged::begin(&written, output)?;
    let rows = data.map(|of| Rows::read(of.config, source, of.rows, stop)).transpose()?;
    let identity = match (data, &rows) {
        (Some(data), Some(rows)) => digest(source, request, data, rows)?,
        _ => String::new(),
    };
    let at_once = data.map_or(0, |of| tokens_at_once(source, request.method, &of.device));
    let rows = rows.map(|rows| rows.joined(at_once));
    let mut writer = PlacedWriter::new(staged.path(), groups, SHARD_BYTES);
    let bytes = (total_of(&own), writer.total());
    require_room(output, bytes.1)?;
    let mut digests = Digests { progress, done: 0, all: bytes.0, of: BTreeMap::new() };
    let mut measured = 0;
    match (data, &rows) {
        (Some(data), Some(rows)) if request.measures(&scheme) => {
            measured = rows.tokens();
            let journal = Journal::open(output, &identity)?;
            let is_measured = |of: &&Matrix| of.part.is_none_or(IncludedPart::is_measured);
            let parameters = chosen.matrices.iter().filter(is_measured).map(|of| of.parameter.as_str()).collect();
            let open = || Layers::open(data.device.clone(), source, &parameters, &rows.calibration);
            let done = Streams::open(request.method, &open)
                .and_then(|of| calibrated(&mut plan, request, of, &journal, &mut writer, &mut digests, stop));
            // A stopped command goes on later.
            if !matches!(done, Err(TrainError::Stopped)) {
                journal.remove()?;
            }
            notes.extend(done?);
        }
        _ => {
            let job = |of| Job { of, decided: Decided::default(), activations: None };
            let jobs = chosen.matrices.iter().map(job).collect();
            plan.write_matrices(jobs, &mut writer, &mut digests, &Ranges::default(), stop, None)?;
        }
    }
    plan.write_kept(&mut writer, &mut digests, stop)?;
    writer.finish().map_err(|e| TrainError::Failed(e.to_string()))?;
    let ignored: Vec<String> = chosen.ignored.iter().cloned().collect();
    let mut config = source.config.with_dtype(dtype).0;
    config["quantization_config"] = scheme.config(&ignored, transposed, request);
    write_synced(&staged.path().join(hf_config::FILE), pretty(&config).as_bytes())?;
    write_companions(folder, None, staged.path())?;
    verify(staged.path(), &digests, stop)?;
    let compared = match (data, &rows) {
        (Some(data), Some(rows)) => {
            let after = ModelSource { folder: staged.path().to_owned(), ..source.clone() };
            Some(compared::compare(&data.device, [source, &after], &rows.compared, rows.are_held_out, stop)?)
        }
        _ => None,
    };
    let group_size = if let Extent::Group(size) = scheme.form.extent { size } else { 0 };
    let done = Compressed { matrices: chosen.matrices.len(), bytes, group_size, measured, compared, notes };
    card::write(folder, name, request, &done, staged.path())?;
    staged.commit(&mut written)?;
    Ok(done)
}

/// Returns the tensors of a model, with those that become codes, and the format of these; and notes for the user. Errors: options
/// that the scheme does not have, and a model without a matrix that fits.
fn formats(source: &ModelSource, request: &CompressRequest, own: &Weights) -> Result<(Chosen, Scheme, Vec<String>)> {
    let mut chosen = choose(source, own, &request.included)?;
    let widths: Vec<(String, usize)> = chosen.matrices.iter().map(|of| (of.module.clone(), of.shape[1])).collect();
    let widths: Vec<(&str, usize)> = widths.iter().map(|(name, width)| (name.as_str(), *width)).collect();
    let scheme = request.scheme(&widths)?;
    let notes = leave_out(&mut chosen, &scheme);
    if chosen.matrices.is_empty() {
        return Err(nothing_fits(&source.folder, request, &notes));
    }
    Ok((chosen, scheme, notes))
}

/// The number of tokens of calibration that run at once. Where a GPU sums moments of all tokens, the values of a layer take an eighth
/// of its memory at most; else they are those of the run's batches.
fn tokens_at_once(source: &ModelSource, method: Method, device: &Device) -> usize {
    const MOST: usize = 1 << 16;
    let (machine, model) = (&device.machine, &source.model);
    match machine.arch {
        Arch::Cpu => 0,
        _ if method != Method::Gptq || part::has_experts(model) => 0,
        _ => (machine.memory / 8 / part::bytes_of_token(model, layers::type_of(source, device)).max(1)).min(MOST),
    }
}

/// Notes on the result for its readers.
fn notes_on(plan: &Plan<'_>, request: &CompressRequest) -> Result<Vec<String>> {
    let mut notes: Vec<String> = plan.chosen.transposed().then(|| TRANSPOSED.to_owned()).into_iter().collect();
    if plan.scheme.is_of_bf16() && plan.dtype()? != plan.saved {
        let (scheme, saved) = (&request.scheme, plan.saved);
        notes.push(format!("all weights are rounded to bfloat16: {scheme} has no values of {saved} for readers"));
    }
    Ok(notes)
}

/// Bytes of all weights of a model.
fn total_of(own: &Weights) -> usize {
    own.names().iter().filter_map(|name| own.get(name).ok()).map(|of| of.length()).sum()
}

/// Errors: the disk of the nearest folder above `output` that is there has less room than the result takes.
fn require_room(output: &Path, bytes: usize) -> Result<()> {
    let absolute = std::path::absolute(output).map_err(|e| TrainError::io("find", output, e))?;
    match absolute.ancestors().find(|folder| folder.is_dir()) {
        Some(folder) => room::require_room(folder, bytes),
        None => Ok(()),
    }
}

/// The digest of everything that decisions about layers follow from.
fn digest(source: &ModelSource, request: &CompressRequest, data: &Calibration<'_>, rows: &Rows) -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    let what = format!("{:?} {:?} {:?}", source.digest(true)?, request, data.device.machine.arch);
    hasher.update(env!("CARGO_PKG_VERSION").as_bytes()).update(what.as_bytes());
    for batch in &rows.calibration {
        hasher.update(&[batch.batch, batch.seq_len].map(usize::to_le_bytes).concat());
        for ids in [&batch.input_ids, &batch.position_ids, &batch.document_start] {
            for id in ids {
                hasher.update(&id.to_le_bytes());
            }
        }
        for present in &batch.present {
            hasher.update(&present.to_le_bytes());
        }
    }
    Ok(hasher.finalize().to_hex().to_string())
}

fn nothing_fits(folder: &Path, request: &CompressRequest, notes: &[String]) -> TrainError {
    let text = format!("{}: no matrix of its layers can be stored as {}", folder.display(), request.scheme);
    let notes: String = notes.iter().map(|note| format!("\n  {note}")).collect();
    TrainError::Usage(format!("{text}{notes}"))
}

/// Leaves matrices as they are that do not fit the format, and says which.
fn leave_out(chosen: &mut Chosen, scheme: &Scheme) -> Vec<String> {
    let mut reasons: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let matrices = std::mem::take(&mut chosen.matrices);
    for of in matrices {
        match scheme.refuses(of.shape) {
            None => chosen.matrices.push(of),
            Some(why) => {
                let shape = if of.transposed { [of.shape[1], of.shape[0]] } else { of.shape };
                reasons.entry(why).or_default().push(of.module.clone());
                chosen.ignored.insert(of.module.clone());
                let name = format!("{}.weight", of.module);
                chosen.kept.push(Kept { tensor: of.parameter, name, shape: shape.to_vec() });
            }
        }
    }
    if !chosen.stacked.is_empty() {
        let why = "matrices of experts that files keep as one tensor".to_owned();
        reasons.insert(why, chosen.stacked.clone());
    }
    let line = |(why, names): (String, Vec<String>)| {
        let more = if names.len() > 1 { format!(" and {} more", names.len() - 1) } else { String::new() };
        format!("left as they are: `{}`{more} ({why})", names[0])
    };
    reasons.into_iter().map(line).collect()
}

/// Bytes of values that are compared at a time, if those of one tensor are fewer.
const READ_AT_ONCE: usize = 1 << 30;

/// Reads a result as any model is read, and compares every tensor with the values that were to be written.
fn verify(folder: &Path, digests: &Digests<'_>, stop: Stop<'_>) -> Result<()> {
    let wrong = |what: &str| TrainError::Failed(format!("{}: written and read back, {what}", folder.display()));
    let files = quantized_checkpoint::weights(folder)?;
    let names: BTreeSet<&str> = files.names().into_iter().collect();
    let expected: BTreeSet<&str> = digests.of.keys().map(String::as_str).collect();
    if let Some(name) = names.symmetric_difference(&expected).next() {
        return Err(wrong(&format!("`{name}` is missing or not expected")));
    }
    let mut rest: Vec<(&String, &blake3::Hash)> = digests.of.iter().collect();
    while !rest.is_empty() {
        go_on(stop)?;
        let mut bytes = 0;
        let is_next = |(name, _): &&(&String, &blake3::Hash)| {
            bytes += files.get(name).map_or(0, |view| 4 * view.shape.iter().product::<usize>());
            bytes <= READ_AT_ONCE
        };
        let count = rest.iter().take_while(is_next).count().max(1);
        let is_other = |(name, digest): (&String, &blake3::Hash)| -> Result<Option<String>> {
            let bytes = files.get(name).and_then(|view| view.bytes()).map_err(TrainError::unreadable)?;
            let hash = blake3::Hasher::new().update_rayon(&bytes).finalize();
            Ok((hash != *digest).then(|| name.clone()))
        };
        let now: Vec<(&String, &blake3::Hash)> = rest.drain(..count).collect();
        let others: Vec<Option<String>> = now.into_par_iter().map(is_other).collect::<Result<_>>()?;
        if let Some(name) = others.into_iter().flatten().next() {
            return Err(wrong(&format!("`{name}` holds other values")));
        }
    }
    Ok(())
}
