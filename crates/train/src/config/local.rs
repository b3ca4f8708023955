//! Local files and folders that options name: whether they are there, reported with all other problems of the text.
//! What is in them is read later. Names on the Hub and in object storage are not looked up.

use std::path::Path;

use options::Reader;

use super::{Config, Setting, is_template_file};

/// The local files that a configuration is checked against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// None: the options by themselves.
    Nowhere,
    /// Model, adapter and template. The data may be on another machine.
    Model,
    /// The model's files and the data.
    ModelAndData,
}

/// Endings of file names, which names of data sets on the Hub do not have.
const FILES: &[&str] =
    &[".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst", ".zstd"];

/// Characters that make a path a pattern of files.
const PATTERN: [char; 4] = ['*', '?', '[', '{'];

pub(super) fn check(config: &Config, reader: &mut Reader, look: Look) {
    if look == Look::Nowhere {
        return;
    }
    check_folder("model", &config.model.model, reader);
    if let Some(teacher) = &config.distillation.teacher {
        check_folder("teacher", teacher, reader);
    }
    if let Some(folder) = config.lora.adapter.as_deref().filter(|_| !reader.is_faulty("adapter"))
        && !Path::new(folder).join("adapter_config.json").is_file()
    {
        let hint = match folder {
            "lora" => "`lora: true` trains adapters; `adapter` is the folder of one to continue",
            "qlora" => "`lora: true` with `qlora_bnb: true`; `adapter` is the folder of one to continue",
            _ => "give the folder of an adapter in PEFT's form",
        };
        reader.report("adapter", format!("there is no adapter in `{folder}`"), Some(hint.to_owned()));
    }
    if let Setting::Value(file) = &config.template.template
        && is_template_file(file)
        && !Path::new(file).is_file()
        && !reader.is_faulty("template")
    {
        reader.report("template", format!("there is no file `{file}`"), None);
    }
    if look == Look::ModelAndData {
        check_data(config, reader);
    }
}

/// Reports a folder of a model that is not there.
fn check_folder(option: &str, model: &str, reader: &mut Reader) {
    if reader.is_faulty(option) {
        return;
    }
    let folder = Path::new(model);
    if folder.is_dir() {
        if !folder.join("config.json").is_file() {
            reader.report(option, format!("`{model}` has no config.json, expected the folder of a model"), None);
        }
        return;
    }
    if !is_hub_name(model) {
        let hint = Some("give a folder, or a name on the Hub in the form `owner/name`".to_owned());
        reader.report(option, format!("there is no folder `{model}`"), hint);
    }
}

fn check_data(config: &Config, reader: &mut Reader) {
    let data = &config.data;
    let lists = [("datasets", &data.datasets), ("validation_datasets", &data.validation_datasets)];
    for (list, datasets) in lists {
        for (index, dataset) in datasets.iter().flatten().enumerate() {
            let (path, of) = (format!("{list}[{index}].path"), dataset.path.as_str());
            let is_elsewhere = of.contains("://") || of.contains(PATTERN);
            let name = of.split('@').next().unwrap_or(of);
            let is_name = is_hub_name(name) && !FILES.iter().any(|ending| of.ends_with(ending));
            if !is_elsewhere && !is_name && !Path::new(of).exists() && !reader.is_faulty(&path) {
                let hint = Some("a dataset on the Hub is written `owner/name`".to_owned());
                reader.report(&path, format!("there is no such file or folder: `{of}`"), hint);
            }
        }
    }
}

/// True for a text that can be a name on the Hub.
fn is_hub_name(text: &str) -> bool {
    !text.starts_with(['.', '/']) && text.matches('/').count() == 1 && !text.ends_with('/')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Task;

    #[test]
    fn what_is_not_there_is_told_with_the_other_problems() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name).display().to_string();
        let text = format!(
            "model: {}\nlearning_rte: 1\nadapter: {}\ntemplate: {}\ndatasets:\n- {{path: {}, type: text}}\n- {{path: \
             owner/name@main, type: text}}\n- {{path: s3://bucket/x.jsonl, type: text}}\n- {{path: {}, type: text}}\n",
            at("model"),
            at("adapter"),
            at("a.jinja"),
            at("data.jsonl"),
            at("*.jsonl"),
        );
        let problems = |look| Config::load_looking(&text, "run.yaml", Task::Sft, &[], look).unwrap_err();
        let places = |look| problems(look).into_iter().map(|of| of.place.path).collect::<Vec<_>>();
        assert_eq!(places(Look::Nowhere), ["learning_rte"]);
        assert_eq!(places(Look::Model), ["learning_rte", "model", "adapter", "template"]);
        assert_eq!(places(Look::ModelAndData), ["learning_rte", "model", "adapter", "template", "datasets[0].path"]);
        std::fs::create_dir(at("model")).unwrap();
        assert!(problems(Look::Model)[1].message.contains("has no config.json"));
        assert!(is_hub_name("Qwen/Qwen3-0.6B") && !is_hub_name("m") && !is_hub_name("./a/b") && !is_hub_name("a/b/c"));
    }
}
