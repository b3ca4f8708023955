//! Settings of a loader: the layout of rows, and the part of them that is read here.

use std::sync::Arc;

use crate::pictures::ImageReader;

/// The way in which documents become rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Several documents a row, best-fit inside windows of documents.
    Packed,
    /// One document a row, each micro-batch padded to the smallest of these lengths that holds its longest row. The
    /// lengths ascend; the last is the sequence length.
    Padded(Vec<usize>),
    /// One document after another in a single row, without padding between them; a micro-batch is as many documents as
    /// it has rows. The row is filled up to the smallest of these lengths; the last holds that many of the longest.
    Joined(Vec<usize>),
}

/// The side on which a row is padded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Padding {
    #[default]
    End,
    Beginning,
}

/// The part of each round of micro-batches, one for every rank, that is distributed here. All ranks walk through one
/// packing, or those of a part of the data through that of the part; the rows of a step do not depend on how many ranks
/// share a packing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The first rank that is served here, from 0.
    pub rank: usize,
    /// Number of ranks from it on that are served here: their micro-batches of a round come one after another.
    pub here: usize,
    pub ranks: usize,
}

impl Share {
    /// All rows, for one rank.
    pub const WHOLE: Share = Share { rank: 0, here: 1, ranks: 1 };

    /// All rows, distributed over `ranks` ranks.
    pub const fn among(ranks: usize) -> Share {
        Share { rank: 0, here: ranks, ranks }
    }
}

/// Settings of a [`crate::loader::Loader`].
#[derive(Clone, Debug)]
pub struct LoaderSpec {
    /// Rows of a micro-batch of one rank.
    pub batch_size: usize,
    pub share: Share,
    /// Tokens of a row, padding included.
    pub seq_len: usize,
    pub layout: Layout,
    pub padding: Padding,
    /// `false` keeps the order of the data in every epoch.
    pub shuffle: bool,
    pub seed: u64,
    /// `None`: for ever.
    pub epochs: Option<u64>,
    /// Fills the end of rows; never trained.
    pub pad_id: i32,
    /// Packed rows are filled up with documents of at most this many tokens in which nothing is trained.
    pub longest_padding: usize,
    /// Micro-batches prepared ahead by a thread; 0: prepared when requested.
    pub prefetch: usize,
    /// By tokens of a row, the tokens of a micro-batch whose logits are computed, where those with a target are no more.
    pub logits: Vec<(usize, usize)>,
    /// Makes patches of images, where the model reads them.
    pub images: Option<Arc<ImageReader>>,
}
