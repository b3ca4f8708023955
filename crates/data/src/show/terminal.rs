//! Rows on a terminal: trained text in green, the rest faint, every second token underlined, lines wrapped to a width.
//!
//! Without colors, trained text is between ⟦ and ⟧ and tokens are separated by `·`. Uses no escape codes except colors.

use super::row::{ShownRow, ShownToken, count, trained, visible};

/// Settings of the terminal that shows rows.
#[derive(Clone, Copy, Debug)]
pub struct Terminal {
    pub color: bool,
    /// Width of the terminal in columns.
    pub width: usize,
    /// Tokens of a row that are shown.
    pub tokens: usize,
}

const TRAINED: &str = "32";
const GIVEN: &str = "2";

/// The text of the rows; `first` is the number of the first.
pub fn terminal(rows: &[ShownRow], first: usize, how: Terminal) -> String {
    let mut out = String::new();
    let key = match how.color {
        true => format!(
            "\u{1b}[{TRAINED}mtrained\u{1b}[0m, \u{1b}[{GIVEN}mgiven\u{1b}[0m; a token is underlined, the next is not"
        ),
        false => "⟦trained⟧, given; tokens are separated by ·".to_owned(),
    };
    out.push_str(&format!("{key}; ↵ is a line's end\n"));
    for (i, row) in rows.iter().enumerate() {
        let all = row.documents.iter().map(|document| trained(document)).sum::<usize>();
        let (mut shown, mut pieces) = (0, 0);
        for (d, document) in row.documents.iter().enumerate() {
            let part = &document[..document.len().min(how.tokens - pieces)];
            if part.is_empty() {
                break;
            }
            let numbers = format!("{} tokens, {} trained", count(document), trained(document));
            let verdict = row.verdicts.get(d).copied().unwrap_or_default();
            rule(&mut out, &format!("row {}, document {}{verdict}: {numbers}", first + i, d + 1), how);
            for (number, image) in row.images.get(d).into_iter().flatten().enumerate() {
                out.push_str(&format!("{}\n", image.caption(number + 1)));
            }
            tokens(&mut out, part, how);
            (shown, pieces) = (shown + count(part), pieces + part.len());
        }
        let left = row.len() - row.padding - shown;
        let more = if left > 0 { format!("{left} tokens more, ") } else { String::new() };
        rule(&mut out, &format!("{more}{} of padding, {all} of {} trained", row.padding, row.len()), how);
    }
    out
}

/// A line with a title.
fn rule(out: &mut String, title: &str, how: Terminal) {
    let dashes = how.width.saturating_sub(title.chars().count() + 4);
    out.push_str(&format!("── {title} {}\n", "─".repeat(dashes)));
}

/// A writer that breaks lines.
struct Lines<'a> {
    out: &'a mut String,
    column: usize,
    width: usize,
    /// The escape code that is in force.
    code: String,
}

impl Lines<'_> {
    fn set(&mut self, code: String) {
        if code != self.code {
            self.out.push_str(if self.code.is_empty() { "" } else { "\u{1b}[0m" });
            self.out.push_str(&if code.is_empty() { String::new() } else { format!("\u{1b}[{code}m") });
            self.code = code;
        }
    }

    fn end(&mut self) {
        let code = std::mem::take(&mut self.code);
        self.out.push_str(if code.is_empty() { "\n" } else { "\u{1b}[0m\n" });
        self.column = 0;
        self.out.push_str(&if code.is_empty() { String::new() } else { format!("\u{1b}[{code}m") });
        self.code = code;
    }

    fn put(&mut self, c: char) {
        let wide = columns(c);
        if self.column + wide > self.width {
            self.end();
        }
        self.out.push(visible(c));
        self.column += wide;
    }
}

fn tokens(out: &mut String, tokens: &[ShownToken], how: Terminal) {
    let mut lines = Lines { out, column: 0, width: how.width.max(8), code: String::new() };
    let mut was_trained = false;
    for (i, token) in tokens.iter().enumerate() {
        let is_trained = token.weight != 0.0;
        if how.color {
            let line = if i % 2 == 0 { ";4" } else { "" };
            lines.set(format!("{}{line}", if is_trained { TRAINED } else { GIVEN }));
        } else {
            match (was_trained, is_trained) {
                (false, true) => lines.put('⟦'),
                (true, false) => lines.put('⟧'),
                _ if i > 0 => lines.put('·'),
                _ => {}
            }
        }
        was_trained = is_trained;
        for c in token.text.chars() {
            lines.put(c);
            if c == '\n' {
                lines.end();
            }
        }
    }
    if !how.color && was_trained {
        lines.put('⟧');
    }
    lines.set(String::new());
    if lines.column > 0 {
        lines.end();
    }
}

/// Columns that a character takes: two for the wide letters of East Asia and for pictures, none for marks.
fn columns(c: char) -> usize {
    match c as u32 {
        0x300..=0x36f | 0xfe00..=0xfe0f => 0,
        0x1100..=0x115f | 0x2e80..=0xa4cf | 0xac00..=0xd7a3 | 0xf900..=0xfaff | 0xfe30..=0xfe6f | 0xff00..=0xff60 => 2,
        0x1f300..=0x1faff | 0x20000..=0x3fffd => 2,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(text: &str, weight: f32) -> ShownToken {
        ShownToken { id: 1, text: text.to_owned(), weight, times: 1 }
    }

    fn row() -> ShownRow {
        let document = vec![token("Hi", 0.0), token(" all\n", 0.0), token("yes", 1.0), token("!\u{1b}[2J", 0.5)];
        ShownRow {
            documents: vec![document, vec![token("日本", 1.0), token("語", 0.0)]],
            padding: 2,
            ..ShownRow::default()
        }
    }

    #[test]
    fn plain_text_marks_what_is_trained_and_where_tokens_end() {
        let text = terminal(&[row()], 1, Terminal { color: false, width: 60, tokens: 100 });
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].starts_with("── row 1, document 1: 4 tokens, 2 trained ──"), "{text}");
        assert_eq!(lines[2..4], ["Hi· all↵", "⟦yes·!␛[2J⟧"]);
        assert_eq!(lines[5], "⟦日本⟧語");
        assert!(lines[6].starts_with("── 2 of padding, 3 of 8 trained "), "{text}");
    }

    #[test]
    fn lines_are_no_longer_than_the_terminal_and_nothing_of_the_data_is_a_code() {
        let long = ShownRow {
            documents: vec![vec![token(&"語".repeat(50), 1.0), token(&"x".repeat(100), 0.0)]],
            padding: 0,
            ..ShownRow::default()
        };
        let text = terminal(&[long, row()], 1, Terminal { color: true, width: 40, tokens: 5 });
        let plain = regex::Regex::new("\u{1b}\\[[0-9;]*m").unwrap().replace_all(&text, "").into_owned();
        assert!(!plain.contains('\u{1b}'), "{plain:?}");
        let width = |line: &str| line.chars().map(columns).sum::<usize>();
        assert!(plain.lines().skip(1).all(|line| width(line) <= 60), "{plain}");
        assert!(plain.lines().filter(|l| !l.starts_with("──")).skip(1).all(|line| width(line) <= 40), "{plain}");
        assert!(text.contains("\u{1b}[32;4m日") || text.contains("\u{1b}[32;4m語"), "{text}");
        assert!(plain.contains("1 tokens more"), "{plain}");
    }
}
