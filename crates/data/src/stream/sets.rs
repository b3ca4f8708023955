//! Sets of a stream: their files, the encoding of their rows, and the order in which rows are taken. Reads no more than the first
//! rows, by which a type that is left open is recognised.

use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::shards::{ShardId, Shards, StreamFile};
use crate::dataset::DatasetSpec;
use crate::error::{DataError, Stop};
use crate::prepare;
use crate::prepare_options::PrepareOptions;
use crate::row_encoding::RowEncoding;
use crate::rows::RowLimit;
use crate::summary::DatasetSummary;
use crate::tokenizer::Tokenizer;

/// A set to be streamed, with its files.
#[derive(Clone, Debug)]
pub struct StreamSet {
    pub spec: DatasetSpec,
    pub files: Vec<StreamFile>,
    /// Data files of its folder that belong to no split.
    pub left_out: Vec<PathBuf>,
}

impl StreamSet {
    /// The set with its files on this machine. Errors: there are none, or one is no regular file.
    pub fn here(spec: DatasetSpec) -> Result<StreamSet, DataError> {
        let (found, left_out) = prepare::files(&spec)?;
        let file = |path: &PathBuf| {
            let (bytes, version) = sampled(path).map_err(|e| DataError::io("read", path, e))?;
            Ok(StreamFile { name: path.display().to_string(), bytes, version })
        };
        let files = found.iter().map(file).collect::<Result<_, DataError>>()?;
        Ok(StreamSet { spec, files, left_out })
    }
}

/// Bytes of each of the parts of a file that are compared.
const SAMPLE: u64 = 64 << 10;

/// The size of a file, and the digest of its beginning, its middle and its end: the whole would take as long as reading the
/// data.
fn sampled(path: &Path) -> std::io::Result<(u64, String)> {
    let file = File::open(path)?;
    let bytes = file.metadata()?.len();
    let mut hasher = blake3::Hasher::new();
    let last = bytes.saturating_sub(SAMPLE);
    for begin in [0, last / 2, last] {
        let mut part = vec![0; SAMPLE.min(bytes - begin) as usize];
        file.read_exact_at(&mut part, begin)?;
        hasher.update(&part);
    }
    Ok((bytes, hasher.finalize().to_hex().to_string()))
}

/// The order in which rows of a stream are taken.
#[derive(Clone, Debug)]
pub struct StreamOptions {
    /// Files are taken in another order in each pass, and the documents of a window are shuffled.
    pub shuffle: bool,
    pub seed: u64,
    /// Number of rows that a window has at most.
    pub buffer: usize,
    /// The share of each set in the rows; empty for a single set.
    pub shares: Vec<f64>,
}

/// The sets of a stream, and the order in which their rows are taken.
pub(super) struct Sets {
    pub all: Vec<SetRows>,
    pub options: StreamOptions,
    /// Number of threads that encode rows; 0 counts as 1.
    pub workers: usize,
}

/// A set whose type is known, with what its rows become.
pub(super) struct SetRows {
    pub name: String,
    /// Names of its files in messages.
    pub files: Vec<Arc<Path>>,
    pub encoding: RowEncoding,
    pub text_field: String,
    pub row_limit: RowLimit,
    /// A summary of no rows.
    pub empty: DatasetSummary,
    /// Columns that the first rows fill.
    pub known: HashSet<String>,
}

impl SetRows {
    /// Recognises the type of a set by the first of its files, in the order of their names, that has rows.
    pub fn new(
        number: usize,
        set: &StreamSet,
        tokenizer: Option<&Arc<Tokenizer>>,
        options: &PrepareOptions,
        shards: &mut dyn Shards,
        stop: Stop<'_>,
    ) -> Result<SetRows, DataError> {
        let name = set.spec.path.display().to_string();
        let files: Vec<PathBuf> = set.files.iter().map(|file| PathBuf::from(&file.name)).collect();
        for file in 0..set.files.len() {
            let id = ShardId { set: number, file };
            let path = shards.get(id, &[], stop)?;
            let (files_read, advice) = (vec![path], options.length_advice());
            let mut counted =
                DatasetSummary { name: name.clone(), files: files_read, advice, ..DatasetSummary::default() };
            let opened = prepare::open(&set.spec, &mut counted, options.preference.purpose);
            let (spec, mut rows, known) = opened?;
            let has_rows = rows.next().is_some();
            drop(rows);
            shards.release(id);
            if has_rows {
                let encoding = RowEncoding::new(&spec, set.spec.kind.is_guess(), tokenizer, options, Arc::default())?;
                return Ok(SetRows {
                    name,
                    files: files.iter().map(|file| Arc::from(file.as_path())).collect(),
                    encoding,
                    text_field: spec.kind.text_field().to_owned(),
                    row_limit: spec.row_limit,
                    empty: DatasetSummary { files, left_out: set.left_out.clone(), ..counted },
                    known,
                });
            }
        }
        Err(DataError::invalid(&name, "the dataset has no rows"))
    }
}
