//! Rows: JSON objects read one by one from local files, each with its place.
//!
//! Knows file formats, but not what a row means. Adding a format is one file here, its extension in [`DATA`] and one
//! line in [`open_file`].

mod arrow;
mod choice;
mod csv;
mod elements;
pub mod files;
mod format;
pub(crate) mod json;
mod limit;
mod parquet;
mod row;
mod saved;
mod stream;
mod text;
mod utf16;

use std::fs::File;
use std::path::{Path, PathBuf};

use self::format::DATA;
pub(crate) use self::format::{format_of, is_columnar};
pub use self::limit::RowLimit;
use self::row::shared;
pub use self::row::{Row, RowLocation, Rows};
use crate::error::{DataError, RowError, RowReason};

/// Opens files one after another, each when the one before it is read. `text_field` is the column under which the whole
/// content of a `.txt` file appears. Errors of a later file become a row of it. Rows are as large as they are by
/// default.
pub fn open(files: &[PathBuf], text_field: &str) -> Result<Rows, DataError> {
    open_within(files, text_field, RowLimit::default())
}

/// The same with a bound on the rows: a larger one is in error.
pub fn open_within(files: &[PathBuf], text_field: &str, limit: RowLimit) -> Result<Rows, DataError> {
    files.iter().try_for_each(|file| check_regular(file))?;
    let Some((first, rest)) = files.split_first() else { return Ok(Box::new(std::iter::empty())) };
    let first = open_file(first, text_field, limit)?;
    // A file that is missing or has no valid end is reported now, and not after hours.
    for file in rest {
        match format_of(file) {
            Some(("parquet", None)) => drop(parquet::open(file, limit)?),
            Some(("arrow", None)) => drop(arrow::open(file, limit)?),
            _ => drop(File::open(file).map_err(|e| DataError::io("open", file, e))?),
        }
    }
    let (rest, text_field) = (rest.to_vec(), text_field.to_owned());
    let later = move |path: PathBuf| match open_file(&path, &text_field, limit) {
        Ok(rows) => rows,
        Err(error) => {
            let fields = Err(RowError::new(RowReason::Unreadable, error));
            Box::new(std::iter::once(Row { place: RowLocation { file: shared(&path), row: 1 }, fields }))
        }
    };
    Ok(Box::new(first.chain(rest.into_iter().flat_map(later))))
}

/// Refuses devices and pipes, which may never end, and cannot be read twice.
pub(crate) fn check_regular(file: &Path) -> Result<(), DataError> {
    let found = std::fs::metadata(file).map_err(|e| DataError::io("open", file, e))?;
    match found.is_file() {
        true => Ok(()),
        false => Err(DataError::invalid(file.display(), "is no regular file: data are read more than once")),
    }
}

fn open_file(path: &Path, text_field: &str, limit: RowLimit) -> Result<Rows, DataError> {
    let format = format_of(path);
    if !path.exists() {
        return Err(DataError::invalid(path.display(), "there is no such file or directory"));
    }
    match format {
        Some(("jsonl", _)) => json::open_lines_or_list(path, limit),
        Some(("json", _)) => json::open(path, limit),
        Some(("csv", _)) => csv::open(path, b',', limit),
        Some(("tsv", _)) => csv::open(path, b'\t', limit),
        Some(("txt", _)) => text::open(path, text_field, limit),
        Some(("parquet", None)) => parquet::open(path, limit),
        Some(("arrow", None)) => arrow::open(path, limit),
        _ => Err(DataError::invalid(path.display(), "this file format is not supported")
            .hint(format!("known are .{}; all but parquet and arrow also as .gz and .zst", DATA.join(", .")))),
    }
}
