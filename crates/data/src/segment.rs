//! A segment: some thousand encoded documents in one array of 32-bit words, in memory or in a file.
//!
//! Words, in the byte order of the machine:
//!
//! ```text
//! head    MARK, FORMAT, documents, words of data
//! index   length of each document; where its data begin; what they are; tokens of its first part; words of its images
//! data    per document: ids, then runs or labels and weights, then positions if it brings its own, then its mark, then
//!         the number of bytes of its images and these bytes
//! ```
//!
//! The first part is the chosen side of a pair or the prompt of an answer, the mark a margin with the number of shared
//! tokens, or a verdict.
//!
//! Trained tokens are stored as runs (begin, end, weight) over which the labels equal the ids. A document for which
//! that is not true, or whose runs would be larger, stores labels and weights in full. For a file, head and index are
//! in memory: a file that changes causes an error, never an access outside a document. Knows no folder and no key.

use std::borrow::Cow;

use crate::document::IGNORE;
use crate::document::{Document, Mark};
use crate::error::DataError;
use crate::image_source::ImageRef;
use crate::word_file::WordFile;

/// `rows` in the byte order of this machine: a file of another order is no segment here.
const MARK: i32 = i32::from_be_bytes(*b"swor");
/// Counts the layouts that there have been.
const FORMAT: i32 = 4;
const HEAD: usize = 4;
/// Words of the index for each document.
const INDEX: usize = 5;
/// A run: begin, end, bits of the weight.
const RUN: usize = 3;
/// In the third word of the index: labels and weights are whole; positions follow; it is a pair or an answer, and a mark
/// follows; below them the number of runs.
const WHOLE: i32 = 1 << 30;
const POSITIONED: i32 = 1 << 29;
const PAIR: i32 = 1 << 28;
const ANSWER: i32 = 1 << 27;
const RUNS: i32 = ANSWER - 1;
/// The bits of a margin that is absent: no number that data bring.
const NO_MARGIN: i32 = -1;

/// Words after which a builder is full: 64 MiB.
pub(crate) const FULL: usize = 1 << 24;

/// A document inside a segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DocumentView<'a> {
    pub ids: &'a [i32],
    pub positions: Option<&'a [i32]>,
    pub mark: Option<Mark>,
    /// Bytes and words of its images.
    images: Option<(usize, &'a [i32])>,
    trained: Trained<'a>,
}

#[derive(Clone, Copy, Debug)]
enum Trained<'a> {
    Runs(&'a [i32]),
    Whole { labels: &'a [i32], weights: &'a [i32] },
}

impl<'a> DocumentView<'a> {
    /// Not shifted; -100 = not trained.
    pub fn labels(&self) -> Cow<'a, [i32]> {
        match self.trained {
            Trained::Whole { labels, .. } => Cow::Borrowed(labels),
            Trained::Runs(_) => {
                let mut labels = vec![IGNORE; self.ids.len()];
                for (begin, end, _) in self.runs().expect("just seen") {
                    labels[begin..end].copy_from_slice(&self.ids[begin..end]);
                }
                Cow::Owned(labels)
            }
        }
    }

    /// The weight of each label; 0 where the label is -100.
    pub fn weights(&self) -> Vec<f32> {
        match self.trained {
            Trained::Whole { weights, .. } => weights.iter().map(|&bits| f32::from_bits(bits as u32)).collect(),
            Trained::Runs(_) => {
                let mut weights = vec![0.0; self.ids.len()];
                self.runs().expect("just seen").for_each(|(begin, end, weight)| weights[begin..end].fill(weight));
                weights
            }
        }
    }

    /// True if its runs ascend and are inside the document.
    fn holds(&self) -> bool {
        let Trained::Runs(words) = self.trained else { return true };
        let mut at = 0;
        words.chunks_exact(RUN).all(|run| {
            let follows = at <= run[0] && run[0] <= run[1] && run[1] as usize <= self.ids.len();
            at = run[1];
            follows
        })
    }

    /// A document of its own.
    pub(crate) fn to_document(self) -> Document {
        let (labels, weights) = (self.labels().into_owned(), self.weights());
        let positions = self.positions.map(<[i32]>::to_vec);
        let images = self.images().unwrap_or_default();
        Document { ids: self.ids.to_vec(), labels, weights, positions, keep: 0, mark: self.mark, images, images_end: 0 }
    }

    /// Its images; `None`: what stands there are none.
    pub fn images(&self) -> Option<Vec<ImageRef>> {
        let Some((length, words)) = self.images else { return Some(Vec::new()) };
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).take(length).collect();
        ImageRef::unpack(&bytes)
    }

    /// The first token of the document's second sequence, if it is a pair.
    pub(crate) fn split(&self) -> Option<usize> {
        match self.mark {
            Some(Mark::Pair { chosen, .. }) => Some(chosen),
            _ => None,
        }
    }

    /// Tokens at the beginning that both sides of a pair share.
    pub(crate) fn shared(&self) -> usize {
        self.mark.map_or(0, Mark::shared)
    }

    /// The parts (begin, end, weight) in which each label is the token's own id, ascending; outside of them nothing is
    /// trained. None reaches over both sides of a pair. `None`: the labels are not of this form.
    pub fn runs(&self) -> Option<impl Iterator<Item = (usize, usize, f32)> + use<'a>> {
        let Trained::Runs(words) = self.trained else { return None };
        let run = |run: &[i32]| (run[0] as usize, run[1] as usize, f32::from_bits(run[2] as u32));
        Some(words.chunks_exact(RUN).map(run))
    }
}

/// The runs of a document's labels; `None` where they would not say everything, or not shorter.
fn runs_of(document: &Document) -> Option<Vec<i32>> {
    let mut runs: Vec<i32> = Vec::new();
    let split = document.split();
    let labelled = document.ids.iter().zip(&document.labels).zip(&document.weights);
    for (t, ((&id, &label), &weight)) in labelled.enumerate() {
        let bits = weight.to_bits() as i32;
        if label == IGNORE {
            if bits != 0 {
                return None;
            }
            continue;
        }
        if label != id {
            return None;
        }
        match runs.last_chunk_mut::<RUN>() {
            Some([_, end, of]) if *end as usize == t && *of == bits && split != Some(t) => *end += 1,
            _ => runs.extend([t as i32, t as i32 + 1, bits]),
        }
    }
    (runs.len() <= 2 * document.len()).then_some(runs)
}

/// A segment that documents are still added to.
#[derive(Debug, Default)]
pub(crate) struct SegmentBuilder {
    lengths: Vec<i32>,
    begins: Vec<i32>,
    kinds: Vec<i32>,
    firsts: Vec<i32>,
    images: Vec<i32>,
    data: Vec<i32>,
}

impl SegmentBuilder {
    /// Panics if the document's vectors differ in length.
    pub(crate) fn push(&mut self, document: &Document) {
        let n = document.len();
        assert!(document.labels.len() == n && document.weights.len() == n, "labels and weights belong to tokens");
        self.lengths.push(n as i32);
        self.begins.push(self.data.len() as i32);
        self.data.extend(&document.ids);
        let mut kind = match runs_of(document) {
            Some(runs) => {
                self.data.extend(&runs);
                (runs.len() / RUN) as i32
            }
            None => {
                self.data.extend(&document.labels);
                self.data.extend(document.weights.iter().map(|weight| weight.to_bits() as i32));
                WHOLE
            }
        };
        if let Some(positions) = &document.positions {
            assert_eq!(positions.len(), n, "positions belong to tokens");
            self.data.extend(positions);
            kind |= POSITIONED;
        }
        let (first, mark) = match document.mark {
            None => (0, vec![]),
            Some(Mark::Pair { chosen, shared, margin }) => {
                kind |= PAIR;
                (chosen, vec![margin.map_or(NO_MARGIN, |margin| margin.to_bits() as i32), shared as i32])
            }
            Some(Mark::Answer { prompt, desirable }) => {
                kind |= ANSWER;
                (prompt, vec![i32::from(desirable)])
            }
            Some(Mark::Sample { .. }) => unreachable!("samples are made in training, and no data have them"),
        };
        assert!(first <= n, "a part of a document is no longer than it");
        self.firsts.push(first as i32);
        self.data.extend(mark);
        let before = self.data.len();
        if !document.images.is_empty() {
            let mut bytes = ImageRef::pack(&document.images);
            self.data.push(bytes.len() as i32);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            self.data.extend(bytes.as_chunks().0.iter().map(|word| i32::from_le_bytes(*word)));
        }
        self.images.push((self.data.len() - before) as i32);
        self.kinds.push(kind);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// True if the next document belongs into another segment.
    pub(crate) fn is_full(&self) -> bool {
        self.data.len() >= FULL
    }

    /// The words of the segment; the builder is empty then.
    pub(crate) fn finish(&mut self) -> Vec<i32> {
        let builder = std::mem::take(self);
        let head = [MARK, FORMAT, builder.lengths.len() as i32, builder.data.len() as i32];
        [&head[..], &builder.lengths, &builder.begins, &builder.kinds, &builder.firsts, &builder.images, &builder.data]
            .concat()
    }
}

/// The storage of the words after head and index.
#[derive(Debug)]
enum Words {
    Memory(Vec<i32>),
    File(WordFile),
}

/// A finished segment, which no longer changes.
#[derive(Debug)]
pub(crate) struct Segment {
    /// The columns of all documents: lengths, places of their data, kinds, tokens of their first parts, words of their
    /// images.
    index: Vec<i32>,
    data: Words,
    documents: usize,
}

impl Segment {
    /// `None`: these are no words of a segment.
    pub(crate) fn of_words(mut words: Vec<i32>) -> Option<Segment> {
        let documents = documents(words.first_chunk()?, words.len())?;
        let data = words.split_off(HEAD + INDEX * documents);
        let index = words.split_off(HEAD);
        is_whole(&index, data.len()).then_some(Segment { index, data: Words::Memory(data), documents })
    }

    /// `None`: the file is no segment. Errors: it cannot be read.
    pub(crate) fn of_file(file: WordFile) -> Result<Option<Segment>, DataError> {
        let mut head = Vec::new();
        if file.words() < HEAD {
            return Ok(None);
        }
        file.read(0, HEAD, &mut head)?;
        let found = head.first_chunk().and_then(|head| documents(head, file.words()));
        let Some(documents) = found else { return Ok(None) };
        let mut index = Vec::new();
        file.read(HEAD, INDEX * documents, &mut index)?;
        let data = file.words() - HEAD - INDEX * documents;
        Ok(is_whole(&index, data).then_some(Segment { index, data: Words::File(file), documents }))
    }

    /// The same documents, in memory.
    pub(crate) fn in_memory(&self) -> Result<Segment, DataError> {
        let mut data = Vec::new();
        match &self.data {
            Words::Memory(words) => data.clone_from(words),
            Words::File(file) => {
                let begin = HEAD + self.index.len();
                file.read(begin, file.words() - begin, &mut data)?;
            }
        }
        Ok(Segment { index: self.index.clone(), data: Words::Memory(data), documents: self.documents })
    }

    pub(crate) fn documents(&self) -> usize {
        self.documents
    }

    /// Tokens of document `i`.
    pub(crate) fn length(&self, i: usize) -> usize {
        self.index[..self.documents][i] as usize
    }

    /// Tokens of the chosen side of document `i`, if it is a pair.
    pub(crate) fn split(&self, i: usize) -> Option<usize> {
        let at = |column: usize| self.index[column * self.documents..][..self.documents][i];
        (at(2) & PAIR != 0).then(|| at(3) as usize)
    }

    /// Document `i`, by way of `copy` where it is in a file. Errors: the file has changed. Panics if there is no
    /// document `i`.
    pub(crate) fn read<'a>(&'a self, i: usize, copy: &'a mut Vec<i32>) -> Result<DocumentView<'a>, DataError> {
        let at = |column: usize| self.index[column * self.documents..][..self.documents][i];
        let (n, begin, kind, first, images) = (at(0) as usize, at(1) as usize, at(2), at(3) as usize, at(4) as usize);
        let file = match &self.data {
            Words::Memory(data) => return Ok(view(&data[begin..], n, kind, (first, images))),
            Words::File(file) => file,
        };
        file.read(HEAD + self.index.len() + begin, size(n, kind) + images, copy)?;
        let view = view(copy, n, kind, (first, images));
        match view.holds() {
            true => Ok(view),
            false => Err(DataError::invalid(file.path().display(), "the file was changed while it was in use")),
        }
    }
}

/// Words of a document of `n` tokens, without those of its images.
fn size(n: usize, kind: i32) -> usize {
    let labels = if kind & WHOLE != 0 { 2 * n } else { RUN * (kind & RUNS) as usize };
    let mark = match () {
        () if kind & PAIR != 0 => 2,
        () => usize::from(kind & ANSWER != 0),
    };
    n + labels + if kind & POSITIONED != 0 { n } else { 0 } + mark
}

/// The document at the beginning of these words, with a first part of `first` tokens and `images` words of images.
fn view(words: &[i32], n: usize, kind: i32, (first, images): (usize, usize)) -> DocumentView<'_> {
    let (ids, rest) = words.split_at(n);
    let (trained, rest) = if kind & WHOLE != 0 {
        let (both, rest) = rest.split_at(2 * n);
        (Trained::Whole { labels: &both[..n], weights: &both[n..] }, rest)
    } else {
        let (runs, rest) = rest.split_at(RUN * (kind & RUNS) as usize);
        (Trained::Runs(runs), rest)
    };
    let (positions, rest) = if kind & POSITIONED != 0 { rest.split_at(n) } else { rest.split_at(0) };
    let mark = match () {
        () if kind & PAIR != 0 => {
            let margin = (rest[0] != NO_MARGIN).then(|| f32::from_bits(rest[0] as u32));
            // A file that changed may say anything.
            let shared = usize::try_from(rest[1]).unwrap_or(0).min(first);
            Some(Mark::Pair { chosen: first, shared, margin })
        }
        () if kind & ANSWER != 0 => Some(Mark::Answer { prompt: first, desirable: rest[0] != 0 }),
        () => None,
    };
    let after = size(n, kind);
    let images = (images > 0).then(|| (words[after].max(0) as usize, &words[after + 1..after + images]));
    DocumentView { images, ids, trained, positions: (kind & POSITIONED != 0).then_some(positions), mark }
}

/// Number of documents, if this is the head of a segment that has room for its index among `words` words.
fn documents(head: &[i32; HEAD], words: usize) -> Option<usize> {
    let [MARK, FORMAT, documents, data] = head else { return None };
    let (documents, data) = (usize::try_from(*documents).ok()?, usize::try_from(*data).ok()?);
    (words == HEAD + INDEX * documents + data).then_some(documents)
}

/// True if the documents of an index follow one another and fill `data` words.
fn is_whole(index: &[i32], data: usize) -> bool {
    let documents = index.len() / INDEX;
    let mut end = 0;
    for i in 0..documents {
        let at = |column: usize| index[column * documents + i];
        let (n, begin, kind, first, images) = (at(0), at(1), at(2), at(3), at(4));
        let is_possible = kind >= 0 && begin == end && (0..=n).contains(&first) && images >= 0;
        let size = usize::try_from(n).ok().filter(|_| is_possible).map(|n| size(n, kind) + images as usize);
        match size.and_then(|size| begin.checked_add(i32::try_from(size).ok()?)) {
            Some(next) => end = next,
            None => return false,
        }
    }
    end as usize == data
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boxes::ImageObject;
    use crate::image_source::ImageSource;

    fn samples() -> Vec<Document> {
        let plain = Document::all_trained((0..40).collect());
        let mut part = plain.clone();
        part.labels[..7].fill(IGNORE);
        part.weights[..7].fill(0.0);
        part.weights[20..30].fill(0.25);
        let mut foreign = plain.clone();
        foreign.labels[3] = 99;
        foreign.positions = Some((5..45).collect());
        let ragged = Document { weights: (0..40).map(|t| t as f32).collect(), ..plain.clone() };
        let none =
            Document { labels: vec![IGNORE; 3], weights: vec![0.0; 3], ids: vec![1, 2, 3], ..Document::default() };
        let pair = Document { mark: Some(Mark::Pair { chosen: 15, shared: 0, margin: Some(-0.5) }), ..part.clone() };
        let even = Document { mark: Some(Mark::Pair { chosen: 20, shared: 9, margin: None }), ..foreign.clone() };
        let answer = Document { mark: Some(Mark::Answer { prompt: 7, desirable: true }), ..part.clone() };
        let refused = Document { mark: Some(Mark::Answer { prompt: 0, desirable: false }), ..ragged.clone() };
        let image = |content: &[u8]| ImageRef::new(ImageSource::Bytes(content.into()), content);
        let objects = vec![ImageObject { name: "a cät".to_owned(), corners: [0.0, 0.5, 0.75, 1.0] }];
        let images = vec![ImageRef { objects, ..image(b"abcde") }, image(b"")];
        let shown = Document { images, ..part.clone() };
        vec![plain, part, foreign, ragged, none, Document::all_trained(vec![7]), pair, even, answer, refused, shown]
    }

    fn words() -> Vec<i32> {
        let mut builder = SegmentBuilder::default();
        samples().iter().for_each(|document| builder.push(document));
        builder.finish()
    }

    #[test]
    fn documents_come_back_as_they_were() {
        let segment = Segment::of_words(words()).unwrap();
        assert_eq!(segment.documents(), samples().len());
        let mut copy = Vec::new();
        for (i, document) in samples().iter().enumerate() {
            let view = segment.read(i, &mut copy).unwrap();
            assert_eq!(segment.length(i), document.len());
            assert_eq!(view.ids, document.ids, "document {i}");
            assert_eq!(*view.labels(), *document.labels, "document {i}");
            assert_eq!(view.weights(), document.weights, "document {i}");
            assert_eq!(view.positions, document.positions.as_deref(), "document {i}");
            assert_eq!(view.mark, document.mark, "document {i}");
            assert_eq!(view.images(), Some(document.images.clone()), "document {i}");
            assert_eq!(segment.split(i), document.split(), "document {i}");
        }
        let runs = |i: usize| segment.read(i, &mut Vec::new()).unwrap().runs().map(Iterator::count);
        // A run ends where the other side of a pair begins.
        assert_eq!([1, 2, 3, 6].map(runs), [Some(3), None, None, Some(4)]);
    }

    /// A wrong index that a digest would not detect never leads outside of the data.
    #[test]
    fn no_change_of_head_or_index_is_read_as_a_segment_of_another_shape() {
        let good = words();
        for i in 0..HEAD + INDEX * samples().len() {
            for change in [1, -1, 1 << 20, i32::MIN] {
                let mut bad = good.clone();
                bad[i] = bad[i].wrapping_add(change);
                if let Some(segment) = Segment::of_words(bad) {
                    let length = |d: usize| segment.read(d, &mut Vec::new()).unwrap().ids.len();
                    (0..segment.documents()).for_each(|d| assert_eq!(length(d), segment.length(d)));
                }
            }
        }
        assert!(Segment::of_words(good[..good.len() - 1].to_vec()).is_none());
        assert!(Segment::of_words(Vec::new()).is_none());
    }

    /// A file that changes while it is read gives a document or an error, and neither a fault nor a panic.
    #[test]
    fn a_file_that_changes_under_us_is_an_error() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("0.rows");
        let good: Vec<u8> = words().iter().flat_map(|word| word.to_ne_bytes()).collect();
        std::fs::write(&path, &good).unwrap();
        let segment = Segment::of_file(WordFile::open(&path).unwrap()).unwrap().unwrap();
        let read = || -> Vec<Result<Document, String>> {
            let one = |i| segment.read(i, &mut Vec::new()).map(DocumentView::to_document).map_err(|e| e.to_string());
            (0..segment.documents()).map(one).collect()
        };
        let same = |document: &Result<Document, String>, sample: &Document| document.as_ref() == Ok(sample);
        assert!(read().iter().zip(&samples()).all(|(document, sample)| same(document, sample)));
        std::fs::write(&path, vec![0xff; good.len()]).unwrap();
        assert!(read().iter().any(|document| document.as_ref().is_err_and(|e| e.contains("was changed"))));
        for length in [good.len() - 1, good.len() / 2, 16, 0] {
            std::fs::write(&path, &good[..length]).unwrap();
            let reported = read().pop().unwrap().unwrap_err();
            assert!(reported.contains("0.rows: the file was cut short while it was in use"), "{reported}");
        }
        std::fs::write(&path, &good).unwrap();
        assert!(segment.in_memory().is_ok());
    }
}
