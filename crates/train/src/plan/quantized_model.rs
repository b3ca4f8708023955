//! Models that come quantized: which of their weights a run keeps in the codes of the files.

use std::collections::BTreeMap;

use tensor::DType;
use tensor::storage::Packing;

use crate::config::{Config, Init, Problem};
use crate::error::Result;
use crate::model::quantized_checkpoint;
use crate::model::source::ModelSource;

/// The weights of a quantized model, as a run uses them.
#[derive(Debug, Default)]
pub struct Stored {
    /// Weights that may be kept in their files' codes, by name.
    pub packings: BTreeMap<String, Packing>,
    pub note: Option<String>,
}

/// Decides about a model that comes quantised. Its form is the file's: an option that asks for another is an error. Under an
/// adapter the codes stay codes, where the engine has their form; what is trained is made numbers.
pub fn decide(config: &Config, source: &ModelSource, dtype: DType, problems: &mut Vec<Problem>) -> Result<Stored> {
    if config.model.init == Init::Random {
        return Ok(Stored::default());
    }
    let Some(scheme) = quantized_checkpoint::scheme(&source.folder)? else { return Ok(Stored::default()) };
    let form = scheme.name();
    let of = &config.qlora;
    for (path, on) in [("qlora_bnb", of.qlora_bnb), ("qlora_fp8", of.qlora_fp8), ("qlora_fp4", of.qlora_fp4)] {
        if on {
            let message = format!("`{path}: true`, but the model is already quantized ({form})");
            let hint = format!("remove `{path}`, or take the model's unquantised repository");
            problems.push(config.mistake(path, message, Some(hint)));
        }
    }
    // A plan needs no weights; a run without them ends before it begins.
    if !quantized_checkpoint::has_weights(&source.folder) {
        let note = format!(
            "the model is already quantized ({form}), and its weights are not here to see which: planned with all of them in \
             {dtype}, which is more memory than the run takes"
        );
        return Ok(Stored { note: Some(note), ..Stored::default() });
    }
    let files = source.weights(&source.folder)?;
    let mut packings = BTreeMap::new();
    for name in files.names().into_iter().filter(|_| config.lora.lora) {
        let packing = files.get(name).ok().and_then(|view| view.packing());
        packings.extend(packing.map(|packing| (name.to_owned(), packing)));
    }
    let activations = quantized_checkpoint::has_activations(&source.folder)?;
    let what = if packings.is_empty() {
        format!("its weights are dequantised to {dtype} while they are loaded")
    } else if !config.precision.recipe.quantises_weights() {
        format!("its linears stay in their codes, and products read their values in {dtype}")
    } else {
        format!("of the values of its linears in {dtype} the recipe makes its own codes")
    };
    let exact = if activations { "; activations are not quantized here" } else { "" };
    Ok(Stored { packings, note: Some(format!("the model is already quantized ({form}): {what}{exact}")) })
}
