//! Models that come quantised: the weights of a model's folder as numbers, whatever form they have there.
//!
//! Knows where a folder says what its weights are; the forms are known to the data crate.

use std::path::Path;

use data::quantised::{Exclusions, HINT, Scheme};
use data::safetensors::Weights;
use serde_json::Value;

use crate::error::{Result, TrainError};
use crate::model::hf_config;

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

/// True if the products of a folder's weights have activations in a number format, too.
pub fn has_activations(folder: &Path) -> Result<bool> {
    Ok(json(folder, hf_config::FILE)?.pointer(ACTIVATIONS).is_some_and(|of| !of.is_null()))
}
