//! A model folder in Hugging Face format: sharded weights, the configuration with their element type, and the files
//! that are copied unchanged. Knows file names; not where weights come from.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use data::safetensors::{FolderWriter, TensorInfo};
use tensor::DType;

use crate::error::{Result, TrainError};
use crate::files::staged::{create_new, write_synced};
use crate::files::written::names;
use crate::model::hf_config::{self, HfConfig};
use crate::model::json_files::{TOKENIZER, TOKENIZER_FILE, pretty, read_json, replace};
use crate::model::tokenizer_class;

/// The optimizer states of a checkpoint, which are no part of a model.
pub(crate) const OPTIMIZER: &str = "optimizer.safetensors";

/// Largest file of a model.
pub const SHARD_BYTES: usize = 5_000_000_000;

/// Files that results copy unchanged: generation settings, tokenizer, chat templates, processors of inputs, the
/// license.
const HANDED_ON: &[&str] = &[
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
    "NOTICE.txt",
];

/// The folder of templates besides the default one.
const MORE_TEMPLATES: &str = "additional_chat_templates";

/// The chat template in a file of its own, which readers prefer to the one in [`TOKENIZER`].
const TEMPLATE: &str = "chat_template.jinja";

/// The files that are published of a model or an adapter besides weights and [`HANDED_ON`].
const PUBLISHED: [&str; 3] = ["README.md", "adapter_config.json", hf_config::FILE];

/// Files of which a folder with a tokenizer has one.
const OF_TOKENIZERS: [&str; 2] = [TOKENIZER_FILE, "tokenizer.model"];

/// Writes weights one after the other; `bytes` gives those of a tensor.
pub fn write_weights(
    folder: &Path,
    tensors: Vec<TensorInfo>,
    mut bytes: impl FnMut(&TensorInfo) -> Result<Vec<u8>>,
) -> Result<()> {
    write_weights_in(folder, tensors, SHARD_BYTES, &mut bytes)
}

fn write_weights_in(
    folder: &Path,
    tensors: Vec<TensorInfo>,
    shard_bytes: usize,
    bytes: &mut dyn FnMut(&TensorInfo) -> Result<Vec<u8>>,
) -> Result<()> {
    let failed = |e: data::DataError| TrainError::Failed(e.to_string());
    let mut writer = FolderWriter::new(folder, tensors, shard_bytes);
    while let Some(tensor) = writer.upcoming() {
        writer.put(&bytes(&tensor)?).map_err(failed)?;
    }
    writer.finish().map_err(failed)
}

/// Writes `config.json`, and copies what is handed on, as [`write_companions`] does.
pub fn write_files(config: &HfConfig, dtype: DType, from: &Path, template: Option<&str>, to: &Path) -> Result<()> {
    write_synced(&to.join(hf_config::FILE), pretty(&config.with_dtype(dtype).0).as_bytes())?;
    write_companions(from, template, to)
}

/// Copies from a folder what is handed on: tokenizer, templates, generation settings, licence. `template` is the chat
/// template that the model was trained with, where it is not the folder's own: then it is the only one.
pub fn write_companions(from: &Path, template: Option<&str>, to: &Path) -> Result<()> {
    let mut files = handed_on(from)?;
    if template.is_some() {
        files.retain(|file| !is_template(file));
    }
    copy(&files, from, to)?;
    tokenizer_class::settle(to)?;
    let Some(template) = template else { return Ok(()) };
    write_synced(&to.join(TEMPLATE), template.as_bytes())?;
    if !to.join(TOKENIZER).is_file() {
        return Ok(());
    }
    let mut settings = read_json(&to.join(TOKENIZER))?;
    if settings.get("chat_template").is_some() {
        settings["chat_template"] = template.into();
        replace(to, TOKENIZER, &settings)?;
    }
    Ok(())
}

/// Copies into a merged model what the adapter carries: its tokenizer and template are those that it was trained with, so
/// those of the model are not copied. An adapter without a tokenizer carries nothing.
pub fn write_companions_of_adapter(adapter: &Path, to: &Path) -> Result<()> {
    if !OF_TOKENIZERS.iter().any(|file| adapter.join(file).is_file()) {
        return Ok(());
    }
    let files = handed_on(adapter)?;
    for old in handed_on(to)? {
        if files.contains(&old) || is_template(&old) {
            let path = to.join(&old);
            std::fs::remove_file(&path).map_err(|e| TrainError::io("replace", &path, e))?;
        }
    }
    let _ = std::fs::remove_dir(to.join(MORE_TEMPLATES));
    copy(&files, adapter, to)?;
    tokenizer_class::settle(to)
}

fn is_template(file: &Path) -> bool {
    file == Path::new(TEMPLATE) || file == Path::new("chat_template.json") || file.starts_with(MORE_TEMPLATES)
}

fn copy(files: &[PathBuf], from: &Path, to: &Path) -> Result<()> {
    if files.iter().any(|file| file.starts_with(MORE_TEMPLATES)) {
        let copies = to.join(MORE_TEMPLATES);
        std::fs::create_dir(&copies).map_err(|e| TrainError::io("create", &copies, e))?;
    }
    for file in files {
        let (from, to) = (from.join(file), to.join(file));
        let copied = File::open(&from).and_then(|mut from| io::copy(&mut from, &mut create_new(&to)?));
        copied.map_err(|e| TrainError::io("copy", &from, e))?;
    }
    Ok(())
}

/// The files that a result takes over from a model's folder, as paths in it.
///
/// Errors: a file that is a link out of the folder. Whoever made the model would decide what of this machine a result
/// carries.
pub fn handed_on(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found: Vec<PathBuf> = HANDED_ON.iter().map(PathBuf::from).collect();
    let templates = std::fs::read_dir(folder.join(MORE_TEMPLATES)).into_iter().flatten().flatten();
    let templates = templates.map(|entry| Path::new(MORE_TEMPLATES).join(entry.file_name()));
    found.extend(templates.filter(|path| path.extension().is_some_and(|ending| ending == "jinja")));
    found.retain(|file| folder.join(file).is_file());
    stay_inside(folder, &found)?;
    Ok(found)
}

fn stay_inside(folder: &Path, files: &[PathBuf]) -> Result<()> {
    let mut paths = files.iter().map(|file| folder.join(file));
    if let Some(path) = paths.find(|path| leads_out(folder, path)) {
        return Err(TrainError::Usage(format!(
            "{} leads to {}, outside of the model's folder: a result would carry what is there\n  hint: put a copy in \
             its place",
            path.display(),
            path.canonicalize().unwrap_or_default().display()
        )));
    }
    Ok(())
}

/// Files of a folder that make a model or an adapter, as paths in it: weights, configuration, card, and what is handed
/// on. Everything else in the folder stays where it is.
///
/// Errors: the folder cannot be read, or one of the files is a link out of it.
pub fn published(folder: &Path) -> Result<Vec<PathBuf>> {
    let failed = |e| TrainError::io("read", folder, e);
    let mut found = handed_on(folder)?;
    for name in names(folder).map_err(failed)? {
        let text = name.to_string_lossy();
        let is_weights = [".safetensors", ".safetensors.index.json", ".gguf"].iter().any(|end| text.ends_with(end));
        let own = is_weights && !text.starts_with('.') && text != OPTIMIZER || PUBLISHED.contains(&&*text);
        if own && folder.join(&name).is_file() {
            found.push(name.into());
        }
    }
    found.sort();
    stay_inside(folder, &found)?;
    Ok(found)
}

/// True if a file of a model's folder lies elsewhere, through links. A hub's cache, which is a folder of links to its
/// own files, counts as one place.
pub fn leads_out(folder: &Path, file: &Path) -> bool {
    let (Ok(folder), Ok(file)) = (folder.canonicalize(), file.canonicalize()) else { return true };
    let snapshots = folder.parent().filter(|parent| parent.ends_with("snapshots"));
    let blobs = snapshots.and_then(Path::parent).map(|repository| repository.join("blobs"));
    !file.starts_with(&folder) && !blobs.is_some_and(|blobs| file.starts_with(blobs))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use data::safetensors::Weights;

    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn what_a_result_carries_lies_in_the_models_folder() {
        let place = tempfile::tempdir().unwrap();
        let (secret, repository) = (place.path().join("secret"), place.path().join("models--a--b"));
        let (folder, blobs) = (repository.join("snapshots/main"), repository.join("blobs"));
        for made in [&folder, &blobs] {
            std::fs::create_dir_all(made).unwrap();
        }
        for file in [&secret, &blobs.join("0123"), &folder.join("vocab.json")] {
            std::fs::write(file, "words").unwrap();
        }
        symlink("../../blobs/0123", folder.join("tokenizer.json")).unwrap();
        symlink("vocab.json", folder.join("vocab.txt")).unwrap();
        symlink(&secret, folder.join("thesis.tex")).unwrap();
        assert_eq!(handed_on(&folder).unwrap(), ["tokenizer.json", "vocab.json", "vocab.txt"].map(PathBuf::from));

        let to = place.path().join("to");
        for name in ["merges.txt", MORE_TEMPLATES] {
            let link = folder.join(name);
            match name {
                MORE_TEMPLATES => {
                    let elsewhere = place.path().join("elsewhere");
                    std::fs::create_dir(&elsewhere).unwrap();
                    std::fs::write(elsewhere.join("id.jinja"), "key").unwrap();
                    std::fs::write(elsewhere.join("id"), "key").unwrap();
                    symlink(elsewhere, &link).unwrap();
                }
                _ => symlink(&secret, &link).unwrap(),
            }
            let error = handed_on(&folder).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("outside of the model's folder"), "{error}");
            std::fs::create_dir(&to).unwrap();
            assert!(write_files(&HfConfig(json!({})), DType::F32, &folder, None, &to).is_err());
            assert_eq!(std::fs::read_dir(&to).unwrap().count(), 1, "config.json");
            std::fs::remove_dir_all(&to).unwrap();
            std::fs::remove_file(&link).unwrap();
        }
        // Nor is anything written through a link that waits in the result's folder.
        std::fs::create_dir(&to).unwrap();
        symlink(&secret, to.join("vocab.json")).unwrap();
        assert!(write_files(&HfConfig(json!({})), DType::F32, &folder, None, &to).is_err());
        assert_eq!(std::fs::read_to_string(&secret).unwrap(), "words");
    }

    #[test]
    fn only_files_of_a_model_are_published() {
        let place = tempfile::tempdir().unwrap();
        let (folder, secret) = (place.path().join("model"), place.path().join("secret"));
        std::fs::create_dir_all(folder.join("sub")).unwrap();
        std::fs::create_dir(folder.join(MORE_TEMPLATES)).unwrap();
        std::fs::write(&secret, "key").unwrap();
        let own =
            ["README.md", "adapter_model.safetensors", "config.json", "model.safetensors.index.json", "vocab.txt"];
        let others = ["sub/.env", ".env", "notes.txt", "state.json", OPTIMIZER, ".x.safetensors", "id.json"];
        let template = "additional_chat_templates/tool_use.jinja";
        for name in own.iter().chain(&others).chain([&template, &"additional_chat_templates/.env"]) {
            std::fs::write(folder.join(name), "words").unwrap();
        }
        symlink(&secret, folder.join("notes.md")).unwrap();
        let mut expected: Vec<PathBuf> = own.iter().chain([&template]).map(PathBuf::from).collect();
        expected.sort();
        assert_eq!(published(&folder).unwrap(), expected);
        for name in ["LICENSE", "x.gguf"] {
            symlink(&secret, folder.join(name)).unwrap();
            let error = published(&folder).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("outside of the model's folder"), "{error}");
            std::fs::remove_file(folder.join(name)).unwrap();
        }
    }

    #[test]
    fn a_result_carries_the_template_that_it_was_trained_with_and_no_other() {
        let place = tempfile::tempdir().unwrap();
        let [model, adapter, merged] = ["model", "adapter", "merged"].map(|name| place.path().join(name));
        for folder in [&model, &adapter, &merged] {
            std::fs::create_dir(folder).unwrap();
        }
        std::fs::create_dir(model.join(MORE_TEMPLATES)).unwrap();
        for (name, text) in [
            (TEMPLATE, "old"),
            ("chat_template.json", "{\"chat_template\": \"old\"}"),
            ("additional_chat_templates/tool_use.jinja", "old"),
            (TOKENIZER, "{\"chat_template\": \"old\", \"eos_token\": \"</s>\"}"),
            ("tokenizer.json", "{}"),
            ("generation_config.json", "{\"top_k\": 1}"),
        ] {
            std::fs::write(model.join(name), text).unwrap();
        }
        let read = |folder: &Path, name: &str| std::fs::read_to_string(folder.join(name)).ok();
        let check = |folder: &Path| {
            assert_eq!(read(folder, TEMPLATE).as_deref(), Some("new"));
            assert_eq!(read(folder, "chat_template.json"), None);
            assert!(!folder.join(MORE_TEMPLATES).exists());
            let settings: Value = serde_json::from_str(&read(folder, TOKENIZER).unwrap()).unwrap();
            let class = "PreTrainedTokenizerFast";
            assert_eq!(settings, json!({"chat_template": "new", "eos_token": "</s>", "tokenizer_class": class}));
            assert_eq!(read(folder, "generation_config.json").as_deref(), Some("{\"top_k\": 1}"));
        };
        write_companions(&model, Some("new"), &adapter).unwrap();
        check(&adapter);
        write_companions(&model, None, &merged).unwrap();
        assert_eq!(read(&merged, TEMPLATE).as_deref(), Some("old"));
        write_companions_of_adapter(&adapter, &merged).unwrap();
        check(&merged);
        // An adapter of other programs, which carries none.
        std::fs::remove_file(adapter.join("tokenizer.json")).unwrap();
        std::fs::write(adapter.join(TEMPLATE), "other").unwrap();
        write_companions_of_adapter(&adapter, &merged).unwrap();
        check(&merged);
    }

    #[test]
    fn a_folder_is_written_in_shards_with_everything_that_belongs_to_the_model() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for name in ["chat_template.jinja", "generation_config.json", "vocab.txt", "model.safetensors", "thesis.tex"] {
            std::fs::write(from.path().join(name), name).unwrap();
        }
        std::fs::create_dir(from.path().join(MORE_TEMPLATES)).unwrap();
        std::fs::write(from.path().join(MORE_TEMPLATES).join("rag.jinja"), "rag").unwrap();
        let info = |name: &str| TensorInfo { name: name.into(), dtype: DType::BF16, shape: vec![3] };
        let tensors = vec![info("b"), info("a"), info("c")];
        let mut bytes = |info: &TensorInfo| Ok(vec![info.name.as_bytes()[0]; 6]);
        write_weights_in(to.path(), tensors, 13, &mut bytes).unwrap();
        let config = HfConfig(json!({"torch_dtype": "float16"}));
        write_files(&config, DType::BF16, from.path(), None, to.path()).unwrap();

        let mut names: Vec<String> =
            std::fs::read_dir(to.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
        let expected = [
            MORE_TEMPLATES,
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            shards[0],
            shards[1],
            "model.safetensors.index.json",
            "vocab.txt",
        ];
        assert_eq!(names, expected);
        let weights = Weights::open(to.path()).unwrap();
        assert_eq!(weights.get("c").unwrap().bytes().unwrap(), [b'c'; 6]);
        let index = std::fs::read_to_string(to.path().join("model.safetensors.index.json")).unwrap();
        let index: Value = serde_json::from_str(&index).unwrap();
        assert_eq!(index["metadata"]["total_size"], 18);
        assert_eq!((&index["weight_map"]["a"], &index["weight_map"]["c"]), (&json!(shards[0]), &json!(shards[1])));
        let config = std::fs::read_to_string(to.path().join("config.json")).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&config).unwrap(), json!({"torch_dtype": "bfloat16"}));
    }
}
