//! Files that save work at the next start: compiled kernels, cuDNN's plans, chosen algorithms.
//!
//! Entries are bytes under a name that says everything they depend on; a damaged one counts as
//! absent, and is remembered so that it can be told. What the bytes mean is not known here.

use crate::error::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

const MAGIC: &[u8; 8] = b"SGCUDA02";

/// A folder of entries. Without a folder nothing is kept between processes. Clones share what they remember.
#[derive(Clone, Debug, Default)]
pub struct DiskCache {
    folder: Option<PathBuf>,
    damaged: Arc<Mutex<Vec<PathBuf>>>,
}

impl DiskCache {
    /// The folder is made at the first write.
    pub fn new(folder: Option<PathBuf>) -> DiskCache {
        DiskCache { folder, damaged: Arc::default() }
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
        let path = self.folder.as_ref()?.join(name);
        let found = decode(name, &std::fs::read(&path).ok()?);
        if found.is_none() {
            self.remembered().push(path);
        }
        found
    }

    /// Entries that were there and not whole, each told once.
    pub fn take_damaged(&self) -> Vec<PathBuf> {
        std::mem::take(&mut self.remembered())
    }

    fn remembered(&self) -> std::sync::MutexGuard<'_, Vec<PathBuf>> {
        self.damaged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// (entries, bytes) of a cache's folder; none where there is no such folder.
    pub fn size_of(folder: &Path) -> Option<(usize, u64)> {
        let files = std::fs::read_dir(folder).ok()?.filter_map(|entry| entry.ok()?.metadata().ok());
        Some(files.filter(std::fs::Metadata::is_file).fold((0, 0), |(count, bytes), of| (count + 1, bytes + of.len())))
    }

    /// Replaces the entry. Readers see the old one or the new one, never half of it.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let path = folder.join(name);
        replace(&path, &encode(name, bytes)).map_err(|e| Error::Cache { path, reason: e.to_string() })
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

fn encode(name: &str, bytes: &[u8]) -> Vec<u8> {
    [MAGIC.as_slice(), &check(name, bytes), bytes].concat()
}

/// `None` when the entry is not whole, or was written under another name.
fn decode(name: &str, entry: &[u8]) -> Option<Vec<u8>> {
    let (hash, bytes) = entry.strip_prefix(MAGIC)?.split_at_checked(blake3::OUT_LEN)?;
    (check(name, bytes) == hash).then(|| bytes.to_vec())
}

fn check(name: &str, bytes: &[u8]) -> [u8; blake3::OUT_LEN] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(name.len() as u64).to_le_bytes()).update(name.as_bytes()).update(bytes);
    *hasher.finalize().as_bytes()
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
        let entry = encode("a", b"machine code");
        assert_eq!(decode("a", &entry).as_deref(), Some(&b"machine code"[..]));
        assert_eq!(decode("b", &entry), None, "an entry of another name");
        let mut flipped = entry.clone();
        *flipped.last_mut().unwrap() ^= 1;
        assert_eq!(decode("a", &flipped), None);
        assert_eq!(decode("a", &entry[..entry.len() - 1]), None);
        assert_eq!(decode("a", MAGIC), None);
        assert_eq!(decode("a", b""), None);
    }

    #[test]
    fn a_damaged_entry_is_told_once_and_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let cache = DiskCache::new(Some(folder.path().to_owned()));
        cache.write("a.plan", b"one").unwrap();
        let path = folder.path().join("a.plan");
        std::fs::write(&path, b"half of on").unwrap();
        let clone = cache.clone();
        assert_eq!(clone.read("a.plan"), None);
        assert_eq!(cache.read("absent.plan"), None);
        assert_eq!(cache.take_damaged(), [path]);
        assert!(cache.take_damaged().is_empty());
        cache.write("a.plan", b"two").unwrap();
        assert_eq!(cache.read("a.plan").as_deref(), Some(&b"two"[..]));
        assert_eq!(DiskCache::size_of(folder.path()).unwrap().0, 1, "nothing is left beside the entry");
    }

    #[test]
    fn writers_side_by_side_leave_whole_entries() {
        let folder = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for writer in 0..4u8 {
                let cache = DiskCache::new(Some(folder.path().to_owned()));
                scope.spawn(move || {
                    for round in 0..50 {
                        cache.write("shared.cubin", &vec![writer; 1000 + round]).unwrap();
                        let read = cache.read("shared.cubin").expect("one of the writers' entries");
                        assert!(read.iter().all(|byte| *byte == read[0]));
                    }
                    assert!(cache.take_damaged().is_empty());
                });
            }
        });
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
