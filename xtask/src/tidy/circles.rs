//! Files that import each other in a circle, and folders of `train` that import from a later one.
//!
//! The number of files in circles only falls.

use std::collections::{BTreeSet, HashSet};

use super::imports::{Imports, of_crate};
use super::{File, Finding};

const PLACE: &str = "xtask/src/tidy/circles.rs";

/// Folders and files of `train` from the bottom up: each imports from itself and from those before it.
const FLOORS: [&str; 13] = [
    "words",
    "error",
    "files",
    "config",
    "nodes",
    "model",
    "input",
    "engine",
    "inference",
    "plan",
    "artifacts",
    "trainer",
    "run",
];

/// Crates with the largest number of their files that are in a circle.
const CIRCLES: &[(&str, usize)] = &[
    ("compiler", 4),
    ("cpu", 0),
    ("data", 26),
    ("device", 0),
    ("gpu", 25),
    ("graph", 0),
    ("net", 0),
    ("ops", 163),
    ("options", 4),
    ("program", 2),
    ("py", 4),
    ("standin", 5),
    ("tensor", 5),
    ("train", 5),
];

/// Counts the circles of all crates, and checks the floors of `train`.
pub fn check(files: &[File], tests: &HashSet<String>) -> Vec<Finding> {
    let crates: BTreeSet<&str> =
        files.iter().filter_map(|file| file.path.strip_prefix("crates/")?.split('/').next()).collect();
    let unknown = crates.into_iter().filter(|name| CIRCLES.iter().all(|(known, _)| known != name));
    let mut found: Vec<Finding> =
        unknown.map(|name| Finding::hard(PLACE, format!("`{name}` has no row in `CIRCLES`"))).collect();
    for (name, most) in CIRCLES {
        let imports = of_crate(files, &format!("crates/{name}/src/"), tests);
        let circles = circles(&imports);
        let count: usize = circles.iter().map(Vec::len).sum();
        if count > *most {
            let list = |of: &Vec<String>| of.iter().map(|of| shown(of)).collect::<Vec<_>>().join(", ");
            let notes = circles.iter().map(|of| Finding::soft(*name, format!("in a circle of imports: {}", list(of))));
            found.extend(notes);
            let text = format!("{count} files of `{name}` import each other in circles, expected at most {most}");
            found.push(Finding::hard(PLACE, text));
        } else if count < *most {
            found.push(Finding::soft(PLACE, format!("{count} files of `{name}` are in circles: write it down")));
        }
        if *name == "train" {
            found.extend(upward(&imports));
        }
    }
    found
}

fn shown(module: &str) -> &str {
    if module.is_empty() { "lib" } else { module }
}

/// Imports from a floor above.
fn upward(imports: &Imports) -> Vec<Finding> {
    let floor = |module: &str| {
        let first = module.split("::").next().unwrap_or_default();
        FLOORS.iter().position(|name| *name == first)
    };
    let mut found = Vec::new();
    for (module, used) in imports.iter().filter(|(module, _)| !module.is_empty()) {
        let place = format!("train: {module}");
        let Some(own) = floor(module) else {
            found.push(Finding::hard(place, format!("has no floor: give it one in {PLACE}")));
            continue;
        };
        let above = used.iter().filter(|used| floor(used).is_none_or(|of| of > own));
        found.extend(
            above.map(|used| Finding::hard(place.clone(), format!("imports from `{}`, a floor above", shown(used)))),
        );
    }
    found
}

/// The sets of modules that reach each other, each with more than one (Tarjan).
fn circles(imports: &Imports) -> Vec<Vec<String>> {
    let mut search = Search { imports, numbers: Default::default(), open: Vec::new(), found: Vec::new() };
    for module in imports.keys() {
        if !search.numbers.contains_key(module.as_str()) {
            search.visit(module);
        }
    }
    search.found
}

struct Search<'a> {
    imports: &'a Imports,
    numbers: std::collections::BTreeMap<&'a str, usize>,
    open: Vec<&'a str>,
    found: Vec<Vec<String>>,
}

impl<'a> Search<'a> {
    /// Returns the lowest number that a module reaches among those that are open.
    fn visit(&mut self, module: &'a str) -> usize {
        let number = self.numbers.len();
        self.numbers.insert(module, number);
        self.open.push(module);
        let mut lowest = number;
        for used in &self.imports[module] {
            match self.numbers.get(used.as_str()) {
                None => lowest = lowest.min(self.visit(used)),
                Some(known) if self.open.contains(&used.as_str()) => lowest = lowest.min(*known),
                Some(_) => {}
            }
        }
        if lowest == number {
            let first = self.open.iter().position(|open| *open == module).expect("it was opened");
            let circle = self.open.split_off(first);
            if circle.len() > 1 {
                self.found.push(circle.into_iter().map(str::to_owned).collect());
            }
        }
        lowest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn imports(of: &[(&str, &[&str])]) -> Imports {
        of.iter().map(|(name, used)| ((*name).to_owned(), used.iter().map(|of| (*of).to_owned()).collect())).collect()
    }

    #[test]
    fn circles_are_found_whole() {
        let found = circles(&imports(&[("a", &["b"]), ("b", &["c"]), ("c", &["a", "d"]), ("d", &["e"]), ("e", &[])]));
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].iter().map(String::as_str).collect::<BTreeSet<_>>(), BTreeSet::from(["a", "b", "c"]));
    }

    #[test]
    fn imports_from_a_floor_above_are_errors() {
        let found =
            upward(&imports(&[("files::log", &["config::tables", "error"]), ("run", &["files::log"]), ("new", &[])]));
        assert_eq!(found.len(), 2);
        assert!(found[0].message.contains("`config::tables`, a floor above"), "{}", found[0]);
        assert!(found[1].message.contains("has no floor"), "{}", found[1]);
    }
}
