//! `quantize_aware`: the format that a run trains for, as `surogate quantize` would choose it for the result.
//!
//! Knows options and the matrices of the model; not how products read other values.

use std::collections::BTreeSet;

use compiler::{CompileOptions, QuantizeAware, Recipe};

use crate::config::{Config, Init};
use crate::error::{Result, TrainError};
use crate::model::compression::chosen::{FUSED, choose};
use crate::model::compression::scheme::CompressRequest;
use crate::model::quantized_checkpoint;
use crate::model::source::ModelSource;

/// Sets the recipe of a run that trains for a format, and returns notes on it. Errors: groups that do not divide rows, and matrices
/// that the format would have codes for and products read otherwise.
pub fn decide(config: &Config, source: &ModelSource, options: &mut CompileOptions) -> Result<Vec<String>> {
    let of = &config.precision;
    let Some(name) = of.quantize_aware else { return Ok(Vec::new()) };
    let request = CompressRequest {
        group_size: of.quantize_aware_group_size,
        asymmetric: of.quantize_aware_asymmetric,
        ..CompressRequest::plain(name.name())
    };
    let mut matrices = compiler::layer_matrices(&source.model, options).map_err(TrainError::from)?;
    matrices.retain(|of| of.shape.len() == 2 && of.name.ends_with(".weight"));
    let columns = |of: &graph::Parameter| if of.transposed { of.shape[0] } else { of.shape[1] };
    let widths: Vec<(&str, usize)> =
        matrices.iter().map(|of| (of.name.trim_end_matches(".weight"), columns(of))).collect();
    let scheme = request.scheme(&widths).map_err(|error| problem(config, &error))?;
    options.recipe = Recipe::QuantizeAware(QuantizeAware {
        weights: scheme.form,
        scales: scheme.dtype(options.weights),
        activations: scheme.form_of_activations(),
        fused: FUSED,
    });
    let trained = compiler::quantize_aware(&source.model, options)?;
    let mut notes = Vec::new();
    let left: Vec<&str> = matrices.iter().map(|of| of.name.as_str()).filter(|name| !trained.contains(*name)).collect();
    if let Some(first) = left.first() {
        let more = if left.len() > 1 { format!(" and {} more", left.len() - 1) } else { String::new() };
        notes.push(format!("`quantize_aware: {name}` leaves `{first}`{more} as it is: rows that are no whole groups"));
    }
    if scheme.measures_activations() {
        notes.push(format!(
            "`quantize_aware: {name}` scales activations by the largest of each micro-batch; `surogate quantize` measures one scale for \
             all rows of its data"
        ));
    }
    check_files(config, source, &request, &trained)?;
    Ok(notes)
}

/// Compares the matrices with those of the files that quantizing would take.
fn check_files(
    config: &Config,
    source: &ModelSource,
    request: &CompressRequest,
    trained: &BTreeSet<String>,
) -> Result<()> {
    if config.model.init == Init::Random || !quantized_checkpoint::has_weights(&source.folder) {
        return Ok(());
    }
    let own = source.own(&source.folder)?;
    let chosen = choose(source, &own, &[])?;
    let widths: Vec<(&str, usize)> = chosen.matrices.iter().map(|of| (of.module.as_str(), of.shape[1])).collect();
    let scheme = request.scheme(&widths).map_err(|error| problem(config, &error))?;
    let quantized: BTreeSet<String> =
        chosen.matrices.iter().filter(|of| scheme.refuses(of.shape).is_none()).map(|of| of.parameter.clone()).collect();
    match quantized.symmetric_difference(trained).next() {
        None => Ok(()),
        Some(name) => {
            let side = if trained.contains(name) { "training rounds it" } else { "quantizing rounds it" };
            let message = format!(
                "`{name}` would have other values once the result is quantized: {side}, and the other does not"
            );
            let hint = "train without `quantize_aware`, or report this model".to_owned();
            Err(TrainError::Config(vec![config.mistake("quantize_aware", message, Some(hint))]))
        }
    }
}

/// The error of a request as one of the option.
fn problem(config: &Config, error: &TrainError) -> TrainError {
    let text = error.to_string();
    let text = text
        .replace("--group-size -1", "`quantize_aware_group_size: -1`")
        .replace("--group-size", "quantize_aware_group_size");
    let (message, hint) = match text.split_once("\n  hint: ") {
        Some((message, hint)) => (message.to_owned(), Some(hint.to_owned())),
        None => (text, None),
    };
    let option = if config.precision.quantize_aware_group_size.is_some() {
        "quantize_aware_group_size"
    } else {
        "quantize_aware"
    };
    TrainError::Config(vec![config.mistake(option, message, hint)])
}
