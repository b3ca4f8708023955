//! The number of GPUs that stages of a pipeline need. Options that do not go with stages are in the table of combinations; the
//! compiler rejects what depends on the model.

use super::Config;

/// The refusal of another number of GPUs than stages: path, message and hint.
pub(super) fn refused(config: &Config) -> Option<(&'static str, String, String)> {
    let (stages, gpus) = (config.stages(), config.devices());
    (stages > 1 && gpus != stages && config.nodes() == 1).then(|| {
        let message =
            format!("`pipeline_parallel_size: {stages}` needs as many GPUs, one for each stage, but `gpus` is {gpus}");
        ("pipeline_parallel_size", message, format!("set `gpus: {stages}`"))
    })
}
