//! Images in a run: whether its data have any, and what does not go with them yet.

use data::boxes::Units;
use data::image::{PixelLimits, Pixels};
use data::pictures::ImageReader;
use data::{Batch, dataset_images};

use crate::config::{Config, NormBbox, Recipe, Task};
use crate::error::{Result, TrainError};
use crate::input::dataset_spec::spec;
use crate::model::source::ModelSource;

/// Returns true if the first rows of a dataset have images. What cannot be read is an error where rows are wanted.
pub fn are_in_data(config: &Config) -> bool {
    let sets = [("datasets", &config.data.datasets), ("validation_datasets", &config.data.validation_datasets)];
    let mut all = sets.iter().flat_map(|(option, list)| list.iter().flatten().enumerate().map(move |of| (option, of)));
    all.any(|(option, (number, of))| {
        let place = format!("{option}[{number}]");
        spec(config, of, &place).is_ok_and(|spec| dataset_images(&spec, config.task.purpose()))
    })
}

/// Returns the reader of the images of a run, where its model reads them. Adds to the notes that options of images have no
/// effect, where it reads none. Errors: options that do not go with images yet.
pub(crate) fn of_run(config: &Config, source: &ModelSource, notes: &mut Vec<String>) -> Result<Option<ImageReader>> {
    let (least, most) = (config.template.min_pixels, config.template.max_pixels);
    if source.model.images.is_none() {
        let given = [
            ("min_pixels", least.is_some()),
            ("max_pixels", most.is_some()),
            ("norm_bbox", config.template.norm_bbox.is_some()),
        ];
        let given = given.into_iter().filter(|(_, is_given)| *is_given);
        let note = |name| format!("`{name}` has no effect: the data have no images that the model reads");
        notes.extend(given.map(|(name, _)| note(name)));
        return Ok(None);
    }
    let problems: Vec<_> = conflicts(config)
        .into_iter()
        .map(|(option, value)| {
            let message = format!("`{option}: {value}` does not go with images in the data yet");
            config.mistake(option, message, Some(format!("remove `{option}`, or the images")))
        })
        .collect();
    if !problems.is_empty() {
        return Err(TrainError::Config(problems));
    }
    let qlora = &config.qlora;
    if config.precision.recipe != Recipe::Bf16 || qlora.qlora_bnb || qlora.qlora_fp8 || qlora.qlora_fp4 {
        notes.push(
            "the products of the vision tower stay in the compute type: only those of text are quantized".to_owned(),
        );
    }
    let mut reader = source.image_reader()?;
    reader.processor = reader.processor.bounded(PixelLimits { least, most }).map_err(|problem| {
        let option = if most.is_some() { "max_pixels" } else { "min_pixels" };
        TrainError::Config(vec![config.mistake(option, problem, Some("remove it".to_owned()))])
    })?;
    match config.template.norm_bbox {
        Some(NormBbox::Norm1000) => reader.boxes.units = Units::Thousandths,
        Some(NormBbox::None) => reader.boxes.units = Units::Pixels,
        None => {}
    }
    Ok(Some(reader))
}

/// A batch of text as it is, where the model reads no images, else one row of its beginning with an image inside: a ramp of
/// colors.
pub(crate) fn check_batch(source: &ModelSource, text: Batch) -> Result<Batch> {
    const SIDE: usize = 96;
    const AROUND: usize = 8;
    if source.model.images.is_none() {
        return Ok(text);
    }
    let ramp = (0..SIDE * SIDE).flat_map(|at| [at / SIDE, at % SIDE, at / 2 % SIDE].map(|value| (2 * value) as u8));
    let image = Pixels { height: SIDE, width: SIDE, rgb: ramp.collect() };
    let reader = source.image_reader()?;
    let pictures = source.pictures(&[image])?;
    let grids: Vec<[usize; 2]> = pictures.iter().map(|of| of.grid).collect();
    let token = reader.form.token;
    let mut words = text.input_ids.iter().copied().filter(|id| *id != token);
    let before: Vec<i32> = words.by_ref().take(AROUND).collect();
    let after: Vec<i32> = words.take(AROUND).collect();
    let ids = [before, vec![token; reader.tokens(&grids)], after].concat();
    let batch = Batch::from_labels(1, ids.len(), ids.clone(), &ids, None, None).map_err(TrainError::Data)?;
    source.with_images(batch, &pictures)
}

/// Options that do not go with images yet, with their values.
fn conflicts(config: &Config) -> Vec<(&'static str, String)> {
    let known = config.preferences.precompute_ref_log_probs;
    let all = [
        ("task", config.task.name().to_owned(), matches!(config.task, Task::Grpo | Task::Distil)),
        // The table knows documents by their tokens, which are the same for other images.
        ("precompute_ref_log_probs", known.to_string(), known),
        ("pipeline_parallel_size", config.stages().to_string(), config.stages() > 1),
        ("sequence_parallel_size", config.sequence().to_string(), config.sequence() > 1),
        ("distributed.num_nodes", config.nodes().to_string(), config.nodes() > 1),
    ];
    all.into_iter().filter(|(.., is_on)| *is_on).map(|(option, value, _)| (option, value)).collect()
}
