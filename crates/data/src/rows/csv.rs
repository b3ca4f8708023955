//! `.csv` and `.tsv`: the first line names the columns, every value is a text.
//!
//! An empty field is an empty text. Knows quoting and separators, no types.

use std::collections::HashSet;
use std::io::BufRead;
use std::path::Path;
use std::sync::Arc;

use csv::{ByteRecord, ReaderBuilder};
use serde_json::{Map, Value};

use super::limit::Bounded;
use super::{Row, RowLimit, RowLocation, Rows, shared, stream};
use crate::error::{DataError, RowError, RowReason};

const BYTE_ORDER_MARK: &str = "\u{feff}";

pub(super) fn open(path: &Path, separator: u8, limit: RowLimit) -> Result<Rows, DataError> {
    let bounded = Bounded::new(stream::open(path)?, limit);
    let mut reader = ReaderBuilder::new().delimiter(separator).flexible(true).from_reader(bounded);
    let invalid = |problem: String| DataError::invalid(path.display(), problem);
    let header = reader.headers().map_err(|e| invalid(format!("the line of column names cannot be read: {e}")))?;
    let columns: Vec<String> =
        header.iter().map(|name| name.strip_prefix(BYTE_ORDER_MARK).unwrap_or(name).to_owned()).collect();
    let mut seen = HashSet::new();
    if let Some(twice) = columns.iter().find(|name| !seen.insert(*name)) {
        return Err(invalid(format!("two columns are called `{twice}`")));
    }
    drop(seen);
    Ok(Box::new(Records { reader, columns, limit, file: shared(path), row: 0, ended: false }))
}

struct Records {
    reader: csv::Reader<Bounded<Box<dyn BufRead + Send>>>,
    columns: Vec<String>,
    limit: RowLimit,
    file: Arc<Path>,
    row: usize,
    ended: bool,
}

impl Iterator for Records {
    type Item = Row;

    fn next(&mut self) -> Option<Row> {
        if self.ended {
            return None;
        }
        let mut record = ByteRecord::new();
        self.row += 1;
        self.reader.get_mut().next_row();
        let fields = match self.reader.read_byte_record(&mut record) {
            Ok(false) => return None,
            Ok(true) => self.fields(&record),
            Err(e) => {
                self.ended = true;
                let is_exceeded = self.reader.get_ref().is_exceeded();
                Err(if is_exceeded { self.limit.exceeded() } else { RowError::new(RowReason::Unreadable, e) })
            }
        };
        Some(Row { place: RowLocation { file: self.file.clone(), row: self.row }, fields })
    }
}

impl Records {
    fn fields(&self, record: &ByteRecord) -> Result<Map<String, Value>, RowError> {
        if record.len() != self.columns.len() {
            let problem = format!("{} fields, the first line names {} columns", record.len(), self.columns.len());
            return Err(RowError::new(RowReason::Unreadable, problem));
        }
        let field = |(name, bytes): (&String, &[u8])| {
            let text = std::str::from_utf8(bytes)
                .map_err(|e| RowError::new(RowReason::Unreadable, format!("column `{name}`: {e}")))?;
            Ok((name.clone(), Value::String(text.to_owned())))
        };
        self.columns.iter().zip(record.iter()).map(field).collect()
    }
}
