//! Files and folders that this process is writing under temporary names: an end at once removes them.
//!
//! Knows paths; not what is written.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

static PATHS: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn paths() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    PATHS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file or folder that has no name of its own yet. Dropped, it is left to its owner.
#[derive(Debug)]
pub struct InMaking(PathBuf);

impl InMaking {
    /// Notes a path that this process alone writes to.
    pub fn new(path: &Path) -> InMaking {
        // The process may change its folder.
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        paths().insert(path.clone());
        InMaking(path)
    }
}

impl Drop for InMaking {
    fn drop(&mut self) {
        paths().remove(&self.0);
    }
}

/// Removes everything that is noted, before the process ends: what other threads write meanwhile is lost.
pub fn remove_all() {
    for path in std::mem::take(&mut *paths()) {
        let is_folder = fs::symlink_metadata(&path).is_ok_and(|data| data.is_dir());
        let _ = if is_folder { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_at_once_removes_what_has_no_name_yet_and_nothing_else() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        fs::create_dir(at("folder")).unwrap();
        for name in ["folder/part", "file", "done", "other"] {
            fs::write(at(name), "x").unwrap();
        }
        let _kept = [InMaking::new(&at("folder")), InMaking::new(&at("file")), InMaking::new(&at("gone"))];
        drop(InMaking::new(&at("done")));
        remove_all();
        assert_eq!(["folder", "file", "done", "other"].map(|name| at(name).exists()), [false, false, true, true]);
    }
}
