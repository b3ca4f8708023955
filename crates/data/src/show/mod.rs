//! Displays rows as the model gets them: every token with its text, document boundaries, and what is trained.
//!
//! Reads batches, so it shows what is actually trained on. Knows no colors.

mod page;
mod picture;
mod row;
mod shown_image;
mod terminal;

use crate::batch::{Batch, Placed};
use crate::document::IGNORE;
use crate::document::Mark;
use crate::error::DataError;
use crate::pairs;
use crate::pictures::ImageReader;
use crate::tokenizer::Tokenizer;
use picture::Images;

pub use page::page;
pub use picture::draw;
pub use row::{ShownRow, ShownToken};
pub use shown_image::ShownImage;
pub use terminal::{Terminal, terminal};

/// The role in a preference of the document that begins at a token of a batch, with a blank before it.
fn verdict(batch: &Batch, at: usize) -> &'static str {
    let of = |placed: &Placed| match placed.mark {
        Mark::Pair { shared, .. } if shared > 0 && placed.begin == at => Some(" (shared)"),
        Mark::Pair { shared, .. } if placed.begin + shared == at => Some(" (chosen)"),
        Mark::Pair { chosen, .. } if placed.begin + chosen == at => Some(" (rejected)"),
        Mark::Answer { desirable, .. } if placed.begin == at => {
            Some(if desirable { " (desirable)" } else { " (undesirable)" })
        }
        _ => None,
    };
    batch.marks.iter().find_map(of).unwrap_or_default()
}

/// The rows of a batch. Without a tokenizer the ids stand for the texts. `pad_id` is what padding consists of, `reader` the
/// one of its images. Errors: an image that was changed since its row was read.
pub fn rows(
    batch: &Batch,
    tokenizer: Option<&Tokenizer>,
    pad_id: i32,
    reader: Option<&ImageReader>,
) -> Result<Vec<ShownRow>, DataError> {
    let n = batch.seq_len;
    let mut images = reader.map(|reader| Images::of(&batch.images, reader));
    (0..batch.batch).map(|row| shown(batch, row * n..(row + 1) * n, (tokenizer, pad_id), images.as_mut())).collect()
}

fn shown(
    batch: &Batch,
    range: std::ops::Range<usize>,
    (tokenizer, pad_id): (Option<&Tokenizer>, i32),
    mut images: Option<&mut Images<'_>>,
) -> Result<ShownRow, DataError> {
    let first = range.start;
    let ids = &batch.input_ids[range.clone()];
    let starts = &batch.document_start[range.clone()];
    let (targets, weights) = (&batch.targets[range.clone()], &batch.weights[range]);
    // The first tokens of the sides of pairs that share their prompts.
    let branches = pairs::forks(batch).concat();
    let mut row = ShownRow::default();
    let mut begin = 0;
    while begin < ids.len() {
        let is_branch = |t: usize| branches.contains(&(first + t));
        let ends = |t: &usize| starts[*t] != starts[begin] || is_branch(*t);
        let end = (begin + 1..ids.len()).find(ends).unwrap_or(ids.len());
        // The last token of a document predicts nothing; the others predict the next.
        let weight = |t: usize| if t > begin && targets[t - 1] != IGNORE { weights[t - 1] } else { 0.0 };
        if ids[begin..end].iter().all(|&id| id == pad_id) && (begin..end).all(|t| weight(t) == 0.0) {
            row.padding += end - begin;
        } else {
            let texts = texts(&ids[begin..end], tokenizer);
            let token = |(i, text)| ShownToken { id: ids[begin + i], text, weight: weight(begin + i), times: 1 };
            row.verdicts.push(verdict(batch, first + begin));
            let tokens: Vec<ShownToken> = texts.into_iter().enumerate().map(token).collect();
            match &mut images {
                Some(images) => {
                    row.images.push(images.next(&ids[begin..end])?);
                    row.documents.push(images.folded(tokens));
                }
                None => row.documents.push(tokens),
            }
        }
        begin = end;
    }
    Ok(row)
}

/// The text that each token adds. A token that holds a part of a character is shown as the vocabulary writes it.
fn texts(ids: &[i32], tokenizer: Option<&Tokenizer>) -> Vec<String> {
    let Some(encoder) = tokenizer.map(Tokenizer::encoder) else {
        return ids.iter().map(|id| format!("{id} ")).collect();
    };
    let decode = |ids: &[i32]| {
        let ids: Vec<u32> = ids.iter().map(|&id| id as u32).collect();
        encoder.decode(&ids, false).ok()
    };
    let text = |i: usize| -> Option<String> {
        // Next to its predecessor: some decoders drop the blank before the first word.
        let before = i.saturating_sub(1);
        let (prefix, both) = (decode(&ids[before..i])?, decode(&ids[before..=i])?);
        let own = both.strip_prefix(&prefix)?;
        (!own.contains('\u{fffd}')).then(|| own.to_owned())
    };
    let written = |id: i32| encoder.id_to_token(id as u32).unwrap_or_else(|| format!("[{id}]"));
    (0..ids.len()).map(|i| text(i).unwrap_or_else(|| written(ids[i]))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::show::row::visible;

    /// Two documents of 3 and 2 tokens and 3 of padding; the second and third token and the last are trained.
    pub(super) fn batch() -> Batch {
        Batch {
            batch: 1,
            seq_len: 8,
            patches: crate::batch::Patches::default(),
            images: Vec::new(),
            logits: 0,
            remote: None,
            marks: Vec::new(),
            reference_logps: Vec::new(),
            old_logps: Vec::new(),
            sampling_logps: Vec::new(),
            teacher: Default::default(),
            divergence: 0.0,
            input_ids: vec![5, 6, 7, 8, 9, 0, 0, 0],
            position_ids: vec![0, 1, 2, 0, 1, 0, 1, 2],
            targets: vec![6, 7, IGNORE, 9, IGNORE, IGNORE, IGNORE, IGNORE],
            weights: vec![1.0, 0.5, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0],
            document_start: vec![0, 0, 0, 3, 3, 5, 5, 5],
            present: vec![1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0],
        }
    }

    #[test]
    fn a_token_is_trained_where_the_one_before_it_predicts_it() {
        let shown = rows(&batch(), None, 0, None).unwrap();
        assert_eq!((shown.len(), shown[0].padding, shown[0].len()), (1, 3, 8));
        let weights: Vec<Vec<f32>> = shown[0].documents.iter().map(|d| d.iter().map(|t| t.weight).collect()).collect();
        assert_eq!(weights, [vec![0.0, 1.0, 0.5], vec![0.0, 1.0]]);
        assert_eq!(shown[0].documents[1][0].text, "8 ");
    }

    #[test]
    fn the_sides_of_a_pair_are_named() {
        let mark = |mark| vec![Placed { begin: 0, tokens: 5, mark }];
        let of = |marks| rows(&Batch { marks, ..batch() }, None, 0, None).unwrap().remove(0).verdicts;
        assert_eq!(of(mark(Mark::Pair { chosen: 3, shared: 0, margin: None })), [" (chosen)", " (rejected)"]);
        assert_eq!(of(mark(Mark::Answer { prompt: 1, desirable: false })), [" (undesirable)", ""]);
        assert_eq!(of(Vec::new()), ["", ""]);
    }

    #[test]
    fn nothing_that_moves_a_cursor_is_shown_as_it_is() {
        let text: String = "a\u{1b}[2J\n\u{202e}\u{7f}".chars().map(visible).collect();
        assert_eq!(text, "a␛[2J↵␦␡");
    }
}
