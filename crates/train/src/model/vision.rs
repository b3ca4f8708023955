//! The modules of a vision tower and its projector, and which of them the options train, at what rate.

use compiler::Rates;
use options::Problem;

use crate::config::Config;
use crate::model::source::ModelSource;

/// The modules of a tower and of a projector, by their whole names.
struct Modules {
    tower: Vec<String>,
    projector: Vec<String>,
}

impl Modules {
    fn of(source: &ModelSource) -> Modules {
        let form = &source.model.adapters;
        let mut modules = Modules { tower: Vec::new(), projector: Vec::new() };
        for of in source.model.weights().filter(|of| !of.buffer) {
            let Some(part) = form.apart.iter().find(|part| of.name.starts_with(part.as_str())) else { continue };
            let of_projector = form.projectors.iter().find(|part| of.name.starts_with(part.as_str()));
            let module = match of_projector {
                Some(part) => part.trim_end_matches('.').to_owned(),
                None => {
                    let inside = &of.name[part.len()..];
                    let first = inside.split_once('.').map_or(0, |(first, _)| first.len());
                    of.name[..part.len() + first].trim_end_matches('.').to_owned()
                }
            };
            let all = if of_projector.is_some() { &mut modules.projector } else { &mut modules.tower };
            if !all.contains(&module) {
                all.push(module);
            }
        }
        modules
    }

    /// Both with their option and what it says.
    fn chosen<'a>(&'a self, config: &Config) -> [(&'static str, Option<bool>, &'a [String]); 2] {
        let of = &config.lora;
        [
            ("train_vision", of.train_vision.value().copied(), &self.tower),
            ("train_projector", of.train_projector.value().copied(), &self.projector),
        ]
    }
}

/// Reports options of a tower where the run has none, or nothing of it is trained.
pub(crate) fn check(config: &Config, source: &ModelSource, problems: &mut Vec<Problem>) {
    let chosen = Modules::of(source).chosen(config).map(|(option, given, of)| (option, given, of.is_empty()));
    let rate = config.optimizer.vision_learning_rate;
    if source.model.images.is_none() {
        let given = chosen.iter().filter(|(_, given, _)| *given == Some(true)).map(|(option, ..)| *option);
        for option in given.chain(rate.map(|_| "vision_learning_rate")) {
            let message = format!("`{option}`: the data have no images that the model reads");
            problems.push(config.mistake(option, message, Some(format!("remove `{option}`"))));
        }
        return;
    }
    for (option, _, _) in chosen.iter().filter(|(_, given, is_empty)| *given == Some(true) && *is_empty) {
        let message = format!("`{option}: true`, but {} has no such part", source.model.architecture);
        problems.push(config.mistake(option, message, Some(format!("remove `{option}`"))));
    }
    let Some(rate) = rate else { return };
    if !chosen.iter().any(|(_, given, _)| given.unwrap_or(!config.lora.lora)) {
        let message =
            format!("`vision_learning_rate: {rate}`, but neither the tower nor the projector is trained in full");
        let hint = "set `train_vision: true` or `train_projector: true`, or remove it";
        problems.push(config.mistake("vision_learning_rate", message, Some(hint.into())));
    } else if config.optimizer.learning_rate == 0.0 {
        let message = "`vision_learning_rate` is relative to `learning_rate`, which is 0";
        problems.push(config.mistake("vision_learning_rate", message, Some("set `learning_rate` above 0".into())));
    }
}

/// Reports what an adapter that is continued does otherwise: the modules that it has in full are those that are trained.
pub(crate) fn check_continued(config: &Config, source: &ModelSource, found: &[String], problems: &mut Vec<Problem>) {
    let Some(folder) = &config.lora.adapter else { return };
    for (option, given, names) in Modules::of(source).chosen(config) {
        let has = !names.is_empty() && names.iter().all(|name| found.contains(name));
        if let Some(given) = given.filter(|given| *given != has) {
            let message = format!(
                "`{option}: {given}`, but the adapter in {folder} has {}these modules in full",
                if has { "" } else { "not " }
            );
            problems.push(config.mistake(option, message, Some(format!("remove `{option}`"))));
        }
    }
}

/// The modules that are trained in full alongside an adapter.
pub(crate) fn saved(config: &Config, source: &ModelSource) -> Vec<String> {
    let modules = Modules::of(source);
    let chosen = modules.chosen(config).into_iter().filter(|(_, given, _)| *given == Some(true));
    chosen.flat_map(|(.., names)| names.iter().cloned()).collect()
}

/// The rates with what the options say of tower and projector.
pub(crate) fn with_vision(config: &Config, source: &ModelSource, mut rates: Rates) -> Rates {
    if source.model.images.is_none() {
        return rates;
    }
    let modules = Modules::of(source);
    for (_, given, names) in modules.chosen(config) {
        if !config.lora.lora && given == Some(false) {
            rates.frozen.extend(names.iter().cloned());
        }
        if let Some(rate) = config.optimizer.vision_learning_rate.filter(|_| given.unwrap_or(!config.lora.lora)) {
            let factor = rate / config.optimizer.learning_rate;
            rates.factors.extend(names.iter().map(|name| (name.clone(), factor)));
        }
    }
    rates
}
