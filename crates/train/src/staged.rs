//! Folders that appear whole or not at all: written beside their place, synced, then renamed. What
//! somebody else put there is never replaced.
//!
//! Knows folders and who wrote them; not what a result or a checkpoint consists of.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::error::{Result, TrainError};

/// Files by which a folder's kind is told.
const KINDS: &[(&str, &str)] = &[
    ("manifest.json", "a run"),
    ("state.json", "a checkpoint"),
    ("adapter_config.json", "an adapter"),
    ("config.json", "a model"),
];

/// Names that are listed of what stands in the way.
const LISTED: usize = 3;

/// The folders that one trainer wrote, as they were when they appeared. Only these may be replaced or
/// removed; one that was changed since is no longer the trainer's.
#[derive(Debug, Default)]
pub struct Written(Vec<Folder>);

#[derive(Debug, PartialEq)]
struct Folder {
    path: PathBuf,
    /// File system and inode: another folder that took the name is another folder.
    identity: (u64, u64),
    names: BTreeSet<OsString>,
}

impl Folder {
    fn read(path: &Path) -> io::Result<Folder> {
        let data = fs::symlink_metadata(path)?;
        Ok(Folder { path: path.canonicalize()?, identity: (data.dev(), data.ino()), names: names(path)? })
    }
}

impl Written {
    /// Starts a folder that will be `target`; parents are made. What is there already is an error,
    /// unless it is empty or was written by this trainer.
    pub fn stage(&self, target: &Path) -> Result<Staged> {
        let name = target
            .file_name()
            .ok_or_else(|| TrainError::Usage(format!("{} is no name for a folder", target.display())))?;
        self.check(target)?;
        let parent = parent(target);
        fs::create_dir_all(&parent).map_err(|e| TrainError::io("create", &parent, e))?;
        let mut attempt = 0;
        loop {
            let beside = format!(".{}.{}.{attempt}.tmp", name.to_string_lossy(), std::process::id());
            let temporary = parent.join(beside);
            match fs::create_dir(&temporary) {
                Ok(()) => return Ok(Staged { target: target.to_owned(), temporary, committed: false }),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => attempt += 1,
                Err(error) => return Err(TrainError::io("create", &temporary, error)),
            }
        }
    }

    /// Whether a folder is there that has to be replaced; an error if it is not this trainer's.
    fn check(&self, target: &Path) -> Result<bool> {
        match occupant(target)? {
            None => Ok(false),
            Some(_) if self.holds(target) => Ok(true),
            Some(found) => Err(TrainError::Usage(format!(
                "{} is {found}, expected nothing, an empty folder, or a folder as this trainer wrote it: nothing is \
                 overwritten\n  hint: choose another path, or move away what is there",
                target.display()
            ))),
        }
    }

    /// Whether a folder is there as this trainer wrote it.
    fn holds(&self, path: &Path) -> bool {
        Folder::read(path).is_ok_and(|found| self.0.contains(&found))
    }

    /// The folders that are still there as they were written, oldest first.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.0.iter().filter(|folder| self.holds(&folder.path)).map(|folder| folder.path.clone()).collect()
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let folder = Folder::read(path).map_err(|e| TrainError::io("read", path, e))?;
        self.0.retain(|known| known.path != folder.path);
        self.0.push(folder);
        Ok(())
    }
}

/// What stands at a path, in words; nothing and an empty folder are none.
pub fn occupant(path: &Path) -> Result<Option<String>> {
    let failed = |e| TrainError::io("read", path, e);
    let data = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        data => data.map_err(failed)?,
    };
    if data.is_symlink() {
        return Ok(Some("a link".to_owned()));
    }
    if !data.is_dir() {
        return Ok(Some("a file".to_owned()));
    }
    let names = names(path).map_err(failed)?;
    if names.is_empty() {
        return Ok(None);
    }
    let kind = KINDS.iter().find(|(mark, _)| names.contains(&OsString::from(mark)));
    let kind = kind.map_or("a folder that is not empty", |(_, kind)| kind);
    let listed: Vec<String> = names.iter().take(LISTED).map(|name| format!("`{}`", name.to_string_lossy())).collect();
    let more = match names.len().saturating_sub(LISTED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    Ok(Some(format!("{kind} ({}{more})", listed.join(", "))))
}

fn names(folder: &Path) -> io::Result<BTreeSet<OsString>> {
    fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name())).collect()
}

/// A folder in the making. Dropped without [`Staged::commit`], it leaves nothing behind.
#[derive(Debug)]
pub struct Staged {
    target: PathBuf,
    temporary: PathBuf,
    committed: bool,
}

impl Staged {
    /// Where to write.
    pub fn path(&self) -> &Path {
        &self.temporary
    }

    /// Writes and syncs a small file.
    pub fn write(&self, name: &str, text: &str) -> Result<()> {
        write_synced(&self.temporary.join(name), text.as_bytes())
    }

    /// Gives the folder its name. An earlier folder of the same trainer is exchanged for it and
    /// removed; an error if something else has come there meanwhile.
    pub fn commit(mut self, written: &mut Written) -> Result<()> {
        sync(&self.temporary)?;
        let replaces = written.check(&self.target)?;
        if replaces { exchange(&self.temporary, &self.target) } else { fs::rename(&self.temporary, &self.target) }
            .map_err(|e| TrainError::io("write", &self.target, e))?;
        self.committed = true;
        sync(&parent(&self.target))?;
        written.add(&self.target)?;
        if replaces {
            fs::remove_dir_all(&self.temporary).map_err(|e| TrainError::io("remove", &self.temporary, e))?;
        }
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.committed {
            let _ = fs::remove_dir_all(&self.temporary);
        }
    }
}

/// Exchanges two folders in one step. A file system that has no such step gets three renames, of which
/// the first is taken back if the second fails.
fn exchange(new: &Path, old: &Path) -> io::Result<()> {
    match renameat_with(CWD, new, CWD, old, RenameFlags::EXCHANGE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => exchange_by_renames(new, old),
        result => Ok(result?),
    }
}

fn exchange_by_renames(new: &Path, old: &Path) -> io::Result<()> {
    let aside = new.with_extension("old");
    fs::rename(old, &aside)?;
    if let Err(error) = fs::rename(new, old) {
        fs::rename(&aside, old)?;
        return Err(error);
    }
    fs::rename(&aside, new)
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
    let write = || -> io::Result<()> {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|e| TrainError::io("write", path, e))
}

/// Gives a small file new content in one step: a reader finds the old or the new, never a part.
pub fn replace_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    write_synced(&temporary, bytes)?;
    fs::rename(&temporary, path).map_err(|e| TrainError::io("write", path, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(written: &mut Written, target: &Path, text: &str) -> Result<()> {
        let staged = written.stage(target)?;
        staged.write("config.json", text)?;
        staged.commit(written)
    }

    fn read(target: &Path) -> String {
        fs::read_to_string(target.join("config.json")).unwrap()
    }

    #[test]
    fn a_folder_appears_when_it_is_committed() {
        let place = tempfile::tempdir().unwrap();
        let target = place.path().join("a/result");
        let mut written = Written::default();
        let staged = written.stage(&target).unwrap();
        staged.write("config.json", "1").unwrap();
        assert!(!target.exists());
        staged.commit(&mut written).unwrap();
        assert_eq!(read(&target), "1");
        drop(written.stage(&target).unwrap());
        write(&mut written, &target, "2").unwrap();
        assert_eq!(read(&target), "2");
        assert_eq!(names(target.parent().unwrap()).unwrap().len(), 1, "nothing is left over");
        assert_eq!(written.paths(), [target.canonicalize().unwrap()]);
    }

    #[test]
    fn what_others_wrote_survives() {
        let place = tempfile::tempdir().unwrap();
        let target = place.path().join("model");
        write(&mut Written::default(), &target, "theirs").unwrap();
        let mut written = Written::default();
        let error = write(&mut written, &target, "mine").unwrap_err().to_string();
        assert!(error.contains("model is a model (`config.json`), expected nothing") && error.contains("hint: "));
        assert_eq!(read(&target), "theirs");

        for name in ["thesis.tex", "file", "link"] {
            let path = place.path().join(name);
            match name {
                "file" => fs::write(&path, "important").unwrap(),
                "link" => std::os::unix::fs::symlink(&target, &path).unwrap(),
                _ => fs::create_dir(&path).and_then(|()| fs::write(path.join(name), "important")).unwrap(),
            }
            let error = write(&mut written, &path, "mine").unwrap_err();
            assert!(error.exit_code() == 2 && error.to_string().contains("nothing is overwritten"), "{error}");
        }
        assert_eq!(fs::read_to_string(place.path().join("thesis.tex/thesis.tex")).unwrap(), "important");
        assert_eq!(names(place.path()).unwrap().len(), 4, "nothing is left over");
    }

    #[test]
    fn what_was_changed_since_or_comes_meanwhile_survives() {
        let place = tempfile::tempdir().unwrap();
        let target = place.path().join("model");
        let (mut mine, mut theirs) = (Written::default(), Written::default());
        write(&mut mine, &target, "mine").unwrap();
        fs::rename(&target, place.path().join("kept")).unwrap();
        write(&mut theirs, &target, "theirs").unwrap();
        assert!(write(&mut mine, &target, "again").is_err(), "the name is mine, the folder is not");
        fs::write(target.join("notes.txt"), "by hand").unwrap();
        assert!(write(&mut theirs, &target, "again").is_err(), "somebody has put a file into it");
        assert_eq!((read(&target), read(&place.path().join("kept"))), ("theirs".into(), "mine".into()));

        let late = place.path().join("late");
        let staged = mine.stage(&late).unwrap();
        write(&mut theirs, &late, "theirs").unwrap();
        assert!(staged.commit(&mut mine).is_err());
        assert_eq!(read(&late), "theirs");
    }

    #[test]
    fn folders_are_exchanged_without_help_of_the_file_system() {
        let place = tempfile::tempdir().unwrap();
        let (new, old) = (place.path().join("new.tmp"), place.path().join("old"));
        for path in [&new, &old] {
            fs::create_dir(path).unwrap();
            fs::write(path.join("config.json"), path.file_name().unwrap().to_str().unwrap()).unwrap();
        }
        exchange_by_renames(&new, &old).unwrap();
        assert_eq!((read(&new).as_str(), read(&old).as_str()), ("old", "new.tmp"));
        fs::remove_dir_all(&new).unwrap();
        assert!(exchange_by_renames(&new, &old).is_err());
        assert_eq!(read(&old), "new.tmp", "the old folder is back in its place");
    }
}
