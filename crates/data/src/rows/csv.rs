//! `.csv` and `.tsv`: the first line names the columns, every value is a text.
//!
//! An empty field is an empty text. The separator is the usual one of the extension, or another that the first lines
//! agree on. Knows quoting and separators, no types.

use std::collections::{HashMap, HashSet};
use std::io::BufRead;
use std::path::Path;
use std::sync::Arc;

use csv::{ByteRecord, ReaderBuilder};
use serde_json::{Map, Value};

use super::limit::Bounded;
use super::row::{Row, RowLocation, Rows, shared};
use super::{RowLimit, stream};
use crate::error::{DataError, RowError, RowReason};

const BYTE_ORDER_MARK: &str = "\u{feff}";

/// Separators that files have, whatever their extension.
const SEPARATORS: [u8; 4] = *b",;\t|";

/// Records of which the separator is a matter.
const COMPARED: usize = 50;

pub(super) fn open(path: &Path, usual: u8, limit: RowLimit) -> Result<Rows, DataError> {
    let mut content = stream::open(path)?;
    let sample = content.fill_buf().map_err(|e| DataError::io("read", path, e))?;
    let (separator, named) = match named(sample) {
        Some((separator, line)) => (separator, line),
        None => (separator(sample, usual), 0),
    };
    let other_separator = (named == 0).then(|| other_separator(sample)).flatten();
    content.consume(named);
    let bounded = Bounded::new(content, limit);
    let mut reader = ReaderBuilder::new().delimiter(separator).flexible(true).from_reader(bounded);
    let invalid = |problem: String| DataError::invalid(path.display(), problem);
    let header = reader.headers().map_err(|e| invalid(format!("the line of column names cannot be read: {e}")))?;
    let written: Vec<&str> = header.iter().map(|name| name.strip_prefix(BYTE_ORDER_MARK).unwrap_or(name)).collect();
    // The spaces belong to the separators: `a, b`.
    let is_spaced: Vec<bool> = written.iter().map(|name| name.starts_with(' ')).collect();
    let columns: Vec<String> = written.iter().map(|name| name.trim().to_owned()).collect();
    if let [only] = &columns[..]
        && let Some(sign) = other_separator
    {
        let hint = format!("separators are `,`, `;`, `|` and tabs; a first line `sep={sign}` names another");
        let problem = format!("its only column would be `{only}`, but every line has `{sign}` as often as the first");
        return Err(invalid(problem).hint(hint));
    }
    let mut seen = HashSet::new();
    if let Some(twice) = columns.iter().find(|name| !seen.insert(*name)) {
        return Err(invalid(format!("two columns are called `{twice}`")));
    }
    drop(seen);
    Ok(Box::new(Records { reader, columns, is_spaced, limit, file: shared(path), row: 0, ended: false }))
}

/// The separator that a first line `sep=;` names, and the bytes of that line.
fn named(sample: &[u8]) -> Option<(u8, usize)> {
    let mark = BYTE_ORDER_MARK.as_bytes();
    let text = sample.strip_prefix(mark).unwrap_or(sample);
    let [separator, rest @ ..] = text.strip_prefix(b"sep=")? else { return None };
    let end = rest.iter().position(|byte| *byte == b'\n')?;
    let is_alone = rest[..end].trim_ascii().is_empty();
    is_alone.then_some((*separator, sample.len() - rest.len() + end + 1))
}

/// The separator by which the largest share of the first records has as many fields, two or more, as the first.
fn separator(sample: &[u8], usual: u8) -> u8 {
    let share = |separator: u8| -> f64 {
        let reader = ReaderBuilder::new().delimiter(separator).has_headers(false).flexible(true).from_reader(sample);
        let mut widths: Vec<usize> =
            reader.into_byte_records().take(COMPARED).map_while(Result::ok).map(|record| record.len()).collect();
        // The sample may end inside of its last record.
        if widths.len() > 2 {
            widths.pop();
        }
        match widths.first() {
            Some(first) if *first > 1 => {
                widths.iter().filter(|width| *width == first).count() as f64 / widths.len() as f64
            }
            _ => 0.0,
        }
    };
    let mut best = (usual, share(usual));
    for other in SEPARATORS {
        let share = share(other);
        if share > best.1 {
            best = (other, share);
        }
    }
    best.0
}

/// A sign that may separate columns although it is no known separator: the first lines, two or more, all have it as often.
fn other_separator(sample: &[u8]) -> Option<char> {
    let text = String::from_utf8_lossy(sample);
    let mut lines: Vec<&str> = text.lines().take(COMPARED).filter(|line| !line.trim().is_empty()).collect();
    // The sample may end inside of its last line.
    if lines.len() > 2 && !text.ends_with('\n') {
        lines.pop();
    }
    let (first, rest) = lines.split_first().filter(|(_, rest)| !rest.is_empty())?;
    let counted = |line: &str| {
        let mut counts: HashMap<char, usize> = HashMap::new();
        line.chars().for_each(|sign| *counts.entry(sign).or_default() += 1);
        counts
    };
    let (of_first, others) = (counted(first), rest.iter().map(|line| counted(line)).collect::<Vec<_>>());
    let separates = |sign: &char| {
        let of_words = sign.is_alphanumeric() || " _-.'\"()[]\u{feff}".contains(*sign);
        !of_words && others.iter().all(|counts| counts.get(sign) == of_first.get(sign))
    };
    // Each sign once, in the order of the line.
    let mut seen = HashSet::new();
    first.chars().filter(|sign| seen.insert(*sign)).find(separates)
}

struct Records {
    reader: csv::Reader<Bounded<Box<dyn BufRead + Send>>>,
    columns: Vec<String>,
    /// By column, whether a space follows the separator before it.
    is_spaced: Vec<bool>,
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
        let field = |((name, is_spaced), bytes): ((&String, &bool), &[u8])| {
            let text = std::str::from_utf8(bytes)
                .map_err(|e| RowError::new(RowReason::Unreadable, format!("column `{name}`: {e}")))?;
            let text = if *is_spaced { text.trim_start_matches(' ') } else { text };
            Ok((name.clone(), Value::String(text.to_owned())))
        };
        self.columns.iter().zip(&self.is_spaced).zip(record.iter()).map(field).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_separator_is_what_the_lines_agree_on() {
        for (text, usual, found) in [
            ("q,a\n1,2\n", b',', b','),
            ("q;a\n1;2\n", b',', b';'),
            ("q\ta\n1,5\t2\n", b',', b'\t'),
            ("q|a\n\"x|y, z\"|2\n", b',', b'|'),
            ("q,a\n1,2\n", b'\t', b','),
            ("q;a, b\n1;2\n3;4\n5;6\n", b',', b';'),
            ("text,n\nOne; day,1\nonly\nTwo,2\n", b',', b','),
            ("text\na; b\n", b',', b','),
            ("", b',', b','),
            ("q;a", b',', b';'),
        ] {
            assert_eq!(separator(text.as_bytes(), usual), found, "{text:?}");
        }
        for (text, found) in [
            ("prompt^completion\nhello^world\nx^y\n", Some('^')),
            ("a:b\n1:2\n", Some(':')),
            ("a\u{1}b\n1\u{1}2\n", Some('\u{1}')),
            ("text\nwhat? this: and that\nno\n", None),
            ("text: all\nwhat? this: and that\nno\n", None),
            ("text (raw)\na (b)\n", None),
            ("a^b\n", None),
            ("", None),
        ] {
            assert_eq!(other_separator(text.as_bytes()), found, "{text:?}");
        }
        assert_eq!(named(b"sep=;\r\nq;a\n"), Some((b';', 7)));
        assert_eq!(named("\u{feff}sep=\t\nq".as_bytes()), Some((b'\t', 9)));
        assert_eq!(named(b"sep=;x\n"), None);
    }

    #[test]
    fn a_long_line_of_one_sign_takes_no_square_of_its_length() {
        let text = [&[0; 300_000][..], b"\nx\ny\n"].concat();
        let begin = std::time::Instant::now();
        assert_eq!(other_separator(&text), None);
        assert!(begin.elapsed().as_secs() < 10, "{:?}", begin.elapsed());
    }
}
