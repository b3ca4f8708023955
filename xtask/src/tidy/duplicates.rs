//! Crates that are built in several versions: each is here with who asks for it, so that a new one is a decision.
//!
//! Reads `Cargo.lock`, and nothing from a network. Licences of what is linked are checked by `notices.rs`.

use std::collections::BTreeMap;

use super::{File, Finding};

const LOCK: &str = "Cargo.lock";

/// (crate, number of versions, who asks for them). `tokenizers` is there twice on purpose: one decides, one is fast.
const KNOWN: &[(&str, usize, &str)] = &[
    ("tokenizers", 2, "data: 0.23 decides, 1.0 encodes byte-level vocabularies"),
    ("base64", 2, "tokenizers 0.23 (spm_precompiled), tokenizers 1.0"),
    ("getrandom", 3, "tokenizers 0.23; tokenizers 1.0 and tempfile; const-random, a macro"),
    ("hashbrown", 2, "tokenizers 1.0 (mem_dbg), parquet"),
    ("itertools", 3, "tokenizers 0.23, tokenizers 1.0 (ptr_hash), criterion"),
    ("miniz_oxide", 2, "png of image, flate2"),
    ("r-efi", 2, "getrandom for UEFI, not built"),
    ("rand", 2, "tokenizers 0.23, tokenizers 1.0"),
    ("rand_chacha", 2, "tokenizers 0.23, tokenizers 1.0"),
    ("rand_core", 2, "tokenizers 0.23, tokenizers 1.0"),
    ("syn", 2, "older macros (darling, derive_builder, mem_dbg, jiff), newer ones (pyo3, serde)"),
    ("thiserror", 2, "sysctl, which is not for Linux; our own"),
    ("thiserror-impl", 2, "thiserror"),
];

/// Checks the lock file; every other file is passed over.
pub fn check(file: &File) -> Vec<Finding> {
    if file.path != LOCK {
        return Vec::new();
    }
    let known: BTreeMap<&str, usize> = KNOWN.iter().map(|(name, versions, _)| (*name, *versions)).collect();
    compared(&versions(&file.text), &known)
}

/// Versions of each crate of a lock file.
fn versions(lock: &str) -> BTreeMap<&str, Vec<&str>> {
    let mut found: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut name = None;
    for line in lock.lines() {
        if let Some(text) = line.strip_prefix("name = ") {
            name = Some(text.trim_matches('"'));
        }
        // The first line of the file is a version, too, and of no crate.
        if let (Some(text), Some(of)) = (line.strip_prefix("version = "), name) {
            found.entry(of).or_default().push(text.trim_matches('"'));
            name = None;
        }
    }
    found
}

fn compared(found: &BTreeMap<&str, Vec<&str>>, known: &BTreeMap<&str, usize>) -> Vec<Finding> {
    let several = found.iter().filter(|(_, versions)| versions.len() > 1);
    let new = several.filter(|(name, versions)| known.get(*name).is_none_or(|known| *known < versions.len()));
    let new = new.map(|(name, versions)| {
        let versions = versions.join(", ");
        Finding::hard(LOCK, format!("`{name}` is built as {versions}: take one, or say in tidy/duplicates.rs who asks"))
    });
    let gone = known.iter().filter(|(name, versions)| found.get(*name).map_or(0, Vec::len) < **versions);
    let gone = gone.map(|(name, versions)| {
        Finding::hard(LOCK, format!("`{name}` has not {versions} versions any more: correct tidy/duplicates.rs"))
    });
    new.chain(gone).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_version_of_a_crate_is_found_and_one_that_went_too() {
        let lock = "version = 4\n\n[[package]]\nname = \"a\"\nversion = \"1.0.0\"\n\n[[package]]\nname = \"a\"\nversion = \"2.0.0\"\n";
        let found = versions(lock);
        assert_eq!(found["a"], ["1.0.0", "2.0.0"]);
        let reported = |known: &[(&'static str, usize)]| compared(&found, &known.iter().copied().collect()).len();
        assert_eq!((reported(&[]), reported(&[("a", 2)]), reported(&[("a", 1)]), reported(&[("a", 3)])), (1, 0, 1, 1));
        assert_eq!(reported(&[("a", 2), ("b", 2)]), 1);
    }
}
