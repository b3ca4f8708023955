//! The folders that a run wrote: which may be replaced or removed, by this process and by one that resumes the run
//! later. Files of others are never touched.
//!
//! Knows folders and who wrote them; not what a result or a checkpoint contains.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Result, TrainError};
use crate::files::digest;

/// Files by which a folder's kind is reported.
const KINDS: &[(&str, &str)] = &[
    ("manifest.json", "a run"),
    ("state.json", "a checkpoint"),
    ("adapter_config.json", "an adapter"),
    ("config.json", "a model"),
];

/// Names that are listed of what stands in the way.
const LISTED: usize = 3;

/// The folders that one run wrote, as they were when they appeared, oldest first. Only these may be
/// replaced or removed; one that was changed since is no longer the run's.
#[derive(Debug, Default)]
pub struct Written {
    /// The run: part of the name of everything that is in progress.
    pub owner: String,
    folders: Vec<Folder>,
}

/// A manifest's entry of a folder, for a later process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Absolute path of the folder.
    pub path: PathBuf,
    /// See [`digest::of_folder`].
    pub digest: String,
}

#[derive(Debug, PartialEq)]
struct Folder {
    path: PathBuf,
    /// File system and inode: another folder that took the name is another folder.
    identity: (u64, u64),
    names: BTreeSet<OsString>,
    digest: String,
}

impl Folder {
    fn read(path: &Path, digest: String) -> io::Result<Folder> {
        let data = fs::symlink_metadata(path)?;
        Ok(Folder { path: path.canonicalize()?, identity: (data.dev(), data.ino()), names: names(path)?, digest })
    }

    /// True if the folder is there, unchanged.
    fn stands(&self) -> bool {
        Folder::read(&self.path, self.digest.clone()).is_ok_and(|found| found == *self)
    }

    fn record(&self) -> Record {
        Record { path: self.path.clone(), digest: self.digest.clone() }
    }
}

impl Written {
    /// Nothing yet, of the run with this id.
    pub fn by(owner: &str) -> Written {
        Written { owner: owner.to_owned(), folders: Vec::new() }
    }

    /// Takes back what an earlier process of the run wrote: of the folders in its records those that are
    /// still as they were.
    pub fn take_back(&mut self, records: &[Record]) -> Result<()> {
        for record in records {
            let failed = |e| TrainError::io("read", &record.path, e);
            let is_folder = match fs::symlink_metadata(&record.path) {
                Err(error) if error.kind() == ErrorKind::NotFound => false,
                data => data.map_err(failed)?.is_dir(),
            };
            if is_folder && digest::of_folder(&record.path).map_err(failed)? == record.digest {
                self.add(&record.path, record.digest.clone())?;
            }
        }
        Ok(())
    }

    /// True if a folder is there that has to be replaced; an error if it is not this run's.
    pub fn check(&self, target: &Path) -> Result<bool> {
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

    /// True if a folder is there as this run wrote it.
    pub fn holds(&self, path: &Path) -> bool {
        let Ok(path) = path.canonicalize() else { return false };
        self.folders.iter().any(|folder| folder.path == path && folder.stands())
    }

    /// The folders that are still there as they were written, oldest first.
    pub fn records(&self) -> Vec<Record> {
        self.folders.iter().filter(|folder| folder.stands()).map(Folder::record).collect()
    }

    /// Paths of the folders that this run wrote.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.records().into_iter().map(|record| record.path).collect()
    }

    /// Adds a folder that has appeared.
    pub fn add(&mut self, path: &Path, digest: String) -> Result<()> {
        let folder = Folder::read(path, digest).map_err(|e| TrainError::io("read", path, e))?;
        self.folders.retain(|known| known.path != folder.path);
        self.folders.push(folder);
        Ok(())
    }

    /// Removes what the run was writing when it was killed.
    pub fn clear_unfinished(&self, place: &Path) -> Result<()> {
        let mark = format!(".{}.", self.owner);
        for name in names(place).map_err(|e| TrainError::io("read", place, e))? {
            let (text, path) = (name.to_string_lossy(), place.join(&name));
            if text.starts_with('.') && text.contains(&mark) && text.ends_with(".tmp") {
                let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
                removed.map_err(|e| TrainError::io("remove", &path, e))?;
            }
        }
        Ok(())
    }
}

/// The thing at a path, in words; None for nothing and for an empty folder.
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

/// Everything in a folder by name.
pub fn names(folder: &Path) -> io::Result<BTreeSet<OsString>> {
    fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name())).collect()
}
