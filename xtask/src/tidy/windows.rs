//! Dependencies that a crate has for one file only: the rest of the crate may not use them.
//!
//! Looks for paths such as `gpu::` in code. Knows the table, not why a file needs its dependency.

use super::functions::words;
use super::source::Source;
use super::{File, Finding};

/// (folder, crate, the only file below the folder that may name it).
const WINDOWS: &[(&str, &str, &str)] = &[
    ("crates/train/src/", "gpu", "crates/train/src/engine/device.rs"),
    ("crates/train/src/", "cpu", "crates/train/src/engine/device.rs"),
    ("crates/train/src/", "ops", "crates/train/src/engine/conformance.rs"),
];

/// Checks one file; anything but Rust is passed over.
pub fn check(file: &File) -> Vec<Finding> {
    let watched = WINDOWS.iter().filter(|(folder, _, only)| file.path.starts_with(folder) && file.path != *only);
    let watched: Vec<_> = watched.collect();
    if watched.is_empty() || !file.path.ends_with(".rs") {
        return Vec::new();
    }
    let source = Source::new(&file.text);
    let mut found = Vec::new();
    for (number, line) in source.bare.lines().enumerate() {
        for (_, name, only) in &watched {
            let named = words(line, name).any(|end| line[end..].starts_with("::") && is_crate(line, end - name.len()));
            if named && !source.in_tests[number] {
                let place = format!("{}:{}", file.path, number + 1);
                found.push(Finding::hard(place, format!("`{name}` is looked at through {only} only")));
            }
        }
    }
    found
}

/// The name at `at` is the first of its path, so a crate and not a module of the same name.
fn is_crate(line: &str, at: usize) -> bool {
    !line[..at].ends_with("::") || line[..at].ends_with(" ::")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(path: &str, text: &str) -> usize {
        check(&File { path: path.into(), text: text.into() }).len()
    }

    #[test]
    fn only_the_named_file_looks_through_a_window() {
        assert_eq!(count("crates/train/src/engine/compiled.rs", "use gpu::GpuBackend;\n"), 1);
        assert_eq!(count("crates/train/src/engine/device.rs", "use gpu::GpuBackend;\n"), 0);
        assert_eq!(count("crates/train/src/plan/compiler_options.rs", "let a = ops::find(name);\n"), 1);
        assert_eq!(count("crates/train/src/plan/compiler_options.rs", "let a = device::cpu::new(); // ops::find\n"), 0);
        assert_eq!(count("crates/py/src/model.rs", "let a = ops::find(name);\n"), 0);
    }
}
