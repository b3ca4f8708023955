//! The data check: counts of rows, and which outcomes are errors.
//!
//! Only counts; prints a table, but knows no terminal.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::dataset::Writing;
use crate::document::Document;
use crate::error::{DataError, RowError, RowReason, shown};
use crate::preference::PreferenceCounts;
use crate::remarks::Remarks;
use crate::rows::{RowLocation, format_of};

/// The share of rows whose loss is worth a warning, and the share that a longer limit should keep.
const MANY: f64 = 0.05;
const ENOUGH: f64 = 0.99;

/// Files that are left out for one reason and named.
const SHOWN_FILES: usize = 8;

/// Advice on rows that are too long: what a longer limit may be, and what else keeps them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LengthAdvice {
    pub(crate) positions: Option<usize>,
    /// A sentence on an option, empty where none helps.
    pub(crate) instead: &'static str,
}

/// Rows that were dropped for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dropped {
    pub rows: usize,
    /// The first of them: which of the set's files, which row, what is wrong with it.
    pub file: usize,
    pub row: usize,
    pub detail: String,
}

/// Counts of one dataset: rows read and left out, tokens, lengths.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DatasetSummary {
    #[serde(skip)]
    pub name: String,
    /// The type that `type: auto` recognized.
    pub found: Option<String>,
    /// Columns that look like data and are not read.
    pub unused: Vec<String>,
    /// Columns that are read where they are there, and that none of the first rows has.
    pub absent: Vec<String>,
    /// Columns that look like data, that only later rows fill, and that are not read.
    pub late: Vec<String>,
    pub writing: Writing,
    /// The files of the set.
    #[serde(skip)]
    pub files: Vec<PathBuf>,
    /// Data files of the folder that belong to no split.
    #[serde(skip)]
    pub left_out: Vec<PathBuf>,
    pub rows_read: usize,
    pub rows_kept: usize,
    pub dropped: BTreeMap<RowReason, Dropped>,
    /// More than `rows_kept` where rows were split.
    pub documents: usize,
    pub tokens: usize,
    /// Tokens that are trained as targets.
    pub trained_tokens: usize,
    /// Tokens of the longest document.
    pub longest: usize,
    /// Documents that fill `max_length` to the last token.
    pub at_limit: usize,
    /// Documents in which a token that ends a turn is trained; `None` where no turns are written.
    pub with_end: Option<usize>,
    /// Documents that begin with two BOS.
    pub doubled_bos: usize,
    /// The documents of each row, and how many rows in a row have as many.
    pub by_row: Vec<(u32, u32)>,
    /// The number of rows by their tokens before truncation; lengths are rounded up by 6 % at most. Empty where rows are
    /// split.
    pub lengths: BTreeMap<usize, usize>,
    /// Rows of more tokens than they may have, be they dropped or cut.
    pub over: usize,
    #[serde(skip)]
    pub advice: LengthAdvice,
    /// The parts of rows that do not reach training.
    pub remarks: Remarks,
    pub preference: PreferenceCounts,
}

/// The tokens and marks that the documents of a dataset should hold.
#[derive(Clone, Debug, Default)]
pub(crate) struct Expected {
    /// Tokens of which one ends each answer.
    pub ends: Option<Vec<i32>>,
    pub bos: Option<i32>,
}

/// Counts of all datasets of a run.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Summary {
    pub datasets: Vec<DatasetSummary>,
}

impl DatasetSummary {
    pub(crate) fn keep(&mut self, documents: &[Document], limit: usize, expected: &Expected) {
        self.rows_read += 1;
        self.rows_kept += 1;
        self.count_row(documents.len());
        self.documents += documents.len();
        if let Some(ends) = &expected.ends {
            let has_end = |document: &&Document| document.labels.iter().any(|label| ends.contains(label));
            *self.with_end.get_or_insert(0) += documents.iter().filter(has_end).count();
        }
        if let Some(bos) = expected.bos {
            let is_doubled = |document: &&Document| document.ids.starts_with(&[bos, bos]);
            self.doubled_bos += documents.iter().filter(is_doubled).count();
        }
        for document in documents {
            self.tokens += document.len();
            self.trained_tokens += document.trained_tokens();
            self.longest = self.longest.max(document.len());
            self.at_limit += usize::from(document.len() == limit);
        }
    }

    pub(crate) fn drop_row(&mut self, place: &RowLocation, error: RowError) {
        self.rows_read += 1;
        self.count_row(0);
        if let Some(dropped) = self.dropped.get_mut(&error.reason) {
            dropped.rows += 1;
            return;
        }
        let known = self.files.iter().position(|file| **file == *place.file);
        let file = known.unwrap_or_else(|| {
            self.files.push(place.file.to_path_buf());
            self.files.len() - 1
        });
        self.dropped.insert(error.reason, Dropped { rows: 1, file, row: place.row, detail: error.detail });
    }

    /// Counts a further row of `tokens` tokens, which may be more than are taken.
    pub(crate) fn count_length(&mut self, tokens: usize, is_over: bool) {
        let step = (tokens.max(1).next_power_of_two() / 32).max(1);
        *self.lengths.entry(tokens.next_multiple_of(step)).or_default() += 1;
        self.over += usize::from(is_over);
    }

    /// The length that a share of the rows does not exceed, where some rows are longer than they may be.
    pub fn length_of(&self, share: f64) -> Option<usize> {
        let wanted = share * self.lengths.values().sum::<usize>() as f64;
        let mut seen = 0;
        let mut reached = self.lengths.iter().filter(|(_, count)| {
            seen += **count;
            seen as f64 >= wanted
        });
        reached.next().map(|(length, _)| *length).filter(|_| self.over > 0)
    }

    /// Counts a further row with `documents` documents.
    pub(crate) fn count_row(&mut self, documents: usize) {
        match self.by_row.last_mut() {
            Some((count, rows)) if *count as usize == documents && *rows < u32::MAX => *rows += 1,
            _ => self.by_row.push((documents as u32, 1)),
        }
    }

    /// The documents of each row.
    pub(crate) fn counts(&self) -> impl Iterator<Item = u32> {
        self.by_row.iter().flat_map(|(count, rows)| std::iter::repeat_n(*count, *rows as usize))
    }

    /// The summary of a set of the same name, of which nothing was read.
    pub(crate) fn named_like(other: &DatasetSummary) -> DatasetSummary {
        let DatasetSummary { name, files, left_out, found, unused, absent, writing, advice, .. } = other.clone();
        DatasetSummary { name, files, left_out, found, unused, absent, writing, advice, ..DatasetSummary::default() }
    }

    /// Adds what became of other rows of the set, but for the documents of each.
    pub(crate) fn add(&mut self, other: &DatasetSummary) {
        self.rows_read += other.rows_read;
        self.rows_kept += other.rows_kept;
        for (reason, dropped) in &other.dropped {
            let known = self.dropped.entry(*reason).or_insert_with(|| Dropped { rows: 0, ..dropped.clone() });
            if (dropped.file, dropped.row) < (known.file, known.row) {
                *known = Dropped { rows: known.rows, ..dropped.clone() };
            }
            known.rows += dropped.rows;
        }
        self.documents += other.documents;
        self.tokens += other.tokens;
        self.trained_tokens += other.trained_tokens;
        self.longest = self.longest.max(other.longest);
        self.at_limit += other.at_limit;
        if let Some(with_end) = other.with_end {
            *self.with_end.get_or_insert(0) += with_end;
        }
        self.doubled_bos += other.doubled_bos;
        other.lengths.iter().for_each(|(length, rows)| *self.lengths.entry(*length).or_default() += rows);
        self.over += other.over;
        let new: Vec<String> = other.late.iter().filter(|name| !self.late.contains(name)).cloned().collect();
        self.late.extend(new);
        self.remarks.extend(&other.remarks);
        self.preference.add(&other.preference);
    }

    /// Place and detail of the first of dropped rows.
    pub fn example(&self, of: &Dropped) -> String {
        let file = self.files.get(of.file).map_or(Cow::Borrowed(""), |file| file.to_string_lossy());
        format!("{file}, row {}: {}", of.row, of.detail)
    }

    /// Rows that are broken, not merely left out by a setting.
    pub fn failures(&self) -> usize {
        self.dropped.iter().filter(|(reason, _)| reason.is_failure()).map(|(_, dropped)| dropped.rows).sum()
    }

    /// Share of the tokens that are trained, in 0..=1.
    pub fn trained_share(&self) -> f64 {
        if self.tokens == 0 { 0.0 } else { self.trained_tokens as f64 / self.tokens as f64 }
    }

    /// The options that keep rows which are too long.
    fn help_with_length(&self) -> String {
        let LengthAdvice { positions, instead } = self.advice;
        let enough = self.length_of(ENOUGH).map(|tokens| match positions {
            Some(most) if tokens > most => format!("the model has no more than {most} positions"),
            _ => format!(
                "`sequence_len` (and `max_length`, where it is set) of at least {tokens} keeps {:.0} % of them",
                100.0 * ENOUGH
            ),
        });
        let known = enough.into_iter().chain((!instead.is_empty()).then(|| instead.to_owned()));
        known.collect::<Vec<_>>().join("; ")
    }

    /// A sentence on rows that are dropped or cut because they are too long, where they are more than a few.
    pub fn warning(&self) -> Option<String> {
        let too_long = self.too_long();
        let over = self.over.max(too_long);
        let share = over as f64 / self.rows_read.max(1) as f64;
        (share >= MANY).then(|| {
            let fate = match (too_long, over - too_long) {
                (_, 0) => "dropped",
                (0, _) => "cut",
                _ => "dropped or cut",
            };
            let (percent, name) = (100.0 * share, shown(&self.name));
            format!("{percent:.1} % of the rows of {name} are too long and {fate}: {}", self.help_with_length())
        })
    }

    /// A sentence on pairs of which mostly the longer answer is chosen.
    pub fn length_bias(&self) -> Option<String> {
        self.preference.length_bias().map(|text| format!("{}: {text}", shown(&self.name)))
    }

    /// The reasons for dropped rows, with the first of each.
    fn reasons(&self) -> String {
        let entry = |(reason, dropped): (&RowReason, &Dropped)| {
            format!("{} x {}, first at {}", dropped.rows, reason.name(), self.example(dropped))
        };
        self.dropped.iter().map(entry).collect::<Vec<_>>().join("; ")
    }

    /// Rows that are dropped because they are too long.
    fn too_long(&self) -> usize {
        self.dropped.get(&RowReason::TooLong).map_or(0, |dropped| dropped.rows)
    }

    /// Errors: more than half of the rows are dropped because they are too long, or fail.
    pub fn check_lengths(&self) -> Result<(), DataError> {
        let too_long = self.too_long();
        if too_long == 0 || 2 * (too_long + self.failures()) <= self.rows_read {
            return Ok(());
        }
        let problem = format!("{too_long} of {} rows are too long: {}", self.rows_read, self.reasons());
        Err(DataError::invalid(&self.name, problem).hint(self.help_with_length()))
    }

    /// Errors: no rows, more than half of the rows fail, or nothing is trained.
    pub(crate) fn check(&self) -> Result<(), DataError> {
        if self.rows_read == 0 {
            return Err(DataError::invalid(&self.name, "the dataset has no rows"));
        }
        if 2 * self.failures() > self.rows_read {
            let problem = format!("{} of {} rows fail: {}", self.failures(), self.rows_read, self.reasons());
            let failed = self.dropped.iter().filter(|(reason, _)| reason.is_failure());
            let most = failed.max_by_key(|(_, dropped)| dropped.rows).expect("rows fail for a reason");
            return Err(DataError::invalid(&self.name, problem).hint(most.0.help()));
        }
        if self.trained_tokens == 0 {
            let problem = format!("no token of {} rows is trained: {}", self.rows_read, self.reasons());
            return Err(DataError::invalid(&self.name, problem).hint(match self.too_long() {
                0 => "check the roles of the messages and `loss_scale`".to_owned(),
                _ => self.help_with_length(),
            }));
        }
        if self.with_end == Some(0) && self.at_limit < self.documents {
            let problem = format!("no token that ends a turn is trained in any of {} documents", self.documents);
            return Err(DataError::invalid(&self.name, problem)
                .hint("the model would never learn to stop: the template should write the model's end token"));
        }
        if 2 * self.doubled_bos > self.documents {
            let problem = format!("{} of {} documents begin with BOS twice", self.doubled_bos, self.documents);
            return Err(DataError::invalid(&self.name, problem)
                .hint("the template or prompt_format writes BOS, and so do the data; remove one"));
        }
        Ok(())
    }
}

/// A number with its digits in groups of three.
fn grouped(n: usize) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

/// The name of a column, and what is in it for a dataset.
type Column = (&'static str, fn(&DatasetSummary) -> String);

/// The table's columns.
const COLUMNS: [Column; 7] = [
    ("rows", |of| grouped(of.rows_read)),
    ("kept", |of| grouped(of.rows_kept)),
    ("dropped", |of| grouped(of.rows_read - of.rows_kept)),
    ("documents", |of| grouped(of.documents)),
    ("tokens", |of| grouped(of.tokens)),
    ("trained", |of| format!("{:.1} %", 100.0 * of.trained_share())),
    ("longest", |of| grouped(of.longest)),
];

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |(name, text): &Column| {
            self.datasets.iter().map(|of| text(of).len()).chain([name.len()]).max().unwrap_or(0)
        };
        let widths = COLUMNS.each_ref().map(width);
        let line = |f: &mut fmt::Formatter<'_>, cell: &dyn Fn(&Column) -> String, end: &str| {
            for (column, width) in COLUMNS.iter().zip(widths) {
                write!(f, "{:>width$}  ", cell(column))?;
            }
            writeln!(f, "{end}")
        };
        line(f, &|column| column.0.to_owned(), "dataset")?;
        for of in &self.datasets {
            line(f, &|column| (column.1)(of), &shown(&of.name))?;
            self.details(of, f)?;
        }
        Ok(())
    }
}

impl Summary {
    fn details(&self, of: &DatasetSummary, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unused = of.unused.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        match (&of.found, unused.as_str()) {
            (Some(found), "") => writeln!(f, "  recognised as {}", shown(found))?,
            (Some(found), unused) => writeln!(f, "  recognised as {}; not used: {}", shown(found), shown(unused))?,
            (None, "") => {}
            (None, unused) => writeln!(f, "  columns that are not used: {}", shown(unused))?,
        }
        if !of.absent.is_empty() {
            let names = of.absent.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
            writeln!(f, "  the first rows have no column {}, which the options name", shown(names))?;
        }
        if !of.late.is_empty() {
            let names = of.late.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
            writeln!(f, "  columns that only later rows fill, and that are not used: {}", shown(names))?;
        }
        if of.files.len() > 1 {
            writeln!(f, "  read from {} files", of.files.len())?;
        }
        for (is_read, why) in [(true, "belongs to no split"), (false, "has a format that is not read")] {
            let files: Vec<_> = of.left_out.iter().filter(|file| format_of(file).is_some() == is_read).collect();
            for file in files.iter().take(SHOWN_FILES) {
                writeln!(f, "  {} {why} and is left out", shown(file.display()))?;
            }
            if let Some(more) = files.len().checked_sub(SHOWN_FILES).filter(|more| *more > 0) {
                writeln!(f, "  … as are {more} more of these")?;
            }
        }
        for (reason, dropped) in &of.dropped {
            let example = shown(of.example(dropped));
            let rows = if dropped.rows == 1 { "row" } else { "rows" };
            writeln!(f, "  dropped {} {rows}: {} (first: {example})", dropped.rows, reason.name())?;
        }
        if let Some(with_end) = of.with_end.filter(|&with_end| with_end < of.documents) {
            writeln!(f, "  {} documents train no token that ends a turn", of.documents - with_end)?;
        }
        if of.doubled_bos > 0 {
            writeln!(f, "  {} documents begin with BOS twice", of.doubled_bos)?;
        }
        for line in of.preference.lines().into_iter().chain(of.remarks.lines()) {
            writeln!(f, "  {}", shown(line))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(document: Document, expected: &Expected) -> DatasetSummary {
        let mut summary = DatasetSummary { name: "set".to_owned(), ..DatasetSummary::default() };
        summary.keep(&[document], 100, expected);
        summary
    }

    #[test]
    fn impossible_masks_are_errors() {
        let ends = Expected { ends: Some(vec![9]), bos: Some(1) };
        let of = |ids: &[i32]| summary(Document::all_trained(ids.to_vec()), &ends).check().map_err(|e| e.to_string());
        assert_eq!(of(&[1, 2, 9]), Ok(()));
        assert!(of(&[1, 2, 3]).unwrap_err().contains("no token that ends a turn"));
        assert!(of(&[1, 1, 9]).unwrap_err().contains("begin with BOS twice"));
        assert!(summary(Document::all_trained(vec![1, 1, 3]), &Expected::default()).check().is_ok());
    }

    #[test]
    fn the_table_is_aligned() {
        let mut first = summary(Document::all_trained(vec![1, 2, 3]), &Expected::default());
        first.tokens = 1_234_567;
        first.drop_row(
            &RowLocation { file: std::path::Path::new("a").into(), row: 3 },
            RowError::new(RowReason::TooLong, "9 tokens"),
        );
        let text = Summary { datasets: vec![first] }.to_string();
        assert_eq!(
            text,
            "rows  kept  dropped  documents     tokens  trained  longest  dataset\n   \
             2     1        1          1  1 234 567    0.0 %        3  set\n  \
             dropped 1 row: too long (first: a, row 3: 9 tokens)\n"
        );
    }
}
