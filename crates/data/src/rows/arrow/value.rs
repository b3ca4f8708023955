//! One value of a column as JSON.
//!
//! Dates, times and decimals are texts; numbers that JSON cannot represent and times outside the calendar are null. The
//! size of a row is counted, because lists of nothing take no bytes in a file. Knows no files.

use jiff::civil::Date;
use serde_json::{Map, Number, Value};

use super::super::limit::Budget;
use super::batch::Column;
use super::schema::{Field, Kind};
use crate::error::{RowError, RowReason};
use crate::image_source::{data_uri, is_image_file};

const OUTSIDE: &str = "damaged: it lies outside of its column";

/// The columns of row `i`, without those whose value is bytes that are no text.
pub(super) fn object(
    fields: &[Field],
    columns: &[Column],
    i: usize,
    budget: &mut Budget,
) -> Result<Map<String, Value>, RowError> {
    let mut object = Map::new();
    for (field, column) in fields.iter().zip(columns) {
        let inside = |e: RowError| RowError { detail: format!("column `{}`: {}", field.name, e.detail), ..e };
        if let Some(value) = value(field, column, i, budget).map_err(inside)? {
            object.insert(field.name.clone(), value);
        }
    }
    Ok(object)
}

fn wrong(problem: impl std::fmt::Display) -> RowError {
    RowError::new(RowReason::WrongType, problem)
}

/// `None`: bytes that are no text, or a type that JSON has nothing for.
fn value(field: &Field, column: &Column, i: usize, budget: &mut Budget) -> Result<Option<Value>, RowError> {
    if i >= column.length {
        return Err(wrong(OUTSIDE));
    }
    budget.take(0)?;
    if !column.valid.is_empty() && column.valid[i / 8] >> (i % 8) & 1 == 0 {
        return Ok(Some(Value::Null));
    }
    if let Some((_, index)) = field.dictionary {
        let key = plain(index, column, i).map_err(wrong)?.and_then(|key| key.as_u64()).map(|key| key as usize);
        let values = column.dictionary.as_ref().ok_or_else(|| wrong("its dictionary is missing"))?;
        let inner = Field { dictionary: None, ..field.clone() };
        return value(&inner, values, key.ok_or_else(|| wrong(OUTSIDE))?, budget);
    }
    Ok(match field.kind {
        Kind::Struct => Some(Value::Object(object(&field.children, &column.children, i, budget)?)),
        Kind::List { offset } => list(field, column, range(column, i, offset).map_err(wrong)?, budget)?,
        Kind::FixedList { size } => list(field, column, i * size..(i + 1) * size, budget)?,
        Kind::Map => map(field, column, range(column, i, 4).map_err(wrong)?, budget)?,
        kind => {
            let value = plain(kind, column, i).map_err(wrong)?;
            budget.bytes(value.as_ref().and_then(Value::as_str).map_or(0, str::len) as u64)?;
            value
        }
    })
}

fn list(
    field: &Field,
    column: &Column,
    range: std::ops::Range<usize>,
    budget: &mut Budget,
) -> Result<Option<Value>, RowError> {
    let (of, items) = (&field.children[0], &column.children[0]);
    if range.end > items.length {
        return Err(wrong(OUTSIDE));
    }
    let items = range.map(|i| Ok(value(of, items, i, budget)?.unwrap_or(Value::Null)));
    Ok(Some(Value::Array(items.collect::<Result<_, RowError>>()?)))
}

fn map(
    field: &Field,
    column: &Column,
    range: std::ops::Range<usize>,
    budget: &mut Budget,
) -> Result<Option<Value>, RowError> {
    let (of, entries) = (&field.children[0], &column.children[0]);
    let mut object = Map::new();
    for i in range {
        match value(&of.children[0], &entries.children[0], i, budget)? {
            Some(Value::String(name)) => {
                let value = value(&of.children[1], &entries.children[1], i, budget)?;
                object.insert(name, value.unwrap_or(Value::Null));
            }
            other => return Err(wrong(format!("map key {} is not a string", other.unwrap_or(Value::Null)))),
        }
    }
    Ok(Some(Value::Object(object)))
}

/// The bytes of value `i` in buffer 0.
fn fixed(column: &Column, i: usize, width: usize) -> Result<&[u8], String> {
    Ok(column.buffers[0].get(i * width..(i + 1) * width).ok_or(OUTSIDE)?)
}

/// A whole number of 1 to 16 bytes.
fn integer(bytes: &[u8], signed: bool) -> i128 {
    let is_negative = signed && bytes.last().is_some_and(|byte| *byte > 127);
    let mut all = [if is_negative { 0xff } else { 0 }; 16];
    all[..bytes.len()].copy_from_slice(bytes);
    i128::from_le_bytes(all)
}

/// The range of value `i` in its data, by the offsets in buffer 0.
fn range(column: &Column, i: usize, width: usize) -> Result<std::ops::Range<usize>, String> {
    let offset = |i| Ok::<_, String>(usize::try_from(integer(fixed(column, i, width)?, true)).map_err(|_| OUTSIDE)?);
    let range = offset(i)?..offset(i + 1)?;
    if range.start <= range.end { Ok(range) } else { Err(OUTSIDE.to_owned()) }
}

/// A text, or the file of an image; other bytes are left out.
fn text(bytes: &[u8]) -> Option<Value> {
    match is_image_file(bytes) {
        true => Some(Value::String(data_uri(bytes))),
        false => std::str::from_utf8(bytes).ok().map(Value::from),
    }
}

fn number(x: f64) -> Option<Value> {
    Some(Number::from_f64(x).map_or(Value::Null, Value::Number))
}

/// A value with nothing inside.
fn plain(kind: Kind, column: &Column, i: usize) -> Result<Option<Value>, String> {
    let own = || fixed(column, i, kind.width().expect("kinds that are asked have a width"));
    Ok(match kind {
        Kind::Null => Some(Value::Null),
        Kind::Bool => Some((column.buffers[0].get(i / 8).ok_or(OUTSIDE)? >> (i % 8) & 1 == 1).into()),
        Kind::Int { signed, .. } => {
            let n = integer(own()?, signed);
            Some(i64::try_from(n).map_or_else(|_| Value::from(n as u64), Value::from))
        }
        Kind::Float { width: 2 } => number(half(integer(own()?, false) as u16)),
        Kind::Float { width: 4 } => number(f32::from_le_bytes(own()?.try_into().expect("four bytes")).into()),
        Kind::Float { .. } => number(f64::from_le_bytes(own()?.try_into().expect("eight bytes"))),
        Kind::Bytes { offset } => text(column.buffers[1].get(range(column, i, offset)?).ok_or(OUTSIDE)?),
        Kind::View => text(view(column, own()?)?),
        Kind::Fixed { .. } => text(own()?),
        Kind::Decimal { scale } => Some(Value::String(decimal(integer(own()?, true), scale))),
        Kind::Date { width } => {
            let parts = if width == 4 { 1 } else { 86_400_000 };
            let days = (integer(own()?, true) as i64).div_euclid(parts);
            let span = jiff::Span::new().try_days(days).ok();
            let date = span.and_then(|span| Date::constant(1970, 1, 1).checked_add(span).ok());
            Some(date.map_or(Value::Null, |date| Value::String(date.to_string())))
        }
        Kind::Timestamp { parts, zoned } => {
            let (count, parts) = (integer(own()?, true), i128::from(parts));
            let (second, part) = (count.div_euclid(parts) as i64, count.rem_euclid(parts) * (1_000_000_000 / parts));
            let zone = if zoned { " +00:00" } else { "" };
            let moment = jiff::Timestamp::new(second, part as i32).ok();
            let text = |moment: jiff::Timestamp| format!("{}{zone}", moment.strftime("%Y-%m-%d %H:%M:%S%.f"));
            Some(moment.map_or(Value::Null, |moment| Value::String(text(moment))))
        }
        Kind::Opaque { .. } => None,
        Kind::List { .. } | Kind::FixedList { .. } | Kind::Map | Kind::Struct => {
            return Err("a value with others inside cannot be an index".to_owned());
        }
    })
}

/// The bytes of a view: its length, then up to twelve bytes, or their beginning, buffer and place.
fn view<'a>(column: &'a Column, view: &'a [u8]) -> Result<&'a [u8], String> {
    let part = |at: usize| integer(&view[at..at + 4], true);
    let length = usize::try_from(part(0)).map_err(|_| OUTSIDE)?;
    if length <= 12 {
        return Ok(&view[4..4 + length]);
    }
    let (buffer, begin) = (usize::try_from(part(8)), usize::try_from(part(12)));
    let (Ok(buffer), Ok(begin)) = (buffer, begin) else { return Err(OUTSIDE.to_owned()) };
    let buffer = column.buffers.get(buffer + 1).ok_or(OUTSIDE)?;
    Ok(buffer.get(begin..begin + length).ok_or(OUTSIDE)?)
}

/// `125` of scale 2 is `1.25`.
fn decimal(n: i128, scale: i32) -> String {
    let digits = n.unsigned_abs().to_string();
    let sign = if n < 0 { "-" } else { "" };
    match usize::try_from(scale) {
        Ok(0) => format!("{sign}{digits}"),
        Ok(scale) if scale <= 64 => {
            let digits = format!("{digits:0>width$}", width = scale + 1);
            let (whole, part) = digits.split_at(digits.len() - scale);
            format!("{sign}{whole}.{part}")
        }
        _ => format!("{sign}{digits}e{}", -i64::from(scale)),
    }
}

/// A float of 16 bits.
fn half(bits: u16) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    let size = match exponent {
        0 => fraction * 2f64.powi(-24),
        31 => f64::NAN,
        _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
    };
    if bits >> 15 == 1 { -size } else { size }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_as_they_are_written() {
        assert_eq!([0x3c00, 0xc000, 0x0001, 0x3555].map(half), [1.0, -2.0, 2f64.powi(-24), 0.333251953125]);
        assert_eq!([(125, 2), (-5, 2), (7, 0), (12, -3)].map(|(n, s)| decimal(n, s)), ["1.25", "-0.05", "7", "12e3"]);
        assert_eq!((integer(&[0xff], true), integer(&[0xff], false), integer(&[1, 1], true)), (-1, 255, 257));
    }
}
