//! Models that come quantised: the weights of a model's folder as numbers, whatever form they have there.
//!
//! Knows where a folder says what its weights are; the forms are known to the data crate.

use std::collections::BTreeMap;
use std::path::Path;

use data::quantised::{Exclusions, HINT, Scheme};
use data::safetensors::Weights;
use serde_json::Value;
use tensor::DType;
use tensor::storage::Packing;

use crate::config::{Config, Init, Problem};
use crate::error::{Result, TrainError};
use crate::hf_config;
use crate::source::ModelSource;

/// File in which ModelOpt says what it did, in folders whose `config.json` does not.
const OF_MODELOPT: &str = "hf_quant_config.json";

/// The place in `config.json` of how engines quantise activations, by compressed-tensors.
const ACTIVATIONS: &str = "/quantization_config/config_groups/group_0/input_activations";

/// The place in `config.json` of the mark that files have the transposes of the model's matrices.
const TRANSPOSED: &str = "/quantization_config/transposed";

/// The JSON of a file of a folder; null where there is no such file.
fn json(folder: &Path, name: &str) -> Result<Value> {
    let path = folder.join(name);
    if !path.is_file() {
        return Ok(Value::Null);
    }
    let text = data::small_file::read_text(&path).map_err(|e| TrainError::io("read", &path, e))?;
    serde_json::from_str(&text)
        .map_err(|e| TrainError::Usage(format!("{}: this is not valid JSON: {e}", path.display())))
}

/// The quantization of a folder's weights; `None` for plain ones. Errors: a format that is not supported.
pub fn scheme(folder: &Path) -> Result<Option<Scheme>> {
    let found = match Scheme::of(&json(folder, hf_config::FILE)?) {
        Ok(None) => Scheme::of_modelopt(&json(folder, OF_MODELOPT)?),
        found => found,
    };
    found.map_err(|what| TrainError::Usage(format!("{}: {what}\n  hint: {HINT}", folder.display())))
}

/// True if a folder has weights at all.
pub fn has_weights(folder: &Path) -> bool {
    ["model.safetensors", "model.safetensors.index.json"].iter().any(|name| folder.join(name).is_file())
}

/// The weights of a model's folder, or of one file; those that are quantised as numbers in f32.
pub fn weights(folder: &Path) -> Result<Weights> {
    let files = Weights::open(folder).map_err(TrainError::model_file)?;
    let Some(scheme) = scheme(folder)? else { return Ok(files) };
    let transposed = json(folder, hf_config::FILE)?.pointer(TRANSPOSED) == Some(&Value::Bool(true));
    let files = files.dequantised(scheme, transposed).map_err(TrainError::model_file)?;
    for name in [hf_config::FILE, OF_MODELOPT] {
        let excluded = Exclusions::of(&json(folder, name)?).and_then(|of| of.check(files.quantised_names()));
        excluded.map_err(|what| TrainError::Usage(format!("{}: {what}\n  hint: {HINT}", folder.display())))?;
    }
    Ok(files)
}

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
    let Some(scheme) = scheme(&source.folder)? else { return Ok(Stored::default()) };
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
    if !has_weights(&source.folder) {
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
    let activations = json(&source.folder, hf_config::FILE)?.pointer(ACTIVATIONS).is_some_and(|of| !of.is_null());
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
