//! The rows of a stream in their order, window by window, encoded by several threads.

use std::collections::HashSet;
use std::iter::Peekable;
use std::sync::Arc;

use serde_json::Value;

use super::place::{SetPlace, StreamPlace};
use super::sets::{SetRows, Sets};
use super::shards::{ShardId, Shards};
use crate::corpus::Corpus;
use crate::error::{DataError, Stop};
use crate::gather::Gathering;
use crate::order::{drawn, permutation};
use crate::pipeline::in_order;
use crate::rows::{self, Row, Rows};
use crate::summary::DatasetSummary;

/// Files that are named ahead of their use.
const AHEAD: usize = 4;

/// Bytes of text after which a window ends before it has all of its rows, so that long rows do not exhaust the memory.
const MOST_TEXT: usize = 256 << 20;

/// Distance between the seeds of the orders of two sets.
const APART: u64 = 0x9E37_79B9_7F4A_7C15;

/// The documents of successive rows, with the places at which these begin and end.
#[derive(Clone, Debug)]
pub(super) struct Window {
    pub corpus: Corpus,
    pub begin: StreamPlace,
    /// The beginning of the next one.
    pub end: StreamPlace,
    /// True if a pass over the only set ends with it.
    pub ends_epoch: bool,
    /// Counts of its rows, by set.
    pub counted: Vec<DatasetSummary>,
}

/// A file that is being read.
struct OpenFile {
    id: ShardId,
    rows: Peekable<Rows>,
}

/// Reads windows, one after another.
pub(super) struct Reader {
    sets: Arc<Sets>,
    shards: Box<dyn Shards>,
    at: StreamPlace,
    files: Vec<Option<OpenFile>>,
    /// The order of files in a pass, by set.
    orders: Vec<Option<(u64, Vec<u32>)>>,
    /// Columns that are known to be filled, by set.
    known: Vec<HashSet<String>>,
}

impl Reader {
    pub fn new(sets: Arc<Sets>, shards: Box<dyn Shards>, at: StreamPlace) -> Reader {
        let files = sets.all.iter().map(|_| None).collect();
        let orders = vec![None; sets.all.len()];
        let known = sets.all.iter().map(|set| set.known.clone()).collect();
        Reader { sets, shards, at, files, orders, known }
    }

    /// Closes its files and gives back what hands them out.
    pub fn into_shards(mut self) -> Box<dyn Shards> {
        for file in self.files.iter_mut().filter_map(Option::take) {
            drop(file.rows);
            self.shards.release(file.id);
        }
        self.shards
    }

    /// Reads and encodes the next rows, up to the size of the buffer or the end of a pass over the only set. Errors: a file
    /// cannot be fetched, a token id is outside of the vocabulary, a set has no rows.
    pub fn window(&mut self, stop: Stop<'_>) -> Result<Window, DataError> {
        let begin = self.at.clone();
        let sets = self.sets.clone();
        let mut known = std::mem::take(&mut self.known);
        let mut counted: Vec<DatasetSummary> = sets.all.iter().map(|set| set.empty.clone()).collect();
        let mut gathering = Gathering::default();
        let (mut rows, mut text, mut ends_epoch, mut failed) = (0, 0, false, None);
        let items = std::iter::from_fn(|| {
            if ends_epoch || rows == sets.options.buffer || text >= MOST_TEXT {
                return None;
            }
            match self.next_row(stop) {
                Ok((set, row, is_last)) => {
                    (rows, text, ends_epoch) = (rows + 1, text + length(&row), is_last);
                    Some((set, row))
                }
                Err(error) => {
                    failed = Some(error);
                    None
                }
            }
        });
        let go_on = || if stop() { Err(DataError::Stopped) } else { Ok(()) };
        let encode = |(set, row): &(usize, Row)| sets.all[*set].encoding.encode(row);
        in_order(items.fuse(), sets.workers, &go_on, &encode, &mut |(set, row), outcome| {
            go_on()?;
            let documents = sets.all[set].encoding.keep(&row, outcome, &mut known[set], &mut counted[set])?;
            documents.iter().try_for_each(|document| gathering.push(document))
        })?;
        if let Some(error) = failed {
            return Err(error);
        }
        self.known = known;
        self.at.window += 1;
        let (corpus, ..) = gathering.finish()?;
        Ok(Window { corpus, begin, end: self.at.clone(), ends_epoch, counted })
    }

    /// The next row with the number of its set; true if a pass over the only set ends with it. In a mixture a set that is used up
    /// begins again.
    fn next_row(&mut self, stop: Stop<'_>) -> Result<(usize, Row, bool), DataError> {
        let set = self.drawn_set();
        if !self.has_more(set, stop)? && !self.has_more(set, stop)? {
            return Err(DataError::invalid(&self.sets.all[set].name, "the dataset has no rows"));
        }
        let file = self.files[set].as_mut().expect("a file with rows is open");
        let mut row = file.rows.next().expect("just seen");
        row.place.file = self.sets.all[set].files[file.id.file].clone();
        self.at.sets[set].row += 1;
        self.at.drawn += 1;
        let is_last = self.sets.all.len() == 1 && !self.has_more(set, stop)?;
        Ok((set, row, is_last))
    }

    /// The set of the next row.
    fn drawn_set(&self) -> usize {
        let shares = &self.sets.options.shares;
        let number = drawn(self.sets.options.seed, self.at.drawn);
        let mut sum = 0.0;
        let below = |share: &f64| {
            sum += share;
            number < sum
        };
        let found = shares.iter().position(below);
        // Rounding may leave the sum a little below 1.
        found.unwrap_or(self.sets.all.len() - 1)
    }

    /// Opens the next file of a set where one is read to its end. False at the end of a pass: then the place is the
    /// beginning of the next one.
    fn has_more(&mut self, set: usize, stop: Stop<'_>) -> Result<bool, DataError> {
        loop {
            if self.files[set].is_none() {
                let SetPlace { epoch, file, .. } = self.at.sets[set];
                if file as usize >= self.sets.all[set].files.len() {
                    self.at.sets[set] = SetPlace { epoch: epoch + 1, file: 0, row: 0 };
                    return Ok(false);
                }
                self.files[set] = Some(self.open(set, stop)?);
            }
            let open = self.files[set].as_mut().expect("just opened");
            if open.rows.peek().is_some() {
                return Ok(true);
            }
            let done = self.files[set].take().expect("just seen");
            drop(done.rows);
            self.shards.release(done.id);
            let at = &mut self.at.sets[set];
            *at = SetPlace { file: at.file + 1, row: 0, ..*at };
        }
    }

    /// The file at the place of a set, without the rows that are taken.
    fn open(&mut self, set: usize, stop: Stop<'_>) -> Result<OpenFile, DataError> {
        let SetPlace { epoch, file, row } = self.at.sets[set];
        let SetRows { files, text_field, row_limit, .. } = &self.sets.all[set];
        if self.orders[set].as_ref().is_none_or(|(of, _)| *of != epoch) {
            let seed = self.sets.options.seed.wrapping_add(APART.wrapping_mul(set as u64 + 1));
            let order = match self.sets.options.shuffle {
                true => permutation(files.len(), seed, epoch),
                false => (0..files.len() as u32).collect(),
            };
            self.orders[set] = Some((epoch, order));
        }
        let (_, order) = self.orders[set].as_ref().expect("just made");
        let id = |file: &u32| ShardId { set, file: *file as usize };
        let next: Vec<ShardId> = order.iter().skip(file as usize + 1).take(AHEAD).map(id).collect();
        let id = id(&order[file as usize]);
        let path = self.shards.get(id, &next, stop)?;
        // A file that was left out would be missed by no count: what cannot be opened ends the run, which a resume goes on with.
        let rows = rows::open_within(&[path], text_field, *row_limit)
            .map_err(|error| DataError::invalid(files[id.file].display(), error))?;
        let rows: Rows = if row > 0 { Box::new(rows.skip(row as usize)) } else { rows };
        Ok(OpenFile { id, rows: rows.peekable() })
    }
}

/// Bytes of the texts of a row, about.
fn length(row: &Row) -> usize {
    fn of(value: &Value) -> usize {
        match value {
            Value::String(text) => text.len(),
            Value::Array(list) => list.iter().map(of).sum::<usize>() + 8 * list.len(),
            Value::Object(map) => map.values().map(of).sum::<usize>() + 8 * map.len(),
            _ => 8,
        }
    }
    row.fields.as_ref().map_or(0, |fields| fields.values().map(of).sum())
}
