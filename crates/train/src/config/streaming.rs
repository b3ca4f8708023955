//! Checks of `streaming`: options that need the whole data before the first step do not go with it.

use options::Reader;

use super::Config;
use super::rates::is_changed;

const OPTION: &str = "streaming";

/// Options that say how a stream is read.
const DETAILS: [&str; 2] = ["shuffle_buffer_size", "streaming_disk_limit"];

/// Checks what a stream needs, and what does not go with one.
pub(super) fn check_streaming(config: &Config, reader: &mut Reader) {
    let data = &config.data;
    if !data.streaming {
        let changed: Vec<&str> = DETAILS.into_iter().filter(|name| is_changed(config, reader, name)).collect();
        for name in changed {
            let message = format!("`{name}` needs `{OPTION}: true`");
            reader.report(name, message, Some(format!("set it, or remove `{name}`")));
        }
        return;
    }
    let datasets = data.datasets.as_deref().unwrap_or_default();
    if config.training.fixed_steps().is_none() && !reader.is_faulty("max_steps") {
        let message = "`streaming: true` needs `max_steps`: how many steps an epoch has is not known";
        reader.report("max_steps", message, Some("set `max_steps`".into()));
    }
    if datasets.len() > 1 && data.interleave_probs.is_none() && !reader.is_faulty("interleave_probs") {
        let message = format!("`{OPTION}: true` with {} datasets needs `interleave_probs`", datasets.len());
        let hint = "write the share of each in the rows, 1 in all, such as `[0.8, 0.2]`";
        reader.report("interleave_probs", message, Some(hint.into()));
    }
    let held_out = "name a file of its own with `validation_datasets`, or set it to 0";
    let refused: [(&str, bool, &str); 2] = [
        (
            "validation_split_ratio",
            reader.is_written("validation_split_ratio")
                && data.validation_split_ratio > 0.0
                && data.validation_datasets.is_none(),
            held_out,
        ),
        (
            "interleave_stopping",
            is_changed(config, reader, "interleave_stopping"),
            "remove it: a dataset that is used up begins again",
        ),
    ];
    for (path, _, hint) in refused.into_iter().filter(|(_, refused, _)| *refused) {
        if reader.is_faulty(path) {
            continue;
        }
        reader.report(path, format!("`{path}` does not go with `{OPTION}: true`"), Some(hint.to_owned()));
    }
    for (index, dataset) in datasets.iter().enumerate() {
        for (name, refused, hint) in [
            ("samples", dataset.samples.is_some(), "`max_steps` says how long the run is"),
            ("repeats", dataset.repeats != 1.0, "`interleave_probs` mixes datasets"),
        ] {
            let path = format!("datasets[{index}].{name}");
            if refused && !reader.is_faulty(&path) {
                reader.report(&path, format!("`{path}` does not go with `{OPTION}: true`"), Some(hint.to_owned()));
            }
        }
    }
}
