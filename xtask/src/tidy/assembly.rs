//! Inline assembly belongs to one header for each vendor of GPUs, and to kernels that only one architecture runs.
//!
//! Knows paths and statements, not what an instruction does.

use super::source::Source;
use super::{File, Finding};

/// The header of a vendor, and what no other GPU has a counterpart of: Hopper's kernels and their headers.
const ALLOWED: &[&str] = &[
    "crates/device/src/dependent_launch.cuh",
    "crates/device/src/handoff.cuh",
    "crates/device/src/intrinsics_nvidia.cuh",
    "crates/device/src/wgmma.cuh",
    "crates/ops/src/attention/hopper/",
    "crates/ops/src/experts/hopper/",
];

/// Reports each line of a CUDA text with inline assembly, unless the file may hold some.
pub fn check(file: &File) -> Vec<Finding> {
    let device_code = [".cu", ".cuh"].iter().any(|ending| file.path.ends_with(ending));
    if !device_code || ALLOWED.iter().any(|allowed| file.path.starts_with(allowed)) {
        return Vec::new();
    }
    let source = Source::new(&file.text);
    let lines = source.code.lines().enumerate().filter(|(_, line)| has_word(line, "asm"));
    lines
        .map(|(number, _)| {
            let place = format!("{}:{}", file.path, number + 1);
            Finding::hard(place, "inline assembly: make it a function of the headers `intrinsics.cuh` of all vendors")
        })
        .collect()
}

/// True if `word` stands alone in the line.
fn has_word(line: &str, word: &str) -> bool {
    line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|part| part == word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(path: &str, text: &str) -> Vec<String> {
        let file = File { path: path.into(), text: text.into() };
        check(&file).into_iter().map(|finding| finding.place).collect()
    }

    #[test]
    fn assembly_outside_of_its_headers_is_found() {
        let text = "// asm in words\nvoid f() {\n  asm volatile(\"x;\");\n  asmall();\n}\n";
        assert_eq!(places("crates/ops/src/a/a.cu", text), ["crates/ops/src/a/a.cu:3"]);
        assert_eq!(places("crates/ops/src/a/a.cuh", text), ["crates/ops/src/a/a.cuh:3"]);
        assert!(places("crates/device/src/intrinsics_nvidia.cuh", text).is_empty());
        assert!(places("crates/ops/src/experts/hopper/steps.cuh", text).is_empty());
        assert!(places("crates/ops/src/a/mod.rs", text).is_empty());
    }
}
