//! Texts that options come from (a YAML file, an argument of the command line) and byte ranges in them.
//! Knows no YAML.

use crate::problem::Location;

/// A named text. Messages show the name before line and column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Shown to the user: a file name, or `command line`.
    pub name: String,
    /// The whole text of the source.
    pub text: String,
}

/// A byte range in one source of a [`Reader`](crate::Reader).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Index of the source in the reader.
    pub source: usize,
    /// Offset of the first byte.
    pub start: usize,
    /// Offset after the last byte.
    pub end: usize,
}

impl Source {
    /// Line, column (both from 1, columns in characters) and the text of the line for a byte range.
    ///
    /// A range that is past the end, or inside a character, is moved back to the nearest character.
    pub fn locate(&self, start: usize, end: usize) -> Location {
        let start = floor_char(&self.text, start);
        let end = floor_char(&self.text, end).max(start);
        let line_start = self.text[..start].rfind('\n').map_or(0, |newline| newline + 1);
        let line_end = self.text[start..].find('\n').map_or(self.text.len(), |newline| start + newline);
        Location {
            source: self.name.clone(),
            line: self.text[..start].matches('\n').count() + 1,
            column: self.text[line_start..start].chars().count() + 1,
            bytes: start..end,
            width: self.text[start..end.min(line_end).max(start)].trim_end().chars().count().max(1),
            line_text: self.text[line_start..line_end].trim_end_matches('\r').to_string(),
        }
    }
}

fn floor_char(text: &str, mut offset: usize) -> usize {
    offset = offset.min(text.len());
    while !text.is_char_boundary(offset) {
        offset -= 1;
    }
    offset
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_count_characters_and_lines_start_at_one() {
        let source = Source { name: "run.yaml".into(), text: "a: 1\r\nname: ünï x\n".into() };
        let at = source.text.find('x').unwrap();
        let location = source.locate(at, at + 1);
        assert_eq!((location.line, location.column, location.width), (2, 11, 1));
        assert_eq!(location.line_text, "name: ünï x");
    }

    #[test]
    fn a_range_past_the_end_points_at_the_end() {
        let source = Source { name: "run.yaml".into(), text: "a".into() };
        let location = source.locate(7, 9);
        assert_eq!((location.line, location.column, location.bytes), (1, 2, 1..1));
    }
}
