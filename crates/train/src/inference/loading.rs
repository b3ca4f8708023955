//! The weights of a model that is not trained, and those of its adapter, in a compiled program.

use std::path::Path;

use compiler::AdapterOptions;
use tensor::DType;

use crate::engine::{Engine, weights};
use crate::error::Result;
use crate::model::other_parts;
use crate::model::source::{ModelSource, SCORE};
use crate::model::weight_set::WeightSet;

/// The options of an adapter folder in PEFT's form, without dropout.
pub(crate) fn read_adapter(folder: &Path, source: &ModelSource) -> Result<AdapterOptions> {
    other_parts::read_options(folder, DType::F32, &source.model).map(|of| AdapterOptions { dropout: 0.0, ..of })
}

/// Reads a model's weights, and an adapter's, to where a program has them.
pub(crate) fn load_weights(engine: &mut Engine, source: &ModelSource, adapter: Option<&Path>) -> Result<()> {
    match adapter {
        None => {
            let files = source.weights(&source.folder)?;
            weights::load(engine, WeightSet::Base, files, &source.folder.display().to_string())?;
        }
        // The head of a reward model may come with its adapter.
        Some(_) => {
            let (folder, files) = (source.folder.display().to_string(), source.weights(&source.folder)?);
            weights::load_and_draw(engine, files, &folder, SCORE, 0)?;
        }
    }
    if let Some(folder) = adapter {
        let files = other_parts::weights(folder, &source.model.files)?;
        weights::load(engine, WeightSet::Adapter, files, &folder.display().to_string())?;
    }
    engine.weights_written()
}
