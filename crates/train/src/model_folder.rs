//! A model folder in Hugging Face's form: weights in shards, the configuration with their element type, and the
//! files that are handed on as they are. Knows names of files; not where weights come from.

use std::path::Path;

use data::safetensors::{FolderWriter, TensorInfo};
use serde_json::{Value, json};
use tensor::DType;

use crate::error::{Result, TrainError};
use crate::staged::write_synced;

/// Largest file of a model.
const SHARD_BYTES: usize = 5_000_000_000;

/// What is handed on as it is: generation settings, tokenizer, chat templates, processors of inputs.
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
];

/// The folder of templates beside the default one.
const MORE_TEMPLATES: &str = "additional_chat_templates";

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

/// Writes `config.json`, and copies from the folder of the model what is handed on.
pub fn write_files(config: &Value, dtype: DType, from: &Path, to: &Path) -> Result<()> {
    write_synced(&to.join("config.json"), pretty(&with_dtype(config, dtype)).as_bytes())?;
    for name in HANDED_ON {
        copy(&from.join(name), &to.join(name))?;
    }
    let (more, copies) = (from.join(MORE_TEMPLATES), to.join(MORE_TEMPLATES));
    if more.is_dir() {
        std::fs::create_dir(&copies).map_err(|e| TrainError::io("create", &copies, e))?;
        for entry in std::fs::read_dir(&more).map_err(|e| TrainError::io("read", &more, e))?.flatten() {
            copy(&entry.path(), &copies.join(entry.file_name()))?;
        }
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    if from.is_file() {
        std::fs::copy(from, to).map_err(|e| TrainError::io("copy", from, e))?;
    }
    Ok(())
}

pub fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).expect("a value is always representable as JSON") + "\n"
}

/// The model's configuration with the element type of the weights, in the spelling that it uses.
pub fn with_dtype(config: &Value, dtype: DType) -> Value {
    let mut config = config.clone();
    let name = match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    };
    let key = if config.get("torch_dtype").is_some() { "torch_dtype" } else { "dtype" };
    config[key] = json!(name);
    config
}

#[cfg(test)]
mod tests {
    use data::safetensors::Weights;

    use super::*;

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
        write_files(&json!({"torch_dtype": "float16"}), DType::BF16, from.path(), to.path()).unwrap();

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
        assert_eq!(weights.get("c").unwrap().bytes, [b'c'; 6]);
        let index = std::fs::read_to_string(to.path().join("model.safetensors.index.json")).unwrap();
        let index: Value = serde_json::from_str(&index).unwrap();
        assert_eq!(index["metadata"]["total_size"], 18);
        assert_eq!((&index["weight_map"]["a"], &index["weight_map"]["c"]), (&json!(shards[0]), &json!(shards[1])));
        let config = std::fs::read_to_string(to.path().join("config.json")).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&config).unwrap(), json!({"torch_dtype": "bfloat16"}));
    }
}
