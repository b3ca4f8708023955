//! The data check: what became of the rows, and which outcomes are errors.
//!
//! Counts only; prints a table, but knows no terminal.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use crate::document::Document;
use crate::error::{DataError, RowError, RowReason};
use crate::rows::Place;

/// Rows that were dropped for one reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dropped {
    pub rows: usize,
    /// Place and detail of the first.
    pub example: String,
}

/// What became of one dataset.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct DatasetSummary {
    pub name: String,
    /// What `type: auto` recognised.
    pub found: Option<String>,
    /// Files that were read.
    pub files: usize,
    /// Data files of the folder that belong to no split.
    pub left_out: Vec<PathBuf>,
    pub rows_read: usize,
    pub rows_kept: usize,
    pub dropped: BTreeMap<RowReason, Dropped>,
    /// More than `rows_kept` where rows were split.
    pub documents: usize,
    pub tokens: usize,
    /// Tokens that are targets.
    pub trained_tokens: usize,
    /// Tokens of the longest document.
    pub longest: usize,
    /// Documents that fill `max_length` to the last token.
    pub at_limit: usize,
}

/// What became of all datasets.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Summary {
    pub datasets: Vec<DatasetSummary>,
}

impl DatasetSummary {
    pub(crate) fn new(name: String) -> Self {
        DatasetSummary { name, ..DatasetSummary::default() }
    }

    pub(crate) fn keep(&mut self, documents: &[Document], limit: usize) {
        self.rows_read += 1;
        self.rows_kept += 1;
        self.documents += documents.len();
        for document in documents {
            self.tokens += document.len();
            self.trained_tokens += document.trained_tokens();
            self.longest = self.longest.max(document.len());
            self.at_limit += usize::from(document.len() == limit);
        }
    }

    pub(crate) fn drop_row(&mut self, place: &Place, error: RowError) {
        self.rows_read += 1;
        let entry = self.dropped.entry(error.reason);
        entry.or_insert_with(|| Dropped { rows: 0, example: format!("{place}: {}", error.detail) }).rows += 1;
    }

    /// Rows that are broken, not merely left out by a setting.
    pub fn failures(&self) -> usize {
        self.dropped.iter().filter(|(reason, _)| reason.is_failure()).map(|(_, dropped)| dropped.rows).sum()
    }

    /// Share of the tokens that are trained, in 0..=1.
    pub fn trained_share(&self) -> f64 {
        if self.tokens == 0 { 0.0 } else { self.trained_tokens as f64 / self.tokens as f64 }
    }

    /// Errors: no rows, more than half of the rows fail, or nothing is trained.
    pub(crate) fn check(&self) -> Result<(), DataError> {
        if self.rows_read == 0 {
            return Err(DataError::invalid(&self.name, "the dataset has no rows"));
        }
        let reasons = || {
            let entry = |(reason, dropped): (&RowReason, &Dropped)| {
                format!("{} x {}, first at {}", dropped.rows, reason.name(), dropped.example)
            };
            self.dropped.iter().map(entry).collect::<Vec<_>>().join("; ")
        };
        if 2 * self.failures() > self.rows_read {
            let problem = format!("{} of {} rows fail: {}", self.failures(), self.rows_read, reasons());
            return Err(DataError::invalid(&self.name, problem).hint("check the dataset's type and column names"));
        }
        if self.trained_tokens == 0 {
            let problem = format!("no token of {} rows is trained: {}", self.rows_read, reasons());
            return Err(DataError::invalid(&self.name, problem)
                .hint("check max_length, truncation_strategy and the roles of the messages"));
        }
        Ok(())
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for d in &self.datasets {
            writeln!(
                f,
                "{}: {} rows read, {} kept, {} documents, {} tokens, {:.1} % trained, longest {}",
                d.name,
                d.rows_read,
                d.rows_kept,
                d.documents,
                d.tokens,
                100.0 * d.trained_share(),
                d.longest
            )?;
            if let Some(found) = &d.found {
                writeln!(f, "  recognised as {found}")?;
            }
            for (reason, dropped) in &d.dropped {
                writeln!(f, "  dropped {} rows: {} (first: {})", dropped.rows, reason.name(), dropped.example)?;
            }
        }
        Ok(())
    }
}
