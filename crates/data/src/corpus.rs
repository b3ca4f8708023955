//! All documents of a run, and the split into training and validation.
//!
//! Knows neither text nor packed rows, nor whether its segments are in memory or in files. Of documents that another node
//! holds it knows the lengths.

use std::sync::Arc;

use crate::document::Document;
use crate::error::DataError;
use crate::preference::{Preference, Unpaired};
use crate::segment::{DocumentView, Segment};

/// All documents of a run, in the order of the data.
#[derive(Clone, Debug, Default)]
pub struct Corpus {
    segments: Vec<Arc<Segment>>,
    /// Number of the first document of each segment, and the number of all documents.
    firsts: Vec<u32>,
    /// Digest of each segment's words, in their order.
    digests: Vec<String>,
    /// The row of its set that each document is from; empty where that is its number.
    rows: Arc<[u32]>,
    /// The distribution of documents over the nodes, if several hold parts: then documents are counted over all.
    spread: Option<Arc<Spread>>,
}

/// The distribution of a corpus's documents over the nodes.
#[derive(Clone, Debug)]
pub(crate) struct Spread {
    /// The number of the part that is here, and the number of parts.
    pub number: usize,
    pub of: usize,
    /// Tokens of every document, on all nodes.
    pub lengths: Vec<u32>,
    /// For every document its place among those that are here, from 1 on; 0 for one on another node.
    pub here: Vec<u32>,
    /// Digest of the contents of all parts.
    pub digest: String,
}

impl Corpus {
    /// The same documents, without files.
    pub(crate) fn in_memory(&self) -> Result<Corpus, DataError> {
        let segments = self.segments.iter().map(|segment| segment.in_memory().map(Arc::new));
        let segments = segments.collect::<Result<_, _>>()?;
        Ok(Corpus { segments, ..self.clone() })
    }

    pub(crate) fn append(&mut self, segment: Segment, digest: String) {
        let before = self.len();
        if self.firsts.is_empty() {
            self.firsts.push(0);
        }
        let count = u32::try_from(before + segment.documents()).expect("documents are counted with 32 bits");
        self.firsts.push(count);
        self.segments.push(Arc::new(segment));
        self.digests.push(digest);
    }

    /// Puts the documents of another corpus after these.
    pub(crate) fn extend(&mut self, other: &Corpus) {
        let before = self.len() as u32;
        if self.firsts.is_empty() {
            self.firsts.push(0);
        }
        self.firsts.extend(other.firsts.iter().skip(1).map(|first| before + first));
        self.segments.extend(other.segments.iter().cloned());
        self.digests.extend(other.digests.iter().cloned());
    }

    /// The same with the row of each document.
    pub(crate) fn with_rows(self, rows: Vec<u32>) -> Corpus {
        Corpus { rows: rows.into(), ..self }
    }

    /// The documents of all nodes, of which these are here.
    pub(crate) fn spread(&self, spread: Arc<Spread>, rows: Vec<u32>) -> Corpus {
        Corpus { spread: Some(spread), ..self.clone() }.with_rows(rows)
    }

    /// Parts of the documents, each held by one node or by several.
    pub fn parts(&self) -> usize {
        self.spread.as_ref().map_or(1, |spread| spread.of)
    }

    /// The number of the part that is here.
    pub fn part(&self) -> usize {
        self.spread.as_ref().map_or(0, |spread| spread.number)
    }

    /// The number of the part that document `i` is in.
    pub fn part_of(&self, i: u32, parts: usize) -> usize {
        self.rows.get(i as usize).copied().unwrap_or(i) as usize % parts
    }

    /// Number of documents, over all nodes.
    pub fn len(&self) -> usize {
        match &self.spread {
            Some(spread) => spread.lengths.len(),
            None => self.firsts.last().map_or(0, |&count| count as usize),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of tokens, over all nodes.
    pub fn tokens(&self) -> usize {
        (0..self.len()).map(|i| self.length(i)).sum()
    }

    /// The segment that holds document `i`, and the document's number there.
    fn place(&self, i: usize) -> (usize, usize) {
        let segment = self.firsts.partition_point(|&first| first as usize <= i) - 1;
        (segment, i - self.firsts[segment] as usize)
    }

    /// A copy of document `i`. Errors: its file has changed. Panics if there is no document `i`.
    pub fn document(&self, i: usize) -> Result<Document, DataError> {
        self.read(i, &mut Vec::new()).map(DocumentView::to_document)
    }

    /// The same without a copy, but for the one in `copy` of what is in a file. Panics if another node has it.
    pub(crate) fn read<'a>(&'a self, i: usize, copy: &'a mut Vec<i32>) -> Result<DocumentView<'a>, DataError> {
        let (segment, inside) = self.place_here(i);
        self.segments[segment].read(inside, copy)
    }

    /// The place of a document that is counted over all nodes.
    fn place_here(&self, i: usize) -> (usize, usize) {
        let here = |spread: &Arc<Spread>| (spread.here[i] as usize).checked_sub(1).expect("a document of another node");
        self.place(self.spread.as_ref().map_or(i, here))
    }

    /// Tokens of document `i`.
    pub fn length(&self, i: usize) -> usize {
        if let Some(spread) = &self.spread {
            return spread.lengths[i] as usize;
        }
        let (segment, inside) = self.place(i);
        self.segments[segment].length(inside)
    }

    /// Tokens of the chosen and of the rejected side of document `i`, if it is a pair. Panics if another node has it.
    pub fn sides(&self, i: usize) -> Option<[usize; 2]> {
        let (segment, inside) = self.place_here(i);
        let segment = &self.segments[segment];
        segment.split(inside).map(|chosen| [chosen, segment.length(inside) - chosen])
    }

    /// The pair that is document `i`; `None`: it is none. Errors: its file has changed.
    pub fn preference(&self, i: usize) -> Result<Option<Preference>, DataError> {
        self.document(i).map(Preference::of)
    }

    /// The answer with a verdict that is document `i`; `None`: it is none. Errors: its file has changed.
    pub fn unpaired(&self, i: usize) -> Result<Option<Unpaired>, DataError> {
        self.document(i).map(Unpaired::of)
    }

    /// Identifies the documents: their tokens, labels, weights, positions and marks, in their order.
    pub fn digest(&self) -> String {
        match &self.spread {
            Some(spread) => spread.digest.clone(),
            None => digest_of_bytes(self.digests.join("\n").as_bytes()),
        }
    }

    /// Identifies them by rows and lengths alone: the same in any number of parts.
    fn outline(&self) -> blake3::Hasher {
        let mut hasher = blake3::Hasher::new();
        for i in 0..self.len() {
            let row = self.rows.get(i).copied().unwrap_or(i as u32);
            hasher.update(&row.to_le_bytes()).update(&(self.length(i) as u32).to_le_bytes());
        }
        hasher
    }
}

/// The digest of a segment's words, as the bytes that files hold.
pub(crate) fn digest_of(words: &[i32]) -> String {
    let mut hasher = blake3::Hasher::new();
    for block in words.chunks(1 << 14) {
        let bytes: Vec<u8> = block.iter().flat_map(|word| word.to_ne_bytes()).collect();
        hasher.update(&bytes);
    }
    hasher.finalize().to_hex().to_string()
}

fn digest_of_bytes(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

/// Some documents of a corpus: the training or the validation part.
#[derive(Clone, Debug)]
pub struct DocumentSet {
    pub corpus: Arc<Corpus>,
    /// Indices into the corpus, ascending.
    pub members: Arc<[u32]>,
}

impl DocumentSet {
    /// Tokens of the longest document; 0 without documents.
    pub fn longest(&self) -> usize {
        self.members.iter().map(|&member| self.corpus.length(member as usize)).max().unwrap_or(0)
    }

    /// Selects every document of the corpus.
    pub fn all(corpus: Arc<Corpus>) -> Self {
        let members = (0..corpus.len() as u32).collect();
        DocumentSet { corpus, members }
    }

    /// Splits off a share of the documents for validation, in 0..1, by the rule of [`crate::order::split`]. Returns
    /// (training, validation).
    pub fn split(&self, ratio: f64, seed: u64) -> (Self, Self) {
        let (training, validation) = crate::order::split(self.len(), ratio, seed);
        let part = |chosen: Vec<u32>| DocumentSet {
            corpus: self.corpus.clone(),
            members: chosen.into_iter().map(|i| self.members[i as usize]).collect(),
        };
        (part(training), part(validation))
    }

    pub fn len(&self) -> usize {
        self.members.len()
    }

    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Identifies the documents of the set by their rows and lengths alone: the same in any number of parts.
    pub fn outline(&self) -> String {
        let mut hasher = self.corpus.outline();
        for member in self.members.iter() {
            hasher.update(&member.to_le_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }

    /// Identifies the documents of the set, without reading them.
    pub fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.corpus.digest().as_bytes());
        if self.len() != self.corpus.len() {
            for member in self.members.iter() {
                hasher.update(&member.to_le_bytes());
            }
        }
        hasher.finalize().to_hex().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_corpus_gives_back_its_documents() {
        assert!(Corpus::default().is_empty() && Corpus::of([]).is_empty());
        let first = Document::all_trained(vec![1, 2, 3]);
        let second = Document { positions: Some(vec![7, 8]), ..Document::all_trained(vec![4, 5]) };
        let mut corpus = Corpus::of([first.clone(), second.clone()]);
        assert_eq!((corpus.len(), corpus.tokens(), corpus.length(1)), (2, 5, 2));
        assert_eq!(corpus.document(0).unwrap(), first);
        assert_eq!(corpus.document(1).unwrap(), second);
        corpus.extend(&Corpus::of([]));
        corpus.extend(&Corpus::of([second]));
        corpus.extend(&Corpus::of([first]));
        assert_eq!((corpus.len(), corpus.tokens()), (4, 10));
        assert_eq!(corpus.document(2).unwrap().ids, [4, 5]);
        assert_eq!(corpus.document(3).unwrap().ids, [1, 2, 3]);
    }

    #[test]
    fn a_digest_tells_documents_and_parts_apart() {
        let of = |id: i32| Arc::new(Corpus::of((0..9).map(|i| Document::all_trained(vec![i, id]))));
        let whole = DocumentSet::all(of(3));
        let digests = [
            whole.digest(),
            DocumentSet::all(of(4)).digest(),
            whole.split(0.2, 1).0.digest(),
            whole.split(0.2, 1).1.digest(),
            whole.split(0.2, 2).0.digest(),
        ];
        assert_eq!(whole.digest(), DocumentSet::all(of(3)).digest());
        assert!((1..digests.len()).all(|i| !digests[..i].contains(&digests[i])), "{digests:?}");
    }
}
