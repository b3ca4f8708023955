//! The folders in which relative paths of images begin, and the files that were looked for: rows that are kept hold as long as
//! these files are what they were. Knows no rows.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::file_stamp::Stamp;

/// The folders of images of rows, and what was found in them.
#[derive(Debug, Default)]
pub struct ImageFolders {
    folders: Vec<PathBuf>,
    /// The stamp of each file before it was read, none for one that was not there; not remembered where nothing is kept.
    seen: Option<Mutex<Seen>>,
}

/// Stamps of files, none for those that were not there.
pub(crate) type Seen = BTreeMap<PathBuf, Option<Stamp>>;

impl From<Vec<PathBuf>> for ImageFolders {
    fn from(folders: Vec<PathBuf>) -> ImageFolders {
        ImageFolders { folders, seen: None }
    }
}

impl ImageFolders {
    /// The same, and remembers which files are looked for.
    pub(crate) fn remembering(self) -> ImageFolders {
        ImageFolders { seen: Some(Mutex::default()), ..self }
    }

    /// The file of a path, relative ones in the first folder that has it.
    pub(crate) fn find(&self, path: &Path) -> Option<PathBuf> {
        match path.is_absolute() {
            true => Some(path.to_owned()).filter(|path| self.is_there(path)),
            false => self.folders.iter().map(|folder| folder.join(path)).find(|path| self.is_there(path)),
        }
    }

    /// The first of the folders.
    pub(crate) fn first(&self) -> Option<&Path> {
        self.folders.first().map(PathBuf::as_path)
    }

    fn is_there(&self, path: &Path) -> bool {
        // Before the content is read: a change after it shows.
        let stamp = self.seen.as_ref().map(|_| Stamp::of(path).ok());
        let is_there = path.is_file();
        if let (Some(seen), Some(stamp)) = (&self.seen, stamp) {
            let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
            // The first look counts: a row may have been read since.
            seen.entry(path.to_owned()).or_insert(stamp.filter(|_| is_there));
        }
        is_there
    }

    /// The files that were looked for; none where they are not remembered.
    pub(crate) fn seen(&self) -> Seen {
        let seen = self.seen.as_ref().map(|seen| seen.lock().unwrap_or_else(PoisonError::into_inner).clone());
        seen.unwrap_or_default()
    }
}
