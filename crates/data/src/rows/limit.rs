//! The size limit of a row: a small compressed file cannot expand beyond the available memory.
//!
//! Knows bytes and values, no format.

use std::io::{self, BufRead, Read};

use crate::error::{RowError, RowReason};

/// Bytes of a row once it is unpacked: of a line, of a record, of an element of a JSON list, of a whole text file. Of
/// rows that are no text, each value counts two bytes besides those of its text, as it would in JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLimit(pub u64);

impl Default for RowLimit {
    fn default() -> Self {
        RowLimit(32 << 20)
    }
}

/// Rows that a batch of a columnar file may have memory for.
const ROWS_OF_A_BATCH: u64 = 64;

impl RowLimit {
    pub(crate) fn exceeded(self) -> RowError {
        let size = options::ByteSize(self.0);
        let hint = "raise `max_row_size` of the dataset, or cut the row into several";
        RowError::new(RowReason::TooLarge, format!("more than {size} ({hint})"))
    }

    /// Bytes that a batch of rows may unpack to.
    pub(crate) fn of_a_batch(self) -> u64 {
        self.0.saturating_mul(ROWS_OF_A_BATCH)
    }

    /// Reads up to and with the next end of a line into `line`, of which a larger one is passed over. `false`: it was
    /// larger.
    pub(crate) fn read_line(self, reader: &mut dyn BufRead, line: &mut Vec<u8>) -> io::Result<bool> {
        let most = self.0.saturating_add(1);
        reader.take(most).read_until(b'\n', line)?;
        if (line.len() as u64) < most || line.last() == Some(&b'\n') {
            return Ok(true);
        }
        line.clear();
        reader.skip_until(b'\n')?;
        Ok(false)
    }

    /// Returns the counter for the values of one row.
    pub(crate) fn budget(self) -> Budget {
        Budget { left: self.0, limit: self }
    }
}

/// The remainder of a row's byte limit.
pub(crate) struct Budget {
    left: u64,
    limit: RowLimit,
}

impl Budget {
    /// Charges for a value with `text` bytes of text.
    pub(crate) fn take(&mut self, text: usize) -> Result<(), RowError> {
        self.bytes(2 + text as u64)
    }

    /// Takes the text of a value that was taken.
    pub(crate) fn bytes(&mut self, count: u64) -> Result<(), RowError> {
        match self.left.checked_sub(count) {
            Some(left) => self.left = left,
            None => return Err(self.limit.exceeded()),
        }
        Ok(())
    }
}

/// A reader that fails when more is read of it than one row may have.
pub(crate) struct Bounded<R> {
    inner: R,
    limit: RowLimit,
    left: u64,
}

impl<R> Bounded<R> {
    pub(crate) fn new(inner: R, limit: RowLimit) -> Self {
        Bounded { inner, limit, left: limit.0 }
    }

    /// Starts a new row with the full limit.
    pub(crate) fn next_row(&mut self) {
        self.left = self.limit.0;
    }

    /// True if the row is larger than its limit.
    pub(crate) fn is_exceeded(&self) -> bool {
        self.left == 0
    }
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            return Err(io::Error::other("a row is larger than it may be"));
        }
        let most = into.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let read = self.inner.read(&mut into[..most])?;
        self.left -= read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larger_lines_are_passed_over() {
        let mut reader = &b"1234\n12345\n123456\n\n1234567"[..];
        let mut lines = Vec::new();
        loop {
            let mut line = Vec::new();
            let fits = RowLimit(5).read_line(&mut reader, &mut line).unwrap();
            if fits && line.is_empty() {
                break;
            }
            lines.push(fits.then(|| String::from_utf8(line).unwrap()));
        }
        let expected = [Some("1234\n"), Some("12345\n"), None, Some("\n"), None];
        assert_eq!(lines.iter().map(Option::as_deref).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_row_has_so_many_values() {
        let mut budget = RowLimit(10).budget();
        assert!(budget.take(0).is_ok() && budget.take(6).is_ok());
        let error = budget.take(0).unwrap_err();
        assert_eq!(error.reason, RowReason::TooLarge);
        assert!(error.detail.contains("more than 10 (raise `max_row_size`"), "{error}");
    }
}
