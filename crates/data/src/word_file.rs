//! A file of 32-bit words, in the byte order of the machine, of which parts are read all over.
//!
//! Knows nothing of what the words are.

use std::cell::RefCell;
use std::path::Path;

use crate::error::DataError;
use crate::part_file::PartFile;

thread_local! {
    /// The bytes of the part that is read.
    static BYTES: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// A file whose length is a multiple of 4, or one of no words.
#[derive(Debug)]
pub(crate) struct WordFile {
    file: PartFile,
}

impl WordFile {
    pub(crate) fn open(path: &Path) -> Result<Self, DataError> {
        Ok(WordFile { file: PartFile::open(path)? })
    }

    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }

    /// Words that the file had when it was opened; 0 if its length is no multiple of 4.
    pub(crate) fn words(&self) -> usize {
        if self.file.len().is_multiple_of(4) { self.file.len() / 4 } else { 0 }
    }

    /// Reads `count` words from `begin` on into `words`, which holds nothing else then. Errors: the file has become
    /// shorter, or there is another in its place.
    pub(crate) fn read(&self, begin: usize, count: usize, words: &mut Vec<i32>) -> Result<(), DataError> {
        BYTES.with_borrow_mut(|bytes| {
            bytes.resize(4 * count, 0);
            self.file
                .read(4 * begin, bytes)
                .map_err(|e| e.hint("cached rows belong to the cache; the next run encodes them again"))?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_from_any_place() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("words");
        let bytes: Vec<u8> = (0..5000i32).flat_map(i32::to_ne_bytes).collect();
        std::fs::write(&path, &bytes).unwrap();
        let file = WordFile::open(&path).unwrap();
        let mut words = vec![7];
        file.read(4000, 3, &mut words).unwrap();
        assert_eq!((file.words(), &words[..]), (5000, &[4000, 4001, 4002][..]));
        std::fs::write(&path, &bytes[..8000]).unwrap();
        let problem = file.read(1998, 3, &mut words).unwrap_err().to_string();
        assert!(
            problem.contains("cut short while it was in use") && problem.contains("encodes them again"),
            "{problem}"
        );
        std::fs::write(&path, &bytes[..7999]).unwrap();
        assert_eq!(WordFile::open(&path).unwrap().words(), 0);
    }
}
