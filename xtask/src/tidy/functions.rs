//! Rules on Rust code lines: no unfinished code, `unsafe` only where allowed, functions that fit on a screen.
//!
//! Knows tokens, not types: the compiler's lints cover the rest.

use super::source::{Source, closing_brace, line_of};
use super::{File, Finding};

/// The places where `unsafe` may stand; the lint denies it elsewhere unless the lint is switched off.
const UNSAFE_PLACES: &[&str] =
    &["crates/gpu/", "crates/standin/src/", "crates/cpu/src/simd", "crates/cpu/src/arena", "fuzz/engine"];

const UNFINISHED: &[&str] = &["todo!", "unimplemented!", "dbg!"];

const LONGEST_FUNCTION: usize = 60;

/// Checks one file; anything but Rust is passed over.
pub fn check(file: &File) -> Vec<Finding> {
    if !file.path.ends_with(".rs") {
        return Vec::new();
    }
    let source = Source::new(&file.text);
    let mut found = Vec::new();
    for (number, line) in source.bare.lines().enumerate() {
        let place = format!("{}:{}", file.path, number + 1);
        for macro_name in UNFINISHED {
            if words(line, macro_name.trim_end_matches('!')).any(|end| line[end..].starts_with('!')) {
                found.push(Finding::hard(&place, format!("`{macro_name}` stands in the code")));
            }
        }
        let unsafe_word = words(line, "unsafe").next().is_some() || line.contains("allow(unsafe_code");
        if unsafe_word && !UNSAFE_PLACES.iter().any(|allowed| file.path.starts_with(allowed)) {
            found.push(Finding::hard(&place, format!("`unsafe` is allowed in {UNSAFE_PLACES:?} only")));
        }
    }
    found.extend(long_functions(file, &source));
    found
}

/// Ends of every occurrence of `word` that is a whole word.
pub fn words<'a>(line: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let part_of_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    line.match_indices(word).filter_map(move |(at, _)| {
        let end = at + word.len();
        let alone = !line[..at].ends_with(part_of_word) && !line[end..].starts_with(part_of_word);
        alone.then_some(end)
    })
}

fn long_functions(file: &File, source: &Source) -> Vec<Finding> {
    let mut found = Vec::new();
    let bare = &source.bare;
    for end in words(bare, "fn") {
        let name: String = bare[end..].trim_start().chars().take_while(|&c| c.is_alphanumeric() || c == '_').collect();
        let Some(open) = bare[end..].find(['{', ';']).map(|offset| end + offset) else { continue };
        if name.is_empty() || bare.as_bytes()[open] == b';' {
            continue;
        }
        let (first, last) = (line_of(bare, end), line_of(bare, closing_brace(bare, open)));
        let lines = last - first + 1;
        if lines > LONGEST_FUNCTION {
            let message = format!("`{name}` has {lines} lines; {LONGEST_FUNCTION} are the measure");
            found.push(Finding::soft(format!("{}:{}", file.path, first + 1), message));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(path: &str, text: &str) -> Vec<String> {
        check(&File { path: path.into(), text: text.into() }).iter().map(Finding::to_string).collect()
    }

    #[test]
    fn unfinished_code_is_found_and_a_word_in_a_text_is_not() {
        let text = format!("fn a() {{ {}!() }}\n// {}!\nconst B: &str = \"{}!()\";\n", "todo", "dbg", "dbg");
        let found = messages("crates/x/src/lib.rs", &text);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("crates/x/src/lib.rs:1"));
    }

    #[test]
    fn unsafe_has_its_places() {
        let word = "unsafe";
        assert_eq!(messages("crates/ops/src/a.rs", &format!("{word} fn a() {{}}\n")).len(), 1);
        assert_eq!(messages("crates/ops/src/a.rs", &format!("#![allow({word}_code)]\n")).len(), 1);
        assert!(messages("crates/gpu/src/a.rs", &format!("{word} fn a() {{}}\n")).is_empty());
        assert!(messages("crates/ops/src/a.rs", &format!("// {word}\n")).is_empty());
    }

    #[test]
    fn a_function_longer_than_a_screen_is_noted() {
        let body = "    let _ = 1;\n".repeat(LONGEST_FUNCTION);
        let found = messages("crates/x/src/lib.rs", &format!("trait T {{ fn s(); }}\nfn long() {{\n{body}}}\n"));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("`long` has 62 lines"));
    }
}
