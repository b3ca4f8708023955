//! Datasets to a corpus: rows are read in order, encoded by several threads, kept in order, counted.
//!
//! Knows neither packing nor batches.

use std::sync::Arc;

use crate::dataset::{DatasetSpec, EncodeRow, encoder};
use crate::dialogue::DialogueOptions;
use crate::document::{Corpus, Document, Truncation};
use crate::error::{DataError, RowError};
use crate::rows::{self, Row};
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
        let encoder = encoder(spec, tokenizer, &options.dialogue)?;
        let counted = read_dataset(spec, &*encoder, options, &mut corpus)?;
        counted.check()?;
        summary.datasets.push(counted);
    }
    Ok(Prepared { corpus: Arc::new(corpus), summary })
}

fn read_dataset(
    spec: &DatasetSpec,
    encoder: &dyn EncodeRow,
    options: &PrepareOptions,
    corpus: &mut Corpus,
) -> Result<DatasetSummary, DataError> {
    let text_field = match &spec.kind {
        crate::dataset::DatasetKind::Text { field } => field,
        _ => "text",
    };
    let mut rows = rows::open(&spec.path, text_field)?.take(spec.samples.unwrap_or(usize::MAX));
    let truncation = spec.kind.truncation(options.truncation);
    let encode = |row: &Row| -> Result<Vec<Document>, RowError> {
        let fields = row.fields.as_ref().map_err(Clone::clone)?;
        encoder.encode(fields)?.truncate(options.max_length, truncation)
    };
    let mut summary = DatasetSummary::new(spec.path.display().to_string());
    loop {
        let chunk: Vec<Row> = rows.by_ref().take(CHUNK).collect();
        if chunk.is_empty() {
            return Ok(summary);
        }
        for (row, outcome) in chunk.iter().zip(in_parallel(&chunk, options.workers, &encode)) {
            match outcome {
                Ok(documents) => {
                    check_vocabulary(&documents, row, options.vocab_size)?;
                    summary.keep(&documents, options.max_length);
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
