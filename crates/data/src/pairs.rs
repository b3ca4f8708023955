//! Inputs of losses of preferences, made from a micro-batch: the answer that each token belongs to. Values of pairs, or of
//! answers with verdicts, lie in the first entries of a tensor that is shaped like the batch. Knows no loss.

use std::ops::Range;

use crate::batch::{Batch, Patches, Placed};
use crate::document::IGNORE;
use crate::document::Mark;

/// The tokens of both sides of each pair, chosen first, as ranges of the vectors of a batch.
fn sides(batch: &Batch) -> impl Iterator<Item = [Range<usize>; 2]> + '_ {
    batch.marks.iter().filter_map(|of| match of.mark {
        Mark::Pair { chosen, .. } => {
            let (split, end) = (of.begin + chosen, of.begin + of.tokens);
            Some([of.begin..split, split..end])
        }
        Mark::Answer { .. } | Mark::Sample { .. } => None,
    })
}

/// An answer with its verdict in a micro-batch.
struct Answer {
    /// The first token of its prompt, that of the answer itself, and the token after its end.
    begin: usize,
    split: usize,
    end: usize,
    desirable: bool,
}

fn answers(batch: &Batch) -> impl Iterator<Item = Answer> + '_ {
    batch.marks.iter().filter_map(|of| match of.mark {
        Mark::Answer { prompt, desirable } => {
            Some(Answer { begin: of.begin, split: of.begin + prompt, end: of.begin + of.tokens, desirable })
        }
        Mark::Pair { .. } | Mark::Sample { .. } => None,
    })
}

/// The tokens of each sampled answer with its prompt, and its advantage.
fn samples(batch: &Batch) -> impl Iterator<Item = (Range<usize>, f32)> + '_ {
    batch.marks.iter().filter_map(|of| match of.mark {
        Mark::Sample { advantage, .. } => Some((of.begin..of.begin + of.tokens, advantage)),
        Mark::Pair { .. } | Mark::Answer { .. } => None,
    })
}

/// For each token 2p in the chosen side of pair p, 2p + 1 in the rejected one; of answers with verdicts and of samples their
/// number; -1 elsewhere.
pub(crate) fn documents(batch: &Batch) -> Vec<i32> {
    let mut numbers = vec![-1; batch.batch * batch.seq_len];
    let answers = answers(batch).map(|of| of.begin..of.end);
    let samples = samples(batch).map(|(tokens, _)| tokens);
    for (number, sequence) in sides(batch).flatten().chain(answers).chain(samples).enumerate() {
        numbers[sequence].fill(number as i32);
    }
    numbers
}

/// The index in its row of the last token that may see each token: answers that follow one prompt are hidden from those after
/// them, nothing else is.
pub(crate) fn last_queries(batch: &Batch) -> Vec<i32> {
    let mut last = vec![batch.seq_len as i32 - 1; batch.batch * batch.seq_len];
    for of in &batch.marks {
        let hidden = match of.mark {
            Mark::Pair { chosen, shared, .. } if shared > 0 => of.begin + shared..of.begin + chosen,
            Mark::Sample { own, .. } if own > 0 => of.begin + of.tokens - own..of.begin + of.tokens,
            _ => continue,
        };
        let end = hidden.end - 1;
        last[hidden].fill((end % batch.seq_len) as i32);
    }
    last
}

/// For each pair that shares its prompt the tokens at which both sides begin to differ: of the chosen one and of the rejected one.
pub(crate) fn forks(batch: &Batch) -> Vec<[usize; 2]> {
    let of = |placed: &Placed| match placed.mark {
        Mark::Pair { chosen, shared, .. } if shared > 0 => Some([placed.begin + shared, placed.begin + chosen]),
        _ => None,
    };
    batch.marks.iter().filter_map(of).collect()
}

/// 1 in the first entries, one for each pair or answer with a verdict.
pub(crate) fn weights(batch: &Batch) -> Vec<f32> {
    let mut weights = vec![0.0; batch.batch * batch.seq_len];
    weights[..batch.marks.len()].fill(1.0);
    weights
}

/// 1 in the entries of answers that are good.
pub(crate) fn desirable(batch: &Batch) -> Vec<f32> {
    let mut desirable = vec![0.0; batch.batch * batch.seq_len];
    desirable.iter_mut().zip(answers(batch)).for_each(|(entry, answer)| *entry = f32::from(u8::from(answer.desirable)));
    desirable
}

/// The estimate of the KL divergence, in the entries of all answers.
pub(crate) fn divergence(batch: &Batch) -> Vec<f32> {
    weights(batch).into_iter().map(|weight| weight * batch.divergence).collect()
}

/// 1 at the last token of both sides of each pair.
pub(crate) fn last(batch: &Batch) -> Vec<f32> {
    let mut last = vec![0.0; batch.batch * batch.seq_len];
    for side in sides(batch).flatten() {
        if let Some(end) = side.rev().find(|t| batch.present[*t] != 0.0) {
            last[end] = 1.0;
        }
    }
    last
}

/// 1 in the first entry of a micro-batch that has pairs.
pub(crate) fn first(batch: &Batch) -> Vec<f32> {
    let mut first = vec![0.0; batch.batch * batch.seq_len];
    first[..batch.marks.len().min(1)].fill(1.0);
    first
}

/// The margin of each pair, by entries; 0 where the data have none.
pub(crate) fn margins(batch: &Batch) -> Vec<f32> {
    let of = |mark: &Mark| match mark {
        Mark::Pair { margin, .. } => margin.unwrap_or(0.0),
        Mark::Answer { .. } | Mark::Sample { .. } => 0.0,
    };
    let mut margins: Vec<f32> = batch.marks.iter().map(|placed| of(&placed.mark)).collect();
    margins.resize(batch.batch * batch.seq_len, 0.0);
    margins
}

/// The advantage of each sample, by entries.
pub(crate) fn advantages(batch: &Batch) -> Vec<f32> {
    let mut advantages: Vec<f32> = samples(batch).map(|(_, advantage)| advantage).collect();
    advantages.resize(batch.batch * batch.seq_len, 0.0);
    advantages
}

/// Values of targets; 0 where there are none.
pub(crate) fn or_zeros(batch: &Batch, values: &[f32]) -> Vec<f32> {
    if values.is_empty() { vec![0.0; batch.batch * batch.seq_len] } else { values.to_vec() }
}

/// 1 for trained targets where there are values of them.
pub(crate) fn known(batch: &Batch, values: &[f32]) -> Vec<f32> {
    let is_known = |target: &i32| f32::from(u8::from(!values.is_empty() && *target != IGNORE));
    batch.targets.iter().map(is_known).collect()
}

/// In entry i the share of the trained targets that i others come before, from 0 to 1; 2 after the last.
pub(crate) fn ranks(batch: &Batch) -> Vec<f32> {
    let count = batch.trained_tokens();
    let share = |i: usize| if i < count { (i as f64 / (count - 1).max(1) as f64) as f32 } else { 2.0 };
    (0..batch.batch * batch.seq_len).map(share).collect()
}

/// The token after each of a document, be it trained or not; -100 after its last.
pub(crate) fn next_tokens(batch: &Batch) -> Vec<i32> {
    let mut next = vec![IGNORE; batch.batch * batch.seq_len];
    for t in 0..next.len().saturating_sub(1) {
        let is_next = |of: &[i32]| of[t + 1] == of[t] + 1;
        let continues = !(t + 1).is_multiple_of(batch.seq_len)
            && batch.document_start[t] == batch.document_start[t + 1]
            && is_next(&batch.position_ids);
        if continues && batch.present[t + 1] != 0.0 {
            next[t] = batch.input_ids[t + 1];
        }
    }
    next
}

/// 1 where [`next_tokens`] has a token.
pub(crate) fn followed(batch: &Batch) -> Vec<f32> {
    next_tokens(batch).into_iter().map(|next| f32::from(u8::from(next != IGNORE))).collect()
}

/// The prompt of each answer with the answer before it, the first with the last one: what a model says of answers to
/// other prompts. All are documents of one row of B·T tokens; targets and weights are those of the answers.
pub fn mismatched(batch: &Batch) -> Batch {
    let size = batch.batch * batch.seq_len;
    if let Some(tokens) = batch.remote {
        return Batch::elsewhere(1, size, tokens);
    }
    let all: Vec<Answer> = answers(batch).collect();
    let (mut ids, mut labels, mut weights, mut positions) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut moved = Vec::new();
    for (number, of) in all.iter().enumerate() {
        let other = &all[(number + all.len() - 1) % all.len()];
        let begin = ids.len();
        ids.extend_from_slice(&batch.input_ids[of.begin..of.split]);
        labels.resize(ids.len(), IGNORE);
        weights.resize(ids.len(), 0.0);
        for t in other.split..other.end {
            ids.push(batch.input_ids[t]);
            // The first token of a document has no predecessor that would predict it.
            let is_predicted = t > other.begin && batch.targets[t - 1] != IGNORE;
            labels.push(if is_predicted { batch.targets[t - 1] } else { IGNORE });
            weights.push(if is_predicted { batch.weights[t - 1] } else { 0.0 });
        }
        positions.extend(0..(ids.len() - begin) as i32);
        moved.push((of.begin..of.split, of.end, begin..ids.len()));
    }
    let used = ids.len();
    ids.resize(size, 0);
    labels.resize(size, IGNORE);
    weights.resize(size, 0.0);
    positions.extend(0..(size - used) as i32);
    let made = Batch::from_labels(1, size, ids, &labels, Some(positions), Some(&weights));
    let made = made.expect("tokens of a batch make a batch");
    let made = if used == 0 { made } else { made.padded_from(&[used]) };
    // Answers keep their targets.
    Batch { patches: moved_images(&batch.patches, &moved, &made), logits: batch.logits, ..made }
}

/// The images of prompts whose tokens moved. For each document: the tokens of its prompt where they were, the end of what
/// followed them there, and its tokens now.
fn moved_images(patches: &Patches, moved: &[(Range<usize>, usize, Range<usize>)], to: &Batch) -> Patches {
    if patches.count() == 0 {
        return Patches::default();
    }
    let size = to.input_ids.len();
    let axes = to.position_ids.iter().flat_map(|position| [*position; 3]).collect();
    let mut made = Patches { rows: vec![-1; size], text_ids: to.input_ids.clone(), axes, ..patches.clone() };
    made.tokens.fill(-1);
    for (prompt, end, document) in moved {
        for (now, then) in document.clone().zip(prompt.clone()) {
            made.axes[3 * now..][..3].copy_from_slice(&patches.axes[3 * then..][..3]);
            if let Ok(row) = usize::try_from(patches.rows[then]) {
                (made.rows[now], made.tokens[row]) = (row as i32, now as i32);
                made.text_ids[now] = patches.text_ids[then];
            }
        }
        // Answers are text, whose axes go on by one from where the images leave them.
        let next = match prompt.end < *end {
            true => patches.axes[3 * prompt.end],
            false => 1 + patches.axes[3 * prompt.start..3 * prompt.end].iter().copied().max().unwrap_or(-1),
        };
        for (place, now) in (document.start + prompt.len()..document.end).enumerate() {
            made.axes[3 * now..][..3].fill(next + place as i32);
        }
    }
    made.text = made.rows.iter().map(|row| if *row < 0 { 1.0 } else { 0.0 }).collect();
    made.last_key = to.last_keys(&made.rows);
    made
}

/// 1 for the targets of each answer that lie within the length of the shorter answer of its pair.
pub(crate) fn common(batch: &Batch) -> Vec<f32> {
    let mut common = vec![0.0; batch.batch * batch.seq_len];
    for pair in sides(batch) {
        let targets = |side: &Range<usize>| side.clone().filter(|t| batch.targets[*t] != IGNORE);
        let shorter = pair.iter().map(|side| targets(side).count()).min().unwrap_or(0);
        for t in pair.iter().flat_map(|side| targets(side).take(shorter)) {
            common[t] = 1.0;
        }
    }
    common
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::patched_view::PatchedView;
    use crate::patches::{Form, Picture};

    #[test]
    fn tokens_know_the_side_of_their_pair() {
        let labels = [-100, 5, 6, 7, -100, 5, -100, -100, -100, 1, 1, -100, -100, 1, 1, 1];
        let batch = Batch::from_labels(4, 4, vec![1; 16], &labels, None, None).unwrap().with_margins(&[None; 2]);
        assert_eq!(documents(&batch), [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]);
        assert_eq!(weights(&batch)[..3], [1.0, 1.0, 0.0]);
        assert_eq!(common(&batch), [1., 0., 0., 0., 1., 0., 0., 0., 1., 1., 0., 0., 1., 1., 0., 0.]);
        assert_eq!(or_zeros(&batch, &batch.reference_logps), [0.0; 16]);
    }

    #[test]
    fn answers_meet_the_prompts_of_their_neighbors() {
        let ids = vec![1, 2, 3, 0, 4, 5, 6, 7];
        let labels = [-100, 2, 3, -100, -100, -100, 6, 7];
        let batch = Batch::from_labels(2, 4, ids, &labels, None, None).unwrap().of_answers(&[true, false]);
        assert_eq!(documents(&batch), [0, 0, 0, -1, 1, 1, 1, 1]);
        assert_eq!((weights(&batch)[..3].to_vec(), desirable(&batch)[..2].to_vec()), (vec![1., 1., 0.], vec![1., 0.]));
        assert_eq!(next_tokens(&batch), [2, 3, -100, -100, 5, 6, 7, -100]);
        let other = mismatched(&Batch { logits: 4, ..batch });
        assert_eq!((other.batch, other.seq_len, other.logits), (1, 8, 4), "its answers have the same tokens");
        assert_eq!(other.input_ids, [1, 6, 7, 4, 5, 2, 3, 0]);
        assert_eq!(other.targets, [6, 7, -100, -100, 2, 3, -100, -100]);
        assert_eq!(other.document_start, [0, 0, 0, 3, 3, 3, 3, 7]);
        assert_eq!(other.present, [1., 1., 1., 1., 1., 1., 1., 0.]);
    }

    const FORM: Form =
        Form { token: 9, width: 12, side: 2, window: 0, table: 0, stretched: false, breaks: false, pad: 8 };

    /// An image of one row of two tokens.
    fn picture() -> Picture {
        let values = Box::new([std::array::from_fn(|value| value as f32); 3]);
        Picture::of([2, 4], PatchedView { pixels: 8, rgb: (0..96).collect(), values, patch: 2, side: 2 })
    }

    #[test]
    fn images_move_with_the_prompts_of_answers() {
        let ids = vec![1, 9, 9, 2, 3, 4, 5, 6, 7, 0, 0, 0];
        let labels = [-100, -100, -100, -100, 3, 4, -100, -100, 7, -100, -100, -100];
        let batch = Batch::from_labels(2, 6, ids, &labels, None, None).unwrap().of_answers(&[true, false]);
        let batch = Batch { patches: FORM.lay_out(&batch, &[picture()]).unwrap(), ..batch };
        let other = mismatched(&batch);
        assert_eq!(other.input_ids[..9], [1, 9, 9, 2, 7, 5, 6, 3, 4]);
        assert_eq!(other.patches, FORM.lay_out(&other, &[picture()]).unwrap());
        assert_eq!(other.patches.axes[3 * 3..][..6], [3, 3, 3, 4, 4, 4]);
    }

    #[test]
    fn an_answer_that_shares_its_prompt_goes_on_after_its_images() {
        let ids = vec![1, 9, 9, 2, 3, 4, 5, 3, 6];
        let batch = Batch::from_labels(1, 9, ids.clone(), &ids, None, None).unwrap();
        let mark = Mark::Pair { chosen: 7, shared: 4, margin: None };
        let batch = Batch { marks: vec![Placed { begin: 0, tokens: 9, mark }], ..batch };
        let patches = FORM.lay_out(&batch, &[picture()]).unwrap();
        let times: Vec<i32> = patches.axes.iter().step_by(3).copied().collect();
        assert_eq!(times, [0, 1, 1, 3, 4, 5, 6, 4, 5]);
    }

    #[test]
    fn tokens_outside_of_pairs_belong_to_none() {
        let batch = Batch::from_labels(1, 3, vec![1; 3], &[1; 3], None, None).unwrap();
        assert_eq!((documents(&batch), weights(&batch)), (vec![-1; 3], vec![0.0; 3]));
    }
}
