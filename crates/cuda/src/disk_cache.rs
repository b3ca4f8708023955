//! Files that save work at the next start: compiled kernels, cuDNN's plans, chosen algorithms.
//!
//! Entries are bytes under a name that says everything they depend on; a damaged one counts as
//! absent. What the bytes mean is not known here.

use crate::error::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

const MAGIC: &[u8; 8] = b"SGCUDA01";

/// A folder of entries. Without a folder nothing is kept between processes.
#[derive(Clone, Debug, Default)]
pub struct DiskCache {
    folder: Option<PathBuf>,
}

impl DiskCache {
    /// The folder is made at the first write.
    pub fn new(folder: Option<PathBuf>) -> DiskCache {
        DiskCache { folder }
    }

    /// `$XDG_CACHE_HOME/surogate/cuda`, else `~/.cache/surogate/cuda`.
    pub fn default_folder() -> Option<PathBuf> {
        let base = std::env::var_os("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?;
        Some(base.join("surogate").join("cuda"))
    }

    /// The entry, if it is there and whole.
    pub fn read(&self, name: &str) -> Option<Vec<u8>> {
        decode(&std::fs::read(self.folder.as_ref()?.join(name)).ok()?)
    }

    /// Replaces the entry. Readers see the old one or the new one, never half of it.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let path = folder.join(name);
        replace(&path, &encode(bytes)).map_err(|e| Error::Cache { path, reason: e.to_string() })
    }
}

/// 64 hexadecimal digits. Every part counts with its length, so no two lists run together.
pub fn digest(parts: &[&[u8]]) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize().to_hex().to_string()
}

fn encode(bytes: &[u8]) -> Vec<u8> {
    [MAGIC.as_slice(), blake3::hash(bytes).as_bytes(), bytes].concat()
}

/// `None` when the entry is not whole.
fn decode(entry: &[u8]) -> Option<Vec<u8>> {
    let (hash, bytes) = entry.strip_prefix(MAGIC)?.split_at_checked(blake3::OUT_LEN)?;
    (blake3::hash(bytes).as_bytes() == hash).then(|| bytes.to_vec())
}

/// Through a file of its own name in the same folder.
fn replace(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    std::fs::create_dir_all(path.parent().expect("an entry lies in the cache's folder"))?;
    static WRITES: AtomicU64 = AtomicU64::new(0);
    let (process, write) = (std::process::id(), WRITES.fetch_add(1, Ordering::Relaxed));
    let partial = path.with_extension(format!("{process}.{write}.partial"));
    std::fs::write(&partial, bytes)?;
    std::fs::rename(&partial, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_entries_are_not_used() {
        let entry = encode(b"machine code");
        assert_eq!(decode(&entry).as_deref(), Some(&b"machine code"[..]));
        let mut flipped = entry.clone();
        *flipped.last_mut().unwrap() ^= 1;
        assert_eq!(decode(&flipped), None);
        assert_eq!(decode(&entry[..entry.len() - 1]), None);
        assert_eq!(decode(MAGIC), None);
        assert_eq!(decode(b""), None);
    }

    #[test]
    fn entries_are_kept_where_there_is_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let cache = DiskCache::new(Some(folder.path().join("made/later")));
        assert_eq!(cache.read("a.plan"), None);
        cache.write("a.plan", b"one").unwrap();
        cache.write("a.plan", b"two").unwrap();
        assert_eq!(cache.read("a.plan").as_deref(), Some(&b"two"[..]));
        let nowhere = DiskCache::default();
        nowhere.write("a.plan", b"one").unwrap();
        assert_eq!(nowhere.read("a.plan"), None);
    }

    #[test]
    fn parts_do_not_run_together() {
        assert_ne!(digest(&[b"ab", b"c"]), digest(&[b"a", b"bc"]));
        assert_eq!(digest(&[b"ab", b"c"]), digest(&[b"ab", b"c"]));
    }
}
