//! A source text with comments and string contents blanked out, so that rules see only code.
//!
//! Reads Rust and CUDA C++ closely enough for that: comments (nested), strings, raw strings, characters and lifetimes.
//! Knows no grammar.

/// The views of one file; all have the same lines and columns as the text.
pub struct Source {
    /// The text with comments blanked and strings kept.
    pub code: String,
    /// Comments and the insides of strings and characters blanked.
    pub bare: String,
    /// For every line (from 0): inside of a `#[cfg(test)]` module.
    pub in_tests: Vec<bool>,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Code,
    Comment,
    Quoted,
}

impl Source {
    pub fn new(text: &str) -> Source {
        let kinds = classify(text.as_bytes());
        let keep = |kept: &dyn Fn(Kind) -> bool| -> String {
            let mut blanked = String::with_capacity(text.len());
            for (at, letter) in text.char_indices() {
                if letter == '\n' || kept(kinds[at]) {
                    blanked.push(letter);
                } else {
                    blanked.extend(std::iter::repeat_n(' ', letter.len_utf8()));
                }
            }
            blanked
        };
        let bare = keep(&|kind| kind == Kind::Code);
        let in_tests = test_lines(&bare);
        Source { code: keep(&|kind| kind != Kind::Comment), bare, in_tests }
    }
}

/// Returns the kind of text that every byte belongs to. The quotes themselves count as code.
fn classify(bytes: &[u8]) -> Vec<Kind> {
    let mut kinds = vec![Kind::Code; bytes.len()];
    let mut at = 0;
    while at < bytes.len() {
        let (kind, end) = piece(bytes, at);
        let (first, last) = if kind == Kind::Quoted { (at + 1, end - 1) } else { (at, end) };
        kinds[first.min(last)..last].fill(kind);
        at = end;
    }
    kinds
}

/// Kind and end of the piece that starts at `at`.
fn piece(bytes: &[u8], at: usize) -> (Kind, usize) {
    let rest = &bytes[at..];
    let word_before = at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
    match rest[0] {
        b'/' if rest.starts_with(b"//") => {
            (Kind::Comment, at + rest.iter().position(|&byte| byte == b'\n').unwrap_or(rest.len()))
        }
        b'/' if rest.starts_with(b"/*") => (Kind::Comment, at + block_comment(rest)),
        b'"' => (Kind::Quoted, at + quoted(rest, b'"')),
        b'r' if !word_before || bytes[at - 1] == b'b' => match raw_string(rest) {
            Some(length) => (Kind::Quoted, at + length),
            None => (Kind::Code, at + 1),
        },
        b'\'' if character(rest) => (Kind::Quoted, at + quoted(rest, b'\'')),
        _ => (Kind::Code, at + 1),
    }
}

fn block_comment(rest: &[u8]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        if rest[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

fn quoted(rest: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            byte if byte == quote => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// Length of a raw string at the start of `rest`, if there is one.
fn raw_string(rest: &[u8]) -> Option<usize> {
    let hashes = rest[1..].iter().take_while(|&&byte| byte == b'#').count();
    if rest.get(1 + hashes) != Some(&b'"') {
        return None;
    }
    let close = [b"\"".as_slice(), &vec![b'#'; hashes]].concat();
    let inside = 2 + hashes;
    let length = rest[inside..].windows(close.len()).position(|window| window == close)?;
    Some(inside + length + close.len())
}

/// A character literal and no lifetime: closed after one character or an escape.
fn character(rest: &[u8]) -> bool {
    match rest.get(1) {
        Some(b'\\') => true,
        Some(&byte) => {
            let width = match byte {
                0..0x80 => 1,
                0x80..0xE0 => 2,
                0xE0..0xF0 => 3,
                _ => 4,
            };
            rest.get(1 + width) == Some(&b'\'')
        }
        None => false,
    }
}

/// The byte after the brace that closes the one at `open`.
pub fn closing_brace(bare: &str, open: usize) -> usize {
    let mut depth = 0usize;
    for (at, byte) in bare.bytes().enumerate().skip(open) {
        match byte {
            b'{' => depth += 1,
            b'}' => {
                depth -= 1;
                if depth == 0 {
                    return at + 1;
                }
            }
            _ => {}
        }
    }
    bare.len()
}

/// The line (from 0) in which a byte is.
pub fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes()[..at].iter().filter(|&&byte| byte == b'\n').count()
}

fn test_lines(bare: &str) -> Vec<bool> {
    let mut marked = vec![false; bare.lines().count()];
    for (at, _) in bare.match_indices("#[cfg(test)]") {
        let Some(open) = bare[at..].find(['{', ';']).map(|offset| at + offset) else { continue };
        let end = if bare.as_bytes()[open] == b'{' { closing_brace(bare, open) } else { open };
        let last = line_of(bare, end).min(marked.len().saturating_sub(1));
        marked[line_of(bare, at)..=last].fill(true);
    }
    marked
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_strings_and_characters_are_distinguished() {
        let source =
            Source::new("let a = \"x // y\"; // z\nlet b = '\"'; /* u /* v */ */ let c: &'a str = r#\"\"w\"#;\n");
        let bare: Vec<&str> = source.bare.lines().map(str::trim_end).collect();
        assert_eq!(bare[0], "let a = \"      \";");
        assert!(!bare[1].contains('u') && bare[1].contains("&'a str"), "{}", bare[1]);
        assert!(source.code.contains("x // y") && !source.code.contains('z') && source.code.contains("\"w"));
        assert!(!source.bare.contains('w'));
        assert_eq!(source.bare.len(), source.code.len());
    }

    #[test]
    fn test_modules_are_marked_to_their_closing_brace() {
        let source = Source::new("fn a() {}\n#[cfg(test)]\nmod tests {\n  const B: &str = \"}\";\n}\nfn c() {}\n");
        assert_eq!(source.in_tests, [false, true, true, true, true, false]);
    }
}
