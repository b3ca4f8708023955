//! Paths as users write them: `~` is the user's own folder, and variables are refused by name, since what would come of
//! them otherwise is a folder of that name.

use std::borrow::Cow;

/// The reason why a path cannot be used as it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unexpanded {
    /// The part that is not expanded, as a clause after the value.
    pub message: String,
    /// The spelling of the path that works.
    pub hint: String,
}

/// The path with the user's own folder in place of a leading `~`. Errors: `$NAME`, `${NAME}` and `$(command)` anywhere in it,
/// the folder of another user (`~name`), and `~` where `HOME` is not set.
pub fn expand(path: &str) -> Result<Cow<'_, str>, Unexpanded> {
    expand_with(path, std::env::var("HOME").ok().filter(|home| !home.is_empty()).as_deref())
}

fn expand_with<'p>(path: &'p str, home: Option<&str>) -> Result<Cow<'p, str>, Unexpanded> {
    if let Some(name) = variable(path) {
        return Err(Unexpanded {
            message: format!("variables such as `{name}` are not expanded"),
            hint: format!("write what `{name}` stands for; `~` is your own folder"),
        });
    }
    let Some(rest) = path.strip_prefix('~') else { return Ok(Cow::Borrowed(path)) };
    if !rest.is_empty() && !rest.starts_with('/') {
        let name = rest.split('/').next().unwrap_or_default();
        let is_user = name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-'));
        if !is_user {
            return Ok(Cow::Borrowed(path));
        }
        return Err(Unexpanded {
            message: format!("`~{name}`, the folder of another user, is not expanded"),
            hint: format!("write the folder itself, or `./{path}` if that is its name"),
        });
    }
    let home = home.ok_or_else(|| Unexpanded {
        message: "`~` needs the variable HOME, which is not set".to_owned(),
        hint: "write the folder itself".to_owned(),
    })?;
    Ok(Cow::Owned(format!("{}{rest}", home.trim_end_matches('/'))))
}

/// The first variable of a path, as it is written there.
fn variable(path: &str) -> Option<&str> {
    path.match_indices('$').find_map(|(at, _)| {
        let after = &path[at + 1..];
        let closed = |close: char| after.find(close).map_or(path.len(), |end| at + end + 2);
        let end = match after.chars().next()? {
            '{' => closed('}'),
            '(' => closed(')'),
            c if c.is_ascii_alphabetic() || c == '_' => {
                let length = after.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(after.len());
                at + 1 + length
            }
            _ => return None,
        };
        Some(&path[at..end])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_own_folder_stands_for_a_tilde() {
        let of = |path: &str| expand_with(path, Some("/users/me/")).map(Cow::into_owned).map_err(|why| why.message);
        for (path, expected) in [
            ("~", "/users/me"),
            ("~/runs", "/users/me/runs"),
            ("~/a ~/b", "/users/me/a ~/b"),
            ("runs/~", "runs/~"),
            ("./~me", "./~me"),
            ("~notes.jsonl", "~notes.jsonl"),
            ("s3://bucket/~x", "s3://bucket/~x"),
            ("costs-$5", "costs-$5"),
            ("owner/name@main", "owner/name@main"),
            ("", ""),
        ] {
            assert_eq!(of(path), Ok(expected.to_owned()));
        }
        assert_eq!(of("~me/runs"), Err("`~me`, the folder of another user, is not expanded".to_owned()));
        assert!(expand_with("~/runs", None).unwrap_err().message.contains("HOME"));
    }

    #[test]
    fn variables_are_refused_by_name() {
        let named = |path: &str| expand_with(path, Some("/users/me")).unwrap_err().message;
        for (path, name) in [
            ("$HOME/x", "$HOME"),
            ("/scratch/$USER", "$USER"),
            ("~/${RUN_ID}/x", "${RUN_ID}"),
            ("a/${unclosed", "${unclosed"),
            ("$(pwd)/x", "$(pwd)"),
            ("s3://$BUCKET/x", "$BUCKET"),
        ] {
            assert_eq!(named(path), format!("variables such as `{name}` are not expanded"));
        }
    }
}
