//! A file of which parts are read by position, all over and by several threads.
//!
//! Never mapped: a mapped file that is truncated ends the process, a read one gives an error. It is as fast: a page
//! fault takes as long as a read of its bytes. Knows nothing of what the bytes are.

use std::fs::{File, Metadata};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::DataError;

/// Files that stay open, at most: half of what a process may usually open. Others are opened for each part.
const OPEN: usize = 512;

static OPENED: AtomicUsize = AtomicUsize::new(0);

/// An open file, or the name of one.
#[derive(Debug)]
pub(crate) struct PartFile {
    path: PathBuf,
    /// Device and inode number of the file.
    identity: (u64, u64),
    length: usize,
    /// `None`: too many are open.
    file: Option<File>,
}

fn identity(of: &Metadata) -> (u64, u64) {
    (of.dev(), of.ino())
}

impl PartFile {
    pub(crate) fn open(path: &Path) -> Result<Self, DataError> {
        let file = File::open(path).map_err(|e| DataError::io("open", path, e))?;
        let of = file.metadata().map_err(|e| DataError::io("read the size of", path, e))?;
        let length =
            usize::try_from(of.len()).map_err(|_| DataError::invalid(path.display(), "the file is too large"))?;
        let stays = OPENED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < OPEN).then_some(n + 1)).is_ok();
        Ok(PartFile { path: path.to_owned(), identity: identity(&of), length, file: stays.then_some(file) })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes that the file had when it was opened.
    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// Fills `bytes` with the file's from `begin` on. Errors: the file has become shorter, or there is another in its
    /// place.
    pub(crate) fn read(&self, begin: usize, bytes: &mut [u8]) -> Result<(), DataError> {
        let failed = |e| DataError::io("read", &self.path, e);
        let reopened;
        let file = match &self.file {
            Some(file) => file,
            None => {
                reopened = File::open(&self.path).map_err(failed)?;
                if identity(&reopened.metadata().map_err(failed)?) != self.identity {
                    return Err(DataError::invalid(self.path.display(), "the file was replaced while it was in use"));
                }
                &reopened
            }
        };
        file.read_exact_at(bytes, begin as u64).map_err(|e| match e.kind() {
            ErrorKind::UnexpectedEof => {
                DataError::invalid(self.path.display(), "the file was cut short while it was in use")
            }
            _ => failed(e),
        })
    }

    /// Closes the file and keeps its path, as happens when too many are open.
    #[cfg(test)]
    pub(crate) fn closed(mut self) -> Self {
        if self.file.take().is_some() {
            OPENED.fetch_sub(1, Ordering::Relaxed);
        }
        self
    }
}

impl Drop for PartFile {
    fn drop(&mut self) {
        if self.file.is_some() {
            OPENED.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_cut_short_or_replaced_is_an_error() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("parts");
        let content: Vec<u8> = (0..20_000u32).map(|i| i as u8).collect();
        std::fs::write(&path, &content).unwrap();
        let file = PartFile::open(&path).unwrap();
        let mut bytes = [0; 12];
        file.read(16_000, &mut bytes).unwrap();
        assert_eq!((file.len(), &bytes[..]), (20_000, &content[16_000..16_012]));
        File::options().write(true).open(&path).unwrap().set_len(8000).unwrap();
        file.read(7988, &mut bytes).unwrap();
        assert!(file.read(7989, &mut bytes).unwrap_err().to_string().contains("cut short while it was in use"));

        let file = file.closed();
        file.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, content[..12]);
        std::fs::write(place.path().join("other"), &content).unwrap();
        std::fs::rename(place.path().join("other"), &path).unwrap();
        assert!(file.read(0, &mut bytes).unwrap_err().to_string().contains("was replaced"));
    }
}
