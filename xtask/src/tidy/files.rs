//! Rules on whole files: a head comment, a readable size, a meaningful name, no machine-specific paths.
//!
//! Knows paths and text; of languages only how a comment begins.

use super::{File, Finding};

const SOFT_LINES: usize = 300;
const HARD_LINES: usize = 800;

/// Names that say nothing about what is inside.
const EMPTY_NAMES: &[&str] =
    &["util", "utils", "helper", "helpers", "common", "manager", "managers", "base", "misc", "v2", "new", "old"];

/// Places of one machine. Split, so that this file is not its own finding.
const MACHINE_PATHS: &[&str] =
    &[concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("/opt/wh", "eels")];

/// The scratch directory: a literal path is wrong outside of tests.
const SCRATCH: &str = concat!("/t", "mp/");

/// Checks one file's head comment, size, name and paths.
pub fn check(file: &File) -> Vec<Finding> {
    let mut found = Vec::new();
    found.extend(head(file));
    found.extend(size(file));
    found.extend(name(file));
    found.extend(machine_paths(file));
    found
}

fn extension(path: &str) -> &str {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.rsplit_once('.').map_or("", |(_, extension)| extension)
}

/// Test data is what others wrote: read, not styled.
fn is_data(path: &str) -> bool {
    path.contains("/fixtures/") || path.starts_with("examples/stories/") || path.starts_with("tests/golden/")
}

fn head(file: &File) -> Option<Finding> {
    let starts: &[&str] = match extension(&file.path) {
        "rs" => &["//!"],
        "cu" | "cuh" => &["//"],
        "py" | "pyi" => &["\"\"\"", "r\"\"\""],
        "sh" | "yaml" | "yml" => &["#"],
        "" if file.text.starts_with("#!") => &["#"],
        _ => return None,
    };
    if is_data(&file.path) {
        return None;
    }
    let first = file.text.lines().find(|line| !line.starts_with("#!") || line.starts_with("#![")).unwrap_or("");
    let opened = starts.iter().any(|start| first.starts_with(start));
    (!opened)
        .then(|| Finding::hard(format!("{}:1", file.path), format!("opens without a head comment (`{}`)", starts[0])))
}

/// Written from a list, a few lines for each row: their size is that of the list.
const LISTS: &[&str] = &["python/surogate/dsl/ops.pyi"];

fn size(file: &File) -> Option<Finding> {
    let measured = matches!(extension(&file.path), "rs" | "py" | "pyi" | "cu" | "cuh" | "sh");
    if !measured || is_data(&file.path) || LISTS.contains(&file.path.as_str()) {
        return None;
    }
    match file.text.lines().count() {
        0..=SOFT_LINES => None,
        lines @ ..=HARD_LINES => {
            Some(Finding::soft(&file.path, format!("{lines} lines; {SOFT_LINES} are the measure")))
        }
        lines => Some(Finding::hard(&file.path, format!("{lines} lines; {HARD_LINES} are the most"))),
    }
}

fn name(file: &File) -> Option<Finding> {
    if is_data(&file.path) {
        return None;
    }
    let empty = file.path.split('/').find(|part| {
        let stem = part.split('.').next().unwrap_or(part);
        EMPTY_NAMES.contains(&stem)
    })?;
    Some(Finding::hard(&file.path, format!("`{empty}` says nothing about its content: name the concept")))
}

fn machine_paths(file: &File) -> Vec<Finding> {
    let tests = file.path.contains("/tests/") || file.path.starts_with("tests/");
    let mut found = Vec::new();
    for (number, line) in file.text.lines().enumerate() {
        let path = MACHINE_PATHS.iter().find(|path| contains_path(line, path));
        let scratch = (!tests && contains_path(line, SCRATCH)).then_some(&SCRATCH);
        if let Some(path) = path.or(scratch) {
            found.push(Finding::hard(
                format!("{}:{}", file.path, number + 1),
                format!("`{path}` is a path of one machine"),
            ));
        }
    }
    found
}

/// `path` at the start of an absolute path: not in the middle of a longer one or of an address.
fn contains_path(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        !before.is_some_and(|letter| letter.is_alphanumeric() || matches!(letter, '_' | '-' | '.' | '/' | '}'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(path: &str, text: &str) -> Vec<String> {
        check(&File { path: path.into(), text: text.into() }).iter().map(Finding::to_string).collect()
    }

    #[test]
    fn every_kind_of_source_needs_its_head() {
        for (path, good, bad) in [
            ("a.rs", "//! A.\n", "use b;\n"),
            ("a.py", "\"\"\"A.\"\"\"\n", "import b\n"),
            ("a.cu", "// A.\n", "__global__ void a();\n"),
            ("a.sh", "#!/bin/sh\n# A.\n", "#!/bin/sh\nset -e\n"),
            ("a", "#!/bin/sh\n# A.\n", "#!/bin/sh\nset -e\n"),
        ] {
            assert_eq!(messages(path, good), Vec::<String>::new());
            assert_eq!(messages(path, bad).len(), 1, "{path}");
        }
    }

    #[test]
    fn sizes_are_noted_then_refused() {
        let lines = |count: usize| format!("//! A.\n{}", "//\n".repeat(count - 1));
        assert!(messages("a.rs", &lines(SOFT_LINES)).is_empty());
        assert!(messages("a.rs", &lines(SOFT_LINES + 1))[0].starts_with("note: "));
        assert!(messages("a.rs", &lines(HARD_LINES + 1))[0].contains("are the most"));
        let list = format!("\"\"\"A.\"\"\"\n{}", "#\n".repeat(HARD_LINES));
        assert!(messages(LISTS[0], &list).is_empty());
    }

    #[test]
    fn names_that_say_nothing_are_found_in_files_and_folders() {
        assert!(messages("crates/a/src/utils.rs", "//! A.\n")[0].contains("`utils.rs`"));
        assert_eq!(messages("python/common/a.py", "\"\"\"A.\"\"\"\n").len(), 1);
        assert!(messages("crates/a/src/database.rs", "//! A.\n").is_empty());
    }

    #[test]
    fn paths_of_one_machine_are_found() {
        let scratch = format!("//! Writes {SCRATCH}x\n");
        assert_eq!(messages("crates/a/src/lib.rs", &scratch).len(), 1);
        assert!(messages("crates/a/tests/b.rs", &scratch).is_empty());
        assert_eq!(messages("docs/a.md", &format!("cd {}main\n", MACHINE_PATHS[0])).len(), 1);
        assert!(messages("docs/a.md", &format!("the frame{}here\n", MACHINE_PATHS[0])).is_empty());
    }
}
