//! The cache key of encoded rows: the content of the files, the tokenizer, every relevant option, and this code.
//!
//! Knows no cache folder. A new option does not compile here until it is marked as relevant or not.

use std::io;
use std::path::{Path, PathBuf, absolute};

use super::stamp::KnownFiles;
use crate::dataset::DatasetSpec;
use crate::prepare_options::PrepareOptions;
use crate::rows;

/// The key of one dataset's rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    /// Everything that matters, a line each.
    pub text: String,
    /// Digest of the key's text: the name of the entry.
    pub digest: String,
}

/// Errors: a file cannot be read.
pub(super) fn key(
    spec: &DatasetSpec,
    files: &[PathBuf],
    tokenizer: Option<&str>,
    options: &PrepareOptions,
    known: &KnownFiles,
) -> io::Result<Key> {
    // What the set is called, and which of a folder's files it is, shows in the files.
    let DatasetSpec { path: _, files: _, subset: _, split: _, kind, samples, shard, row_limit } = spec;
    // Threads and advice do not change rows.
    let PrepareOptions { max_length, truncation, vocab_size, workers: _, positions: _, dialogue, preference } = options;
    let mut text = format!("encoded by {}\n", env!("DATA_SOURCES"));
    for file in files {
        text += &format!("file {} {}\n", form(file), known.digest(file)?);
    }
    text += &format!("rows {samples:?} {shard:?} {row_limit:?} {kind:?}\n");
    text += &format!("tokenizer {}\n", tokenizer.unwrap_or("none"));
    text += &format!("length {max_length} {truncation:?}\nvocabulary {vocab_size}\ndialogue {dialogue:?}\n");
    text += &format!("preference {preference:?}\n");
    if dialogue.images.is_some() {
        // Relative paths of images mean other files elsewhere.
        for folder in files.iter().filter_map(|file| file.parent()) {
            text += &format!("images of {folder:?} {:?}\n", absolute(folder.join("."))?);
        }
    }
    let digest = blake3::hash(text.as_bytes()).to_hex().to_string();
    Ok(Key { text, digest })
}

/// The format that a file is read in, chosen by its name.
fn form(file: &Path) -> String {
    format!("{:?}", rows::format_of(file))
}
