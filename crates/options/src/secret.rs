//! Hides passwords and keys in addresses of servers before a value goes to a log, a report or another file.
//!
//! Knows the form of addresses; not which options hold one.

use std::borrow::Cow;

use serde_json::Value;

/// The text that replaces a user and a password.
const HIDDEN: &str = "***";

/// Parts of the names of parameters whose values are secret.
const SECRETS: [&str; 7] = ["token", "secret", "password", "passwd", "key", "signature", "credential"];

/// Returns the text with `***` for what is before the `@` of an address such as `scheme://user:password@host`, and for the
/// values of its parameters that are secret by their names.
pub fn without_userinfo(text: &str) -> Cow<'_, str> {
    let mut shown = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, authority) = rest.split_at(at + 3);
        let ends = |c: char| matches!(c, '/' | '?' | '#' | '"' | '\'' | '\\') || c.is_whitespace();
        let end = authority.find(ends).unwrap_or(authority.len());
        shown.push_str(before);
        rest = authority;
        if let Some(user) = authority[..end].rfind('@').or_else(|| end_of_password(authority, end)) {
            shown.push_str(HIDDEN);
            rest = &authority[user..];
        }
        let is_end = |c: char| matches!(c, '"' | '\'' | '\\') || c.is_whitespace();
        let (address, after) = rest.split_at(rest.find(is_end).unwrap_or(rest.len()));
        if let Some((path, query)) = address.split_once('?').filter(|(path, _)| !path.contains("://")) {
            shown.push_str(&format!("{path}?{}", without_values(query)));
            rest = after;
        }
    }
    if shown.contains(HIDDEN) {
        shown.push_str(rest);
        return Cow::Owned(shown);
    }
    Cow::Borrowed(text)
}

/// The place of the `@` after a password that was written with a `/`, `?` or `#`, which should be encoded: what is between the
/// colon and the first of these, at `end`, is no port.
fn end_of_password(authority: &str, end: usize) -> Option<usize> {
    let (_, port) = authority[..end].rsplit_once(':').filter(|(_, port)| !port.starts_with('['))?;
    if !authority[end..].starts_with(['/', '?', '#']) || port.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let is_end = |c: char| matches!(c, '"' | '\'' | '\\') || c.is_whitespace();
    let whole = &authority[..authority.find(is_end).unwrap_or(authority.len())];
    whole[end..].find('@').map(|at| end + at)
}

/// True for a text in which [`without_userinfo`] has replaced something.
pub fn hides(text: &str) -> bool {
    let is_end = |c: char| matches!(c, '"' | '\'' | '\\') || c.is_whitespace();
    let hidden = format!("={HIDDEN}");
    let is_hidden = |address: &str| {
        let query = address.split(is_end).next().and_then(|address| address.split_once('?'));
        query.is_some_and(|(_, query)| query.split('&').any(|of| of.ends_with(&hidden)))
    };
    text.contains(&format!("://{HIDDEN}@")) || text.split("://").skip(1).any(is_hidden)
}

fn is_secret(name: &str) -> bool {
    SECRETS.iter().any(|secret| name.contains(secret)) || ["sig", "pwd", "pass", "auth"].contains(&name)
}

/// The parameters of an address with `***` for the values of those that are secret.
fn without_values(query: &str) -> String {
    let shown = |parameter: &str| match parameter.split_once('=') {
        Some((name, _)) if is_secret(&name.to_ascii_lowercase()) => format!("{name}={HIDDEN}"),
        _ => without_userinfo(parameter).into_owned(),
    };
    query.split('&').map(shown).collect::<Vec<_>>().join("&")
}

/// The same for every text of a value.
pub fn hide_userinfo(value: &mut Value) {
    match value {
        Value::String(text) => {
            if let Cow::Owned(shown) = without_userinfo(text) {
                *text = shown;
            }
        }
        Value::Array(items) => items.iter_mut().for_each(hide_userinfo),
        Value::Object(fields) => fields.values_mut().for_each(hide_userinfo),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn passwords_are_hidden_and_nothing_else() {
        for (text, shown) in [
            ("aim://user:password@host:53800/x", "aim://***@host:53800/x"),
            ("https://token@host", "https://***@host"),
            ("a://u:p@h, b://v:q@i/w@x", "a://***@h, b://***@i/w@x"),
            ("s://u:p@ss@host/", "s://***@host/"),
            ("s3://bucket/a@b", "s3://bucket/a@b"),
            ("aim://user:pa/ss?w#d@host:1/x@y", "aim://***@host:1/x@y"),
            ("aim://host:53800/x@y", "aim://host:53800/x@y"),
            ("http://[::1]:80/x@y, me@host", "http://[::1]:80/x@y, me@host"),
            ("me@host", "me@host"),
            ("aim://host:9/x?token=abc&run=3", "aim://host:9/x?token=***&run=3"),
            ("https://u:p@h/?X-Amz-Signature=ab b?key=1", "https://***@h/?X-Amz-Signature=*** b?key=1"),
            ("https://h/p?page=2", "https://h/p?page=2"),
            ("https://p/?url=https://u:p@h/x&sig=a", "https://p/?url=https://***@h/x&sig=***"),
            ("://", "://"),
            ("", ""),
        ] {
            assert_eq!(without_userinfo(text), shown);
        }
        assert!(hides("aim://***@h") && hides("\"aim://h:9/x?run=3&token=***\""));
        assert!(!hides("Open https://h/login?user=me and replace token=*** by your own") && !hides("a?token=***"));
        let mut value = json!({"aim_repo": "aim://u:p@h", "list": ["x://u@h", 1, null]});
        hide_userinfo(&mut value);
        assert_eq!(value, json!({"aim_repo": "aim://***@h", "list": ["x://***@h", 1, null]}));
    }
}
