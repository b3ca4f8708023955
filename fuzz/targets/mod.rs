//! The fuzz targets: for each kind of untrusted bytes a function that reads them as the program does, and seeds.
//!
//! Used by the engine (`fuzz/engine.rs`) and by the test that replays what was found (`crates/train/tests/it/corpus.rs`).
//! A target may reject its input; it may not panic, hang, or ask for memory out of proportion.

mod checkpoint;
mod conversations;
mod images;
mod model_files;
mod row_files;

use std::fs;
use std::path::{Path, PathBuf};

use train::config::{Config, Task, render_problems};

/// One kind of foreign bytes.
pub struct Target {
    pub name: &'static str,
    /// Returns true if the bytes were accepted.
    pub read: fn(&[u8]) -> bool,
    /// Bytes of the right form, from the repository's own files.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

const fn target(name: &'static str, read: fn(&[u8]) -> bool, seeds: fn() -> Vec<Vec<u8>>) -> Target {
    Target { name, read, seeds }
}

/// Every target, by its name.
pub const TARGETS: &[Target] = &[
    target("yaml", yaml, yaml_seeds),
    target("card", row_files::card, row_files::card_seeds),
    target("rows", row_files::rows, row_files::rows_seeds),
    target("arrow", row_files::arrow, row_files::arrow_seeds),
    target("parquet", row_files::parquet, row_files::parquet_seeds),
    target("dataset", conversations::dataset, conversations::dataset_seeds),
    target("conversation", conversations::conversation, conversations::conversation_seeds),
    target("template", conversations::template, conversations::template_seeds),
    target("image", images::image, images::image_seeds),
    target("processor", images::processor, images::processor_seeds),
    target("tokenizer", model_files::tokenizer, model_files::tokenizer_seeds),
    target("tokenizer_config", model_files::tokenizer_config, model_files::tokenizer_config_seeds),
    target("model_config", model_files::config, model_files::config_seeds),
    target("safetensors", model_files::safetensors, model_files::safetensors_seeds),
    target("quantised", model_files::quantised, model_files::quantised_seeds),
    target("shards", model_files::shards, model_files::shards_seeds),
    target("adapter", model_files::adapter, model_files::adapter_seeds),
    target("gguf", model_files::gguf, model_files::gguf_seeds),
    target("checkpoint", checkpoint::resume, checkpoint::seeds),
];

/// The root folder of the repository.
fn root() -> PathBuf {
    let inside = Path::new(env!("CARGO_MANIFEST_DIR"));
    let has_examples = |folder: &&Path| folder.join("examples/stories").is_dir();
    inside.ancestors().find(has_examples).expect("the manifest lies in the repository").to_owned()
}

fn stories() -> PathBuf {
    root().join("examples/stories/model")
}

fn file(path: &str) -> Vec<u8> {
    let path = root().join(path);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A folder for a target's files: of a test, among what cargo builds; else a process's own in the system's place.
fn scratch(name: &str) -> PathBuf {
    let own = || std::env::temp_dir().join(format!("surogate-fuzz-{}", std::process::id()));
    let folder = option_env!("CARGO_TARGET_TMPDIR").map_or_else(own, |place| Path::new(place).join("fuzz")).join(name);
    fs::create_dir_all(&folder).expect("a folder of our own can be made");
    folder
}

/// The bytes as a file of this name.
fn written(folder: &str, name: &str, bytes: &[u8]) -> PathBuf {
    let path = scratch(folder).join(name);
    fs::write(&path, bytes).expect("a file of our own can be written");
    path
}

/// `run.yaml`: through every option table, and what was read once more through JSON.
fn yaml(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    let mut taken = false;
    for task in [Task::Sft, Task::Pt] {
        match Config::load(text, "run.yaml", task, &[]) {
            Ok(config) => {
                let again = Config::load_json(&config.to_json().to_string(), task, &[]);
                assert!(again.is_ok(), "options that were taken are taken again: {again:?}");
                taken = true;
            }
            Err(problems) => assert!(!problems.is_empty() && !render_problems(&problems).is_empty()),
        }
    }
    taken
}

fn yaml_seeds() -> Vec<Vec<u8>> {
    let taken = |text: &str| Config::load(text, "run.yaml", Task::Sft, &[]).is_ok();
    // Every option that goes with those before it.
    let mut every = "model: m\n".to_owned();
    for row in train::config::rows() {
        let line = format!("{}: {}\n", row.name, row.default_json());
        if taken(&format!("{every}{line}")) {
            every += &line;
        }
    }
    let forms = "model: &m a\ndatasets:\n  - path: b\n    type: text\n  - {path: *m, type: auto, samples: 3}\n\
                 lora_target_modules: [q_proj, 'v_proj']\nrun_name: |\n  x\n  y\n# end\n";
    vec![file("examples/stories.yaml"), file("examples/gsm8k.yaml"), every.into_bytes(), forms.into()]
}
