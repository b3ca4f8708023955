//! Read-only memory mapping of whole files: the one place of this crate with `unsafe`.
//!
//! Knows no file format.

use std::fs::File;
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
    #[allow(unsafe_code)]
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let file = File::open(path).map_err(|e| DataError::io("open", path, e))?;
        let length = file.metadata().map_err(|e| DataError::io("read the size of", path, e))?.len();
        if length == 0 {
            return Ok(MappedFile { map: None });
        }
        // SAFETY: the mapping is private and read-only. A writer that truncates the file while it is mapped would
        // fault; our own writers replace files by rename, which leaves a mapped file intact.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(|e| DataError::io("map", path, e))?;
        Ok(MappedFile { map: Some(map) })
    }
}

impl MappedFile {
    /// The file as 32-bit words in the byte order of the machine; empty if its length is no multiple of 4.
    #[allow(unsafe_code)]
    pub fn words(&self) -> &[i32] {
        // SAFETY: every bit pattern is an i32, and the slices share the lifetime of the mapping.
        match unsafe { self.align_to::<i32>() } {
            ([], words, []) => words,
            _ => &[],
        }
    }

    /// Lets the system take back the pages that were read; they are paged in again when they are needed. Advice: a
    /// system that does not take it costs memory only.
    #[allow(unsafe_code)]
    pub fn release(&self) {
        if let Some(map) = &self.map {
            // SAFETY: the mapping is of a file and read-only, so what is given back is read from the file again.
            let _ = unsafe { map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
        }
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }
}
