//! The imports among the files of a crate: which file names something that another defines.
//!
//! Follows `use` declarations, re-exports and paths in code outside of tests. Knows paths, no types: a method of a type
//! that a third file extends is no import.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::File;
use super::functions::words;
use super::source::Source;

/// The modules of a crate by their paths, such as `plan::preview`; the root is the empty path.
pub type Imports = BTreeMap<String, BTreeSet<String>>;

/// Re-exports are followed through at most this number of modules.
const DEPTH: usize = 6;

/// The paths that one file names.
#[derive(Default)]
struct Module {
    imports: Vec<String>,
    /// Re-exported names with their paths.
    exports: BTreeMap<String, String>,
    /// All names that declarations bring in, with their paths.
    names: BTreeMap<String, String>,
}

/// Returns the imports among the files of a crate, whose sources begin with `folder`. `tests`: files that are modules of tests.
pub fn of_crate(files: &[File], folder: &str, tests: &HashSet<String>) -> Imports {
    let mut modules = BTreeMap::new();
    for file in files.iter().filter(|file| !tests.contains(&file.path)) {
        let Some(path) = file.path.strip_prefix(folder).and_then(|path| path.strip_suffix(".rs")) else { continue };
        let path = path.trim_end_matches("/mod").replace('/', "::");
        let path = if ["lib", "main"].contains(&path.as_str()) { String::new() } else { path };
        modules.insert(path, read(&file.text));
    }
    let names: Vec<String> = modules.keys().cloned().collect();
    let found = names.iter().map(|name| {
        let used = modules[name].imports.iter().filter_map(|path| resolve(&modules, name, path, 0));
        (name.clone(), used.filter(|used| used != name).collect())
    });
    found.collect()
}

fn read(text: &str) -> Module {
    let source = Source::new(text);
    let lines = source.bare.lines().zip(&source.in_tests).map(|(line, in_tests)| if *in_tests { "" } else { line });
    let mut code: String = lines.flat_map(|line| [line, "\n"]).collect();
    let mut module = Module::default();
    loop {
        let next = words(&code, "use").map(|end| end - 3).next();
        let Some(begin) = next else { break };
        let Some(end) = code[begin..].find(';').map(|length| begin + length) else { break };
        let before = code[..begin].rsplit(['\n', ';', '}']).next().unwrap_or_default();
        let is_export = words(before, "pub").next().is_some();
        for path in expanded(code[begin + 3..end].trim()) {
            let (path, name) = match path.split_once(" as ") {
                Some((path, name)) => (path.trim().to_owned(), name.trim().to_owned()),
                None => (path.clone(), path.rsplit("::").next().unwrap_or_default().to_owned()),
            };
            if is_export {
                module.exports.insert(name.clone(), path.clone());
            } else {
                module.imports.push(path.clone());
            }
            module.names.insert(name, path);
        }
        code.replace_range(begin..end, "");
    }
    // What a file re-exports and names itself, it also imports.
    let used = module.exports.iter().filter(|(name, _)| words(&code, name).next().is_some());
    let used: Vec<String> = used.map(|(_, path)| path.clone()).collect();
    module.imports.extend(used);
    module.imports.extend(paths(&code));
    module
}

/// The paths of a `use` declaration: `a::{b, c::d}` is `a::b` and `a::c::d`.
fn expanded(tree: &str) -> Vec<String> {
    let Some((before, inside)) = tree.split_once('{') else {
        return vec![tree.split_whitespace().collect::<Vec<_>>().join(" ")];
    };
    let inside = inside.trim_end().trim_end_matches('}');
    let (mut depth, mut begin, mut parts) = (0, 0, Vec::new());
    for (at, letter) in inside.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&inside[begin..at]);
                begin = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&inside[begin..]);
    // A part whose brace was cut off gets it back.
    let whole =
        |part: &str| part.trim().to_owned() + &"}".repeat(part.matches('{').count() - part.matches('}').count());
    let parts = parts.into_iter().map(whole).filter(|part| !part.is_empty());
    parts.flat_map(|part| expanded(&part)).map(|part| format!("{}{part}", before.trim())).collect()
}

/// Every path of at least two names in code.
fn paths(code: &str) -> Vec<String> {
    let is_part = |letter: char| letter.is_alphanumeric() || letter == '_' || letter == ':';
    let found = code.split(|letter| !is_part(letter)).filter(|path| path.contains("::") && !path.starts_with(':'));
    found.map(|path| path.trim_end_matches(':').to_owned()).collect()
}

/// The module of the crate that defines what a path in `module` names; None for other crates.
fn resolve(modules: &BTreeMap<String, Module>, module: &str, path: &str, depth: usize) -> Option<String> {
    let mut parts: Vec<&str> = path.split("::").collect();
    let mut base: Vec<&str> = match parts[0] {
        "crate" => Vec::new(),
        "self" => module.split("::").filter(|part| !part.is_empty()).collect(),
        "super" => {
            let mut base: Vec<&str> = module.split("::").filter(|part| !part.is_empty()).collect();
            while parts.get(1) == Some(&"super") {
                base.pop();
                parts.remove(0);
            }
            base.pop();
            base
        }
        first => {
            let child = if module.is_empty() { first.to_owned() } else { format!("{module}::{first}") };
            if !modules.contains_key(&child) {
                // The path begins with a name that a declaration brings in, such as a module's.
                let path = modules[module].names.get(first).filter(|path| depth < DEPTH && *path != first)?;
                let rest = &parts[1..];
                return resolve(modules, module, &[&[path.as_str()], rest].concat().join("::"), depth + 1);
            }
            parts.insert(0, "self");
            module.split("::").filter(|part| !part.is_empty()).collect()
        }
    };
    base.extend(&parts[1..]);
    let known = (0..=base.len()).rev().find(|count| modules.contains_key(&base[..*count].join("::")))?;
    let target = base[..known].join("::");
    let export = base.get(known).and_then(|name| modules[&target].exports.get(*name)).filter(|_| depth < DEPTH);
    let whole = export.map(|path| [&[path.as_str()], &base[known + 1..]].concat().join("::"));
    whole.and_then(|path| resolve(modules, &target, &path, depth + 1)).or(Some(target))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn imports(files: &[(&str, &str)]) -> Imports {
        let file = |(path, text): &(&str, &str)| File { path: format!("c/src/{path}"), text: (*text).to_owned() };
        of_crate(&files.iter().map(file).collect::<Vec<_>>(), "c/src/", &HashSet::new())
    }

    #[test]
    fn imports_follow_trees_and_re_exports() {
        let found = imports(&[
            ("lib.rs", "mod a;\nmod b;\npub use a::inner::Thing;\n"),
            ("a/mod.rs", "mod inner;\npub use inner::{Other, Thing as Known};\n"),
            ("a/inner.rs", "pub struct Thing;\npub struct Other;\n// use crate::b::X;\n"),
            ("b.rs", "use crate::{Thing, a::{Known, Other as O}};\nuse std::path::Path;\n"),
            (
                "d.rs",
                "fn f() { crate::b::run(\"crate::a::inner::Thing\") }\n#[cfg(test)]\nmod tests { use crate::a; }\n",
            ),
        ]);
        let of = |name: &str| found[name].iter().map(String::as_str).collect::<Vec<_>>();
        assert_eq!(of("b"), ["a::inner"]);
        assert_eq!(of("d"), ["b"]);
        assert!(of("a").is_empty() && of("a::inner").is_empty() && of("").is_empty());
    }

    #[test]
    fn paths_through_names_and_own_re_exports_are_found() {
        let found = imports(&[
            ("lib.rs", ""),
            ("a/mod.rs", "mod inner;\npub use inner::Thing;\nfn f(of: Thing) {}\n"),
            ("a/inner.rs", "pub struct Thing;\n"),
            ("b.rs", "use crate::a;\nfn f() { a::inner::run() }\n"),
        ]);
        assert_eq!(found["a"], BTreeSet::from(["a::inner".to_owned()]));
        assert_eq!(found["b"], BTreeSet::from(["a".to_owned(), "a::inner".to_owned()]));
    }

    #[test]
    fn parents_and_children_are_found() {
        let found = imports(&[
            ("lib.rs", ""),
            ("a/mod.rs", "mod inner;\nfn f() { inner::run() }\n"),
            ("a/inner.rs", "use super::Thing;\n"),
        ]);
        assert_eq!(found["a"], BTreeSet::from(["a::inner".to_owned()]));
        assert_eq!(found["a::inner"], BTreeSet::from(["a".to_owned()]));
    }
}
