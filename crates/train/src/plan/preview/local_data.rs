//! Availability of a run's data on this machine, so that a plan can read it as the run will. A plan downloads nothing.

use std::path::Path;

use data::Purpose;

use crate::config::{Config, Dataset, DatasetType};
use crate::error::Result;
use crate::input::encoded::Encoded;
use crate::model::source::ModelSource;
use crate::plan::Plan;

/// The documents of the run, read and encoded as the run does it; or why they are not available locally, a sentence.
/// `unavailable` are datasets that are not here, each with the reason.
///
/// Errors: those of reading them, which would end the run as well.
pub fn documents(
    config: &Config,
    source: &ModelSource,
    unavailable: &[String],
) -> Result<std::result::Result<Encoded, String>> {
    let Some(datasets) = &config.data.datasets else { return Ok(Err("no `datasets` are written".into())) };
    if config.task.purpose() == Purpose::Prompts {
        return Ok(Err("answers are sampled in the run".into()));
    }
    let validation = config.data.validation_datasets.as_deref().unwrap_or_default();
    let lists = [("datasets", datasets.as_slice()), ("validation_datasets", validation)];
    let places = lists
        .into_iter()
        .flat_map(|(option, list)| list.iter().enumerate().map(move |(index, of)| (format!("{option}[{index}]"), of)));
    let missing = places.filter(|(place, _)| !config.fetched.contains_key(place)).find_map(|(_, of)| missing(of));
    if let Some(why) = unavailable.first().cloned().or(missing) {
        return Ok(Err(why));
    }
    let is_text = |of: &Dataset| of.r#type != DatasetType::Tokens;
    if datasets.iter().chain(validation).any(is_text) && !source.folder.join("tokenizer.json").is_file() {
        return Ok(Err(format!("there is no tokenizer.json in {} to count their tokens", source.folder.display())));
    }
    Encoded::read(config, source, Plan::new(config, source)?.rows(), None, &|| false).map(Ok)
}

/// The reason why a local dataset cannot be read, if there is no such file.
fn missing(of: &Dataset) -> Option<String> {
    let is_pattern = of.path.contains(['*', '?', '[', '{']);
    let found = match is_pattern {
        true => data::rows::files::find(Path::new(&of.path), None, &of.split).is_ok(),
        false => Path::new(&of.path).exists(),
    };
    (!found).then(|| format!("there is no `{}` here", of.path))
}
