//! Smaller models of the same architecture, from folder to folder: `surogate prune`. Channels, heads and layers that the
//! activations over rows of a run's data call unimportant are left out; the result is compared with the model.
//!
//! Knows the order of the work. Which axes belong together `axes.rs` says, what stays `kept.rs`.

mod axes;
mod card;
mod cut;
mod fields;
mod kept;
mod latency;
mod request;
mod scores;
mod search;

use std::collections::BTreeMap;
use std::path::Path;

use data::Stop;
use data::safetensors::{NamedTensor, TensorInfo, write};
use tensor::{DType, HostTensor};

pub use kept::Sizes;
pub use latency::Latency;
pub use request::{PruneRequest, Pruned};
pub use scores::{Over, Summing};

use self::axes::{Axes, axes};
use self::cut::{cut, new_name};
use self::fields::fields;
use self::kept::Kept;
use self::request::Build;
use self::scores::Scores;
use self::search::Work;
use crate::artifacts::compress::compared::compare;
use crate::artifacts::compress::rows::Rows;
use crate::artifacts::compress::{Calibration, same_layer};
use crate::error::{Result, TrainError, go_on};
use crate::files::staged::{Staged, write_synced};
use crate::files::written::Written;
use crate::model::folder::{handed_on, write_companions, write_weights};
use crate::model::hf_config;
use crate::model::json_files::pretty;
use crate::model::source::ModelSource;

/// The file with the indices of the model that stayed.
const KEPT: &str = "pruned.json";

/// Writes a smaller model. The folder appears whole. `name`: the model as the user calls it.
///
/// Errors: sizes that the model does not have, an architecture whose channels cannot be removed, and anything that stands at
/// `output` already.
pub fn prune(
    source: &ModelSource,
    name: &str,
    request: &PruneRequest<'_>,
    data: &Calibration<'_>,
    build: Build<'_>,
    output: &Path,
    stop: Stop<'_>,
) -> Result<Pruned> {
    let folder = &source.folder;
    handed_on(folder)?;
    let mut written = Written::by("prune");
    written.check(output)?;
    let axes = axes(&source.model);
    let stacks = source.model.body.iter().filter(|item| matches!(item, graph::Item::Repeat(_))).count();
    if stacks != 1 {
        let text =
            format!("{} has {stacks} stacks of layers, expected one: others are not pruned", source.model.architecture);
        return Err(TrainError::Usage(text));
    }
    kept::check(&request.sizes, &axes)?;
    let sizes = kept::within(&request.sizes, &axes, &source.model)?;
    kept::check(&sizes, &axes)?;
    let dtype = source.dtype().unwrap_or(DType::BF16);
    let work = Work { source, axes: &axes, dtype, build };
    // A latency that no size has is an error before anything is measured.
    work.fast_enough(&sizes, request, &Scores::even(&axes, &source.model))?;
    Staged::clear_abandoned(&written.owner, output)?;
    let staged = Staged::begin(&written, output)?;
    let rows = Rows::read(data.config, source, data.rows, stop)?;
    let scores = scores::measure(
        data.device.clone(),
        source,
        &axes,
        &rows.calibration,
        request.summing,
        request.layers_by_loss,
        stop,
    )?;
    if let Some(path) = request.scores {
        write_scores(&scores, path)?;
    }
    let sizes = work.fast_enough(&sizes, request, &scores)?;
    let kept = kept::choose(&sizes, &axes, &scores);
    if kept::count(&sizes, &axes, &source.model) == kept::count(&Sizes::default(), &axes, &source.model) {
        let text = format!("{}: nothing is removed: the model is as small as that already", folder.display());
        return Err(TrainError::Usage(text));
    }
    let own = source.own(folder)?;
    let (fields, changed) = fields(source, dtype, &sizes, &axes, &kept);
    write_synced(&staged.path().join(hf_config::FILE), pretty(&fields).as_bytes())?;
    let made = work.model(&sizes, &scores)?;
    let cuts = kept.cuts(&axes);
    let stays = |name: &str| new_name(name, &axes, &kept).is_some();
    let mut tensors: BTreeMap<String, (String, Vec<usize>)> = BTreeMap::new();
    for tensor in own.names().into_iter().filter(|name| stays(name)) {
        let view = own.get(tensor).map_err(TrainError::model_file)?;
        let here = |axis: usize| cuts.get(&(tensor.to_owned(), axis)).map_or(view.shape[axis], Vec::len);
        let shape: Vec<usize> = (0..view.shape.len()).map(here).collect();
        let is_cut = shape != view.shape;
        let in_stack = own.whole_of(tensor).is_some_and(|(whole, _)| whole != tensor);
        if is_cut && (in_stack || source.stored_shape(tensor).is_some()) {
            let text = format!("`{tensor}` is a part of another tensor in the files, whose channels are not removed");
            return Err(TrainError::Usage(text));
        }
        let file_name = own.name_in_file(tensor).unwrap_or(tensor);
        let file_name = cut::renumbered(file_name, tensor, &axes, &kept);
        tensors.insert(file_name, (tensor.to_owned(), shape));
    }
    check_shapes(source, &made, &tensors, &axes, &kept)?;
    let infos: Vec<TensorInfo> = tensors
        .iter()
        .map(|(name, (tensor, shape))| {
            let dtype = own.get(tensor).map_err(TrainError::model_file)?.dtype;
            Ok(TensorInfo { name: name.clone(), dtype, shape: shape.clone() })
        })
        .collect::<Result<_>>()?;
    write_weights(staged.path(), infos, |info| {
        go_on(stop)?;
        let (tensor, _) = &tensors[&info.name];
        let whole = own.get(tensor).map_err(TrainError::model_file)?.to_host().map_err(TrainError::unreadable)?;
        let axes = 0..whole.shape.len();
        Ok(axes
            .fold(whole, |of, axis| match cuts.get(&(tensor.clone(), axis)) {
                Some(kept) => cut(&of, axis, kept),
                None => of,
            })
            .bytes)
    })?;
    write_companions(folder, None, staged.path())?;
    write_synced(&staged.path().join(KEPT), pretty(&kept.to_json()).as_bytes())?;
    let seconds = |of: &Latency| -> Result<_> { Ok((of.clone(), of.of(&source.model, dtype)?, of.of(&made, dtype)?)) };
    let latency = request.latency.as_ref().map(seconds).transpose()?;
    let after = ModelSource {
        folder: staged.path().to_owned(),
        config: hf_config::HfConfig(fields),
        model: made,
        pixels: source.pixels,
    };
    let compared = compare(&data.device, [source, &after], &rows.compared, rows.are_held_out, stop)?;
    let count = |sizes: &Sizes| kept::count(sizes, &axes, &source.model);
    let done = Pruned {
        parameters: (count(&Sizes::default()), count(&sizes)),
        latency,
        sizes: changed,
        measured: rows.tokens(),
        compared,
    };
    card::write(folder, name, &done, staged.path())?;
    staged.commit(&mut written)?;
    Ok(done)
}

/// Checks that the architecture takes what is written: tensors of these shapes, and layers that compute what they did.
fn check_shapes(
    source: &ModelSource,
    made: &graph::Model,
    tensors: &BTreeMap<String, (String, Vec<usize>)>,
    axes: &Axes,
    kept: &Kept,
) -> Result<()> {
    let unfit = |what: String| {
        let text = format!(
            "{} does not take these sizes: {what}\n  hint: give others; --intermediate-size is free in most architectures",
            source.model.architecture
        );
        TrainError::Usage(text)
    };
    let new = axes::axes(made);
    if new.layers.len() != kept.layers.len() {
        return Err(unfit(format!("it has {} layers, expected {}", new.layers.len(), kept.layers.len())));
    }
    for (tensor, shape) in tensors.values() {
        let name = new_name(tensor, axes, kept).expect("it stays");
        let of_layer = new.layers.iter().find_map(|of| {
            let parameters = &of.place.block(made).parameters;
            parameters.iter().find(|spec| of.place.numbered(&spec.name) == name)
        });
        let Some(spec) = of_layer.or_else(|| made.parameters.iter().find(|spec| spec.name == name)) else { continue };
        if spec.stored.is_none() && spec.shape != *shape {
            return Err(unfit(format!("`{name}` would be {:?}, the weights are {shape:?}", spec.shape)));
        }
    }
    for (layer, of) in kept.layers.iter().zip(&new.layers) {
        if !same_layer(&source.model, axes.layers[*layer].place, made, of.place) {
            let text = format!("layer {} computes something else than layer {layer} did", of.place.layer);
            return Err(unfit(text));
        }
    }
    Ok(())
}

/// Writes scores as tensors, in the names that they have in papers.
fn write_scores(scores: &Scores, path: &Path) -> Result<()> {
    let mut tensors: Vec<(String, Vec<f64>)> =
        vec![("hidden".to_owned(), scores.hidden.clone()), ("block_influence".to_owned(), scores.influence.clone())];
    if !scores.losses.is_empty() {
        tensors.push(("loss_without".to_owned(), scores.losses.clone()));
    }
    for (kind, all) in [("heads", &scores.heads), ("intermediate", &scores.mlp), ("experts", &scores.experts)] {
        let of_layers = all.iter().enumerate().filter(|(_, of)| !of.is_empty());
        tensors.extend(of_layers.map(|(layer, of)| (format!("{kind}.{layer}"), of.clone())));
    }
    let tensor = |of: &Vec<f64>| {
        let bytes = of.iter().flat_map(|x| x.to_le_bytes()).collect();
        HostTensor::new(DType::F64, vec![of.len()], bytes)
    };
    let tensors: Vec<(String, HostTensor)> = tensors.iter().map(|(name, of)| (name.clone(), tensor(of))).collect();
    let named: Vec<NamedTensor<'_>> = tensors.iter().map(|(name, of)| NamedTensor::new(name.clone(), of)).collect();
    write(path, &named, &BTreeMap::new()).map_err(|e| TrainError::Failed(e.to_string()))
}
