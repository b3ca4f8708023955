//! Read-only memory mapping of whole files: the one place of this crate with `unsafe`.
//!
//! Knows no file format.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::ops::Deref;
use std::path::Path;

use crate::error::DataError;

/// The bytes of a file, paged in by the system as they are read.
#[derive(Debug)]
pub struct MappedFile {
    map: Option<memmap2::Mmap>,
}

impl MappedFile {
    /// Maps `path`; an empty file gives an empty slice.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let file = File::open(path).map_err(|e| DataError::io("open", path, e))?;
        Self::of(&file, path)
    }

    /// The same, with a copy of the file's beginning, up to `most` bytes of it: what is checked there stays as it was
    /// checked, whatever becomes of the file.
    pub fn open_with_head(path: &Path, most: impl FnOnce(&[u8; 8]) -> u64) -> Result<(Self, Vec<u8>), DataError> {
        let failed = |e| DataError::io("read", path, e);
        let mut file = File::open(path).map_err(|e| DataError::io("open", path, e))?;
        let mut prefix = [0; 8];
        let mut head = Vec::new();
        match file.read_exact(&mut prefix) {
            Ok(()) => {
                head.extend(prefix);
                file.by_ref().take(most(&prefix)).read_to_end(&mut head).map_err(failed)?;
            }
            Err(e) if e.kind() == ErrorKind::UnexpectedEof => {}
            Err(e) => return Err(failed(e)),
        }
        Ok((Self::of(&file, path)?, head))
    }

    #[allow(unsafe_code)]
    fn of(file: &File, path: &Path) -> Result<Self, DataError> {
        let length = file.metadata().map_err(|e| DataError::io("read the size of", path, e))?.len();
        if length == 0 {
            return Ok(MappedFile { map: None });
        }
        // SAFETY: the mapping is private and read-only. A writer that truncates the file while it is mapped would
        // fault; our own writers replace files by rename, which leaves a mapped file intact.
        let map = unsafe { memmap2::Mmap::map(file) }.map_err(|e| DataError::io("map", path, e))?;
        Ok(MappedFile { map: Some(map) })
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }
}
