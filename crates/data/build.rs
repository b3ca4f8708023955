//! Gives the crate a digest of its own sources and of the versions it is built with, as `DATA_SOURCES`: rows that other
//! code encoded are not taken for rows that this code would encode.
//!
//! Knows files as bytes.

use std::fs;
use std::path::{Path, PathBuf};

/// Versions of the libraries; absent where the crate is built outside of its workspace.
const VERSIONS: &str = "../../Cargo.lock";

fn main() {
    let mut files = Vec::new();
    collect(Path::new("src"), &mut files);
    files.sort();
    if Path::new(VERSIONS).is_file() {
        files.push(PathBuf::from(VERSIONS));
        println!("cargo:rerun-if-changed={VERSIONS}");
    }
    println!("cargo:rerun-if-changed=src");
    let mut digest = blake3::Hasher::new();
    // Each part with its length.
    let mut add = |bytes: &[u8]| {
        digest.update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
    };
    for file in files {
        add(file.to_string_lossy().as_bytes());
        add(&fs::read(&file).unwrap_or_else(|e| panic!("cannot read {}: {e}", file.display())));
    }
    println!("cargo:rustc-env=DATA_SOURCES={}", digest.finalize().to_hex());
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap_or_else(|e| panic!("cannot list {}: {e}", folder.display())) {
        let path = entry.unwrap_or_else(|e| panic!("cannot list {}: {e}", folder.display())).path();
        if path.is_dir() { collect(&path, files) } else { files.push(path) }
    }
}
