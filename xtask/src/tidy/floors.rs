//! The crate layers: which crate may use which, checked against `cargo metadata`.
//!
//! A crate uses only crates of lower floors, and only those that its row names. Knows the table, nothing of what the
//! crates contain.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::Finding;

/// One crate's place in the house.
struct Room {
    name: &'static str,
    floor: u8,
    /// The crates that it may use.
    uses: &'static [&'static str],
    /// Crates that its tests may use besides, upwards too.
    tests_use: &'static [&'static str],
}

const fn room(
    name: &'static str,
    floor: u8,
    uses: &'static [&'static str],
    tests_use: &'static [&'static str],
) -> Room {
    Room { name, floor, uses, tests_use }
}

const PLAN: &[Room] = &[
    room("tensor", 0, &[], &[]),
    room("options", 0, &[], &[]),
    room("device", 0, &[], &[]),
    room("net", 0, &[], &[]),
    room("graph", 1, &["tensor"], &[]),
    room("program", 1, &["tensor", "net"], &[]),
    room("data", 1, &["tensor", "options"], &[]),
    room("ops", 2, &["tensor", "device", "graph", "program"], &[]),
    room("compiler", 3, &["tensor", "graph", "program", "ops"], &["cpu"]),
    room("cpu", 3, &["tensor", "net", "program", "ops"], &[]),
    room("gpu", 3, &["tensor", "options", "net", "device", "program"], &[]),
    room(
        "train",
        4,
        &["tensor", "options", "net", "graph", "program", "data", "ops", "compiler", "cpu", "gpu"],
        &["standin"],
    ),
    room("standin", 4, &["tensor", "program", "cpu", "gpu"], &["graph", "ops", "compiler"]),
    room("py", 5, &["tensor", "options", "graph", "program", "data", "ops", "compiler", "cpu", "gpu", "train"], &[]),
    room("xtask", 6, &["tensor", "options", "device", "graph", "program", "ops", "compiler", "gpu", "train"], &[]),
];

/// Crates from outside that only the named crates may use: what is heavy to build, or what opens a door to the machine.
const DOORS: &[(&str, &[&str])] = &[
    ("arrow", &["data"]),
    ("parquet", &["data"]),
    ("object_store", &["data"]),
    ("tokenizers", &["data"]),
    ("minijinja", &["data"]),
    ("granit-parser", &["options"]),
    ("libloading", &["gpu"]),
    ("pyo3", &["py"]),
    ("numpy", &["py"]),
];

/// Returns the output of `cargo metadata --no-deps` for the repository at `root`.
///
/// # Errors
/// cargo cannot be run or fails.
pub fn metadata(root: &Path) -> Result<Value, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let reported = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root)
        .output()
        .map_err(|error| format!("cargo metadata: {error}"))?;
    if !reported.status.success() {
        return Err(format!("cargo metadata: {}", String::from_utf8_lossy(&reported.stderr).trim()));
    }
    serde_json::from_slice(&reported.stdout).map_err(|error| format!("cargo metadata gave no JSON: {error}"))
}

fn texts<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

/// Holds every package against the plan.
pub fn check(metadata: &Value) -> Vec<Finding> {
    let packages = metadata["packages"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut found = Vec::new();
    for package in packages {
        let name = texts(package, "name");
        let Some(room) = PLAN.iter().find(|room| room.name == name) else {
            found.push(Finding::hard(
                name,
                "this crate has no floor: give it a row in xtask/src/tidy/floors.rs and in ARCHITECTURE.md",
            ));
            continue;
        };
        for dependency in package["dependencies"].as_array().map(Vec::as_slice).unwrap_or_default() {
            let (used, kind) = (texts(dependency, "name"), texts(dependency, "kind"));
            found.extend(check_use(room, used, kind == "dev"));
        }
    }
    found
}

/// Holds the table of ARCHITECTURE.md against the plan.
pub fn check_page(page: &str) -> Vec<Finding> {
    let row = |room: &Room| {
        let uses = if room.uses.is_empty() { "–".to_owned() } else { room.uses.join(", ") };
        format!("| {} | `{}` | {uses} |", room.floor, room.name)
    };
    let missing = PLAN.iter().map(row).filter(|row| !page.lines().any(|line| line.starts_with(row)));
    missing.map(|row| Finding::hard("ARCHITECTURE.md", format!("has no row `{row}`"))).collect()
}

fn check_use(room: &Room, used: &str, in_tests: bool) -> Option<Finding> {
    if let Some((_, holders)) = DOORS.iter().find(|(door, _)| *door == used) {
        let allowed = in_tests || holders.contains(&room.name);
        return (!allowed).then(|| Finding::hard(room.name, format!("uses `{used}`, which only {holders:?} may use")));
    }
    let target = PLAN.iter().find(|other| other.name == used)?;
    if room.uses.contains(&used) || (in_tests && room.tests_use.contains(&used)) {
        return None;
    }
    Some(Finding::hard(
        room.name,
        format!("(floor {}) may not use `{used}` (floor {}); it may use {:?}", room.floor, target.floor, room.uses),
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn package(name: &str, uses: &[(&str, Option<&str>)]) -> Value {
        let dependencies: Vec<Value> = uses.iter().map(|(name, kind)| json!({"name": name, "kind": kind})).collect();
        json!({"name": name, "dependencies": dependencies})
    }

    fn messages(packages: &[Value]) -> Vec<String> {
        check(&json!({ "packages": packages })).iter().map(Finding::to_string).collect()
    }

    #[test]
    fn no_row_of_the_plan_points_up_or_sideways() {
        for room in PLAN {
            for used in room.uses {
                let target = PLAN.iter().find(|other| other.name == *used).unwrap_or_else(|| panic!("no room {used}"));
                assert!(target.floor < room.floor, "{} uses {used}, which is not below it", room.name);
            }
        }
    }

    #[test]
    fn a_use_upwards_sideways_or_of_a_room_not_named_is_found() {
        assert!(messages(&[package("graph", &[("tensor", None), ("serde", None)])]).is_empty());
        for (name, used) in [("tensor", "graph"), ("gpu", "cpu"), ("gpu", "ops"), ("compiler", "data")] {
            let found = messages(&[package(name, &[(used, None)])]);
            assert_eq!(found.len(), 1, "{name} -> {used}");
            assert!(found[0].contains(&format!("may not use `{used}`")), "{found:?}");
        }
    }

    #[test]
    fn tests_may_look_up_only_where_it_is_stated() {
        assert!(messages(&[package("compiler", &[("cpu", Some("dev"))])]).is_empty());
        assert_eq!(messages(&[package("ops", &[("cpu", Some("dev"))])]).len(), 1);
    }

    #[test]
    fn the_page_has_a_row_of_each_crate() {
        let page = include_str!("../../../ARCHITECTURE.md");
        assert!(check_page(page).is_empty(), "{:?}", check_page(page));
        let wrong = page.replace("| 1 | `graph` | tensor |", "| 1 | `graph` | tensor, options |");
        assert_eq!(check_page(&wrong).len(), 1);
    }

    #[test]
    fn unknown_crates_and_guarded_doors_are_found() {
        assert!(messages(&[package("attic", &[])])[0].contains("no floor"));
        assert!(messages(&[package("train", &[("tokenizers", None)])])[0].contains("only [\"data\"]"));
    }
}
