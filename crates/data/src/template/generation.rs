//! `{% generation %} … {% endgeneration %}`: the block by which a template marks what the assistant says.
//!
//! The template engine does not know it, so it becomes a filter block (equal in its handling of white space and scope)
//! that puts two marks around its text; the marks are taken out of the rendering again.

use std::ops::Range;

/// The filter's name in the rewritten template.
pub(super) const FILTER: &str = "generation_marks";

/// Noncharacters: they are in no text that is meant for exchange.
const OPEN: char = '\u{fdd0}';
const CLOSE: char = '\u{fdd1}';

/// Replaces the block tags; `None` if there are none.
pub(super) fn rewrite(source: &str) -> Option<String> {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    let mut found = false;
    while let Some(begin) = rest.find("{%") {
        // After the opening delimiter, whose second sign may not close it: `{%}`.
        let Some(length) = rest[begin + 2..].find("%}") else { break };
        let end = begin + 2 + length;
        let tag = &rest[begin + 2..end];
        let word = tag.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        let replacement = match word {
            "generation" => format!("filter {FILTER}"),
            "endgeneration" => "endfilter".to_owned(),
            _ => String::new(),
        };
        out.push_str(&rest[..begin]);
        if replacement.is_empty() {
            out.push_str(&rest[begin..end + 2]);
        } else {
            found = true;
            out.push_str("{%");
            out.push_str(&tag.replacen(word, &replacement, 1));
            out.push_str("%}");
        }
        rest = &rest[end + 2..];
    }
    out.push_str(rest);
    found.then_some(out)
}

/// The filter: its text between the marks.
pub(super) fn mark(text: &str) -> String {
    format!("{OPEN}{text}{CLOSE}")
}

/// True if a text holds one of the marks itself.
pub(super) fn contains_mark(text: &str) -> bool {
    text.contains([OPEN, CLOSE])
}

/// Takes the marks out; the ranges are bytes of the returned text. `None` if the marks do not pair.
pub(super) fn take_marks(marked: &str) -> Option<(String, Vec<Range<usize>>)> {
    let mut text = String::with_capacity(marked.len());
    let mut ranges = Vec::new();
    let mut open = None;
    for c in marked.chars() {
        match c {
            OPEN if open.is_none() => open = Some(text.len()),
            CLOSE => ranges.push(open.take()?..text.len()),
            OPEN => return None,
            c => text.push(c),
        }
    }
    open.is_none().then_some((text, ranges))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_keep_their_white_space_control() {
        let source = "a{%- generation %}b{% endgeneration -%}{% if generation %}";
        let expected = "a{%- filter generation_marks %}b{% endfilter -%}{% if generation %}";
        assert_eq!(rewrite(source).as_deref(), Some(expected));
        assert_eq!(rewrite("{% if x %}{% endif %}"), None);
        assert_eq!(rewrite("{%}"), None);
        let (source, expected) = ("{%}%}{% generation %}", "{%}%}{% filter generation_marks %}");
        assert_eq!(rewrite(source).as_deref(), Some(expected));
    }

    #[test]
    fn marks_become_ranges() {
        let marked = format!("ab{}{}e", mark("cd"), mark(""));
        assert_eq!(take_marks(&marked), Some(("abcde".to_owned(), vec![2..4, 4..4])));
        assert_eq!(take_marks(&mark(&mark("x"))), None);
    }
}
