//! Tokenised documents: one by one while they are made, then side by side in flat arrays.
//!
//! Knows neither text nor rows of a batch.

use std::sync::Arc;

use crate::batch::IGNORE;
use crate::error::{RowError, RowReason};

/// One document: what the packing keeps whole.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Document {
    pub ids: Vec<i32>,
    /// Not shifted; -100 = not trained.
    pub labels: Vec<i32>,
    /// Weight of each label; 0 where the label is -100.
    pub weights: Vec<f32>,
    /// Given positions; without them they count from 0.
    pub positions: Option<Vec<i32>>,
    /// Tokens at the beginning that survive [`Truncation::Left`]: BOS and the system prompt.
    pub keep: usize,
}

/// What happens to a document that is longer than the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Truncation {
    /// The row is left out, and counted.
    Delete,
    /// The beginning is cut off, but for what the document keeps.
    Left,
    /// The end is cut off.
    Right,
    /// Cut into consecutive pieces, each a document of its own.
    Split,
}

impl Document {
    /// A document of which every token is trained with weight 1.
    pub fn all_trained(ids: Vec<i32>) -> Self {
        Document { labels: ids.clone(), weights: vec![1.0; ids.len()], ids, positions: None, keep: 0 }
    }

    pub fn len(&self) -> usize {
        self.ids.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Labels that something predicts: the first token of a document has no predecessor.
    pub fn trained_tokens(&self) -> usize {
        let labelled = self.labels.iter().zip(&self.weights).skip(1);
        labelled.filter(|&(&label, &weight)| label != IGNORE && weight != 0.0).count()
    }

    /// Brings the document under `limit` tokens. Pieces in which nothing is trained are dropped; if none is left, the
    /// row is in error.
    pub fn truncate(self, limit: usize, how: Truncation) -> Result<Vec<Document>, RowError> {
        if self.is_empty() {
            return Err(RowError::new(RowReason::Empty, "no tokens"));
        }
        let pieces = if self.len() <= limit {
            vec![self]
        } else {
            match how {
                Truncation::Delete => {
                    let problem = format!("{} tokens, the limit is {limit}", self.len());
                    return Err(RowError::new(RowReason::TooLong, problem));
                }
                Truncation::Left => vec![self.without_beginning(limit)?],
                Truncation::Right => vec![self.slice(0, limit)],
                Truncation::Split => (0..self.len())
                    .step_by(limit)
                    .map(|from| self.slice(from, (from + limit).min(self.len())))
                    .collect(),
            }
        };
        let kept: Vec<Document> = pieces.into_iter().filter(|piece| piece.trained_tokens() > 0).collect();
        if kept.is_empty() {
            return Err(RowError::new(RowReason::Untrained, "no token of the row is trained"));
        }
        Ok(kept)
    }

    /// What is kept of the beginning, and the end up to `limit` tokens. The first token after the gap is not trained:
    /// what stands before it now is not what it follows.
    fn without_beginning(&self, limit: usize) -> Result<Document, RowError> {
        if self.keep >= limit {
            let problem = format!("the system prompt alone has {} tokens, the limit is {limit}", self.keep);
            return Err(RowError::new(RowReason::TooLong, problem));
        }
        let mut document = self.slice(0, self.keep);
        let mut end = self.slice(self.len() - (limit - self.keep), self.len());
        end.labels[0] = IGNORE;
        end.weights[0] = 0.0;
        document.ids.append(&mut end.ids);
        document.labels.append(&mut end.labels);
        document.weights.append(&mut end.weights);
        if let (Some(positions), Some(mut more)) = (&mut document.positions, end.positions) {
            positions.append(&mut more);
        }
        Ok(document)
    }

    fn slice(&self, from: usize, to: usize) -> Document {
        Document {
            ids: self.ids[from..to].to_vec(),
            labels: self.labels[from..to].to_vec(),
            weights: self.weights[from..to].to_vec(),
            positions: self.positions.as_ref().map(|positions| positions[from..to].to_vec()),
            keep: 0,
        }
    }
}

/// A document inside a [`Corpus`].
#[derive(Clone, Copy, Debug)]
pub struct DocumentView<'a> {
    pub ids: &'a [i32],
    pub labels: &'a [i32],
    pub weights: &'a [f32],
    pub positions: Option<&'a [i32]>,
}

/// All documents of a run, in the order of the data.
#[derive(Clone, Debug, Default)]
pub struct Corpus {
    ids: Vec<i32>,
    labels: Vec<i32>,
    weights: Vec<f32>,
    /// Documents `i` lies at `bounds[i]..bounds[i + 1]`; empty for an empty corpus.
    bounds: Vec<usize>,
    /// Positions of the few documents that bring their own, sorted by document.
    positions: Vec<(usize, Vec<i32>)>,
}

impl Corpus {
    /// Panics if the document's vectors differ in length.
    pub fn push(&mut self, document: Document) {
        let n = document.len();
        assert!(document.labels.len() == n && document.weights.len() == n, "labels and weights belong to tokens");
        if self.bounds.is_empty() {
            self.bounds.push(0);
        }
        if let Some(positions) = document.positions {
            assert_eq!(positions.len(), n, "positions belong to tokens");
            self.positions.push((self.len(), positions));
        }
        self.ids.extend(document.ids);
        self.labels.extend(document.labels);
        self.weights.extend(document.weights);
        self.bounds.push(self.ids.len());
    }

    /// Number of documents.
    pub fn len(&self) -> usize {
        self.bounds.len().saturating_sub(1)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.ids.len()
    }

    /// Panics if there is no document `i`.
    pub fn document(&self, i: usize) -> DocumentView<'_> {
        let range = self.bounds[i]..self.bounds[i + 1];
        let own = self.positions.binary_search_by_key(&i, |entry| entry.0).ok();
        DocumentView {
            ids: &self.ids[range.clone()],
            labels: &self.labels[range.clone()],
            weights: &self.weights[range],
            positions: own.map(|at| self.positions[at].1.as_slice()),
        }
    }

    /// Tokens of document `i`.
    pub fn length(&self, i: usize) -> usize {
        self.bounds[i + 1] - self.bounds[i]
    }
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

    /// Every document.
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncation_keeps_labels_beside_their_tokens() {
        let mut document = Document::all_trained((0..10).collect());
        document.labels[..6].fill(IGNORE);
        document.weights[..6].fill(0.0);
        let error = document.clone().truncate(4, Truncation::Delete).unwrap_err();
        assert_eq!(error.reason, RowReason::TooLong);
        assert_eq!(document.clone().truncate(4, Truncation::Right).unwrap_err().reason, RowReason::Untrained);
        let pieces = document.clone().truncate(4, Truncation::Split).unwrap();
        assert_eq!(pieces.iter().map(|p| p.ids.clone()).collect::<Vec<_>>(), [vec![4, 5, 6, 7], vec![8, 9]]);
        assert_eq!(pieces[0].labels, [IGNORE, IGNORE, 6, 7]);
        assert_eq!(document.clone().truncate(10, Truncation::Delete).unwrap(), [document.clone()]);
        document.keep = 2;
        let left = document.clone().truncate(5, Truncation::Left).unwrap().remove(0);
        assert_eq!((left.ids, left.labels), (vec![0, 1, 7, 8, 9], vec![IGNORE, IGNORE, IGNORE, 8, 9]));
        assert_eq!(document.truncate(2, Truncation::Left).unwrap_err().reason, RowReason::TooLong);
    }

    #[test]
    fn a_corpus_gives_back_its_documents() {
        let mut corpus = Corpus::default();
        assert!(corpus.is_empty());
        let first = Document::all_trained(vec![1, 2, 3]);
        let second = Document { positions: Some(vec![7, 8]), ..Document::all_trained(vec![4, 5]) };
        corpus.push(first);
        corpus.push(second);
        assert_eq!((corpus.len(), corpus.tokens(), corpus.length(1)), (2, 5, 2));
        assert_eq!(corpus.document(0).positions, None);
        assert_eq!(corpus.document(1).positions, Some(&[7, 8][..]));
        assert_eq!(corpus.document(1).ids, [4, 5]);
    }
}
