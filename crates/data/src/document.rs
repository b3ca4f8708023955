//! One tokenized document, and how it is truncated.
//!
//! Knows neither text nor packed rows.

use crate::error::{RowError, RowReason};
use crate::image_source::ImageRef;

/// The label of a token that is not trained.
pub const IGNORE: i32 = -100;

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
    /// The document's role in a preference pair, if it has one.
    pub mark: Option<Mark>,
    /// Its images, in the order of their tokens.
    pub images: Vec<ImageRef>,
    /// The place after the last token of an image: no truncation cuts before it.
    pub images_end: usize,
}

/// A preference that stands in a document.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mark {
    /// The chosen side of `chosen` tokens, followed by the rejected one. Each is a sequence of its own, with positions
    /// from 0. The first `shared` tokens belong to both: the rejected side stands without them and goes on from there.
    Pair { chosen: usize, shared: usize, margin: Option<f32> },
    /// One answer after a prompt of `prompt` tokens.
    Answer { prompt: usize, desirable: bool },
    /// An answer that the model sampled, by how much it is better than others to its prompt. Where answers follow one prompt,
    /// the last `own` tokens are those that the others do not see, and only the first has the prompt; else it is 0.
    Sample { advantage: f32, own: usize },
}

impl Mark {
    /// Tokens at the beginning that both sides of a pair share.
    pub(crate) fn shared(self) -> usize {
        match self {
            Mark::Pair { shared, .. } => shared,
            Mark::Answer { .. } | Mark::Sample { .. } => 0,
        }
    }
}

/// The handling of a document that is longer than the limit.
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
        Document { labels: ids.clone(), weights: vec![1.0; ids.len()], ids, ..Document::default() }
    }

    pub fn len(&self) -> usize {
        self.ids.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Tokens of the chosen side of a pair.
    pub(crate) fn split(&self) -> Option<usize> {
        match self.mark {
            Some(Mark::Pair { chosen, .. }) => Some(chosen),
            _ => None,
        }
    }

    /// Labels that something predicts: the first token of a sequence has no predecessor.
    pub fn trained_tokens(&self) -> usize {
        let split = self.split().unwrap_or(0);
        let labelled = self.labels.iter().zip(&self.weights).enumerate();
        labelled.filter(|&(t, (&label, &weight))| t != 0 && t != split && label != IGNORE && weight != 0.0).count()
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
                Truncation::Left | Truncation::Right | Truncation::Split
                    if !self.images.is_empty() && (how != Truncation::Right || limit < self.images_end) =>
                {
                    let problem = format!("{} tokens, the limit is {limit}, and no image is cut", self.len());
                    return Err(RowError::new(RowReason::TooLong, problem));
                }
                Truncation::Delete => {
                    let problem = format!("{} tokens, the limit is {limit}", self.len());
                    return Err(RowError::new(RowReason::TooLong, problem));
                }
                Truncation::Left => vec![self.without_beginning(limit)?],
                Truncation::Right => vec![self.beginning(limit)],
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

    /// Keeps `keep` tokens of the beginning and the end, up to `limit` tokens together. The first token after the gap
    /// is not trained, because it does not follow the token before the gap.
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

    /// Adds the tokens of another document, which like this one has no positions of its own.
    pub(crate) fn append(&mut self, other: Document) {
        self.ids.extend(other.ids);
        self.labels.extend(other.labels);
        self.weights.extend(other.weights);
    }

    /// The first tokens, which hold all images.
    pub(crate) fn beginning(&self, tokens: usize) -> Document {
        assert!(self.images_end <= tokens, "no image is cut");
        Document { images: self.images.clone(), images_end: self.images_end, ..self.slice(0, tokens) }
    }

    pub(crate) fn slice(&self, from: usize, to: usize) -> Document {
        Document {
            ids: self.ids[from..to].to_vec(),
            labels: self.labels[from..to].to_vec(),
            weights: self.weights[from..to].to_vec(),
            positions: self.positions.as_ref().map(|positions| positions[from..to].to_vec()),
            ..Document::default()
        }
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
}
