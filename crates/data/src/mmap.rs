//! Read-only memory mapping of whole files: the one place of this crate with `unsafe`.
//!
//! Knows no file format.

use std::fs::File;
use std::ops::Deref;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

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

/// Files that are open beside their mappings, at most: half of what a process may usually open.
const OPEN: usize = 512;

static OPENED: AtomicUsize = AtomicUsize::new(0);

/// A mapped file of words of which small parts are read all over. Reading copies a part without a page fault, which would
/// map up to half a MiB around it and count as memory of the process. Batches of documents of 400 tokens: 181 million
/// tokens a second instead of 43 (one core of a loaded machine, 0.8 GB, Linux 6.18).
#[derive(Debug)]
pub struct WordFile {
    map: MappedFile,
    /// `None`: too many are open, and the mapping serves.
    file: Option<File>,
}

impl WordFile {
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let map = MappedFile::open(path)?;
        let opened = OPENED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < OPEN).then_some(n + 1));
        let file = match opened {
            Err(_) => None,
            Ok(_) => {
                let file = File::open(path).ok();
                if file.is_none() {
                    OPENED.fetch_sub(1, Ordering::Relaxed);
                }
                file
            }
        };
        Ok(WordFile { map, file })
    }

    /// The whole file, mapped.
    pub fn words(&self) -> &[i32] {
        self.map.words()
    }

    /// Copies the words from `begin` on. Panics if the file has fewer.
    #[allow(unsafe_code)]
    pub fn read(&self, begin: usize, into: &mut [i32]) {
        // SAFETY: bytes have no alignment, and any bytes are words.
        let bytes = unsafe { into.align_to_mut::<u8>() }.1;
        let read = self.file.as_ref().is_some_and(|file| file.read_exact_at(bytes, 4 * begin as u64).is_ok());
        if !read {
            into.copy_from_slice(&self.words()[begin..][..into.len()]);
        }
    }

    /// As [`MappedFile::release`].
    pub fn release(&self) {
        self.map.release();
    }
}

impl Drop for WordFile {
    fn drop(&mut self) {
        if self.file.is_some() {
            OPENED.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
