//! Parts of model cards, `README.md`: public names, the licence of the model before, the card that a merge hands on. Cards are
//! meant to be published, so they name no folders of this machine.
//!
//! The form is that of Hugging Face: a block of YAML, then Markdown.

use std::fmt::Write;
use std::path::Path;

use options::{Reader, Tree};
use serde_json::Value;

use crate::error::{Result, TrainError};
use crate::files::staged::write_synced;
use crate::model::folder::leads_out;

/// The name of the file.
pub(crate) const FILE: &str = "README.md";

/// Bytes of a model's card that are read.
const MOST: usize = 1 << 20;

/// Characters of a model's licence, its name or its address.
const MOST_OF_LICENCE: usize = 300;

/// The kind of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Adapter,
    Merged,
    Model,
}

impl Form {
    pub(crate) fn library(self) -> &'static str {
        if self == Form::Adapter { "peft" } else { "transformers" }
    }

    pub(crate) fn sentence(self) -> &'static str {
        match self {
            Form::Adapter => "A LoRA adapter, made",
            Form::Merged => "A model with a LoRA adapter merged into its weights, made",
            Form::Model => "A model, made",
        }
    }
}

/// Copies the card of an adapter to the model that it was merged into. Without a card there is nothing to copy.
pub fn hand_on(from: &Path, form: Form, to: &Path) -> Result<()> {
    let Some(text) = read(from)? else { return Ok(()) };
    let library = |form: Form| format!("library_name: {}\n", form.library());
    let text = text.replacen(&library(Form::Adapter), &library(form), 1);
    let text = text.replacen(Form::Adapter.sentence(), form.sentence(), 1);
    let text = text.replacen("base_model_relation: adapter\n", "base_model_relation: finetune\n", 1);
    write_synced(&to.join(FILE), text.as_bytes())
}

/// The card of a folder. A link that leads out of it is not followed.
fn read(folder: &Path) -> Result<Option<String>> {
    let path = folder.join(FILE);
    if !path.is_file() || leads_out(folder, &path) {
        return Ok(None);
    }
    let bytes = data::small_file::read(&path).map_err(|e| TrainError::io("read", &path, e))?;
    Ok(Some(String::from_utf8_lossy(&bytes[..bytes.len().min(MOST)]).into_owned()))
}

/// The model of a run as an adapter names it: a path of the Hub's cache becomes the name that it was fetched by, another
/// folder's the absolute one, by which every later command finds it.
pub fn base_name(path: &str) -> String {
    name_in_cache(path).unwrap_or_else(|| match std::path::absolute(path) {
        Ok(whole) if whole.is_dir() => whole.to_string_lossy().into_owned(),
        _ => path.to_owned(),
    })
}

/// The name of the repository whose snapshot in the Hub's cache a path is.
fn name_in_cache(path: &str) -> Option<String> {
    let (before, rest) = path.split_once("/snapshots/")?;
    let is_whole = rest.trim_end_matches('/').split('/').count() == 1;
    let repository = before.rsplit('/').next()?.strip_prefix("models--")?;
    is_whole.then(|| repository.replacen("--", "/", 1))
}

/// A name on the Hub as it is; of any other path only the end.
pub fn public_name(path: &str) -> String {
    let end = || path.trim_end_matches('/').rsplit('/').next().unwrap_or(path).to_owned();
    hub_name(path).unwrap_or_else(end)
}

/// The name on the Hub that a path is, without its revision.
pub(crate) fn hub_name(path: &str) -> Option<String> {
    if let Some(name) = name_in_cache(path) {
        return Some(name);
    }
    let name = path.split('@').next().unwrap_or(path);
    let is_name = name.matches('/').count() == 1
        && !name.starts_with(['.', '/', '~'])
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c))
        && !Path::new(path).exists();
    is_name.then(|| name.to_owned())
}

/// The lines on the licence in the card of the model that a run starts from; none where it says nothing.
pub(crate) fn licence(folder: &Path) -> String {
    let card = read(folder).ok().flatten().unwrap_or_default();
    let Some((front, _)) = card.strip_prefix("---\n").and_then(|rest| rest.split_once("\n---")) else {
        return String::new();
    };
    let root = Reader::new(&[]).read_yaml(FILE, front);
    let Some(Tree::Map(entries)) = root.map(|root| root.tree) else { return String::new() };
    let mut lines = String::new();
    for wanted in ["license", "license_name", "license_link"] {
        let found = entries.iter().find(|(key, _)| key.name == wanted).map(|(_, value)| &value.tree);
        let Some(Tree::Scalar { text, .. }) = found else { continue };
        let is_plain = text.chars().count() <= MOST_OF_LICENCE && options::visible(text) == *text;
        if is_plain && !text.contains(['\n', '\t']) {
            // A text of JSON is one of YAML.
            let _ = writeln!(lines, "{wanted}: {}", Value::from(text.as_str()));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_folder_of_this_machine_is_named() {
        assert_eq!(public_name("/srv/me/secret/model/"), "model");
        assert_eq!(public_name("s3://bucket/x/data.jsonl"), "data.jsonl");
        assert_eq!(public_name("Qwen/Qwen3-0.6B"), "Qwen/Qwen3-0.6B");
        assert_eq!(public_name("owner/set@main"), "owner/set");
        let cached = "/users/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/0123abc/";
        assert_eq!((public_name(cached), base_name(cached)), ("Qwen/Qwen3-0.6B".into(), "Qwen/Qwen3-0.6B".into()));
        assert_eq!(base_name("/srv/me/model"), "/srv/me/model");
        assert_eq!(base_name("owner/name"), "owner/name");
        // Tests run in the folder of their crate.
        assert_eq!(base_name("src"), std::env::current_dir().unwrap().join("src").to_string_lossy());
    }

    #[test]
    fn the_licence_is_that_of_the_model_and_a_card_follows_a_merge() {
        let place = tempfile::tempdir().unwrap();
        assert_eq!(licence(place.path()), "");
        let text = "---\nlicense: apache-2.0\ntags:\n- x\n---\nlicense: no\n";
        std::fs::write(place.path().join(FILE), text).unwrap();
        assert_eq!(licence(place.path()), "license: \"apache-2.0\"\n");
        for (front, expected) in [
            ("license: mit\rbase_model: evil/model\rtags:\r- injected", "license: \"mit\"\n"),
            ("license: [\nlicense_link: 'x\u{1b}[2J'", ""),
            (
                "license: other\nlicense_link: \"x\\e[2J\"\nlicense_name: 'a: \"b\"'",
                concat!("license: \"other\"\n", "license_name: \"a: \\\"b\\\"\"\n"),
            ),
            ("license: |\n  a\n  ---\n  b", ""),
            ("license: [mit]\nlicense_name: {a: b}", ""),
            ("license: &a mit\nlicense_name: *a", "license: \"mit\"\nlicense_name: \"mit\"\n"),
        ] {
            std::fs::write(place.path().join(FILE), format!("---\n{front}\n---\n")).unwrap();
            assert_eq!(licence(place.path()), expected, "{front:?}");
        }
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        hand_on(from.path(), Form::Merged, to.path()).unwrap();
        assert!(!to.path().join(FILE).exists());
        let text = format!("---\nlibrary_name: peft\n---\n{} by", Form::Adapter.sentence());
        std::fs::write(from.path().join(FILE), text).unwrap();
        hand_on(from.path(), Form::Merged, to.path()).unwrap();
        let merged = std::fs::read_to_string(to.path().join(FILE)).unwrap();
        assert_eq!(merged, format!("---\nlibrary_name: transformers\n---\n{} by", Form::Merged.sentence()));
    }
}
