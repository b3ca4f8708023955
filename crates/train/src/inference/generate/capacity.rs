//! Capacity of a compiled generator: rows, pages, tokens of a prompt that are read at once.

use compiler::{EntryOptions, KeyValueCache};
use program::{Documents, Variant};

/// Tokens of a cache page.
pub const PAGE: usize = 16;

/// Tokens of a prompt that are read at once, at most and at least.
const CHUNKS: [usize; 2] = [16, 1024];
/// The factor by which the chunk for the rest of a prompt is smaller.
const SMALLER: usize = 8;
/// The factor by which each smaller batch is smaller.
const FEWER: usize = 4;

/// The sizes that a generator is compiled for.
#[derive(Clone, Debug, PartialEq)]
pub struct Capacity {
    pub rows: usize,
    pub cache: KeyValueCache,
    /// Tokens of a prompt that are read at once, ascending.
    pub chunks: Vec<usize>,
    /// Numbers of rows that decode together, ascending.
    pub batches: Vec<usize>,
    /// Shapes of rows with images that are compiled with the others; further ones are compiled when they come.
    pub images: Vec<Variant>,
}

/// The tokens that one sequence needs.
#[derive(Clone, Copy, Debug)]
pub struct Need {
    pub prompt: usize,
    /// Tokens that it may have in the end.
    pub tokens: usize,
}

impl Need {
    pub fn pages(&self) -> usize {
        self.tokens.div_ceil(PAGE)
    }
}

impl Capacity {
    /// The capacity for sequences of which up to `rows` run at a time. `roomy`: more than that, so that later ones fit
    /// too.
    pub fn of(needs: &[Need], rows: usize, longest: Option<usize>, roomy: bool) -> Capacity {
        let rows = rows.min(needs.len()).max(1);
        let mut pages: Vec<usize> = needs.iter().map(Need::pages).collect();
        pages.sort_unstable_by(|a, b| b.cmp(a));
        let most = pages.first().copied().unwrap_or(1).max(1);
        let limit = longest.map_or(usize::MAX, |tokens| tokens.div_ceil(PAGE)).max(most);
        let pages_per_sequence = if roomy { most.next_power_of_two().min(limit) } else { most };
        let together = pages.iter().take(rows).sum::<usize>().max(pages_per_sequence);
        let pages = if roomy { together.next_power_of_two().min(rows * pages_per_sequence) } else { together };
        let prompt = needs.iter().map(|need| need.prompt).max().unwrap_or(1);
        let [least, most] = CHUNKS;
        let chunk = prompt.next_power_of_two().clamp(least, most);
        let chunks = [chunk / SMALLER, chunk].into_iter().filter(|chunk| *chunk >= least).collect();
        let mut batches: Vec<usize> =
            std::iter::successors(Some(rows), |rows| (*rows > 1).then(|| rows.div_ceil(FEWER))).collect();
        batches.reverse();
        Capacity {
            rows,
            cache: KeyValueCache { sequences: rows, pages, page: PAGE, pages_per_sequence },
            chunks,
            batches,
            images: Vec::new(),
        }
    }

    /// The same with one shape for prompts and one for tokens: less to compile, more padding.
    pub fn in_one_shape(self) -> Capacity {
        let largest = |of: &[usize]| of.last().copied().into_iter().collect();
        Capacity { chunks: largest(&self.chunks), batches: largest(&self.batches), ..self }
    }

    /// True if nearly as many sequences can run at a time as with the wanted capacity.
    pub fn suits(&self, wanted: &Capacity) -> bool {
        self.rows >= wanted.rows
            && self.cache.pages >= wanted.cache.pages - wanted.cache.pages / 8
            && self.cache.pages >= wanted.cache.pages_per_sequence
            && self.cache.pages_per_sequence >= wanted.cache.pages_per_sequence
            && self.chunks.last() >= wanted.chunks.last()
    }

    /// Shapes that are compiled: prompts row by row, then tokens of several sequences, then rows with images.
    pub fn variants(&self) -> Vec<Variant> {
        let prompts = self.chunks.iter().map(|chunk| variant(1, *chunk));
        let tokens = self.batches.iter().map(|rows| variant(*rows, 1));
        prompts.chain(tokens).chain(self.images.iter().copied()).collect()
    }

    pub fn entry(&self) -> EntryOptions {
        EntryOptions::generate(self.cache)
    }

    /// Tokens of a row that are read at once, unless an image is longer.
    pub fn most_at_once(&self) -> usize {
        *self.chunks.last().expect("prompts are read in chunks")
    }

    /// The chunk for this number of tokens with the least padding, or the largest.
    pub fn chunk(&self, tokens: usize) -> usize {
        let fitting = self.chunks.iter().copied().find(|chunk| *chunk >= tokens);
        fitting.unwrap_or_else(|| self.most_at_once())
    }

    /// The tokens of a row with images: a chunk, or more where an image is longer than any.
    pub fn row(&self, tokens: usize) -> usize {
        self.chunk(tokens).max(tokens.next_power_of_two())
    }

    /// The smallest batch with room for this number of rows.
    pub fn batch(&self, rows: usize) -> usize {
        self.batches.iter().copied().find(|batch| *batch >= rows).expect("no more sequences run than there are rows")
    }
}

pub fn variant(batch: usize, seq_len: usize) -> Variant {
    Variant { batch, seq_len, documents: Documents::Rows, patches: 0, logits: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needs(of: &[(usize, usize)]) -> Vec<Need> {
        of.iter().map(|(prompt, tokens)| Need { prompt: *prompt, tokens: *tokens }).collect()
    }

    #[test]
    fn long_and_short_sequences_share_pages() {
        let of = needs(&[(100, 1000), (5, 20), (5, 20), (5, 20)]);
        let exact = Capacity::of(&of, 3, Some(4096), false);
        assert_eq!((exact.rows, exact.cache.pages_per_sequence, exact.cache.pages), (3, 63, 63 + 2 + 2));
        assert_eq!(exact.chunks, [16, 128]);
        let roomy = Capacity::of(&of, 3, Some(1008), true);
        assert_eq!((roomy.cache.pages_per_sequence, roomy.cache.pages), (63, 128));
        assert!(roomy.suits(&exact) && !exact.suits(&roomy));
        // A few pages less are enough, unless one sequence needs them all.
        let pages = |pages| Capacity { cache: KeyValueCache { pages, ..exact.cache }, ..exact.clone() };
        assert!(pages(64).suits(&exact) && !pages(60).suits(&exact) && !pages(64).suits(&pages(80)));
    }

    #[test]
    fn shapes_follow_from_the_rows() {
        let of = Capacity::of(&needs(&[(2000, 3000); 64]), 64, None, false);
        assert_eq!((of.batches.clone(), of.chunks.clone()), (vec![1, 4, 16, 64], vec![128, 1024]));
        assert_eq!((of.batch(1), of.batch(5), of.batch(64)), (1, 16, 64));
        assert_eq!((of.chunk(3), of.chunk(128), of.chunk(129), of.chunk(2000)), (128, 128, 1024, 1024));
        assert_eq!(of.variants().len(), 6);
        let small = Capacity::of(&needs(&[(1, 2)]), 8, None, true);
        assert_eq!((small.rows, small.batches.clone(), small.chunks.clone()), (1, vec![1], vec![16]));
    }
}
