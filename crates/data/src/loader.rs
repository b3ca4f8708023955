//! From documents to a stream of micro-batches, prepared by a separate thread.
//!
//! The stream is a function of (documents, spec, position): a position can be saved and restored. Knows no files and no
//! text.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use serde::{Deserialize, Serialize};

use crate::batch::{Batch, IGNORE};
use crate::corpus::DocumentSet;
use crate::error::DataError;
use crate::order::permutation;
use crate::packing::best_fit;
use crate::segment::DocumentView;

/// How documents become rows.
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

/// Where a row is filled up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Padding {
    #[default]
    End,
    Beginning,
}

/// Which rows of each round of micro-batches, one for every rank, are distributed here. All ranks walk through one
/// packing, so the rows of a step do not depend on how many share them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The first rank that is served here, from 0.
    pub rank: usize,
    /// How many ranks from it on are: their micro-batches of a round come one after another.
    pub here: usize,
    pub ranks: usize,
}

impl Share {
    /// All rows, for one rank.
    pub const WHOLE: Share = Share { rank: 0, here: 1, ranks: 1 };

    /// All rows, dealt among so many ranks.
    pub const fn among(ranks: usize) -> Share {
        Share { rank: 0, here: ranks, ranks }
    }
}

/// Settings of a [`Loader`].
#[derive(Clone, Debug)]
pub struct LoaderSpec {
    /// Rows of a micro-batch of one rank.
    pub batch_size: usize,
    pub share: Share,
    /// Tokens of a row.
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
}

/// Documents that are packed together.
const WINDOW: usize = 8192;

/// A place in the data: the next row to be taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Position {
    pub epoch: u64,
    /// Window of documents inside the epoch's order.
    pub window: u64,
    /// Row inside the window.
    pub bin: u64,
}

/// The rows of the data in their order, one after another.
struct Cursor {
    documents: DocumentSet,
    spec: LoaderSpec,
    position: Position,
    /// Micro-batches of the present round that were not taken yet, and where the round began.
    round: VecDeque<Result<Batch, DataError>>,
    begun: Position,
    /// The order of `position.epoch`, and the rows (corpus indices) of `position.window`.
    epoch_order: Option<(u64, Vec<u32>)>,
    window_rows: Option<(u64, u64, Vec<Vec<u32>>)>,
}

impl Cursor {
    fn windows(&self) -> u64 {
        self.documents.len().div_ceil(WINDOW) as u64
    }

    /// Rows of one window as corpus indices.
    fn rows_of(&mut self, epoch: u64, window: u64) -> Vec<Vec<u32>> {
        let n = self.documents.len();
        if self.epoch_order.as_ref().is_none_or(|(of, _)| *of != epoch) {
            let order = if self.spec.shuffle { permutation(n, self.spec.seed, epoch) } else { (0..n as u32).collect() };
            self.epoch_order = Some((epoch, order));
        }
        let (_, order) = self.epoch_order.as_ref().expect("just made");
        let begin = window as usize * WINDOW;
        let members = &self.documents.members;
        let chosen: Vec<u32> = order[begin..(begin + WINDOW).min(n)].iter().map(|&i| members[i as usize]).collect();
        match self.spec.layout {
            Layout::Padded(_) | Layout::Joined(_) => chosen.into_iter().map(|document| vec![document]).collect(),
            Layout::Packed => {
                let lengths: Vec<usize> = chosen.iter().map(|&d| self.documents.corpus.length(d as usize)).collect();
                let rows = best_fit(&lengths, self.spec.seq_len);
                rows.into_iter().map(|row| row.into_iter().map(|i| chosen[i as usize]).collect()).collect()
            }
        }
    }

    fn rows_in_epoch(&mut self, epoch: u64) -> u64 {
        (0..self.windows()).map(|window| self.rows_of(epoch, window).len() as u64).sum()
    }

    /// The next row's documents; `None` after the last epoch.
    fn next_row(&mut self) -> Option<Vec<u32>> {
        loop {
            let at = self.position;
            if self.spec.epochs.is_some_and(|epochs| at.epoch >= epochs) {
                return None;
            }
            if at.window >= self.windows() {
                self.position = Position { epoch: at.epoch + 1, window: 0, bin: 0 };
                continue;
            }
            if self.window_rows.as_ref().is_none_or(|(epoch, window, _)| (*epoch, *window) != (at.epoch, at.window)) {
                let rows = self.rows_of(at.epoch, at.window);
                self.window_rows = Some((at.epoch, at.window, rows));
            }
            let (_, _, rows) = self.window_rows.as_ref().expect("just made");
            match rows.get(at.bin as usize) {
                Some(row) => {
                    self.position.bin += 1;
                    return Some(row.clone());
                }
                None => self.position = Position { window: at.window + 1, bin: 0, ..at },
            }
        }
    }

    /// The next micro-batch, and the place at which the data go on: a round begins again where not all of it was taken.
    fn next_batch(&mut self) -> Option<(Result<Batch, DataError>, Position)> {
        if self.round.is_empty() {
            self.begun = self.position;
            self.round = self.next_round()?;
        }
        let batch = self.round.pop_front().expect("a round has a micro-batch for each rank");
        Some((batch, if self.round.is_empty() { self.position } else { self.begun }))
    }

    /// A micro-batch for every rank that is served here; the last ones are filled up with rows in which nothing is
    /// trained, or consist of them.
    fn next_round(&mut self) -> Option<VecDeque<Result<Batch, DataError>>> {
        let batch_size = self.spec.batch_size;
        let Share { rank, here, ranks } = self.spec.share;
        let of_all: Vec<Vec<u32>> = std::iter::from_fn(|| self.next_row()).take(batch_size * ranks).collect();
        if of_all.is_empty() {
            return None;
        }
        let length_of = |row: &Vec<u32>| row.iter().map(|&d| self.documents.corpus.length(d as usize)).sum::<usize>();
        let fitting = |lengths: &[usize], needed: usize| {
            lengths.iter().copied().find(|&length| length >= needed).expect("the last length holds every micro-batch")
        };
        // Ranks step together: they take the length that the longest row of all needs.
        let longest = || of_all.iter().map(length_of).max().unwrap_or(0);
        let joined = || of_all.chunks(batch_size).map(|rows| length_of(&rows.concat())).max().unwrap_or(0);
        let length = match &self.spec.layout {
            Layout::Packed => self.spec.seq_len,
            Layout::Padded(lengths) => fitting(lengths, longest()),
            Layout::Joined(lengths) => fitting(lengths, joined()),
        };
        let of = |rank: usize| {
            let rows = of_all.chunks(batch_size).nth(rank).unwrap_or_default();
            match &self.spec.layout {
                Layout::Packed | Layout::Padded(_) => self.assemble(rows, batch_size, length),
                Layout::Joined(_) => self.assemble(&[rows.concat()], 1, length),
            }
        };
        Some((rank..rank + here).map(of).collect())
    }

    fn assemble(&self, rows: &[Vec<u32>], batch_size: usize, seq_len: usize) -> Result<Batch, DataError> {
        let size = batch_size * seq_len;
        let mut batch = Batch {
            batch: batch_size,
            seq_len,
            input_ids: Vec::with_capacity(size),
            position_ids: Vec::with_capacity(size),
            targets: Vec::with_capacity(size),
            weights: Vec::with_capacity(size),
            document_start: Vec::with_capacity(size),
        };
        let mut copy = Vec::new();
        for number in 0..batch_size {
            let row_begin = number * seq_len;
            let row = rows.get(number).map_or(&[][..], Vec::as_slice);
            let used: usize = row.iter().map(|&d| self.documents.corpus.length(d as usize)).sum();
            let padding = seq_len - used;
            if self.spec.padding == Padding::Beginning {
                self.fill(&mut batch, padding, row_begin);
            }
            for &document in row {
                let view = self.documents.corpus.read(document as usize, &mut copy)?;
                append(&mut batch, view, row_begin);
            }
            if self.spec.padding == Padding::End {
                self.fill(&mut batch, padding, row_begin);
            }
        }
        Ok(batch)
    }

    /// Padding is documents of their own in which nothing is trained.
    fn fill(&self, batch: &mut Batch, padding: usize, row_begin: usize) {
        let start = batch.input_ids.len() - row_begin;
        let longest = match self.spec.layout {
            Layout::Packed => self.spec.longest_padding.max(1),
            Layout::Padded(_) | Layout::Joined(_) => padding.max(1),
        };
        batch.input_ids.resize(row_begin + start + padding, self.spec.pad_id);
        batch.targets.resize(row_begin + start + padding, IGNORE);
        batch.weights.resize(row_begin + start + padding, 0.0);
        for begin in (0..padding).step_by(longest) {
            let end = begin.saturating_add(longest).min(padding);
            batch.position_ids.extend(0..(end - begin) as i32);
            batch.document_start.resize(row_begin + start + end, (start + begin) as i32);
        }
    }
}

fn append(batch: &mut Batch, view: DocumentView<'_>, row_begin: usize) {
    let n = view.ids.len();
    let begin = batch.input_ids.len();
    batch.input_ids.extend_from_slice(view.ids);
    batch.targets.resize(begin + n, IGNORE);
    batch.weights.resize(begin + n, 0.0);
    match (view.positions, view.runs()) {
        (None, Some(runs)) => {
            batch.position_ids.extend(0..n as i32);
            batch.document_start.resize(begin + n, (begin - row_begin) as i32);
            for (from, to, weight) in runs.filter(|run| run.2 != 0.0) {
                // The first token of a document has no predecessor.
                let from = from.max(1);
                if from < to {
                    batch.targets[begin + from - 1..begin + to - 1].copy_from_slice(&view.ids[from..to]);
                    batch.weights[begin + from - 1..begin + to - 1].fill(weight);
                }
            }
        }
        _ => append_by_token(batch, view, begin, row_begin),
    }
}

/// A document whose labels are not its tokens, or whose positions are its own.
fn append_by_token(batch: &mut Batch, view: DocumentView<'_>, begin: usize, row_begin: usize) {
    let n = view.ids.len();
    let (labels, weights) = (view.labels(), view.weights());
    let mut start = begin - row_begin;
    for t in 0..n {
        let continues = |t: usize| view.positions.is_none_or(|p| p[t] == p[t - 1].wrapping_add(1));
        if t > 0 && !continues(t) {
            start = begin + t - row_begin;
        }
        batch.position_ids.push(view.positions.map_or(t as i32, |p| p[t]));
        batch.document_start.push(start as i32);
        if t + 1 < n && continues(t + 1) && labels[t + 1] != IGNORE && weights[t + 1] != 0.0 {
            batch.targets[begin + t] = labels[t + 1];
            batch.weights[begin + t] = weights[t + 1];
        }
    }
}

/// A stream of micro-batches.
pub struct Loader {
    source: Source,
    position: Position,
}

enum Source {
    Inline(Box<Cursor>),
    Thread { batches: Option<Receiver<(Result<Batch, DataError>, Position)>>, worker: Option<JoinHandle<()>> },
}

impl Loader {
    /// Starts at `position` (the default is the beginning). Errors: no documents, or one longer than a row.
    pub fn new(documents: DocumentSet, spec: LoaderSpec, position: Position) -> Result<Self, DataError> {
        let cursor = Cursor::new(documents, spec, position)?;
        let ahead = cursor.spec.prefetch;
        let source = if ahead == 0 { Source::Inline(Box::new(cursor)) } else { spawn(cursor, ahead) };
        Ok(Loader { source, position })
    }

    /// The place after the last round of batches that was handed out: what a checkpoint stores.
    pub fn position(&self) -> Position {
        self.position
    }
}

impl Iterator for Loader {
    type Item = Result<Batch, DataError>;

    /// The next micro-batch; `None` after the last epoch. Errors: a file of the documents has changed.
    fn next(&mut self) -> Option<Result<Batch, DataError>> {
        match &mut self.source {
            Source::Inline(cursor) => {
                let (batch, position) = cursor.next_batch()?;
                self.position = position;
                Some(batch)
            }
            Source::Thread { batches, worker } => match batches.as_ref()?.recv() {
                Ok((batch, position)) => {
                    self.position = position;
                    Some(batch)
                }
                Err(_) => {
                    *batches = None;
                    if let Some(Err(panic)) = worker.take().map(JoinHandle::join) {
                        std::panic::resume_unwind(panic);
                    }
                    None
                }
            },
        }
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        if let Source::Thread { batches, worker } = &mut self.source {
            *batches = None;
            if let Some(worker) = worker.take() {
                let _ = worker.join();
            }
        }
    }
}

fn spawn(mut cursor: Cursor, ahead: usize) -> Source {
    let (sender, receiver) = sync_channel(ahead);
    let worker = std::thread::Builder::new().name("data-loader".to_owned()).spawn(move || {
        while let Some(batch) = cursor.next_batch() {
            if sender.send(batch).is_err() {
                return;
            }
        }
    });
    Source::Thread { batches: Some(receiver), worker: Some(worker.expect("the system can start a thread")) }
}

impl Cursor {
    fn new(documents: DocumentSet, spec: LoaderSpec, position: Position) -> Result<Self, DataError> {
        assert!(spec.batch_size > 0 && spec.seq_len > 0, "a micro-batch has rows and tokens");
        let Share { rank, here, ranks } = spec.share;
        assert!(here > 0 && rank + here <= ranks, "a rank is one of those that there are");
        if documents.is_empty() {
            return Err(DataError::invalid("datasets", "there are no documents to train on"));
        }
        let lengths = documents.members.iter().map(|&d| documents.corpus.length(d as usize));
        if let Some(length) = lengths.max().filter(|&length| length > spec.seq_len) {
            let problem = format!("a document has {length} tokens, a row {}", spec.seq_len);
            return Err(DataError::invalid("datasets", problem).hint("prepare them with max_length = sequence_len"));
        }
        let longest = match &spec.layout {
            Layout::Packed => None,
            Layout::Padded(lengths) => Some((lengths, spec.seq_len)),
            Layout::Joined(lengths) => Some((lengths, spec.seq_len * spec.batch_size)),
        };
        if let Some((lengths, longest)) = longest {
            assert!(lengths.is_sorted() && lengths.last() == Some(&longest), "buckets end at the longest row");
        }
        let (round, begun) = (VecDeque::new(), position);
        Ok(Cursor { documents, spec, position, round, begun, epoch_order: None, window_rows: None })
    }
}

/// What `epochs` passes over the documents amount to.
#[derive(Clone, Debug, PartialEq)]
pub struct Extent {
    /// Rows of all epochs.
    pub rows: u64,
    /// Rows of each epoch.
    pub by_epoch: Vec<u64>,
    /// Micro-batches of each rank; the last may hold empty rows, or nothing else.
    pub micro_batches: u64,
    /// Share of the first epoch's row tokens that are not padding, in 0..=1; padding counts up to `seq_len`.
    pub fill: f64,
}

impl Extent {
    /// Optimizer steps of `accumulation` micro-batches; the last may be short.
    pub fn steps(&self, accumulation: usize) -> u64 {
        self.micro_batches.div_ceil(accumulation as u64)
    }

    /// The same of which a share of the last epoch, above 0 and at most 1, is taken, in micro-batches of `batch` rows.
    pub fn with_part_of_last(mut self, share: f64, batch: u64) -> Extent {
        let Some(last) = self.by_epoch.last_mut() else { return self };
        let left_out = *last - ((*last as f64 * share).ceil() as u64).clamp(1, *last);
        *last -= left_out;
        self.rows -= left_out;
        self.micro_batches = self.rows.div_ceil(batch);
        self
    }
}

/// Counts rows without making batches: every epoch has its own packing. `spec.epochs: None` counts one epoch.
pub fn extent(documents: &DocumentSet, spec: &LoaderSpec) -> Result<Extent, DataError> {
    let mut cursor = Cursor::new(documents.clone(), spec.clone(), Position::default())?;
    let first = cursor.rows_in_epoch(0);
    let further = (1..spec.epochs.unwrap_or(1)).map(|epoch| cursor.rows_in_epoch(epoch));
    let by_epoch: Vec<u64> = match spec.epochs {
        Some(0) => Vec::new(),
        _ => std::iter::once(first).chain(further).collect(),
    };
    let rows = by_epoch.iter().sum::<u64>();
    let tokens: usize = documents.members.iter().map(|&d| documents.corpus.length(d as usize)).sum();
    let fill = tokens as f64 / (first * spec.seq_len as u64) as f64;
    Ok(Extent { rows, by_epoch, micro_batches: rows.div_ceil((spec.batch_size * spec.share.ranks) as u64), fill })
}
