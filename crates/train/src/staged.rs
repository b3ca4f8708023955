//! Folders that appear whole or not at all: written beside their place, synced, then renamed.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::error::{Result, TrainError};

/// A folder in the making. Dropped without [`Staged::commit`], it leaves nothing behind.
pub struct Staged {
    target: PathBuf,
    temporary: PathBuf,
    committed: bool,
}

impl Staged {
    /// Starts a folder that will be `target`; parents are made. A target that exists is an error
    /// unless it holds a file of one of the names in `replaceable`, or nothing.
    pub fn new(target: &Path, replaceable: &[&str]) -> Result<Staged> {
        let occupied = fs::read_dir(target).is_ok_and(|mut entries| entries.next().is_some());
        if target.is_file() || (occupied && !replaceable.iter().any(|name| target.join(name).is_file())) {
            let text = format!("{} exists and is no earlier result: nothing is overwritten", target.display());
            return Err(TrainError::Usage(text));
        }
        let name = target
            .file_name()
            .ok_or_else(|| TrainError::Usage(format!("{} is no name for a folder", target.display())))?;
        let parent = parent(target);
        fs::create_dir_all(&parent).map_err(|e| TrainError::io("create", &parent, e))?;
        let temporary = parent.join(format!(".{}.{}.tmp", name.to_string_lossy(), std::process::id()));
        let _ = fs::remove_dir_all(&temporary);
        fs::create_dir(&temporary).map_err(|e| TrainError::io("create", &temporary, e))?;
        Ok(Staged { target: target.to_owned(), temporary, committed: false })
    }

    /// Where to write.
    pub fn path(&self) -> &Path {
        &self.temporary
    }

    /// Writes and syncs a small file.
    pub fn write(&self, name: &str, text: &str) -> Result<()> {
        write_synced(&self.temporary.join(name), text.as_bytes())
    }

    /// Gives the folder its name; an earlier result of that name is removed.
    pub fn commit(mut self) -> Result<()> {
        let failed = |action: &'static str, path: &Path| {
            let path = path.to_owned();
            move |e| TrainError::io(action, &path, e)
        };
        sync(&self.temporary)?;
        let old = self.temporary.with_extension("old");
        let had_old = self.target.exists();
        if had_old {
            fs::rename(&self.target, &old).map_err(failed("rename", &self.target))?;
        }
        fs::rename(&self.temporary, &self.target).map_err(failed("rename", &self.temporary))?;
        self.committed = true;
        if had_old {
            fs::remove_dir_all(&old).map_err(failed("remove", &old))?;
        }
        sync(&parent(&self.target))
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.committed {
            let _ = fs::remove_dir_all(&self.temporary);
        }
    }
}

/// The folder that a path lies in.
fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

fn sync(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|f| f.sync_all()).map_err(|e| TrainError::io("sync", folder, e))
}

/// Writes a file and waits until it is on the disk.
pub fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || -> std::io::Result<()> {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|e| TrainError::io("write", path, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_appears_when_it_is_committed() {
        let place = tempfile::tempdir().unwrap();
        let target = place.path().join("a/result");
        let staged = Staged::new(&target, &["mark"]).unwrap();
        staged.write("mark", "1").unwrap();
        assert!(!target.exists());
        staged.commit().unwrap();
        assert_eq!(fs::read_to_string(target.join("mark")).unwrap(), "1");
        drop(Staged::new(&target, &["mark"]).unwrap());
        let again = Staged::new(&target, &["mark"]).unwrap();
        again.write("mark", "2").unwrap();
        again.commit().unwrap();
        assert_eq!(fs::read_to_string(target.join("mark")).unwrap(), "2");
        assert_eq!(fs::read_dir(target.parent().unwrap()).unwrap().count(), 1, "nothing is left over");
    }

    #[test]
    fn foreign_folders_are_not_overwritten() {
        let place = tempfile::tempdir().unwrap();
        fs::write(place.path().join("thesis.tex"), "important").unwrap();
        let error = Staged::new(place.path(), &["config.json"]).err().unwrap();
        assert!(error.to_string().contains("nothing is overwritten"), "{error}");
    }
}
