//! From documents to a stream of micro-batches, prepared by a separate thread.
//!
//! The stream is a function of (documents, spec, position): a position can be saved and restored. Knows no files and no
//! text.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::batch::Patches;
use crate::batch::{Batch, Placed};
use crate::corpus::{Corpus, DocumentSet};
use crate::document::IGNORE;
use crate::error::{DataError, Stop};
use crate::loader_spec::{Layout, LoaderSpec, Padding, Share};
use crate::round_images::{Made, Reading, most_ahead};
use crate::row_order::{Position, Round, RowOrder};
use crate::segment::DocumentView;
use crate::stream::{Stream, StreamOrder};

/// Micro-batches of the data in their order.
struct Cursor {
    order: Order,
    spec: LoaderSpec,
    /// Rounds whose images are being read.
    ahead: VecDeque<Begun>,
    /// Micro-batches of the present round that were not taken yet, and where the round began and ended.
    round: VecDeque<Made>,
    begun: Position,
    ended: Position,
    /// True if the epoch ends with the present round.
    is_last: bool,
}

/// A round that was drawn, and where it began and ended.
struct Begun {
    reading: Reading,
    begun: Position,
    ended: Position,
    is_last: bool,
}

/// The order of rows: of documents that are known as a whole, or of a stream.
enum Order {
    Whole(RowOrder),
    Stream(StreamOrder),
}

impl Order {
    fn position(&self) -> Position {
        match self {
            Order::Whole(order) => order.position(),
            Order::Stream(order) => order.position(),
        }
    }

    fn parts(&self) -> usize {
        match self {
            Order::Whole(order) => order.documents.corpus.parts(),
            Order::Stream(_) => 1,
        }
    }

    fn round(&mut self, wanted: usize) -> Result<Option<Round>, DataError> {
        match self {
            Order::Whole(order) => Ok(order.round(wanted)),
            Order::Stream(order) => order.round(wanted),
        }
    }
}

/// A micro-batch that is handed out.
struct Delivered {
    batch: Result<Batch, DataError>,
    /// The place at which the data go on: a round begins again where not all of it was taken.
    position: Position,
    /// True for the last micro-batch of its epoch.
    ends_epoch: bool,
}

impl Cursor {
    fn next_batch(&mut self) -> Option<Delivered> {
        if self.round.is_empty() {
            self.begin_rounds();
            let next = self.ahead.pop_front()?;
            (self.begun, self.ended, self.is_last) = (next.begun, next.ended, next.is_last);
            self.round = next.reading.finish();
        }
        let batch = self.round.pop_front().expect("a round has a micro-batch for each rank");
        let is_whole = self.round.is_empty();
        let position = if is_whole { self.ended.clone() } else { self.begun.clone() };
        Some(Delivered { batch, position, ends_epoch: is_whole && self.is_last })
    }

    /// Draws the next round, and with images as many after it as keep all threads at work while the first is trained on.
    fn begin_rounds(&mut self) {
        let reader = self.spec.images.clone();
        let most = if self.spec.prefetch > 0 && reader.is_some() { most_ahead() } else { 0 };
        let size = |ahead: &VecDeque<Begun>| ahead.iter().map(|of| 1 + of.reading.images()).sum::<usize>();
        while self.ahead.is_empty() || size(&self.ahead) < most {
            let begun = self.order.position();
            let Some((made, is_last)) = self.next_round() else { return };
            let reading = Reading::begin(reader.clone(), made);
            self.ahead.push_back(Begun { reading, begun, ended: self.order.position(), is_last });
        }
    }

    /// A micro-batch for every rank that is served here, and whether the epoch ends with them; the last ones of an epoch are
    /// filled up with rows in which nothing is trained, or consist of them.
    fn next_round(&mut self) -> Option<(Vec<Made>, bool)> {
        let batch_size = self.spec.batch_size;
        let Share { rank, here, ranks } = self.spec.share;
        // Ranks in a row have a part of the data.
        let in_part = ranks / self.order.parts();
        let Round { corpus, rows: of_all, is_last } = match self.order.round(batch_size * in_part) {
            Ok(round) => round?,
            Err(error) => return Some((vec![Err(error)], false)),
        };
        let length_of = |row: &Vec<u32>| row.iter().map(|&d| corpus.length(d as usize)).sum::<usize>();
        let fitting = |lengths: &[usize], needed: usize| {
            lengths.iter().copied().find(|&length| length >= needed).expect("the last length holds every micro-batch")
        };
        // Ranks step together: they take the length that the longest row of all needs.
        let longest = || of_all.iter().flatten().map(length_of).max().unwrap_or(0);
        let micro_batches = || of_all.iter().flat_map(|rows| rows.chunks(batch_size));
        let joined = || micro_batches().map(|rows| length_of(&rows.concat())).max().unwrap_or(0);
        let length = match &self.spec.layout {
            Layout::Packed => self.spec.seq_len,
            Layout::Padded(lengths) => fitting(lengths, longest()),
            Layout::Joined(lengths) => fitting(lengths, joined()),
        };
        let of = |rank: usize| {
            let rows = of_all[rank / in_part].chunks(batch_size).nth(rank % in_part).unwrap_or_default();
            let (number, rows) = match &self.spec.layout {
                Layout::Packed | Layout::Padded(_) => (batch_size, rows.to_vec()),
                Layout::Joined(_) => (1, vec![rows.concat()]),
            };
            match rank / in_part == corpus.part() {
                true => self.assemble(&corpus, &rows, number, length),
                false => Ok(Batch::elsewhere(number, length, rows.iter().map(length_of).sum())),
            }
        };
        let mut made: Vec<Made> = (rank..rank + here).map(of).collect();
        // Ranks take one shape.
        let most = made.iter().flatten().map(Batch::trained_tokens).max().unwrap_or(0);
        let logits = self.spec.logits.iter().find(|of| of.0 == length && of.1 >= most).map_or(0, |of| of.1);
        made.iter_mut().flatten().for_each(|batch| batch.logits = logits);
        Some((made, is_last))
    }

    fn assemble(
        &self,
        corpus: &Corpus,
        rows: &[Vec<u32>],
        batch_size: usize,
        seq_len: usize,
    ) -> Result<Batch, DataError> {
        let size = batch_size * seq_len;
        let mut batch = Batch {
            batch: batch_size,
            seq_len,
            input_ids: Vec::with_capacity(size),
            position_ids: Vec::with_capacity(size),
            targets: Vec::with_capacity(size),
            weights: Vec::with_capacity(size),
            document_start: Vec::with_capacity(size),
            present: Vec::with_capacity(size),
            marks: Vec::new(),
            reference_logps: Vec::new(),
            old_logps: Vec::new(),
            sampling_logps: Vec::new(),
            teacher: Default::default(),
            divergence: 0.0,
            patches: Patches::default(),
            images: Vec::new(),
            logits: 0,
            remote: None,
        };
        let mut copy = Vec::new();
        for number in 0..batch_size {
            let row_begin = number * seq_len;
            let row = rows.get(number).map_or(&[][..], Vec::as_slice);
            let used: usize = row.iter().map(|&d| corpus.length(d as usize)).sum();
            let padding = seq_len - used;
            if self.spec.padding == Padding::Beginning {
                self.fill(&mut batch, padding, row_begin);
            }
            for &document in row {
                let view = corpus.read(document as usize, &mut copy)?;
                append(&mut batch, view, row_begin);
                let changed = || DataError::invalid("the data cache", "the images of a row cannot be read");
                batch.images.extend(view.images().ok_or_else(changed)?);
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
        batch.present.resize(row_begin + start + padding, 0.0);
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
    batch.present.resize(begin + n, 1.0);
    batch.marks.extend(view.mark.map(|mark| Placed { begin, tokens: n, mark }));
    match (view.positions, view.runs()) {
        (None, Some(runs)) => {
            let (split, shared) = (view.split().unwrap_or(n), view.shared());
            for (first, end, position) in [(0, split, 0), (split, n, shared)] {
                batch.position_ids.extend(position as i32..(position + end - first) as i32);
                let start = if shared > 0 { begin } else { begin + first };
                batch.document_start.resize(begin + end, (start - row_begin) as i32);
            }
            for (from, to, weight) in runs.filter(|run| run.2 != 0.0) {
                // The first token of a sequence has no predecessor.
                let from = if from == 0 || from == split { from + 1 } else { from };
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
    let (split, shared) = (view.split(), view.shared());
    for t in 0..n {
        let follows = |t: usize| view.positions.is_none_or(|p| p[t] == p[t - 1].wrapping_add(1));
        let continues = |t: usize| split != Some(t) && follows(t);
        if t > 0 && !continues(t) && shared == 0 {
            start = begin + t - row_begin;
        }
        let counted = || split.filter(|split| *split <= t).map_or(t, |split| t - split + shared);
        batch.position_ids.push(view.positions.map_or_else(|| counted() as i32, |p| p[t]));
        batch.document_start.push(start as i32);
        if t + 1 < n && continues(t + 1) && labels[t + 1] != IGNORE && weights[t + 1] != 0.0 {
            batch.targets[begin + t] = labels[t + 1];
            batch.weights[begin + t] = weights[t + 1];
        }
    }
}

/// Interval at which a wait for data asks whether to go on.
const LOOK: Duration = Duration::from_millis(50);

/// A stream of micro-batches that can be resumed at a position.
pub struct Loader {
    source: Source,
    /// Micro-batches that were waited for and not handed out yet.
    ready: VecDeque<Delivered>,
    position: Position,
    ends_epoch: bool,
    waited: Duration,
    /// Ends what the thread waits for: files that are fetched.
    over: Arc<AtomicBool>,
}

enum Source {
    /// A stream that has not begun: nothing is fetched before the first batch is requested.
    Waiting(Option<Box<Cursor>>),
    Inline(Box<Cursor>),
    Thread {
        batches: Option<Receiver<Delivered>>,
        worker: Option<JoinHandle<()>>,
    },
}

impl Loader {
    /// Starts at `position` (the default is the beginning). Errors: no documents, or one longer than a row.
    pub fn new(documents: DocumentSet, spec: LoaderSpec, position: Position) -> Result<Self, DataError> {
        let cursor = Cursor::new(documents, spec, position.clone())?;
        Ok(Loader::over(Source::of(cursor), position, Arc::default()))
    }

    /// Goes through sets that are streamed, without an end, from `position` on (the default is the beginning).
    pub fn streamed(stream: &Arc<Stream>, spec: LoaderSpec, position: Position) -> Loader {
        let order = StreamOrder::new(stream.clone(), &spec, &position);
        let over = order.over.clone();
        let source = Source::Waiting(Some(Box::new(Cursor::over(Order::Stream(order), spec))));
        Loader::over(source, position, over)
    }

    /// Goes through the first documents of sets that are streamed, as far as they are known; nothing is fetched.
    pub fn beginning_of(stream: &Arc<Stream>, spec: LoaderSpec) -> Loader {
        let cursor = Cursor::over(Order::Stream(StreamOrder::beginning(stream.clone(), &spec)), spec);
        Loader::over(Source::Inline(Box::new(cursor)), Position::default(), Arc::default())
    }

    fn over(source: Source, position: Position, over: Arc<AtomicBool>) -> Loader {
        Loader { source, ready: VecDeque::new(), position, ends_epoch: false, waited: Duration::ZERO, over }
    }

    /// Waits until the next micro-batches are there: this many, or fewer at the end of an epoch or before an error. Nothing is
    /// handed out, and the position stays. False: `stop` said so before.
    pub fn wait_for(&mut self, count: usize, stop: &mut dyn FnMut() -> bool) -> bool {
        let begun = Instant::now();
        self.begin();
        let Source::Thread { batches: Some(batches), .. } = &self.source else { return true };
        let is_last = |of: &Delivered| of.ends_epoch || of.batch.is_err();
        let mut goes_on = true;
        while goes_on && self.ready.len() < count && !self.ready.back().is_some_and(is_last) {
            match batches.recv_timeout(LOOK) {
                Ok(delivered) => self.ready.push_back(delivered),
                Err(RecvTimeoutError::Timeout) => goes_on = !stop(),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.waited += begun.elapsed();
        goes_on
    }

    fn begin(&mut self) {
        if let Source::Waiting(cursor) = &mut self.source {
            self.source = Source::of(*cursor.take().expect("a stream begins once"));
        }
    }

    /// Returns the time that [`Loader::next`] has taken since the last call: that in which training waited for data.
    pub fn take_waited(&mut self) -> Duration {
        std::mem::take(&mut self.waited)
    }

    /// Says whether an epoch ends with the batch that was handed out last. No batch has rows of two epochs.
    pub fn ends_epoch(&self) -> bool {
        self.ends_epoch
    }

    /// The place after the last round of batches that was handed out: what a checkpoint stores.
    pub fn position(&self) -> Position {
        self.position.clone()
    }
}

impl Iterator for Loader {
    type Item = Result<Batch, DataError>;

    /// The next micro-batch; `None` after the last epoch. Errors: a file of the documents has changed.
    fn next(&mut self) -> Option<Result<Batch, DataError>> {
        let begun = Instant::now();
        self.begin();
        let delivered = match &mut self.source {
            _ if !self.ready.is_empty() => self.ready.pop_front(),
            Source::Waiting(_) => unreachable!("it has just begun"),
            Source::Inline(cursor) => cursor.next_batch(),
            Source::Thread { batches, worker } => {
                let received = batches.as_ref()?.recv().ok();
                if received.is_none() {
                    *batches = None;
                    if let Some(Err(panic)) = worker.take().map(JoinHandle::join) {
                        std::panic::resume_unwind(panic);
                    }
                }
                received
            }
        };
        self.waited += begun.elapsed();
        let Delivered { batch, position, ends_epoch } = delivered?;
        (self.position, self.ends_epoch) = (position, ends_epoch);
        Some(batch)
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Source::Thread { batches, worker } = &mut self.source {
            *batches = None;
            if let Some(worker) = worker.take() {
                let _ = worker.join();
            }
        }
    }
}

impl Source {
    fn of(cursor: Cursor) -> Source {
        match cursor.spec.prefetch {
            0 => Source::Inline(Box::new(cursor)),
            ahead => spawn(cursor, ahead),
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
        Ok(Cursor::over(Order::Whole(row_order(documents, &spec, position)?), spec))
    }

    fn over(order: Order, spec: LoaderSpec) -> Self {
        assert!(spec.batch_size > 0 && spec.seq_len > 0, "a micro-batch has rows and tokens");
        let Share { rank, here, ranks } = spec.share;
        assert!(here > 0 && rank + here <= ranks, "a rank is one of those that there are");
        let longest = match &spec.layout {
            Layout::Packed => None,
            Layout::Padded(lengths) => Some((lengths, spec.seq_len)),
            Layout::Joined(lengths) => Some((lengths, spec.seq_len * spec.batch_size)),
        };
        if let Some((lengths, longest)) = longest {
            assert!(lengths.is_sorted() && lengths.last() == Some(&longest), "buckets end at the longest row");
        }
        assert!(ranks.is_multiple_of(order.parts()), "every part of the data has as many ranks");
        let begun = order.position();
        let (ahead, round) = (VecDeque::new(), VecDeque::new());
        Cursor { order, spec, ahead, round, begun: begun.clone(), ended: begun, is_last: false }
    }
}

/// The order of documents that are known as a whole. Errors: there are none, or one is longer than a row.
fn row_order(documents: DocumentSet, spec: &LoaderSpec, position: Position) -> Result<RowOrder, DataError> {
    if documents.is_empty() {
        return Err(DataError::invalid("datasets", "there are no documents to train on"));
    }
    let lengths = documents.members.iter().map(|&d| documents.corpus.length(d as usize));
    if let Some(length) = lengths.max().filter(|&length| length > spec.seq_len) {
        let problem = format!("a document has {length} tokens, a row {}", spec.seq_len);
        return Err(DataError::invalid("datasets", problem).hint("prepare them with max_length = sequence_len"));
    }
    Ok(RowOrder::new(documents, spec, position))
}

/// The extent of `epochs` passes over the documents.
#[derive(Clone, Debug, PartialEq)]
pub struct Extent {
    /// Rows of all epochs together.
    pub rows: u64,
    /// Rows of each epoch, by epoch.
    pub by_epoch: Vec<u64>,
    /// Micro-batches of each rank up to the end of each epoch, whose last may hold empty rows, or nothing else.
    pub ends: Vec<u64>,
    /// Micro-batches of each rank, in all epochs.
    pub micro_batches: u64,
    /// Share of the first epoch's row tokens that are not padding, in 0..=1; padding counts up to `seq_len`.
    pub fill: f64,
}

impl Extent {
    /// Optimizer steps of `accumulation` micro-batches; the last of an epoch may be short.
    pub fn steps(&self, accumulation: usize) -> u64 {
        self.steps_by_epoch(accumulation).sum()
    }

    /// The same of each epoch.
    pub fn steps_by_epoch(&self, accumulation: usize) -> impl Iterator<Item = u64> + '_ {
        let begins = std::iter::once(&0).chain(&self.ends);
        self.ends.iter().zip(begins).map(move |(end, begin)| (end - begin).div_ceil(accumulation as u64))
    }

    /// The same of which a share of the last epoch, above 0 and at most 1, is taken.
    pub fn with_part_of_last(mut self, share: f64) -> Extent {
        let of = |all: u64| ((all as f64 * share).ceil() as u64).clamp(1, all.max(1));
        let Some(last) = self.by_epoch.last_mut() else { return self };
        let left_out = *last - of(*last).min(*last);
        *last -= left_out;
        self.rows -= left_out;
        let begin = self.ends.iter().rev().nth(1).copied().unwrap_or(0);
        self.micro_batches = begin + of(self.micro_batches - begin);
        if let Some(end) = self.ends.last_mut() {
            *end = self.micro_batches;
        }
        self
    }
}

/// Micro-batches of each rank from a place to the end of its epoch, then those of each later epoch.
///
/// # Panics
/// If there is no last epoch.
pub fn remaining(documents: &DocumentSet, spec: &LoaderSpec, position: Position) -> Result<Vec<u64>, DataError> {
    assert!(spec.epochs.is_some(), "only what ends has a rest");
    let mut row_order = row_order(documents.clone(), spec, position)?;
    let wanted = spec.batch_size * spec.share.ranks / documents.corpus.parts();
    let (mut by_epoch, mut count) = (Vec::new(), 0);
    while let Some(round) = row_order.round(wanted) {
        count += 1;
        if round.is_last {
            by_epoch.push(std::mem::take(&mut count));
        }
    }
    Ok(by_epoch)
}

/// Counts rows as [`extent_unless`] does, to the end.
pub fn extent(documents: &DocumentSet, spec: &LoaderSpec) -> Result<Extent, DataError> {
    extent_unless(documents, spec, &|| false)
}

/// Counts rows without making batches: every epoch has its own packing. `spec.epochs: None` counts one epoch. An error if
/// `stop` says so between two epochs.
pub fn extent_unless(documents: &DocumentSet, spec: &LoaderSpec, stop: Stop<'_>) -> Result<Extent, DataError> {
    let mut row_order = row_order(documents.clone(), spec, Position::default())?;
    let parts = documents.corpus.parts();
    let batch = (spec.batch_size * spec.share.ranks / parts) as u64;
    let (mut rows, mut by_epoch, mut ends) = (0u64, Vec::<u64>::new(), Vec::<u64>::new());
    for epoch in 0..spec.epochs.unwrap_or(1) {
        if stop() {
            return Err(DataError::Stopped);
        }
        let of_parts = row_order.rows_in_epoch(epoch);
        by_epoch.push(of_parts.iter().sum());
        rows += by_epoch[epoch as usize];
        let own = of_parts.iter().map(|rows| rows.div_ceil(batch)).max().unwrap_or(0);
        ends.push(ends.last().copied().unwrap_or(0) + own);
    }
    let first: u64 = by_epoch.first().copied().unwrap_or_else(|| row_order.rows_in_epoch(0).iter().sum());
    let tokens: usize = documents.members.iter().map(|&d| documents.corpus.length(d as usize)).sum();
    let fill = tokens as f64 / (first * spec.seq_len as u64) as f64;
    let micro_batches = ends.last().copied().unwrap_or(0);
    Ok(Extent { rows, by_epoch, ends, micro_batches, fill })
}
