//! Rows of one set to documents, and what is counted of them. Knows neither files nor where documents go.

use std::collections::HashSet;
use std::sync::Arc;

use crate::dataset::{DatasetKind, DatasetSpec, Limits, Noticed, RowDocuments, RowForm, encoder, is_talk, late};
use crate::document::{Document, Truncation};
use crate::error::{DataError, RowError};
use crate::image_folders::ImageFolders;
use crate::prepare_options::PrepareOptions;
use crate::remarks::Remark;
use crate::rows::{self, Row};
use crate::summary::{DatasetSummary, Expected};
use crate::tokenizer::Tokenizer;

/// The documents of one row, and what was noticed on the way.
pub(crate) struct Outcome {
    documents: Result<Vec<Document>, RowError>,
    noticed: Noticed,
}

/// The encoding of the rows of a set whose type is known.
pub(crate) struct RowEncoding {
    kind: DatasetKind,
    /// True if the type was left open.
    is_guess: bool,
    encoder: Box<dyn RowDocuments>,
    limits: Limits,
    /// Tokens of a row that are taken.
    longest: usize,
    expected: Expected,
    vocab_size: usize,
}

impl RowEncoding {
    /// Relative paths of images begin in one of the `folders`. Errors: the type of the set needs a tokenizer or a template that
    /// is not there.
    pub fn new(
        spec: &DatasetSpec,
        is_guess: bool,
        tokenizer: Option<&Arc<Tokenizer>>,
        options: &PrepareOptions,
        folders: Arc<ImageFolders>,
    ) -> Result<RowEncoding, DataError> {
        let encoder = encoder(spec, tokenizer, &options.dialogue, &options.preference, folders)?;
        let truncation = spec.kind.truncation(options.truncation);
        Ok(RowEncoding {
            kind: spec.kind.clone(),
            is_guess,
            limits: Limits { max_length: options.max_length, truncation },
            longest: options.preference.longest(options.max_length, &spec.kind),
            expected: encoder.expected(),
            encoder,
            vocab_size: options.vocab_size,
        })
    }

    /// Values that templates have read from the clock so far, by format.
    pub fn clock_readings(&self) -> Vec<(String, String)> {
        self.encoder.clock_readings().into_iter().collect()
    }

    /// Encodes a row; any thread may.
    pub fn encode(&self, row: &Row) -> Outcome {
        let mut noticed = Noticed::default();
        let form = if rows::is_columnar(&row.place.file) { RowForm::Columnar } else { RowForm::Text };
        let fields = row.fields.as_ref().map_err(Clone::clone);
        if let (true, Ok(fields), DatasetKind::Text { field }) = (self.is_guess, &fields, &self.kind) {
            noticed.remarks.add(Remark::Source, usize::from(fields.get(field).is_some_and(is_talk)));
        }
        let documents = fields.and_then(|fields| self.encoder.documents(fields, form, &self.limits, &mut noticed));
        Outcome { documents, noticed }
    }

    /// Counts what became of a row, in the order of the rows, and returns its documents. `known` are the columns that are
    /// known to be filled. Errors: a token outside of the vocabulary.
    pub fn keep(
        &self,
        row: &Row,
        outcome: Outcome,
        known: &mut HashSet<String>,
        summary: &mut DatasetSummary,
    ) -> Result<Vec<Document>, DataError> {
        if let Ok(fields) = &row.fields {
            late(fields, &self.kind, known, &mut summary.late);
        }
        if self.limits.truncation != Truncation::Split {
            outcome.noticed.length.into_iter().for_each(|(tokens, is_over)| summary.count_length(tokens, is_over));
        }
        match outcome.documents {
            Ok(documents) => {
                check_vocabulary(&documents, row, self.vocab_size)?;
                summary.keep(&documents, self.longest, &self.expected);
                summary.remarks.extend(&outcome.noticed.remarks);
                summary.preference.add(&outcome.noticed.counts);
                Ok(documents)
            }
            Err(error) => {
                summary.drop_row(&row.place, error);
                Ok(Vec::new())
            }
        }
    }
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
