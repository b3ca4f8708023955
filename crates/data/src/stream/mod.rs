//! Sets that are read, encoded and packed while a run trains, window by window, and of which nothing stays on the disk.
//!
//! ```text
//! shards ──▶ rows of all sets, drawn by their shares ──▶ window: encoded, shuffled, packed ──▶ rounds of rows
//! ```
//!
//! A window is the next rows up to the size of the shuffle buffer. It is a function of the place at which it begins, so
//! a run continues at any row of it. Knows neither batches nor where shards come from.

mod order;
mod place;
mod reader;
mod sets;
mod shards;
#[cfg(test)]
mod tests;
mod windows;

use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};

pub(crate) use self::order::StreamOrder;
pub use self::place::{SetPlace, StreamPlace};
use self::reader::{Reader, Window};
use self::sets::{SetRows, Sets};
pub use self::sets::{StreamOptions, StreamSet};
pub use self::shards::{LocalShards, ShardId, Shards, StreamFile};
use crate::corpus::DocumentSet;
use crate::error::{DataError, Stop};
use crate::prepare_options::PrepareOptions;
use crate::summary::{DatasetSummary, Summary};
use crate::tokenizer::Tokenizer;

/// Opens what hands out the files of the sets.
pub type OpenShards = Arc<dyn Fn() -> Result<Box<dyn Shards>, DataError> + Send + Sync>;

/// Reports a sentence to the user.
pub type Notify = Arc<dyn Fn(&str) + Send + Sync>;

/// The sets of a stream, what their rows depend on, and what has become of the rows so far.
pub struct Stream {
    sets: Arc<Sets>,
    open: OpenShards,
    /// Shards that no reader uses now.
    idle: Mutex<Option<Box<dyn Shards>>>,
    first: Window,
    digest: String,
    counted: Mutex<Vec<DatasetSummary>>,
    /// Numbers of the sets whose rows are known to be too long.
    warned: Mutex<HashSet<usize>>,
    notify: Notify,
}

impl Stream {
    /// Reads the first window: what it shows of the sets is checked as sets are that are read as a whole. With it the
    /// documents of the window and what became of its rows.
    ///
    /// Errors: a file that cannot be fetched or read, a set that is unfit by its first rows.
    pub fn begin(
        sets: &[StreamSet],
        (tokenizer, options): (Option<&Arc<Tokenizer>>, &PrepareOptions),
        order: StreamOptions,
        open: OpenShards,
        notify: Notify,
        stop: Stop<'_>,
    ) -> Result<(Arc<Stream>, DocumentSet, Summary), DataError> {
        sets.iter().try_for_each(check_names)?;
        let mut shards = open()?;
        let of_set =
            |(number, set): (usize, &StreamSet)| SetRows::new(number, set, tokenizer, options, &mut *shards, stop);
        let all = sets.iter().enumerate().map(of_set).collect::<Result<Vec<_>, _>>()?;
        let workers = options.workers;
        let known = Arc::new(Sets { all, options: order, workers });
        let mut reader = Reader::new(known.clone(), shards, StreamPlace::begin(sets.len()));
        let first = reader.window(stop)?;
        for summary in &first.counted {
            // A set of a small share may have no row in the first window.
            if summary.rows_read > 0 || sets.len() == 1 {
                summary.check()?;
            }
        }
        let corpus = Arc::new(first.corpus.clone());
        let summary = Summary { datasets: first.counted.clone() };
        let digest = digest(sets, tokenizer.map(|of| of.digest()), options, &first);
        let counted = Mutex::new(first.counted.clone());
        let long = first.counted.iter().enumerate().filter(|(_, of)| of.warning().is_some());
        let warned = Mutex::new(long.map(|(number, _)| number).collect());
        let idle = Mutex::new(Some(reader.into_shards()));
        let stream = Stream { sets: known, open, idle, first, digest, counted, warned, notify };
        Ok((Arc::new(stream), DocumentSet::all(corpus), summary))
    }

    /// Identifies the files, by their names, sizes and versions, and what their rows become.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Counts of the rows that were read so far; of those read again after a resume, too.
    pub fn counted(&self) -> Summary {
        Summary { datasets: lock(&self.counted).clone() }
    }

    /// Passes over the set that was gone through the least, at a place.
    pub fn passes(&self, place: &StreamPlace) -> f64 {
        let of = |(set, at): (&SetRows, &SetPlace)| at.epoch as f64 + at.file as f64 / set.files.len().max(1) as f64;
        self.sets.all.iter().zip(&place.sets).map(of).fold(f64::INFINITY, f64::min)
    }

    /// Returns the number of files of all sets together.
    pub fn files(&self) -> usize {
        self.sets.all.iter().map(|set| set.files.len()).sum()
    }

    /// A reader that begins at a place, with the shards that are free, or others. Errors: the place is of another number of
    /// sets, or files cannot be fetched.
    fn reader(&self, at: StreamPlace) -> Result<Reader, DataError> {
        let (found, known) = (at.sets.len(), self.sets.all.len());
        if found != known {
            return Err(DataError::invalid(
                "the place in the data",
                format!("it is of {found} datasets, there are {known}"),
            ));
        }
        let idle = lock(&self.idle).take();
        let shards = idle.map_or_else(|| (self.open)(), Ok)?;
        Ok(Reader::new(self.sets.clone(), shards, at))
    }

    /// Keeps the shards of a reader for the next one.
    fn give_back(&self, reader: Reader) {
        *lock(&self.idle) = Some(reader.into_shards());
    }

    /// Adds what became of a window's rows; reports what rows before did not show: the first that is dropped for each reason,
    /// columns, kinds of remarks, and that many are too long. Errors: a set has become unfit.
    fn count(&self, window: &Window) -> Result<(), DataError> {
        let mut counted = lock(&self.counted);
        for (number, (all, of)) in counted.iter_mut().zip(&window.counted).enumerate() {
            let new = of.dropped.iter().filter(|(reason, _)| !all.dropped.contains_key(reason));
            for (reason, dropped) in new {
                let first = of.example(dropped);
                (self.notify)(&format!("Note: dropped a row of {}: {} ({first})", all.name, reason.name()));
            }
            let late: Vec<String> =
                of.late.iter().filter(|name| !all.late.contains(name)).map(|name| format!("`{name}`")).collect();
            if !late.is_empty() {
                let names = late.join(", ");
                (self.notify)(&format!(
                    "Note: {}: columns that only later rows fill, and that are not used: {names}",
                    all.name
                ));
            }
            for line in of.remarks.without(&all.remarks).lines() {
                (self.notify)(&format!("Note: {}, from now on: {line}", all.name));
            }
            all.add(of);
            if all.rows_read > 0 {
                all.check()?;
                all.check_lengths()?;
            }
            if let Some(text) = all.warning()
                && lock(&self.warned).insert(number)
            {
                (self.notify)(&format!("Warning: so far, {text}"));
            }
        }
        Ok(())
    }
}

/// Errors: a file of a set has no format that is known.
fn check_names(set: &StreamSet) -> Result<(), DataError> {
    let unknown = set.files.iter().find(|file| crate::rows::format_of(Path::new(&file.name)).is_none());
    match unknown {
        None => Ok(()),
        Some(file) => Err(DataError::invalid(&file.name, "this file format is not supported")),
    }
}

/// Identifies files and encoding. Where files are on this machine is left out.
fn digest(sets: &[StreamSet], tokenizer: Option<&str>, options: &PrepareOptions, first: &Window) -> String {
    // Threads and advice do not change rows.
    let PrepareOptions { max_length, truncation, vocab_size, workers: _, positions: _, dialogue, preference } = options;
    let mut text = format!(
        "tokenizer {tokenizer:?} length {max_length} {truncation:?} {vocab_size} {dialogue:?} {preference:?}\n"
    );
    for set in sets {
        text += &format!("set {:?} {:?}\n", set.spec.kind, set.spec.row_limit);
        for file in &set.files {
            let name = Path::new(&file.name).file_name().unwrap_or_default().to_string_lossy();
            text += &format!("file {name} {} {}\n", file.bytes, file.version);
        }
    }
    text += &first.corpus.digest();
    blake3::hash(text.as_bytes()).to_hex().to_string()
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().expect("no thread panics with a lock of a stream held")
}

/// Asks whether a reader's work is over.
fn is_over(over: &AtomicBool) -> bool {
    over.load(std::sync::atomic::Ordering::Relaxed)
}
