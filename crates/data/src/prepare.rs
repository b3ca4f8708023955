//! Datasets to a corpus: rows are read in order, encoded by several threads, kept in order, counted.
//!
//! Knows neither packing nor batches.

use std::sync::Arc;

use serde_json::{Map, Value};

use crate::dataset::{DatasetKind, DatasetSpec, EncodeRow, SAMPLE, detect, encoder};
use crate::dialogue::DialogueOptions;
use crate::document::{Corpus, Document, Truncation};
use crate::error::{DataError, RowError};
use crate::rows::{self, Row, Rows};
use crate::summary::{DatasetSummary, Summary};
use crate::tokenizer::Tokenizer;

/// What holds for all datasets of a run.
#[derive(Clone, Debug)]
pub struct PrepareOptions {
    /// Tokens a document may have; at most the row length.
    pub max_length: usize,
    pub truncation: Truncation,
    /// Rows of the model's embedding table: a larger token id is an error.
    pub vocab_size: usize,
    /// Threads that encode; 0 or 1: the calling thread alone.
    pub workers: usize,
    pub dialogue: DialogueOptions,
}

/// Documents, and how they came about.
#[derive(Debug)]
pub struct Prepared {
    pub corpus: Arc<Corpus>,
    pub summary: Summary,
}

/// Rows that are encoded before the next ones are read.
const CHUNK: usize = 2048;

/// Reads and encodes every dataset. `tokenizer` may be absent if all are of type tokens.
///
/// Errors: a file that cannot be read, a token id outside of the vocabulary, a dataset of which more than half of the
/// rows fail, a dataset in which nothing is trained.
pub fn prepare(
    datasets: &[DatasetSpec],
    tokenizer: Option<&Arc<Tokenizer>>,
    options: &PrepareOptions,
) -> Result<Prepared, DataError> {
    let mut corpus = Corpus::default();
    let mut summary = Summary::default();
    for spec in datasets {
        let mut counted = DatasetSummary::new(spec.path.display().to_string());
        let (spec, rows) = open(spec, &mut counted)?;
        let encoder = encoder(&spec, tokenizer, &options.dialogue)?;
        read_dataset(&spec, rows, &*encoder, options, &mut corpus, &mut counted)?;
        counted.check()?;
        summary.datasets.push(counted);
    }
    Ok(Prepared { corpus: Arc::new(corpus), summary })
}

/// Finds the files of a set and opens them; recognises its type where that is left open.
fn open(spec: &DatasetSpec, summary: &mut DatasetSummary) -> Result<(DatasetSpec, Rows), DataError> {
    let files = match &spec.files {
        Some(files) => files.clone(),
        None => {
            let (files, left_out) = rows::files::find(&spec.path, spec.subset.as_deref(), &spec.split)?;
            summary.left_out = left_out;
            files
        }
    };
    summary.files = files.len();
    let text_field = match &spec.kind {
        DatasetKind::Text { field } => field,
        DatasetKind::Auto(hints) if !hints.text.is_empty() => &hints.text,
        _ => "text",
    };
    let mut rows = rows::open(&files, text_field)?;
    let DatasetKind::Auto(hints) = &spec.kind else { return Ok((spec.clone(), rows)) };
    let first: Vec<Row> = rows.by_ref().take(SAMPLE).collect();
    let readable: Vec<&Map<String, Value>> = first.iter().filter_map(|row| row.fields.as_ref().ok()).collect();
    if readable.is_empty() && !first.is_empty() {
        return Err(DataError::invalid(&summary.name, "none of its first rows can be read"));
    }
    let kind = if first.is_empty() {
        DatasetKind::Tokens
    } else {
        let found = detect(&readable, hints)
            .map_err(|(problem, hint)| DataError::invalid(&summary.name, problem).hint(hint))?;
        summary.found = Some(found.words);
        found.kind
    };
    Ok((DatasetSpec { kind, ..spec.clone() }, Box::new(first.into_iter().chain(rows))))
}

fn read_dataset(
    spec: &DatasetSpec,
    rows: Rows,
    encoder: &dyn EncodeRow,
    options: &PrepareOptions,
    corpus: &mut Corpus,
    summary: &mut DatasetSummary,
) -> Result<(), DataError> {
    let mut rows = rows.take(spec.samples.unwrap_or(usize::MAX));
    let truncation = spec.kind.truncation(options.truncation);
    let expected = encoder.expected();
    let encode = |row: &Row| -> Result<Vec<Document>, RowError> {
        let fields = row.fields.as_ref().map_err(Clone::clone)?;
        encoder.encode(fields)?.truncate(options.max_length, truncation)
    };
    loop {
        let chunk: Vec<Row> = rows.by_ref().take(CHUNK).collect();
        if chunk.is_empty() {
            return Ok(());
        }
        for (row, outcome) in chunk.iter().zip(in_parallel(&chunk, options.workers, &encode)) {
            match outcome {
                Ok(documents) => {
                    check_vocabulary(&documents, row, options.vocab_size)?;
                    summary.keep(&documents, options.max_length, &expected);
                    documents.into_iter().for_each(|document| corpus.push(document));
                }
                Err(error) => summary.drop_row(&row.place, error),
            }
        }
    }
}

/// Applies `work` to every item with several threads; results in the order of the items.
fn in_parallel<T: Sync, R: Send>(items: &[T], workers: usize, work: &(dyn Fn(&T) -> R + Sync)) -> Vec<R> {
    if workers <= 1 || items.len() < 2 * workers {
        return items.iter().map(work).collect();
    }
    let share = items.len().div_ceil(workers);
    std::thread::scope(|scope| {
        let parts: Vec<_> =
            items.chunks(share).map(|part| scope.spawn(move || part.iter().map(work).collect::<Vec<R>>())).collect();
        let join = |part: std::thread::ScopedJoinHandle<'_, Vec<R>>| {
            part.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        parts.into_iter().flat_map(join).collect()
    })
}

fn check_vocabulary(documents: &[Document], row: &Row, vocab_size: usize) -> Result<(), DataError> {
    let outside = |id: &&i32| **id >= 0 && **id as usize >= vocab_size;
    let ids = documents.iter().flat_map(|document| document.ids.iter().chain(&document.labels));
    match ids.into_iter().find(outside) {
        None => Ok(()),
        Some(id) => {
            let problem = format!("token id {id} is outside of the model's vocabulary of {vocab_size}");
            Err(DataError::invalid(&row.place, problem).hint("the tokenizer or the data belong to another model"))
        }
    }
}
