//! `.parquet` by the row interface of the parquet crate, without arrow: rows become JSON objects.
//!
//! Lists, structs and maps nest as they do in JSON; dates, times and decimals are texts. Bytes that are no text, such as
//! images, are left out of the row.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row as ParquetRow};
use serde_json::{Map, Number, Value};

use super::{Place, Row, Rows, shared};
use crate::error::{DataError, RowError, RowReason};

pub(super) fn open(path: &Path) -> Result<Rows, DataError> {
    let file = File::open(path).map_err(|e| DataError::io("open", path, e))?;
    let reader = guarded(|| SerializedFileReader::new(file).map_err(|e| e.to_string()))
        .map_err(|e| DataError::invalid(path.display(), format!("no readable parquet file: {e}")))?;
    let expected = reader.metadata().file_metadata().num_rows().max(0) as usize;
    let rows = guarded(|| Ok(RowIter::from_file_into(Box::new(reader))))
        .map_err(|e| DataError::invalid(path.display(), format!("no readable parquet file: {e}")))?;
    Ok(Box::new(ParquetRows { rows, file: shared(path), read: 0, expected, ended: false }))
}

/// The library panics on some damaged files; for us a damaged file is the user's, not an invariant of ours.
/// What panicked is not used again.
fn guarded<T>(read: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(format!("damaged: {}", text.unwrap_or_else(|| "the reader gave up".to_owned())))
    })
}

struct ParquetRows {
    rows: RowIter<'static>,
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
        let next = guarded(|| self.rows.next().transpose().map_err(|e| e.to_string()));
        let fields = match next.transpose() {
            Some(Ok(row)) => object(row).map_err(|detail| RowError::new(RowReason::WrongType, detail)),
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
        Some(Row { place: Place { file: self.file.clone(), row: self.read }, fields })
    }
}

fn object(row: ParquetRow) -> Result<Map<String, Value>, String> {
    fields(row.get_column_iter())
}

fn fields<'a>(columns: impl Iterator<Item = (&'a String, &'a Field)>) -> Result<Map<String, Value>, String> {
    let is_text = |field: &Field| !matches!(field, Field::Bytes(bytes) if std::str::from_utf8(bytes.data()).is_err());
    let readable = columns.filter(|(_, field)| is_text(field));
    readable.map(|(name, field)| Ok((name.clone(), value(field)?))).collect()
}

fn value(field: &Field) -> Result<Value, String> {
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
        Field::Bytes(bytes) => {
            let text = std::str::from_utf8(bytes.data()).map_err(|e| format!("binary column is no text: {e}"))?;
            Value::String(text.to_owned())
        }
        Field::Group(row) => Value::Object(fields(row.get_column_iter())?),
        Field::ListInternal(list) => Value::Array(list.elements().iter().map(value).collect::<Result<_, _>>()?),
        Field::MapInternal(map) => {
            let entries = map.entries().iter().map(|(key, field)| match value(key)? {
                Value::String(name) => Ok((name, value(field)?)),
                other => Err(format!("map key {other} is no string")),
            });
            Value::Object(entries.collect::<Result<_, String>>()?)
        }
        Field::Decimal(_)
        | Field::Date(_)
        | Field::TimeMillis(_)
        | Field::TimeMicros(_)
        | Field::TimestampMillis(_)
        | Field::TimestampMicros(_) => Value::String(field.to_string()),
    })
}
