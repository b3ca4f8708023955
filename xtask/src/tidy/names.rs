//! Model names belong in `python/surogate/models/` only: the engine knows architectures as graphs.
//!
//! Checks code and strings of the crates that compile and run a model, without their tests. A comment may say where a
//! formula comes from.

use std::collections::HashSet;

use super::source::Source;
use super::{File, Finding};

const NAMELESS: &[&str] = &["tensor", "graph", "program", "ops", "compiler", "cpu", "gpu"];

const FAMILIES: &[&str] = &["qwen", "llama", "mistral", "gemma", "gpt", "deepseek", "smollm", "granite", "olmo", "glm"];

/// The published name of a law for rotary frequencies that any model may use.
const SCALING_LAW: &str = "llama3";

/// The files that are modules of tests as a whole: `#[cfg(test)] mod name;` is next to them.
pub fn test_modules(files: &[File]) -> HashSet<String> {
    let mut found = HashSet::new();
    for file in files.iter().filter(|file| file.path.ends_with(".rs")) {
        let (folder, name) = file.path.rsplit_once('/').unwrap_or(("", &file.path));
        let folder = match name {
            "lib.rs" | "main.rs" | "mod.rs" => folder.to_string(),
            _ => file.path.trim_end_matches(".rs").to_string(),
        };
        for (at, marker) in file.text.match_indices("#[cfg(test)]\nmod ") {
            let module: String =
                file.text[at + marker.len()..].chars().take_while(|&c| c.is_alphanumeric() || c == '_').collect();
            found.extend([format!("{folder}/{module}.rs"), format!("{folder}/{module}/mod.rs")]);
        }
    }
    found
}

/// Checks one file that is no module of tests; anything outside the named crates is passed over.
pub fn check(file: &File) -> Vec<Finding> {
    let watched = NAMELESS.iter().any(|name| file.path.starts_with(&format!("crates/{name}/src/")));
    let code = [".rs", ".cu", ".cuh"].iter().any(|ending| file.path.ends_with(ending));
    if !watched || !code {
        return Vec::new();
    }
    let source = Source::new(&file.text);
    let mut found = Vec::new();
    for ((number, line), in_tests) in source.code.lines().enumerate().zip(&source.in_tests) {
        let line = line.to_lowercase().replace(SCALING_LAW, "");
        let Some(family) = FAMILIES.iter().find(|family| line.contains(**family)) else { continue };
        if !in_tests {
            let place = format!("{}:{}", file.path, number + 1);
            found.push(Finding::hard(
                place,
                format!("`{family}`: a model's name stands outside of python/surogate/models/"),
            ));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(path: &str, text: &str) -> usize {
        check(&File { path: path.into(), text: text.into() }).len()
    }

    #[test]
    fn a_file_declared_for_tests_only_is_known() {
        let file = |path: &str, text: &str| File { path: path.into(), text: text.into() };
        let files = [file("crates/ops/src/rope/mod.rs", "//! R.\n#[cfg(test)]\nmod golden;\nmod frequencies;\n")];
        let found = test_modules(&files);
        assert!(found.contains("crates/ops/src/rope/golden.rs"));
        assert!(!found.contains("crates/ops/src/rope/frequencies.rs"));
    }

    #[test]
    fn code_and_strings_are_watched_comments_and_tests_are_not() {
        let path = "crates/compiler/src/a.rs";
        assert_eq!(count(path, "if name == \"Qwen3ForCausalLM\" {}\n"), 1);
        assert_eq!(count(path, "fn gemma_offset() {}\n"), 1);
        assert_eq!(count(path, "// as `LlamaRMSNorm` in transformers\n"), 0);
        assert_eq!(count(path, "#[cfg(test)]\nmod tests {\n    const A: &str = \"qwen3\";\n}\n"), 0);
        assert_eq!(count(path, "match kind { \"llama3\" => {} }\n"), 0);
        assert_eq!(count("crates/train/src/a.rs", "const FAMILY: &str = \"qwen\";\n"), 0);
    }
}
