//! `.parquet` with the row interface of the parquet crate, without arrow: rows become JSON objects.
//!
//! Lists, structs and maps nest as in JSON; dates, times and decimals are texts, or null outside the calendar. Binary
//! values that are not text, such as images, are left out of the row.

mod pages;

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use parquet::record::reader::RowIter;
use serde_json::{Map, Number, Value};

use self::pages::Examined;
use super::limit::Budget;
use super::limit::RowLimit;
use super::row::{Row, RowLocation, Rows, shared};
use crate::error::{DataError, RowError, RowReason};
use crate::guard::guarded;
use crate::image_source::{data_uri, is_image_file};

pub(super) fn open(path: &Path, limit: RowLimit) -> Result<Rows, DataError> {
    let file = File::open(path).map_err(|e| DataError::io("open", path, e))?;
    let reader = library(|| SerializedFileReader::new(file).map_err(|e| e.to_string()))
        .map_err(|e| DataError::invalid(path.display(), format!("no readable parquet file: {e}")))?;
    let expected = reader.metadata().file_metadata().num_rows().max(0) as usize;
    check_rows(&reader, limit).map_err(|e| DataError::invalid(path.display(), e).hint(HINT))?;
    let rows = library(|| Ok(RowIter::from_file_into(Box::new(Examined(reader)))))
        .map_err(|e| DataError::invalid(path.display(), format!("no readable parquet file: {e}")))?;
    Ok(Box::new(ParquetRows { rows, limit, file: shared(path), read: 0, expected, ended: false }))
}

const HINT: &str = "raise `max_row_size` of the dataset, or write the file with smaller rows";

/// Digits after the point of a decimal: each is written.
const MOST_DIGITS: i32 = 256;

/// The library makes whole rows: what they claim is examined before. A list of a billion equal numbers takes a few
/// bytes in a file.
fn check_rows(reader: &dyn FileReader, limit: RowLimit) -> Result<(), String> {
    for (number, group) in reader.metadata().row_groups().iter().enumerate() {
        let rows = group.num_rows().max(1) as u64;
        for column in group.columns() {
            let values = column.num_values().max(0) as u64;
            if 2 * (values / rows) > limit.0 {
                let name = column.column_path().string();
                return Err(format!("row group {}: {values} values of `{name}` in {rows} rows", number + 1));
            }
        }
    }
    Ok(())
}

fn library<T>(read: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    guarded(read).unwrap_or_else(|panic| Err(format!("damaged: {panic}")))
}

struct ParquetRows {
    rows: RowIter<'static>,
    limit: RowLimit,
    file: Arc<Path>,
    read: usize,
    expected: usize,
    ended: bool,
}

impl Iterator for ParquetRows {
    type Item = Row;

    fn next(&mut self) -> Option<Row> {
        if self.ended {
            return None;
        }
        let next = library(|| self.rows.next().transpose().map_err(|e| e.to_string()));
        let fields = match next.transpose() {
            Some(Ok(row)) => fields(row.get_column_iter(), &mut self.limit.budget()),
            Some(Err(e)) => {
                self.ended = true;
                Err(RowError::new(RowReason::Unreadable, e))
            }
            None if self.read < self.expected => {
                self.ended = true;
                let missing = format!("the file claims {} rows and ends after {}", self.expected, self.read);
                Err(RowError::new(RowReason::Unreadable, missing))
            }
            None => return None,
        };
        self.read += 1;
        Some(Row { place: RowLocation { file: self.file.clone(), row: self.read }, fields })
    }
}

fn fields<'a>(
    columns: impl Iterator<Item = (&'a String, &'a Field)>,
    budget: &mut Budget,
) -> Result<Map<String, Value>, RowError> {
    let is_read = |field: &Field| match field {
        Field::Bytes(bytes) => std::str::from_utf8(bytes.data()).is_ok() || is_image_file(bytes.data()),
        _ => true,
    };
    let readable = columns.filter(|(_, field)| is_read(field));
    readable.map(|(name, field)| Ok((name.clone(), value(field, budget)?))).collect()
}

fn value(field: &Field, budget: &mut Budget) -> Result<Value, RowError> {
    let wrong = |problem: String| RowError::new(RowReason::WrongType, problem);
    budget.take(match field {
        Field::Str(text) => text.len(),
        Field::Bytes(bytes) => bytes.data().len(),
        _ => 0,
    })?;
    let number = |x: f64| Number::from_f64(x).map_or(Value::Null, Value::Number);
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(x) => Value::Bool(*x),
        Field::Byte(x) => (*x).into(),
        Field::Short(x) => (*x).into(),
        Field::Int(x) => (*x).into(),
        Field::Long(x) => (*x).into(),
        Field::UByte(x) => (*x).into(),
        Field::UShort(x) => (*x).into(),
        Field::UInt(x) => (*x).into(),
        Field::ULong(x) => (*x).into(),
        Field::Float16(x) => number(f64::from(*x)),
        Field::Float(x) => number(f64::from(*x)),
        Field::Double(x) => number(*x),
        Field::Str(text) => Value::String(text.clone()),
        Field::Bytes(bytes) if is_image_file(bytes.data()) => Value::String(data_uri(bytes.data())),
        Field::Bytes(bytes) => {
            let text =
                std::str::from_utf8(bytes.data()).map_err(|e| wrong(format!("binary column is not text: {e}")))?;
            Value::String(text.to_owned())
        }
        Field::Group(row) => Value::Object(fields(row.get_column_iter(), budget)?),
        Field::ListInternal(list) => {
            Value::Array(list.elements().iter().map(|field| value(field, budget)).collect::<Result<_, _>>()?)
        }
        Field::MapInternal(map) => {
            let entries = map.entries().iter().map(|(key, field)| match value(key, budget)? {
                Value::String(name) => Ok((name, value(field, budget)?)),
                other => Err(wrong(format!("map key {other} is not a string"))),
            });
            Value::Object(entries.collect::<Result<_, RowError>>()?)
        }
        Field::Decimal(of) if !(0..=MOST_DIGITS).contains(&of.scale()) || of.data().len() > 64 => Value::Null,
        Field::TimeMillis(..=-1) | Field::TimeMicros(..=-1) => Value::Null,
        Field::Decimal(_)
        | Field::Date(_)
        | Field::TimeMillis(_)
        | Field::TimeMicros(_)
        | Field::TimestampMillis(_)
        | Field::TimestampMicros(_) => guarded(|| field.to_string()).map_or(Value::Null, Value::String),
    })
}
