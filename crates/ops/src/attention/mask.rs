//! The attention mask: for every query, the interval of keys that it sees, less those of other branches. For the
//! references; kernels read the same numbers on the device.

use std::ops::Range;

use super::reading::Reading;
use crate::real::Real;

/// One row's intervals. First and last keys never fall from one query to the next, and hold the query itself.
#[derive(Clone, Copy)]
pub struct Mask<'a> {
    starts: &'a [i32],
    last: Option<&'a [i32]>,
    last_query: Option<&'a [i32]>,
    window: Option<usize>,
    bidirectional: bool,
}

impl<'a> Mask<'a> {
    /// Returns the mask of row `b` of tensors [B, T]; `limit` is `last_query` if the call has branches, else
    /// `last_key`. Panics where they break the promise.
    pub fn of_row(b: usize, tokens: usize, starts: &'a [i32], limit: Option<&'a [i32]>, reading: &Reading) -> Self {
        let row = |all: &'a [i32]| &all[b * tokens..(b + 1) * tokens];
        let (last_query, last) = if reading.branches { (limit, None) } else { (None, limit) };
        let mask = Mask {
            starts: row(starts),
            last: last.map(row),
            last_query: last_query.map(row),
            window: reading.window,
            bidirectional: reading.bidirectional,
        };
        for i in 0..tokens {
            let (seen, before) = (mask.visible(i), if i > 0 { mask.visible(i - 1) } else { 0..1 });
            assert!(
                seen.contains(&i) && seen.end <= tokens && before.start <= seen.start && before.end <= seen.end,
                "attention: query {i} of row {b} sees keys {seen:?} of {tokens}, the one before it {before:?}: an \
                 interval holds its query and never goes back"
            );
            assert!(
                !mask.hides(i, i) && !mask.hides(i, seen.start),
                "attention: query {i} of row {b} sees itself and the beginning of its document, which hides it"
            );
        }
        mask
    }

    /// The keys that query `i` sees.
    pub fn visible(&self, i: usize) -> Range<usize> {
        let first = self.window.map_or(0, |window| (i + 1).saturating_sub(window));
        let end = match self.last {
            Some(last) => last[i] as usize + 1,
            None if self.bidirectional => self.starts.len(),
            None => i + 1,
        };
        first.max(self.starts[i] as usize)..end
    }

    /// True if key `j` belongs to a branch that ends before query `i`.
    fn hides(&self, i: usize, j: usize) -> bool {
        self.last_query.is_some_and(|last| (last[j] as usize) < i)
    }

    /// Returns true if rows hold branches, of which queries do not see all.
    pub fn has_branches(&self) -> bool {
        self.last_query.is_some()
    }

    /// Sets the scores of keys of other branches to −∞; `scores` are those of the keys that [`Mask::visible`] says.
    pub fn hide<T: Real>(&self, i: usize, scores: &mut [T]) {
        if let Some(last) = self.last_query {
            let keys = &last[self.visible(i)];
            let hidden = scores.iter_mut().zip(keys).filter(|(_, last)| (**last as usize) < i);
            hidden.for_each(|(score, _)| *score = T::negative_infinity());
        }
    }

    /// Returns the keys of its document that query `i` sees but for a window, as ranges in order: one, or the parts of its
    /// common beginnings and its branch.
    pub fn parts(&self, i: usize) -> Vec<Range<usize>> {
        let seen = self.starts[i] as usize..self.visible(i).end;
        let Some(last) = self.last_query else { return vec![seen] };
        let (mut parts, mut begin, mut j) = (Vec::new(), seen.start, seen.start);
        while j < seen.end {
            if self.hides(i, j) {
                // Hidden with all that its branch holds.
                parts.push(begin..j);
                begin = last[j] as usize + 1;
                j = begin;
            } else {
                j += 1;
            }
        }
        parts.push(begin..seen.end);
        parts.retain(|part| !part.is_empty());
        parts
    }

    /// The keys that any of consecutive queries sees.
    pub fn visible_to(&self, queries: &Range<usize>) -> Range<usize> {
        self.visible(queries.start).start..self.visible(queries.end - 1).end
    }
}
