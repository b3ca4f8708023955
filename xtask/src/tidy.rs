//! `cargo xtask tidy`: checks the code rules that a reviewer would otherwise check by hand.
//!
//! Collects the files, runs each rule, prints all findings at once. Knows which files the repository holds, not what
//! they are about.

mod assembly;
mod circles;
mod comments;
mod duplicates;
mod files;
mod floors;
mod functions;
mod imports;
mod names;
mod retired;
mod source;
mod windows;

use std::fmt;
use std::path::Path;
use std::process::Command;

/// One place that breaks a rule, or, if `soft`, one that is close to it.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// Path from the repository's root, with a line where there is one.
    pub place: String,
    /// The fault, and what is expected instead.
    pub message: String,
    /// True for a finding that is reported and fails nothing.
    pub soft: bool,
}

impl Finding {
    fn hard(place: impl Into<String>, message: impl Into<String>) -> Finding {
        Finding { place: place.into(), message: message.into(), soft: false }
    }

    fn soft(place: impl Into<String>, message: impl Into<String>) -> Finding {
        Finding { place: place.into(), message: message.into(), soft: true }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}: {}", if self.soft { "note: " } else { "" }, self.place, self.message)
    }
}

/// One text file: its path from the root (with `/`) and its content.
pub struct File {
    pub path: String,
    pub text: String,
}

/// The text files that git holds or would hold (new ones that are not ignored count).
///
/// # Errors
/// git is missing or this is no git checkout; a listed file cannot be read.
fn text_files(root: &Path) -> Result<Vec<File>, String> {
    let listed = Command::new("git")
        .args(["-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .map_err(|error| format!("tidy asks git for the files of the repository: {error}"))?;
    if !listed.status.success() {
        return Err(format!("git ls-files: {}", String::from_utf8_lossy(&listed.stderr).trim()));
    }
    let mut files = Vec::new();
    for path in String::from_utf8_lossy(&listed.stdout).split('\0').filter(|path| !path.is_empty()) {
        let full = root.join(path);
        if !full.is_file() {
            continue; // deleted in the working tree, not yet in the index
        }
        let bytes = std::fs::read(&full).map_err(|error| format!("cannot read {path}: {error}"))?;
        if let Ok(text) = String::from_utf8(bytes) {
            files.push(File { path: path.to_string(), text });
        }
    }
    Ok(files)
}

/// Every finding of every rule, sorted by place.
///
/// # Errors
/// The repository cannot be read (see [`text_files`]) or `cargo metadata` fails.
pub fn findings(root: &Path) -> Result<Vec<Finding>, String> {
    let mut found = floors::check(&floors::metadata(root)?);
    let files = text_files(root)?;
    let page = files.iter().find(|file| file.path == "ARCHITECTURE.md");
    found.extend(floors::check_page(page.map_or("", |file| &file.text)));
    let test_modules = names::test_modules(&files);
    for file in &files {
        found.extend(assembly::check(file));
        found.extend(files::check(file));
        found.extend(functions::check(file));
        found.extend(windows::check(file));
        found.extend(retired::check(file));
        found.extend(duplicates::check(file));
        if !test_modules.contains(&file.path) {
            found.extend(names::check(file));
        }
    }
    found.extend(comments::check(&files));
    found.extend(circles::check(&files, &test_modules));
    found.sort();
    Ok(found)
}

/// Prints all findings.
///
/// # Errors
/// A rule is broken (soft findings are none), or the repository cannot be read.
pub fn run(root: &Path) -> Result<(), String> {
    let found = findings(root)?;
    for finding in &found {
        println!("{finding}");
    }
    let broken = found.iter().filter(|finding| !finding.soft).count();
    match broken {
        0 => {
            println!("tidy: ok, {} notes", found.len());
            Ok(())
        }
        _ => Err(format!("tidy: {broken} places break a rule of the house (ARCHITECTURE.md, section Conventions)")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_repository_is_tidy() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the repository");
        let broken: Vec<String> =
            findings(root).unwrap().iter().filter(|finding| !finding.soft).map(Finding::to_string).collect();
        assert!(broken.is_empty(), "{} places break a rule of the house:\n{}", broken.len(), broken.join("\n"));
    }
}
