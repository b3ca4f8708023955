//! Cache files that speed up the next start: compiled kernels, cuDNN plans, chosen algorithms.
//!
//! An entry is bytes under a name that covers everything they depend on. A damaged entry counts as absent and is
//! recorded so that it can be reported. Does not know what the bytes mean.

use options::cache;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

const MAGIC: &[u8; 8] = b"SGCUDA02";

/// A folder of entries. Without a folder, or with one that cannot be used, nothing is kept between processes: no run
/// ends because of its cache. Clones share what they remember.
#[derive(Clone, Debug, Default)]
pub struct DiskCache {
    folder: Option<PathBuf>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    notes: Mutex<Vec<String>>,
    /// True after a failed write: the next would fail, too.
    is_read_only: AtomicBool,
}

impl DiskCache {
    /// Creates the folder, for this user alone. A folder of another user is not used.
    pub fn new(folder: Option<PathBuf>) -> DiskCache {
        let mut made = DiskCache { folder, shared: Arc::default() };
        if let Some(Err(why)) = made.folder.as_deref().map(cache::prepare) {
            made.note(format!("compiled kernels are not kept for the next run: {why}"));
            made.folder = None;
        }
        made
    }

    /// Opens the cache in the user's own folder, if there is a place for it.
    pub fn of_user() -> DiskCache {
        match DiskCache::default_folder() {
            Ok(folder) => DiskCache::new(Some(folder)),
            Err(why) => {
                let nowhere = DiskCache::default();
                nowhere.note(format!("compiled kernels are not kept for the next run: {why}"));
                nowhere
            }
        }
    }

    /// `$XDG_CACHE_HOME/surogate/cuda`, else `~/.cache/surogate/cuda`; the error says why there is no such place.
    pub fn default_folder() -> Result<PathBuf, String> {
        cache::folder_of_user("cuda")
    }

    /// Returns the entry, if it exists, is whole, and belongs to this user.
    pub fn read(&self, name: &str) -> Option<Vec<u8>> {
        let path = self.folder.as_ref()?.join(name);
        let data = std::fs::symlink_metadata(&path).ok()?;
        let found = cache::read_trusted(&path).and_then(|bytes| decode(name, &bytes));
        if found.is_none() {
            let folder = path.parent().unwrap_or(&path).display();
            self.note(match cache::is_trusted(&data) {
                true => format!("the cached {} was damaged and was made again", path.display()),
                false => format!("entries of the cache {folder} that other users could write were made again"),
            });
        }
        found
    }

    /// Returns the notes for the user, each once.
    pub fn take_notes(&self) -> Vec<String> {
        std::mem::take(&mut self.notes())
    }

    fn note(&self, text: String) {
        self.notes().push(text);
    }

    fn notes(&self) -> std::sync::MutexGuard<'_, Vec<String>> {
        self.shared.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns (entries, bytes) of a cache's folder; `None` where there is no such folder.
    pub fn size_of(folder: &Path) -> Option<(usize, u64)> {
        let files = std::fs::read_dir(folder).ok()?.filter_map(|entry| entry.ok()?.metadata().ok());
        Some(files.filter(std::fs::Metadata::is_file).fold((0, 0), |(count, bytes), of| (count + 1, bytes + of.len())))
    }

    /// Replaces the entry. Readers see the old one or the new one, never half of it. After the first failed write,
    /// which is noted, nothing more is written.
    pub fn write(&self, name: &str, bytes: &[u8]) {
        let Some(folder) = &self.folder else { return };
        if self.shared.is_read_only.load(Ordering::Relaxed) {
            return;
        }
        if let Err(error) = replace(&folder.join(name), &encode(name, bytes))
            && !self.shared.is_read_only.swap(true, Ordering::Relaxed)
        {
            self.note(format!("what was compiled is not kept for the next run: {}: {error}", folder.display()));
        }
    }
}

/// Returns 64 hexadecimal digits. Every part counts with its length, so that no two lists of parts have the same input.
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

/// Replaces a file by renaming a temporary one in the same folder, which is removed on failure. A name that a process with the
/// number of this one has left, as processes of containers do, is passed over.
fn replace(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    static WRITES: AtomicU64 = AtomicU64::new(0);
    let (partial, mut file) = loop {
        let (process, write) = (std::process::id(), WRITES.fetch_add(1, Ordering::Relaxed));
        let partial = path.with_extension(format!("{process}.{write}.partial"));
        match cache::create_new(&partial) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            created => break (partial, created?),
        }
    };
    let replaced = file.write_all(bytes).and_then(|()| std::fs::rename(&partial, path));
    if replaced.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    replaced
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

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
    fn a_damaged_entry_is_reported_once_and_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let cache = DiskCache::new(Some(folder.path().to_owned()));
        cache.write("a.plan", b"one");
        let path = folder.path().join("a.plan");
        // Written by the owner: the permissions of the entry stay.
        std::fs::write(&path, b"half of on").unwrap();
        let clone = cache.clone();
        assert_eq!(clone.read("a.plan"), None);
        assert_eq!(cache.read("absent.plan"), None);
        assert_eq!(cache.take_notes(), [format!("the cached {} was damaged and was made again", path.display())]);
        assert!(cache.take_notes().is_empty());
        cache.write("a.plan", b"two");
        assert_eq!(cache.read("a.plan").as_deref(), Some(&b"two"[..]));
        assert_eq!(DiskCache::size_of(folder.path()).unwrap().0, 1, "nothing but the entry is left");
    }

    #[test]
    fn writers_side_by_side_leave_whole_entries() {
        let folder = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for writer in 0..4u8 {
                let cache = DiskCache::new(Some(folder.path().to_owned()));
                scope.spawn(move || {
                    for round in 0..50 {
                        cache.write("shared.cubin", &vec![writer; 1000 + round]);
                        let read = cache.read("shared.cubin").expect("one of the writers' entries");
                        assert!(read.iter().all(|byte| *byte == read[0]));
                    }
                    assert!(cache.take_notes().is_empty());
                });
            }
        });
    }

    #[test]
    fn entries_are_kept_where_there_is_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let cache = DiskCache::new(Some(folder.path().join("made/later")));
        assert_eq!(cache.read("a.plan"), None);
        cache.write("a.plan", b"one");
        // A process of a container has the number of the one before it, which was killed.
        for write in 0..1000 {
            let left = folder.path().join(format!("made/later/a.{}.{write}.partial", std::process::id()));
            std::fs::write(left, "left").unwrap();
        }
        cache.write("a.plan", b"two");
        assert!(cache.take_notes().is_empty());
        assert_eq!(cache.read("a.plan").as_deref(), Some(&b"two"[..]));
        let nowhere = DiskCache::default();
        nowhere.write("a.plan", b"one");
        assert_eq!(nowhere.read("a.plan"), None);
    }

    #[test]
    fn what_others_can_write_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let cache = DiskCache::new(Some(folder.path().to_owned()));
        cache.write("a.cubin", b"code");
        let path = folder.path().join("a.cubin");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(cache.read("a.cubin"), None);
        assert!(cache.take_notes()[0].ends_with("that other users could write were made again"));
        cache.write("a.cubin", b"code");
        assert_eq!(cache.read("a.cubin").as_deref(), Some(&b"code"[..]));
    }

    #[test]
    fn a_cache_that_cannot_be_used_is_reported_once_and_ends_nothing() {
        let place = tempfile::tempdir().unwrap();
        std::fs::write(place.path().join("file"), "").unwrap();
        let cache = DiskCache::new(Some(place.path().join("file/cuda")));
        cache.write("a.cubin", b"code");
        let notes = cache.take_notes();
        assert!(notes.len() == 1 && notes[0].starts_with("compiled kernels are not kept"), "{notes:?}");
        // Writing fails for every user, root too, if the folder is gone.
        let cache = DiskCache::new(Some(place.path().join("cuda")));
        std::fs::remove_dir(place.path().join("cuda")).unwrap();
        cache.write("a.cubin", b"code");
        cache.clone().write("b.cubin", b"code");
        let notes = cache.take_notes();
        assert!(notes.len() == 1 && notes[0].starts_with("what was compiled is not kept"), "{notes:?}");
        assert_eq!(cache.read("a.cubin"), None);
    }

    #[test]
    fn parts_do_not_run_together() {
        assert_ne!(digest(&[b"ab", b"c"]), digest(&[b"a", b"bc"]));
        assert_eq!(digest(&[b"ab", b"c"]), digest(&[b"ab", b"c"]));
    }
}
