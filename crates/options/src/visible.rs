//! Escapes untrusted text (names, paths, values, columns) before it goes to a terminal or a log: nothing in it can move
//! the cursor, change the title, or change the text direction of what follows.

use std::borrow::Cow;
use std::fmt::Write;

/// Returns the text with every character that steers a terminal or hides spelled as `\u001b`. Line ends and tabs stay.
/// In JSON, where such characters only are in strings, the spelling means the character itself.
pub fn visible(text: &str) -> Cow<'_, str> {
    spelled(text, is_hidden)
}

/// The same of prose, such as the answer of a model: joiners, and marks of direction that reach no further than the
/// characters next to them, belong to the spelling of words and emoji, and stay.
pub fn visible_text(text: &str) -> Cow<'_, str> {
    spelled(text, |c| is_hidden(c) && !is_of_words(c))
}

fn spelled(text: &str, is_spelled: impl Fn(char) -> bool + Copy) -> Cow<'_, str> {
    if !text.contains(is_spelled) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match is_spelled(c) {
            true => write!(shown, "\\u{:04x}", c as u32).expect("a text takes everything"),
            false => shown.push(c),
        }
    }
    Cow::Owned(shown)
}

/// True for joiners, breaks without a width, and marks of direction without a scope.
fn is_of_words(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}')
}

/// True for controls except line ends and tabs, for marks and overrides of direction, and for separators of lines that
/// only some programs know.
fn is_hidden(c: char) -> bool {
    match c {
        '\n' | '\t' => false,
        '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}' => true,
        c => c.is_control(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_steers_a_terminal() {
        assert!(matches!(visible("ä\tlöss\n  hint: 模型 🙂 e\u{301}"), Cow::Borrowed(_)));
        assert_eq!(visible("\u{1b}[2J\u{9b}31m\u{7}\rx"), "\\u001b[2J\\u009b31m\\u0007\\u000dx");
        assert_eq!(visible("a\u{202e}b\u{2066}c\u{7f}\u{0}"), "a\\u202eb\\u2066c\\u007f\\u0000");
        for c in (0..=0x10ffff).filter_map(char::from_u32).filter(|c| c.is_control() && !"\n\t".contains(*c)) {
            assert!(!visible(&c.to_string()).contains(char::is_control), "{c:?}");
        }
    }

    #[test]
    fn words_keep_what_joins_them() {
        for text in ["می\u{200c}خواهم", "क\u{94d}\u{200d}ष", "👩\u{200d}🔬", "א\u{200f}!", "C++\u{200e}", "\u{200d}"]
        {
            assert_eq!(visible_text(text), text);
            assert_ne!(visible(text), text, "a name shows what hides in it");
        }
        assert_eq!(
            visible_text("a\u{202e}b\u{2066}c\u{1b}[2J\u{2028}\u{feff}"),
            "a\\u202eb\\u2066c\\u001b[2J\\u2028\\ufeff"
        );
    }

    #[test]
    fn json_keeps_its_meaning() {
        let value = serde_json::json!({"a\u{1b}\u{9b}": ["\u{7f}\u{202e}\n\t\"\\", 1]});
        let text = value.to_string();
        let shown = visible(&text);
        assert!(!shown.contains(is_hidden) && text.contains(is_hidden));
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
    }
}
