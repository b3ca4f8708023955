//! The elements of a JSON list as texts, one after another: a list larger than memory is read like lines.
//!
//! Tracks brackets and strings, and leaves everything else to the parser: the list was already validated as JSON. Knows
//! no rows.

use std::io::{self, BufRead};

use super::RowLimit;
use crate::error::{RowError, RowReason};

pub(super) struct Elements {
    reader: Box<dyn BufRead + Send>,
    limit: RowLimit,
    /// The list's first bracket was read.
    opened: bool,
    ended: bool,
}

/// The state of the scan for the end of an element.
#[derive(Default)]
struct ScanState {
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// Something of it was read.
    begun: bool,
}

impl ScanState {
    /// Takes a byte. `None`: the element ended before it.
    fn take(&mut self, byte: u8) -> Option<()> {
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' if self.in_string => self.escaped = true,
            b'"' => self.in_string = !self.in_string,
            _ if self.in_string => {}
            b'[' | b'{' => self.depth += 1,
            b',' | b']' | b'}' if self.depth == 0 => return None,
            b']' | b'}' => self.depth -= 1,
            _ => {}
        }
        Some(())
    }
}

impl Elements {
    /// The reader is before the list's first bracket.
    pub(super) fn new(reader: Box<dyn BufRead + Send>, limit: RowLimit) -> Self {
        Elements { reader, limit, opened: false, ended: false }
    }

    /// The next element, and whether it is larger than it may be; `None` after the last.
    fn read(&mut self) -> io::Result<Option<(Vec<u8>, bool)>> {
        let (mut text, mut is_large) = (Vec::new(), false);
        let mut place = ScanState::default();
        if !self.opened {
            self.reader.read_exact(&mut [0])?;
            self.opened = true;
        }
        loop {
            let block = self.reader.fill_buf()?;
            if block.is_empty() {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the list has no end"));
            }
            let end = block.iter().position(|byte| {
                place.begun |= !byte.is_ascii_whitespace() && !matches!(byte, b',' | b']');
                place.take(*byte).is_none()
            });
            let taken = end.unwrap_or(block.len());
            is_large |= (text.len() + taken) as u64 > self.limit.0;
            match is_large {
                true => text = Vec::new(),
                false => text.extend_from_slice(&block[..taken]),
            }
            let last = end.map(|end| block[end]);
            self.reader.consume(taken + usize::from(end.is_some()));
            if let Some(last) = last {
                self.ended = last != b',';
                return Ok(place.begun.then_some((text, is_large)));
            }
        }
    }
}

impl Iterator for Elements {
    type Item = Result<Vec<u8>, RowError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        match self.read() {
            Ok(element) => element.map(|(text, is_large)| if is_large { Err(self.limit.exceeded()) } else { Ok(text) }),
            Err(e) => {
                self.ended = true;
                Some(Err(RowError::new(RowReason::Unreadable, e)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn elements_are_those_of_the_list() {
        let nested = json!([{"a": [1, "]", {"b": "\\\"}"}]}, [], [[]], "x,y", 1.5, null, {}, "ü"]);
        for (list, block) in [(json!([]), 9), (json!([7]), 9), (nested.clone(), 1), (nested.clone(), 3), (nested, 999)]
        {
            for text in [list.to_string(), serde_json::to_string_pretty(&list).unwrap() + "\n"] {
                let reader = io::BufReader::with_capacity(block, io::Cursor::new(text.into_bytes()));
                let elements = Elements::new(Box::new(reader), RowLimit(1000));
                let found: Vec<Value> = elements.map(|text| serde_json::from_slice(&text.unwrap()).unwrap()).collect();
                assert_eq!(Value::Array(found), list);
            }
        }
    }

    #[test]
    fn large_elements_are_passed_over() {
        let text = r#"[{"a": 1}, {"a": "12345678901"}, {"a": 2}]"#;
        let elements = Elements::new(Box::new(text.as_bytes()), RowLimit(10));
        let fits: Vec<bool> = elements.map(|element| element.is_ok()).collect();
        assert_eq!(fits, [true, false, true]);
    }
}
