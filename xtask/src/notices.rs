//! `THIRD_PARTY_NOTICES.txt`: the licences of everything that is linked into the wheel's engine.
//!
//! Gets the crates from cargo and reads the licence texts in their sources, including C libraries inside crates. A
//! licence that is not listed here is an error: someone must review it first. Knows no crate by name except those that
//! do not ship their licence text.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// The file, from the repository's root.
pub const FILE: &str = "THIRD_PARTY_NOTICES.txt";

/// The target that the wheel is built for.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Licences under which a crate may be linked, the one that is taken of several first. The word after it is how files
/// of that licence are called where a crate has several.
const ALLOWED: &[(&str, &str)] = &[
    ("Apache-2.0", "APACHE"),
    ("MIT", "MIT"),
    ("BSD-2-Clause", "BSD"),
    ("BSD-3-Clause", "BSD"),
    ("ISC", "ISC"),
    ("Zlib", "ZLIB"),
    ("BSL-1.0", "BOOST"),
    ("MPL-2.0", "MPL"),
];

/// Beginnings of the names of files that hold licences.
const NAMES: [&str; 6] = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "COPYRIGHT", "UNLICENSE"];

const HEAD: &str = "\
The engine of Surogate (surogate/_native) is linked from the crates below and from the standard library of Rust.
Surogate itself is under the Apache License 2.0; see LICENSE. Where a crate leaves a choice, the licence that is named
here is the one that was taken. Made by `cargo xtask generate`; the sources of every crate are on crates.io.
";

/// The MIT licence below its line of copyright.
const MIT: &str = "\
Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated documentation
files (the \"Software\"), to deal in the Software without restriction, including without limitation the rights to use, copy,
modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the Software
is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED \"AS IS\", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE,
ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
";

/// The standard library has no entry among cargo's packages.
const STANDARD_LIBRARY: &str = "std, core, alloc (the standard library of Rust, by the Rust Project's contributors)";

/// A crate that is linked.
struct Linked {
    name: String,
    version: String,
    licence: &'static str,
    /// Texts with the file's name, without what belongs to licences that were not taken.
    texts: Vec<(String, String)>,
}

/// The content of [`FILE`].
///
/// # Errors
/// cargo fails, a source cannot be read, a licence is not allowed, or a text that must go along is missing.
pub fn text(root: &Path) -> Result<String, String> {
    let own = read(&root.join("LICENSE"))?;
    let wanted = linked_names(root)?;
    let packages = packages(root)?;
    let mut crates = Vec::new();
    let mut problems = Vec::new();
    for package in packages.iter().filter(|package| !package["source"].is_null()) {
        let word = |key: &str| package[key].as_str().unwrap_or_default().to_owned();
        if !wanted.contains(&(word("name"), word("version"))) {
            continue;
        }
        match linked(package, &own) {
            Ok(linked) => crates.push(linked),
            Err(problem) => problems.push(format!("{} {}: {problem}", word("name"), word("version"))),
        }
    }
    crates.sort_by(|one, other| (&one.name, &one.version).cmp(&(&other.name, &other.version)));
    match problems.is_empty() {
        true => Ok(page(&crates, &own)),
        false => Err(format!("licences of what is linked:\n  {}", problems.join("\n  "))),
    }
}

fn cargo(root: &Path, arguments: &[&str]) -> Result<String, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo).args(arguments).current_dir(root).output();
    let output = output.map_err(|error| format!("cargo {}: {error}", arguments[0]))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("cargo {}: {}", arguments[0], String::from_utf8_lossy(&output.stderr).trim())),
    }
}

/// Name and version of what the engine is linked from: no tool of the build, no macro, nothing of tests.
fn linked_names(root: &Path) -> Result<BTreeSet<(String, String)>, String> {
    let tree = cargo(
        root,
        &[
            "tree",
            "--locked",
            "--package",
            "py",
            "--features",
            "extension-module",
            "--edges",
            "normal,no-proc-macro",
            "--target",
            TARGET,
            "--prefix",
            "none",
            "--format",
            "{p}",
        ],
    )?;
    let pair = |line: &str| {
        let mut words = line.split_whitespace();
        Some((words.next()?.to_owned(), words.next()?.strip_prefix('v')?.to_owned()))
    };
    Ok(tree.lines().filter_map(pair).collect())
}

fn packages(root: &Path) -> Result<Vec<Value>, String> {
    let text = cargo(root, &["metadata", "--locked", "--format-version", "1", "--filter-platform", TARGET])?;
    let metadata: Value = serde_json::from_str(&text).map_err(|error| format!("cargo metadata: {error}"))?;
    metadata["packages"].as_array().cloned().ok_or_else(|| "cargo metadata lists no packages".to_owned())
}

fn linked(package: &Value, apache: &str) -> Result<Linked, String> {
    let expression = package["license"].as_str().ok_or("it names no licence")?;
    let (licence, file_word) =
        choose(expression).ok_or_else(|| format!("`{expression}` is no licence that is allowed"))?;
    let manifest = Path::new(package["manifest_path"].as_str().ok_or("cargo does not say where it lies")?);
    let folder = manifest.parent().ok_or("its manifest has no folder")?;
    let mut texts = Vec::new();
    for path in licence_files(folder, 2)? {
        let name = path.strip_prefix(folder).expect("found below").to_string_lossy().into_owned();
        let upper = name.to_ascii_uppercase();
        let is_of = |word: &str| upper.contains(word);
        let of_another = ["APACHE", "MIT", "BSD", "ISC", "ZLIB", "BOOST", "UNLICENSE", "CC0", "GPL"].into_iter();
        let text = tidied(&read(&path)?);
        // Besides the licence that was taken, some ship this one as the other choice, in a file that does not say so.
        let is_general_public = text.trim_start().starts_with("GNU GENERAL PUBLIC LICENSE");
        if is_of(file_word) || !of_another.filter(|word| *word != file_word).any(is_of) && !is_general_public {
            texts.push((name, text));
        }
    }
    if texts.iter().all(|(name, _)| name.to_ascii_uppercase().starts_with("NOTICE")) {
        texts.push(("LICENSE".to_owned(), tidied(&standard_text(licence, package, apache)?)));
    }
    let word = |key: &str| package[key].as_str().unwrap_or_default().to_owned();
    Ok(Linked { name: word("name"), version: word("version"), licence, texts })
}

/// The text of a licence for a crate that ships none: whose the work is says its manifest.
fn standard_text(licence: &str, package: &Value, apache: &str) -> Result<String, String> {
    let authors: Vec<&str> = package["authors"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    match licence {
        "Apache-2.0" => Ok(apache.to_owned()),
        "MIT" if !authors.is_empty() => Ok(format!("Copyright (c) {}\n\n{MIT}", authors.join(", "))),
        _ => Err(format!("`{licence}` asks for its text, and there is none")),
    }
}

/// The licence that is taken of an expression, with the word in its files' names.
fn choose(expression: &str) -> Option<(&'static str, &'static str)> {
    let offered: Vec<&str> = expression.split(" OR ").flat_map(|part| part.split('/')).map(str::trim).collect();
    ALLOWED.iter().copied().find(|(name, _)| offered.contains(name))
}

/// Files with licences in a folder and `depth` levels below it, in the order of their names.
fn licence_files(folder: &Path, depth: usize) -> Result<Vec<PathBuf>, String> {
    let failed = |error| format!("{}: {error}", folder.display());
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_uppercase();
        if path.is_dir() {
            if depth > 0 && !name.starts_with("TEST") {
                found.extend(licence_files(&path, depth - 1)?);
            }
        } else if NAMES.iter().any(|start| name.starts_with(start)) && !name.ends_with(".RS") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn read(path: &Path) -> Result<String, String> {
    let bytes = fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Without what editors add: ends of lines, blanks at ends, empty lines around.
fn tidied(text: &str) -> String {
    let lines: Vec<&str> = text.trim_start_matches('\u{feff}').lines().map(str::trim_end).collect();
    lines.join("\n").trim_matches('\n').to_owned()
}

/// The same text for all who differ in blanks only.
fn key(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn page(crates: &[Linked], own: &str) -> String {
    let line = "-".repeat(100);
    let mut page = format!("{HEAD}\n{line}\n\n{STANDARD_LIBRARY}: Apache-2.0\n");
    for linked in crates {
        page += &format!("{} {}: {}\n", linked.name, linked.version, linked.licence);
    }
    // Equal texts once, in the order of the first crate that has them.
    let mut owners: BTreeMap<String, (usize, &str, Vec<String>)> = BTreeMap::new();
    let own = tidied(own);
    owners.insert(key(&own), (0, &own, vec!["the standard library of Rust".to_owned()]));
    for (number, linked) in crates.iter().enumerate() {
        for (file, text) in &linked.texts {
            let entry = owners.entry(key(text)).or_insert((number + 1, text, Vec::new()));
            let nested = if file.contains('/') { format!(" ({file})") } else { String::new() };
            entry.2.push(format!("{} {}{nested}", linked.name, linked.version));
        }
    }
    let mut texts: Vec<_> = owners.into_values().collect();
    texts.sort_by(|one, other| (one.0, one.1).cmp(&(other.0, other.1)));
    for (_, text, names) in texts {
        page += &format!("\n{line}\n\n{}\n\n{text}\n", names.join(", "));
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_several_licences_one_is_taken_and_others_are_refused() {
        assert_eq!(choose("MIT OR Apache-2.0"), Some(("Apache-2.0", "APACHE")));
        assert_eq!(choose("Unlicense/MIT"), Some(("MIT", "MIT")));
        assert_eq!(choose("Apache-2.0 WITH LLVM-exception OR MIT"), Some(("MIT", "MIT")));
        assert_eq!(choose("GPL-3.0-only"), None);
        assert_eq!(choose("MIT AND GPL-2.0-only"), None);
    }

    #[test]
    fn every_crate_stands_in_the_page_with_a_text_and_no_machine_does() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the repository");
        let page = text(root).unwrap_or_else(|problem| panic!("{problem}"));
        for name in ["tokenizers", "parquet", "minijinja", "zstd-sys", "pyo3", "rayon"] {
            assert!(page.lines().any(|line| line.starts_with(&format!("{name} "))), "{name}");
        }
        assert!(page.contains("oniguruma/COPYING") && page.contains("zstd/LICENSE"), "C libraries inside of crates");
        assert!(!page.contains("proptest") && !page.contains("syn 2"), "tests and macros are not linked");
        let registry = std::env::var("CARGO_HOME").or_else(|_| std::env::var("HOME")).unwrap_or_default();
        assert!(registry.is_empty() || !page.contains(&registry));
    }
}
