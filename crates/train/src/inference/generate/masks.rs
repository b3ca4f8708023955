//! Tokens that cannot follow, as a model's `generation_config.json` says: always, at first, after certain others, before an
//! answer is long enough. The rules are those of transformers.

/// The rules of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Masks {
    /// Tokens that never follow (`suppress_tokens`).
    pub never: Vec<u32>,
    /// Tokens that no answer begins with (`begin_suppress_tokens`).
    pub not_first: Vec<u32>,
    /// Sequences that are not completed (`bad_words_ids`).
    pub words: Vec<Vec<u32>>,
    /// Tokens in a row that do not occur twice (`no_repeat_ngram_size`); 0: all may.
    pub ngram: usize,
    /// Tokens of an answer before it may end (`min_new_tokens`), and of the sequence (`min_length`).
    pub least_new: usize,
    pub least: usize,
    /// The tokens of which one is the last where an answer is as long as it may be (`forced_eos_token_id`).
    pub last: Vec<u32>,
}

impl Masks {
    pub fn is_empty(&self) -> bool {
        *self == Masks::default()
    }

    /// Takes the tokens that cannot follow out of the logits. `ids`: the sequence so far, of which the first `prompt` are the
    /// prompt; `ends`: tokens that end an answer; `most`: tokens that the sequence may have.
    pub fn apply(&self, logits: &mut [f32], (ids, prompt): (&[i32], usize), ends: &[u32], most: usize) {
        let is_short = ids.len() - prompt < self.least_new || ids.len() < self.least;
        let ends = ends.iter().filter(|_| is_short);
        let first = self.not_first.iter().filter(|_| ids.len() == prompt);
        for id in self.never.iter().chain(first).chain(ends) {
            forbid(logits, *id);
        }
        for word in &self.words {
            let Some((last, before)) = word.split_last() else { continue };
            let is_there = before.len() <= ids.len()
                && ids[ids.len() - before.len()..].iter().zip(before).all(|(id, known)| *id as u32 == *known);
            if is_there {
                forbid(logits, *last);
            }
        }
        if self.ngram > 0 && ids.len() + 1 >= self.ngram {
            let end = &ids[ids.len() + 1 - self.ngram..];
            for known in ids.windows(self.ngram).filter(|known| known.starts_with(end)) {
                forbid(logits, known[self.ngram - 1] as u32);
            }
        }
        let last: Vec<usize> = self.last.iter().map(|id| *id as usize).filter(|id| *id < logits.len()).collect();
        if ids.len() + 1 == most && !last.is_empty() {
            logits.fill(f32::NEG_INFINITY);
            last.into_iter().for_each(|id| logits[id] = 0.0);
        }
    }
}

fn forbid(logits: &mut [f32], id: u32) {
    if let Some(logit) = logits.get_mut(id as usize) {
        *logit = f32::NEG_INFINITY;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tokens of ten that may follow.
    fn allowed(masks: &Masks, ids: &[i32], prompt: usize) -> Vec<usize> {
        let mut logits = vec![1.0; 10];
        masks.apply(&mut logits, (ids, prompt), &[2], 6);
        (0..10).filter(|id| logits[*id].is_finite()).collect()
    }

    #[test]
    fn what_cannot_follow_is_taken_out() {
        let all = |without: &[usize]| (0..10).filter(|id| !without.contains(id)).collect::<Vec<_>>();
        let of = Masks { never: vec![3, 99], not_first: vec![4], ..Masks::default() };
        assert_eq!(allowed(&of, &[1, 5], 2), all(&[3, 4]));
        assert_eq!(allowed(&of, &[1, 5, 5], 2), all(&[3]));
        let of = Masks { words: vec![vec![7], vec![5, 6], vec![1, 5, 8], vec![9, 9, 9, 9]], ..Masks::default() };
        assert_eq!(allowed(&of, &[1, 5], 1), all(&[6, 7, 8]));
        assert_eq!(allowed(&of, &[5, 1], 1), all(&[7]));
        let of = Masks { ngram: 2, ..Masks::default() };
        assert_eq!(allowed(&of, &[1, 5, 1, 6, 1], 1), all(&[5, 6]));
        assert_eq!(allowed(&Masks { ngram: 1, ..Masks::default() }, &[1, 5], 1), all(&[1, 5]));
        assert_eq!(allowed(&Masks { ngram: 9, ..Masks::default() }, &[1, 5], 1), all(&[]));
        let of = Masks { least_new: 2, ..Masks::default() };
        assert_eq!((allowed(&of, &[1, 5], 1), allowed(&of, &[1, 5, 5], 1)), (all(&[2]), all(&[])));
        let of = Masks { least: 3, ..Masks::default() };
        assert_eq!((allowed(&of, &[1, 5], 1), allowed(&of, &[1, 5, 5], 1)), (all(&[2]), all(&[])));
        let of = Masks { last: vec![4, 2], least_new: 9, ..Masks::default() };
        assert_eq!(allowed(&of, &[1, 5, 5, 5, 5], 1), [2, 4], "it ends where it must");
        assert!(Masks::default().is_empty() && !of.is_empty());
    }
}
