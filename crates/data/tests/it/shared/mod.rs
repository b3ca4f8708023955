//! Finds the reference assets next to the checkout and unpacks tokenizers; knows nothing of what is tested.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

/// The folder `shared/assets` next to the checkout.
pub fn assets() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(3).expect("the repository lies in a folder");
    let folder = root.join("shared/assets");
    assert!(folder.is_dir(), "there is no {}", folder.display());
    folder
}

/// A tokenizer folder; one with a packed tokenizer.json is unpacked to `scratch`.
pub fn tokenizer_folder(source: &Path, scratch: &Path) -> PathBuf {
    let packed = source.join("tokenizer.json.gz");
    if !packed.is_file() {
        return source.to_owned();
    }
    let target = scratch.join(source.file_name().unwrap());
    fs::create_dir_all(&target).unwrap();
    for entry in fs::read_dir(source).unwrap() {
        let file = entry.unwrap().path();
        let bytes = fs::read(&file).unwrap();
        if file != packed {
            File::create(target.join(file.file_name().unwrap())).unwrap().write_all(&bytes).unwrap();
        }
    }
    let mut text = Vec::new();
    flate2::read::GzDecoder::new(File::open(&packed).unwrap()).read_to_end(&mut text).unwrap();
    fs::write(target.join("tokenizer.json"), text).unwrap();
    target
}

/// The lines of a JSON-lines file.
pub fn json_lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().filter(|line| !line.trim().is_empty()).map(|line| serde_json::from_str(line).unwrap()).collect()
}
