//! Datasets to a corpus: rows are read in order, encoded by several threads, kept in order, counted.
//!
//! Knows neither packing nor batches.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::boxes::OBJECTS;
use crate::cache::{EntryWriter, ImageFiles, Lookup, RowCache};
use crate::corpus::Corpus;
use crate::dataset::{DatasetKind, DatasetSpec, IMAGES, RowShard, SAMPLE, absent, as_list, detect, filled, unused};
use crate::document::Document;
use crate::error::{DataError, Stop, shown};
use crate::file_stamp::Stamp;
use crate::gather::Gathering;
use crate::image_folders::{ImageFolders, Seen};
use crate::image_parts::is_image;
use crate::image_source::ImageSource;
use crate::pipeline::in_order;
use crate::preference::{self, Purpose};
use crate::prepare_options::PrepareOptions;
use crate::row_encoding::RowEncoding;
use crate::rows::{self, Row, Rows};
use crate::spread;
use crate::summary::{DatasetSummary, Summary};
use crate::tokenizer::Tokenizer;

/// Documents, and how they came about.
#[derive(Debug)]
pub struct EncodedCorpus {
    pub corpus: Arc<Corpus>,
    pub summary: Summary,
    /// Notes on the cache for the user, a sentence each.
    pub notes: Vec<String>,
}

/// The row cache, and a callback for the time in which another process holds it.
#[derive(Clone, Copy)]
pub struct Keeping<'a> {
    pub cache: &'a RowCache,
    /// Called when the work waits for another process.
    pub notify: &'a dyn Fn(&str),
}

/// Reads and encodes every dataset. `tokenizer` may be absent if all are of type tokens.
///
/// Errors: a file that cannot be read, a token id outside of the vocabulary, a dataset of which more than half of the
/// rows fail, a dataset in which nothing is trained.
pub fn prepare(
    datasets: &[DatasetSpec],
    tokenizer: Option<&Arc<Tokenizer>>,
    options: &PrepareOptions,
) -> Result<EncodedCorpus, DataError> {
    prepare_cached(datasets, tokenizer, options, None, &|| false)
}

/// The same, with rows taken from the cache where it has them, and kept there where it has not. The documents are the
/// same either way. Asked to stop, it leaves nothing unfinished in the cache.
pub fn prepare_cached(
    datasets: &[DatasetSpec],
    tokenizer: Option<&Arc<Tokenizer>>,
    options: &PrepareOptions,
    keeping: Option<Keeping<'_>>,
    stop: Stop<'_>,
) -> Result<EncodedCorpus, DataError> {
    let mut corpus = Corpus::default();
    let mut summary = Summary::default();
    let mut notes = Vec::new();
    let (mut taken, mut kept) = (0, 0);
    for spec in datasets {
        let (files, left_out) = files(spec)?;
        let (name, advice) = (spec.path.display().to_string(), options.length_advice());
        let counted = DatasetSummary { name, files, left_out, advice, ..DatasetSummary::default() };
        let set = Set { spec, tokenizer, options, counted, stop };
        let Encoded { rows, counted, from } = match keeping {
            Some(keeping) => set.cached(keeping, &mut notes)?,
            None => set.encode(None)?.encoded,
        };
        taken += usize::from(from == Origin::Cache);
        kept += usize::from(from == Origin::Kept);
        corpus.extend(&rows);
        summary.datasets.push(counted);
    }
    if taken < datasets.len()
        && let Some(reason) = tokenizer.and_then(|tokenizer| tokenizer.encoder().slow_because())
    {
        notes.push(format!("texts are encoded by the tokenizers library, the same ids but slower: {reason}"));
    }
    if let Some(Keeping { cache, .. }) = keeping {
        let sets = |n: usize| if n == 1 { "1 set".to_owned() } else { format!("{n} sets") };
        let folder = cache.folder().display();
        notes.extend((taken > 0).then(|| format!("the rows of {} are from the cache in {folder}", sets(taken))));
        notes.extend((kept > 0).then(|| format!("the rows of {} were encoded and are kept in {folder}", sets(kept))));
    }
    let notes = notes.iter().map(shown).collect();
    let corpus = corpus.with_rows(spread::rows_of(&summary));
    Ok(EncodedCorpus { corpus: Arc::new(corpus), summary, notes })
}

/// The digest of everything that the rows of the sets follow from: files, tokenizer and options, whichever of the rows
/// are read. Errors: a file cannot be read.
pub fn origin(
    datasets: &[DatasetSpec],
    tokenizer: Option<&Arc<Tokenizer>>,
    options: &PrepareOptions,
    cache: Option<&RowCache>,
) -> Result<String, DataError> {
    let mut digests = Vec::new();
    for spec in datasets {
        let (files, _) = files(spec)?;
        let whole = DatasetSpec { shard: RowShard::ALL, ..spec.clone() };
        let digest = tokenizer.map(|tokenizer| tokenizer.digest());
        let key = match cache {
            Some(cache) => cache.key(&whole, &files, digest, options),
            None => RowCache::new(PathBuf::new()).key(&whole, &files, digest, options),
        };
        digests.push(key.map_err(|error| DataError::invalid(spec.path.display(), error))?.digest);
    }
    Ok(blake3::hash(digests.join("\n").as_bytes()).to_hex().to_string())
}

/// Returns true if the first rows of a set have images: a column of them, or parts of messages. Types of texts alone, and
/// sets that cannot be read, have none.
pub fn dataset_images(spec: &DatasetSpec, purpose: Purpose) -> bool {
    let mut summary = DatasetSummary::default();
    let Ok((found, _)) = files(spec) else { return false };
    summary.files = found;
    let Ok((spec, rows, _)) = open(spec, &mut summary, purpose) else { return false };
    if matches!(spec.kind, DatasetKind::Text { .. } | DatasetKind::Tokens | DatasetKind::Instruction(_)) {
        return false;
    }
    let has_column =
        |row: &Map<String, Value>| IMAGES.iter().any(|name| row.get(*name).is_some_and(|of| !of.is_null()));
    let mut readable = rows.take(SAMPLE).filter_map(|row| row.fields.ok());
    readable.any(|row| has_column(&row) || row.values().any(have_images))
}

/// Returns true if a value is a list of messages, or the text of one as JSON, with an image among their parts.
fn have_images(messages: &Value) -> bool {
    let any = |value: &Value, of: &dyn Fn(&Value) -> bool| as_list(value).is_some_and(|list| list.iter().any(of));
    any(messages, &|message| {
        message.as_object().is_some_and(|fields| fields.values().any(|content| any(content, &is_image)))
    })
}

/// The source of encoded rows, and whether they are cached now.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    Cache,
    /// Encoded, and now in the cache.
    Kept,
    /// Encoded, and in no cache.
    Encoded,
}

struct Encoded {
    rows: Corpus,
    counted: DatasetSummary,
    from: Origin,
}

/// One set, and what its rows depend on.
struct Set<'a> {
    spec: &'a DatasetSpec,
    tokenizer: Option<&'a Arc<Tokenizer>>,
    options: &'a PrepareOptions,
    /// With the names of the set and its files.
    counted: DatasetSummary,
    stop: Stop<'a>,
}

impl Set<'_> {
    /// The set's rows out of the cache, or into it.
    fn cached(self, keeping: Keeping<'_>, notes: &mut Vec<String>) -> Result<Encoded, DataError> {
        let Keeping { cache, notify } = keeping;
        let stamps = self.stamps();
        let digest = self.tokenizer.map(|tokenizer| tokenizer.digest());
        // A file that cannot be read is reported where rows are read.
        let Ok(key) = cache.key(self.spec, &self.counted.files, digest, self.options) else {
            return Ok(self.encode(None)?.encoded);
        };
        let name = self.counted.name.clone();
        let clock = |format: &str| self.options.dialogue.clock_reading(format);
        let mut found = cache.find(&key, &clock);
        match &found {
            Lookup::Damaged(problem) => {
                notes.push(format!("the cache holds damaged rows of {name} ({problem}): they are encoded again"));
            }
            Lookup::Changed(path) => notes.push(format!(
                "the image {} has changed since the rows of {name} in the cache were read: they are encoded again",
                path.display()
            )),
            Lookup::Rows(..) | Lookup::Nothing => {}
        }
        let mut writer = None;
        if !matches!(found, Lookup::Rows(..)) {
            let waiting = || notify(&format!("waiting for another process that prepares the rows of {}", shown(&name)));
            match cache.begin(&key, &waiting, self.stop) {
                Ok(begun) => {
                    // Another process may have written them meanwhile.
                    found = cache.find(&key, &clock);
                    writer = Some(begun);
                }
                Err(error) => notes.push(not_kept(&name, cache, &error)),
            }
        }
        if let Lookup::Rows(rows, summary) = found {
            let DatasetSummary { name, files, left_out, advice, .. } = self.counted;
            return Ok(Encoded {
                rows,
                counted: DatasetSummary { name, files, left_out, advice, ..summary },
                from: Origin::Cache,
            });
        }
        let set = Set { counted: self.counted.clone(), ..self };
        let Written { mut encoded, writer, failed, clock, images } = set.encode(writer)?;
        if let Some(error) = failed {
            notes.push(not_kept(&name, cache, &error));
        }
        let Some(writer) = writer else { return Ok(encoded) };
        if self.stamps() != stamps {
            notes.push(format!("a file of {name} changed while it was read: its rows are not kept"));
            return Ok(encoded);
        }
        let images = match images.map(|(seen, digests)| ImageFiles::of(&seen, &digests)).transpose() {
            Ok(images) => images.unwrap_or_default(),
            Err(error) => {
                notes.push(format!("the rows of {name} are not kept, because of an image ({error})"));
                return Ok(encoded);
            }
        };
        match writer.commit(&key, &encoded.counted, (clock, &images)) {
            Ok(()) => {
                encoded.from = Origin::Kept;
                // By their last names, under which files are found that are not kept open.
                if let Lookup::Rows(rows, _) = cache.find(&key, &|format| self.options.dialogue.clock_reading(format)) {
                    encoded.rows = rows;
                }
                cache.clear_unused();
            }
            Err(error) => notes.push(not_kept(&name, cache, &error)),
        }
        Ok(encoded)
    }

    /// Stamps of the files, which show changes.
    fn stamps(&self) -> Vec<Option<Stamp>> {
        self.counted.files.iter().map(|file| Stamp::of(file).ok()).collect()
    }

    /// Encodes the rows of the set, into an entry where one is given.
    fn encode(self, writer: Option<EntryWriter>) -> Result<Written, DataError> {
        let Set { spec, tokenizer, options, mut counted, stop } = self;
        let is_guess = spec.kind.is_guess();
        let (spec, rows, known) = open(spec, &mut counted, options.preference.purpose)?;
        let mut folders: Vec<PathBuf> =
            counted.files.iter().filter_map(|file| Some(file.parent()?.to_owned())).collect();
        folders.dedup();
        let folders = ImageFolders::from(folders);
        let keeps_images = writer.is_some() && options.dialogue.images.is_some();
        let folders = Arc::new(if keeps_images { folders.remembering() } else { folders });
        if options.dialogue.images.is_some() {
            let (objects, images) = match spec.kind {
                DatasetKind::Conversation(_) => (true, true),
                DatasetKind::Preference(_) | DatasetKind::Unpaired(_) => (false, true),
                _ => (false, false),
            };
            counted.unused.retain(|name| !(images && IMAGES.contains(&name.as_str()) || objects && name == OBJECTS));
        }
        let encoding = RowEncoding::new(&spec, is_guess, tokenizer, options, folders.clone())?;
        let mut gathering = Gathering::new(writer);
        let mut digests = HashMap::new();
        let mut keep = |document: &Document| {
            for image in document.images.iter().filter(|_| keeps_images) {
                if let ImageSource::Path(path) = &image.source {
                    digests.insert(path.clone(), image.digest);
                }
            }
            gathering.push(document)
        };
        read_dataset(&spec, (rows, known), &encoding, options.workers, (&mut keep, &mut counted), stop)?;
        if spec.shard == RowShard::ALL {
            counted.check()?;
        }
        let (rows, writer, failed) = gathering.finish()?;
        let clock = encoding.clock_readings();
        let encoded = Encoded { rows, counted, from: Origin::Encoded };
        let images = keeps_images.then(|| (folders.seen(), digests));
        Ok(Written { encoded, writer, failed, clock, images })
    }
}

/// Rows that were encoded, and what an entry needs to hold them.
struct Written {
    encoded: Encoded,
    writer: Option<EntryWriter>,
    /// The error that stopped writing.
    failed: Option<io::Error>,
    /// Values that templates read off the clock, by format.
    clock: Vec<(String, String)>,
    /// The files of images that rows looked for, and digests of what was read of them.
    images: Option<(Seen, HashMap<PathBuf, [u8; 32]>)>,
}

fn not_kept(name: &str, cache: &RowCache, error: &io::Error) -> String {
    let folder = cache.folder().display();
    format!("the rows of {name} are not kept, because {folder} cannot be written ({error}): they stay in memory")
}

/// The files of a set, and those of its folder that belong to no split.
pub(crate) fn files(spec: &DatasetSpec) -> Result<(Vec<PathBuf>, Vec<PathBuf>), DataError> {
    let (files, left_out) = match &spec.files {
        Some(files) => (files.clone(), Vec::new()),
        None => rows::files::find(&spec.path, spec.subset.as_deref(), &spec.split)?,
    };
    files.iter().try_for_each(|file| rows::check_regular(file))?;
    Ok((files, left_out))
}

/// A set whose type is known, its rows, and the columns that the first of them fill.
pub(crate) type Opened = (DatasetSpec, Rows, HashSet<String>);

/// Opens the files of a set; recognises its type where that is left open, and names the columns that are not read.
pub(crate) fn open(spec: &DatasetSpec, summary: &mut DatasetSummary, purpose: Purpose) -> Result<Opened, DataError> {
    let mut rows = rows::open_within(&summary.files, spec.kind.text_field(), spec.row_limit)?;
    let first: Vec<Row> = rows.by_ref().take(SAMPLE).collect();
    let readable: Vec<&Map<String, Value>> = first.iter().filter_map(|row| row.fields.as_ref().ok()).collect();
    let kind = match &spec.kind {
        DatasetKind::Auto(_) if first.is_empty() => DatasetKind::Tokens,
        DatasetKind::Auto(_) if readable.is_empty() => {
            let problem = match first.iter().find_map(|row| Some((&row.place, row.fields.as_ref().err()?))) {
                Some((place, error)) => format!("none of its first rows can be read, the first at {place}: {error}"),
                None => "none of its first rows can be read".to_owned(),
            };
            return Err(DataError::invalid(&summary.name, problem));
        }
        DatasetKind::Auto(hints) => {
            let found = detect(&readable, hints, purpose)
                .map_err(|(problem, hint)| DataError::invalid(&summary.name, problem).hint(hint))?;
            summary.found = Some(found.words);
            found.kind
        }
        given if readable.is_empty() => given.clone(),
        given => {
            let (kind, words) = preference::resolved(given, &readable)
                .map_err(|(problem, hint)| DataError::invalid(&summary.name, problem).hint(hint))?;
            summary.found = words;
            kind
        }
    };
    preference::check_purpose(&kind, purpose)
        .map_err(|(problem, hint)| DataError::invalid(&summary.name, problem).hint(hint))?;
    summary.unused = unused(&readable, &kind);
    summary.absent = absent(&readable, &kind);
    summary.writing = kind.writing();
    let known = filled(&readable);
    Ok((DatasetSpec { kind, ..spec.clone() }, Box::new(first.into_iter().chain(rows)), known))
}

/// Reads the rows of a set.
fn read_dataset(
    spec: &DatasetSpec,
    (rows, mut known): (Rows, HashSet<String>),
    encoding: &RowEncoding,
    workers: usize,
    (keep, summary): (&mut dyn FnMut(&Document) -> Result<(), DataError>, &mut DatasetSummary),
    stop: Stop<'_>,
) -> Result<(), DataError> {
    let RowShard { number, of } = spec.shard;
    assert!(number < of, "a part is one of those that there are");
    let rows = rows.take(spec.samples.unwrap_or(usize::MAX)).skip(number).step_by(of);
    let go_on = || if stop() { Err(DataError::Stopped) } else { Ok(()) };
    in_order(rows, workers, &go_on, &|row| encoding.encode(row), &mut |row, outcome| {
        go_on()?;
        let documents = encoding.keep(&row, outcome, &mut known, summary)?;
        documents.iter().try_for_each(&mut *keep)
    })
}
