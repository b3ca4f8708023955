//! A file of 32-bit words, in the byte order of the machine, of which parts are read all over.
//!
//! Read by position and not mapped: a mapped file that somebody cuts short ends the process, a read one gives an error.
//! It is faster, too: a page fault maps half a MiB for a document of two KiB. Knows nothing of what the words are.

use std::cell::RefCell;
use std::fs::{File, Metadata};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::DataError;

/// Files that stay open, at most: half of what a process may usually open. Others are opened for each part.
const OPEN: usize = 512;

static OPENED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The bytes of the part that is read.
    static BYTES: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// An open file, or the name of one.
#[derive(Debug)]
pub(crate) struct WordFile {
    path: PathBuf,
    /// Device and number.
    identity: (u64, u64),
    words: usize,
    /// `None`: too many are open.
    file: Option<File>,
}

fn identity(of: &Metadata) -> (u64, u64) {
    (of.dev(), of.ino())
}

impl WordFile {
    pub(crate) fn open(path: &Path) -> Result<Self, DataError> {
        let file = File::open(path).map_err(|e| DataError::io("open", path, e))?;
        let of = file.metadata().map_err(|e| DataError::io("read the size of", path, e))?;
        let stays = OPENED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < OPEN).then_some(n + 1)).is_ok();
        let words = if of.len() % 4 == 0 { (of.len() / 4) as usize } else { 0 };
        Ok(WordFile { path: path.to_owned(), identity: identity(&of), words, file: stays.then_some(file) })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Words that the file had when it was opened; 0 if its length is no multiple of 4.
    pub(crate) fn words(&self) -> usize {
        self.words
    }

    /// Reads `count` words from `begin` on into `words`, which holds nothing else then. Errors: the file has become
    /// shorter, or there is another in its place.
    pub(crate) fn read(&self, begin: usize, count: usize, words: &mut Vec<i32>) -> Result<(), DataError> {
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
        BYTES.with_borrow_mut(|bytes| {
            bytes.resize(4 * count, 0);
            file.read_exact_at(bytes, 4 * begin as u64).map_err(|e| match e.kind() {
                std::io::ErrorKind::UnexpectedEof => {
                    DataError::invalid(self.path.display(), "the file was cut short while it was in use")
                        .hint("cached rows belong to the cache; the next run encodes them again")
                }
                _ => failed(e),
            })?;
            words.clear();
            words.extend(bytes.as_chunks().0.iter().map(|word| i32::from_ne_bytes(*word)));
            // A part of a whole segment is read once; what documents need stays.
            if bytes.len() > 1 << 22 {
                *bytes = Vec::new();
            }
            Ok(())
        })
    }
}

impl Drop for WordFile {
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
        let path = place.path().join("words");
        let bytes: Vec<u8> = (0..5000i32).flat_map(i32::to_ne_bytes).collect();
        std::fs::write(&path, &bytes).unwrap();
        let mut file = WordFile::open(&path).unwrap();
        let mut words = Vec::new();
        file.read(4000, 3, &mut words).unwrap();
        assert_eq!((file.words(), &words[..]), (5000, &[4000, 4001, 4002][..]));
        File::options().write(true).open(&path).unwrap().set_len(8000).unwrap();
        file.read(1997, 3, &mut words).unwrap();
        assert!(file.read(1998, 3, &mut words).unwrap_err().to_string().contains("cut short while it was in use"));

        // As it is with too many files.
        drop(file.file.take());
        OPENED.fetch_sub(1, Ordering::Relaxed);
        file.read(0, 1, &mut words).unwrap();
        assert_eq!(words, [0]);
        std::fs::write(place.path().join("other"), &bytes).unwrap();
        std::fs::rename(place.path().join("other"), &path).unwrap();
        assert!(file.read(0, 1, &mut words).unwrap_err().to_string().contains("was replaced"));
    }
}
