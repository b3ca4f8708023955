//! Values that were computed from rows and weights, kept for later runs in a file each, next to the encoded rows:
//!
//! ```text
//! FOLDER/KEY.values       digest of what follows, and a new line; the content
//! ```
//!
//! A file appears by renaming, whole or not at all; one that is damaged, or that others can write, is not read.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::RowCache;
use super::files::{ENDING, private, replace};

fn digest(key: &str, content: &[u8]) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(key.as_bytes()).update(b"\n").update(content);
    hasher.finalize().to_hex().to_string()
}

impl RowCache {
    pub(super) fn values_path(&self, key: &str) -> PathBuf {
        self.folder.join(format!("{}.{ENDING}", blake3::hash(key.as_bytes()).to_hex()))
    }

    /// Returns the content that was kept under this key, if there is any and it is whole.
    pub fn values(&self, key: &str) -> Option<Vec<u8>> {
        let path = self.values_path(key);
        let bytes = options::cache::read_trusted(&path)?;
        let at = bytes.iter().position(|byte| *byte == b'\n')?;
        let content = &bytes[at + 1..];
        if bytes[..at] != *digest(key, content).as_bytes() {
            return None;
        }
        mark_as_used(&path);
        Some(content.to_vec())
    }

    /// Keeps content under a key. Errors: the folder cannot be written.
    pub fn keep_values(&self, key: &str, content: &[u8]) -> io::Result<()> {
        private().recursive(true).create(&self.folder)?;
        self.clear_unused();
        replace(&self.values_path(key), |file| {
            writeln!(file, "{}", digest(key, content))?;
            file.write_all(content)?;
            file.sync_data()
        })
    }
}

/// Sets the time of use; without the right to write, none is kept.
pub(super) fn mark_as_used(path: &Path) {
    let _ = fs::File::options().append(true).open(path).and_then(|file| file.set_modified(SystemTime::now()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read_under_their_key_while_they_are_whole() {
        let place = tempfile::tempdir().unwrap();
        let cache = RowCache::new(place.path().join("rows"));
        assert_eq!(cache.values("a"), None);
        cache.keep_values("a", b"first\n").unwrap();
        cache.keep_values("a", b"second\n").unwrap();
        cache.keep_values("b", b"").unwrap();
        assert_eq!(cache.values("a").as_deref(), Some(&b"second\n"[..]));
        assert_eq!(cache.values("b").as_deref(), Some(&b""[..]));
        assert_eq!(cache.values("c"), None);

        let (first, second) = (cache.values_path("a"), cache.values_path("c"));
        fs::copy(&first, &second).unwrap();
        assert_eq!(cache.values("c"), None, "the content of another key");
        let mut bytes = fs::read(&first).unwrap();
        bytes.pop();
        fs::write(&first, bytes).unwrap();
        assert_eq!(cache.values("a"), None, "a part of the content");
        assert_eq!(fs::read_dir(cache.folder()).unwrap().count(), 3, "no temporary file stays");
    }
}
