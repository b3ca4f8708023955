//! `cargo xtask generate [--check]`: files generated from the option tables, the operations and the list of crates.
//!
//! Writes the reference page, the JSON schema, the signatures of the operations and the third-party notices; with `--check` it writes nothing and names
//! the files that differ. Knows where the files are, not what is in them.

use std::path::{Path, PathBuf};

use crate::{notices, stubs};

/// The generated files as (path from the repository's root, content).
///
/// # Errors
/// The licences of the crates cannot be read, or one is not allowed.
pub fn generated() -> Result<Vec<(&'static str, String)>, String> {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the repository");
    let schema = serde_json::to_string_pretty(&train::config::schema()).expect("a JSON value can be written");
    Ok(vec![
        ("docs/combinations.md", train::config::combinations_page()),
        ("docs/config.md", train::config::reference_page()),
        ("docs/surogate.schema.json", schema + "\n"),
        (stubs::FILE, stubs::text()),
        (notices::FILE, notices::text(repository)?),
    ])
}

/// The files below `root` that are not what the tables make of them.
///
/// # Errors
/// A file that cannot be made, or not be read for another reason than that it is not there.
pub fn stale(root: &Path) -> Result<Vec<PathBuf>, String> {
    let mut stale = Vec::new();
    for (path, content) in generated()? {
        let path = root.join(path);
        match std::fs::read_to_string(&path) {
            Ok(found) if found == content => {}
            Ok(_) => stale.push(path),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => stale.push(path),
            Err(error) => return Err(format!("cannot read {}: {error}", path.display())),
        }
    }
    Ok(stale)
}

/// Writes the files that differ, or with `check` only finds them.
///
/// # Errors
/// With `check`: files differ. Without: a file could not be written.
pub fn run(root: &Path, check: bool) -> Result<(), String> {
    let stale = stale(root)?;
    if check {
        let names: Vec<String> = stale.iter().map(|path| path.display().to_string()).collect();
        return match names.is_empty() {
            true => Ok(()),
            false => Err(format!("not as generated: {}\nrun `cargo xtask generate` and commit", names.join(", "))),
        };
    }
    for (path, content) in generated()? {
        let path = root.join(path);
        if stale.contains(&path) {
            std::fs::write(&path, content).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
            println!("wrote {}", path.display());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_repository_holds_what_the_tables_generate() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the repository");
        run(root, true).unwrap_or_else(|message| panic!("{message}"));
    }

    #[test]
    fn a_missing_and_a_changed_file_are_stale() {
        let root = std::env::temp_dir().join(format!("surogate-generate-{}", std::process::id()));
        for folder in ["docs", "python/surogate/dsl"] {
            std::fs::create_dir_all(root.join(folder)).unwrap();
        }
        assert_eq!(stale(&root).unwrap().len(), generated().unwrap().len());
        run(&root, false).unwrap();
        assert_eq!(stale(&root).unwrap(), Vec::<PathBuf>::new());
        std::fs::write(root.join("docs/config.md"), "other").unwrap();
        assert_eq!(stale(&root).unwrap(), [root.join("docs/config.md")]);
        assert!(run(&root, true).unwrap_err().contains("config.md"));
        std::fs::remove_dir_all(&root).unwrap();
    }
}
