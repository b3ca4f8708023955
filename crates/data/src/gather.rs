//! Documents into segments as they come: written to an entry of the cache or kept in memory.
//!
//! Knows neither rows nor keys. A corpus is the same in either place.

use std::io;

use crate::cache::EntryWriter;
use crate::corpus::{Corpus, digest_of};
use crate::document::Document;
use crate::error::DataError;
use crate::segment::{Segment, SegmentBuilder};

/// A corpus, the entry that holds it, and why there is none.
pub(crate) type Gathered = (Corpus, Option<EntryWriter>, Option<io::Error>);

/// A corpus in the making.
#[derive(Default)]
pub(crate) struct Gathering {
    open: SegmentBuilder,
    corpus: Corpus,
    writer: Option<EntryWriter>,
    /// The error that stopped writing, after which segments stay in memory.
    failed: Option<io::Error>,
}

impl Gathering {
    pub(crate) fn new(writer: Option<EntryWriter>) -> Self {
        Gathering { writer, ..Gathering::default() }
    }

    /// Errors: what is written so far cannot be read back.
    pub(crate) fn push(&mut self, document: &Document) -> Result<(), DataError> {
        self.open.push(document);
        if self.open.is_full() { self.close() } else { Ok(()) }
    }

    fn close(&mut self) -> Result<(), DataError> {
        let words = self.open.finish();
        let digest = digest_of(&words);
        let written = match &mut self.writer {
            Some(writer) => writer.add(&words, &digest).map_err(|error| self.failed = Some(error)).ok(),
            None => None,
        };
        if self.failed.is_some() && self.writer.is_some() {
            // What is written so far is removed with the writer, so that a full disk is none afterwards.
            self.corpus = self.corpus.in_memory()?;
            self.writer = None;
        }
        let segment = written.or_else(|| Segment::of_words(words)).expect("a builder makes segments");
        self.corpus.append(segment, digest);
        Ok(())
    }

    /// The corpus, the entry to be committed, and what went wrong with it.
    pub(crate) fn finish(mut self) -> Result<Gathered, DataError> {
        if !self.open.is_empty() {
            self.close()?;
        }
        Ok((self.corpus, self.writer, self.failed))
    }
}

impl Corpus {
    /// Documents that are available, in memory.
    pub fn of(documents: impl IntoIterator<Item = Document>) -> Corpus {
        let mut gathering = Gathering::new(None);
        let in_memory = "what lies in memory can be read";
        documents.into_iter().for_each(|document| gathering.push(&document).expect(in_memory));
        gathering.finish().expect(in_memory).0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{ImageFiles, Key, RowCache};
    use crate::segment::FULL;
    use crate::summary::DatasetSummary;

    const LENGTH: usize = 1 << 20;

    /// Documents that fill two segments and begin a third.
    fn documents() -> impl Iterator<Item = Document> {
        let count = (2 * FULL / LENGTH + 2) as i32;
        (0..count).map(|i| Document::all_trained((i..i + LENGTH as i32).collect()))
    }

    /// Gathers into a cache; `spoil` is called after half of the documents with the folder that is written to.
    fn gather(spoil: impl Fn(&std::path::Path)) -> (Corpus, Option<EntryWriter>, Option<io::Error>, tempfile::TempDir) {
        let place = tempfile::tempdir().unwrap();
        let key = Key { text: "key".to_owned(), digest: "0".repeat(64) };
        let mut gathering =
            Gathering::new(Some(RowCache::new(place.path().to_owned()).begin(&key, &|| {}, &|| false).unwrap()));
        for (i, document) in documents().enumerate() {
            if i == documents().count() / 2 + 1 {
                spoil(place.path());
            }
            gathering.push(&document).unwrap();
        }
        let (corpus, writer, failed) = gathering.finish().unwrap();
        (corpus, writer, failed, place)
    }

    #[test]
    fn a_corpus_of_files_and_one_of_memory_are_the_same() {
        let plain = Corpus::of(documents());
        let (written, writer, failed, place) = gather(|_| {});
        assert!(failed.is_none());
        let key = Key { text: "key".to_owned(), digest: "0".repeat(64) };
        writer.unwrap().commit(&key, &DatasetSummary::default(), (Vec::new(), &ImageFiles::default())).unwrap();
        // The disk is full: the entry cannot be written on.
        let (failing, writer, failed, _place) = gather(|folder| {
            let partial = std::fs::read_dir(folder).unwrap().flatten().find(|entry| entry.path().is_dir()).unwrap();
            std::fs::remove_dir_all(partial.path()).unwrap();
        });
        assert!(writer.is_none() && failed.is_some());
        let names: Vec<_> = std::fs::read_dir(place.path().join(&key.digest)).unwrap().flatten().collect();
        assert_eq!(names.len(), 5, "three segments, a list, their stamps: {names:?}");
        for other in [written, failing] {
            assert_eq!((other.len(), other.digest()), (plain.len(), plain.digest()));
            assert!((0..plain.len()).all(|i| plain.document(i).unwrap() == other.document(i).unwrap()));
        }
    }
}
