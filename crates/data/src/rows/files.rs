//! The files of a dataset: one file, a pattern, or the files of a folder that belong to a subset and a split.
//!
//! Knows names, and the `configs` in a dataset's README; never opens a data file. The choice among names is a pure
//! function, so files of a remote dataset are chosen before they are downloaded.

pub use super::choice::{Chosen, NoChoice, TRAIN};
use super::choice::{listed, no};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use options::{Node, Reader, Tree};
use regex::Regex;
use serde_json::Value;

use super::format::{DATA, format_of};
use super::saved;
use crate::error::{DataError, shown};

/// Words by which a name gives its split.
const SPLITS: [(&str, &[&str]); 3] = [
    (TRAIN, &["train", "training"]),
    ("validation", &["validation", "valid", "dev", "val"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];

/// Files that are next to data and are none.
const NOT_DATA: [&str; 8] = [
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "package.json",
];

/// Extensions of files that hold data and are not read.
const UNREAD: [&str; 18] = [
    "xlsx", "xls", "ods", "pkl", "pickle", "feather", "orc", "avro", "msgpack", "npy", "npz", "h5", "hdf5", "tar",
    "zip", "sqlite", "bz2", "xz",
];

/// Chooses the files of a subset and a split among the names of a folder (relative, with `/`). `card`: the text of its
/// README.md.
///
/// Errors: there is no such subset or split, or no data file at all.
pub fn choose(names: &[String], card: Option<&str>, subset: Option<&str>, split: &str) -> Result<Chosen, NoChoice> {
    let visible = |no: NoChoice| NoChoice { problem: shown(no.problem), hint: shown(no.hint) };
    choose_by(names, card, subset, split).map_err(visible)
}

fn choose_by(names: &[String], card: Option<&str>, subset: Option<&str>, split: &str) -> Result<Chosen, NoChoice> {
    if subset.is_none()
        && let Some(chosen) = saved::choose(names, split)
    {
        return chosen;
    }
    let mut names: Vec<String> = names.iter().filter(|name| is_data(name)).cloned().collect();
    names.sort();
    if names.is_empty() {
        return Err(no("there are no data files", known()));
    }
    if let Some(configs) = card.and_then(configs) {
        return by_card(&names, &configs, subset, split);
    }
    if let Some(subset) = subset.filter(|subset| *subset != "default") {
        let folders = [format!("{subset}/"), format!("data/{subset}/")];
        let inside = |name: &String| folders.iter().any(|folder| name.starts_with(folder.as_str()));
        let all = listed(names.iter().filter_map(|name| name.split_once('/').map(|(folder, _)| folder)));
        names.retain(inside);
        if names.is_empty() {
            return Err(no(format!("there is no subset `{subset}`"), format!("folders here: {all}")));
        }
    }
    by_name(&names, split)
}

/// True for the name of a file that may belong to a dataset.
fn is_data(name: &str) -> bool {
    let hidden = name.split('/').any(|part| part.starts_with(['.', '_']));
    let own = name.rsplit('/').next().unwrap_or(name);
    !hidden && !NOT_DATA.contains(&own) && format_of(Path::new(name)).is_some_and(|(format, _)| DATA.contains(&format))
}

/// True for a file that holds data by its name, in a format that is not read.
fn is_unread(name: &str) -> bool {
    let extension = Path::new(name).extension().and_then(|of| of.to_str()).unwrap_or_default();
    UNREAD.contains(&extension.to_ascii_lowercase().as_str())
}

fn known() -> String {
    format!("known are .{}, each also as .gz and .zst", DATA.join(", ."))
}

/// Bytes of a README that are read, and of a pattern: there are no longer ones that someone meant.
const MOST_OF_CARD: u64 = 16 << 20;
const MOST_OF_PATTERN: usize = 4096;

/// The entries of `configs` in the YAML head of a README.
fn configs(card: &str) -> Option<Vec<Value>> {
    let head = card.trim_start_matches('\u{feff}').strip_prefix("---")?;
    let (head, _) = head.split_once("\n---")?;
    let root: Node = Reader::new(&[]).read_yaml("README.md", head)?;
    let Tree::Map(entries) = &root.tree else { return None };
    let (_, node) = entries.iter().find(|(key, _)| key.name == "configs")?;
    let list = node.to_json();
    let usable = |config: &Value| config.get("data_files").is_some();
    let configs: Vec<Value> = list.as_array()?.iter().filter(|config| usable(config)).cloned().collect();
    (!configs.is_empty()).then_some(configs)
}

fn by_card(names: &[String], configs: &[Value], subset: Option<&str>, split: &str) -> Result<Chosen, NoChoice> {
    let name_of = |config: &Value| config["config_name"].as_str().unwrap_or("default").to_owned();
    let all: Vec<String> = configs.iter().map(name_of).collect();
    let hint = || format!("subsets here: {}", all.join(", "));
    let config = match subset {
        Some(subset) => configs
            .iter()
            .find(|config| name_of(config) == subset)
            .ok_or_else(|| no(format!("there is no subset `{subset}`"), hint()))?,
        None => configs
            .iter()
            .find(|config| config["default"] == true || name_of(config) == "default")
            .or(if configs.len() == 1 { configs.first() } else { None })
            .ok_or_else(|| no("the set has several subsets", format!("set `subset`; {}", hint())))?,
    };
    let patterns = |value: &Value| -> Vec<String> {
        let list = value.as_array().cloned().unwrap_or_else(|| vec![value.clone()]);
        list.iter().filter_map(|pattern| pattern.as_str().map(str::to_owned)).collect()
    };
    let files = &config["data_files"];
    let entries: Vec<(String, Vec<String>)> = match files.as_array() {
        Some(list) if list.iter().all(Value::is_object) => list
            .iter()
            .map(|entry| (entry["split"].as_str().unwrap_or(TRAIN).to_owned(), patterns(&entry["path"])))
            .collect(),
        _ => vec![(TRAIN.to_owned(), patterns(files))],
    };
    let splits = listed(entries.iter().map(|(split, _)| split.as_str()));
    let Some((_, patterns)) = entries.iter().find(|(name, _)| name == split) else {
        return Err(no(format!("there is no split `{split}`"), format!("splits here: {splits}")));
    };
    let prefix = config["data_dir"].as_str().map_or(String::new(), |folder| format!("{folder}/"));
    let tests: Vec<Regex> = patterns.iter().map(|pattern| glob(&format!("{prefix}{pattern}"))).collect();
    let chosen: Vec<String> = names.iter().filter(|name| tests.iter().any(|t| t.is_match(name))).cloned().collect();
    if chosen.is_empty() {
        return Err(no(format!("no data file matches {}", patterns.join(", ")), known()));
    }
    Ok(Chosen { names: chosen, left_out: Vec::new() })
}

/// Chooses files of a split by the words in their names.
fn by_name(names: &[String], split: &str) -> Result<Chosen, NoChoice> {
    let of: Vec<Option<String>> = names.iter().map(|name| split_of(name)).collect();
    let with = |wanted: Option<&str>| -> Vec<String> {
        names.iter().zip(&of).filter(|(_, of)| of.as_deref() == wanted).map(|(name, _)| name.clone()).collect()
    };
    let (chosen, others) = (with(Some(split)), with(None));
    if !chosen.is_empty() {
        let left_out = if split == TRAIN { others } else { Vec::new() };
        return Ok(Chosen { names: chosen, left_out });
    }
    if split == TRAIN && !others.is_empty() {
        return Ok(Chosen { names: others, left_out: Vec::new() });
    }
    let mut splits: Vec<&str> = of.iter().flatten().map(String::as_str).collect();
    splits.extend((!others.is_empty()).then_some(TRAIN));
    Err(no(format!("there is no split `{split}`"), format!("splits here: {}", listed(splits.into_iter()))))
}

/// The split that a name gives: `data/NAME-00000-of-00003.parquet`, or a known word between signs.
fn split_of(name: &str) -> Option<String> {
    let lower = name.to_ascii_lowercase();
    let (stem, _) = lower.rsplit('/').next()?.split_once('.')?;
    let shard = Regex::new(r"^(.+?)-\d{5}-of-\d{5}").expect("a valid pattern");
    if let Some(found) = shard.captures(stem)
        && name.starts_with("data/")
        && &found[1] != "data"
    {
        return Some(found[1].to_owned());
    }
    let is_sign = |c: char| !c.is_ascii_alphabetic();
    let words: Vec<&str> = lower.split(is_sign).collect();
    // The last word that is one: `test/train.jsonl` of a set called "test" is for training.
    words
        .iter()
        .rev()
        .find_map(|word| SPLITS.iter().find(|(_, known)| known.contains(word)).map(|(split, _)| (*split).to_owned()))
}

/// A pattern of `*` (inside a name), `**` (any depth), `?`, `[…]` and `{a,b}` as an expression over a whole path.
pub fn glob(pattern: &str) -> Regex {
    if pattern.len() > MOST_OF_PATTERN {
        return Regex::new("[^\\s\\S]").expect("a pattern that matches nothing is valid");
    }
    let mut text = String::from("^");
    let mut rest = pattern;
    let mut depth = 0;
    while let Some(c) = rest.chars().next() {
        let (piece, taken) = match c {
            '*' if rest.starts_with("**/") => ("(?:.*/)?".to_owned(), 3),
            '*' if rest.starts_with("**") => (".*".to_owned(), 2),
            '*' => ("[^/]*".to_owned(), 1),
            '?' => ("[^/]".to_owned(), 1),
            '[' if rest[1..].contains(']') => {
                let end = 1 + rest[1..].find(']').expect("just seen");
                (character_class(&rest[1..end]), end + 1)
            }
            '{' if rest.contains('}') => {
                depth += 1;
                ("(?:".to_owned(), 1)
            }
            '}' if depth > 0 => {
                depth -= 1;
                (")".to_owned(), 1)
            }
            ',' if depth > 0 => ("|".to_owned(), 1),
            c => (regex::escape(&c.to_string()), c.len_utf8()),
        };
        text.push_str(&piece);
        rest = &rest[taken..];
    }
    text.push('$');
    // What is no expression is a name like any other.
    Regex::new(&text)
        .unwrap_or_else(|_| Regex::new(&format!("^{}$", regex::escape(pattern))).expect("an escaped text is valid"))
}

/// The character class of a pattern, from the text between its brackets, as a regular expression.
fn character_class(inside: &str) -> String {
    let (not, inside) = inside.strip_prefix('!').map_or(("", inside), |rest| ("^", rest));
    let escaped: String =
        inside.chars().flat_map(|c| if r"\[&~^".contains(c) { vec!['\\', c] } else { vec![c] }).collect();
    format!("[{not}{escaped}]")
}

/// True if a path is a pattern rather than the name of a file.
pub fn is_pattern(path: &Path) -> bool {
    path.to_string_lossy().contains(['*', '?', '[', '{']) && !path.exists()
}

/// The local files of a dataset, in the order in which they are read, and those of its folder that are left out.
///
/// Errors: there is no such file, folder, subset or split, or a pattern that matches nothing.
pub fn find(path: &Path, subset: Option<&str>, split: &str) -> Result<(Vec<PathBuf>, Vec<PathBuf>), DataError> {
    if path.is_dir() {
        let names = names_below(path)?;
        let card = File::open(path.join("README.md")).ok().and_then(|file| {
            let mut text = String::new();
            file.take(MOST_OF_CARD).read_to_string(&mut text).ok().map(|_| text)
        });
        let chosen = choose(&names, card.as_deref(), subset, split)
            .map_err(|no| DataError::invalid(path.display(), no.problem).hint(no.hint))?;
        let join = |names: Vec<String>| names.iter().map(|name| path.join(name)).collect();
        let mut unread: Vec<String> = names.into_iter().filter(|name| is_unread(name)).collect();
        unread.sort();
        return Ok((join(chosen.names), join([chosen.left_out, unread].concat())));
    }
    let files = if is_pattern(path) { matching(path)? } else { vec![path.to_owned()] };
    if let Some(file) = files.first().filter(|file| !file.exists()) {
        return Err(DataError::invalid(file.display(), "there is no such file or directory")
            .hint("a set on the hub is written `owner/name`"));
    }
    if let Some(subset) = subset {
        return Err(DataError::invalid(path.display(), format!("a file has no subset `{subset}`"))
            .hint("remove `subset`, or give the folder"));
    }
    if split != TRAIN {
        return Err(DataError::invalid(path.display(), format!("a file has no split `{split}`"))
            .hint("remove `split`, or give the folder"));
    }
    Ok((files, Vec::new()))
}

/// Every file below a folder, relative, with `/`.
fn names_below(folder: &Path) -> Result<Vec<String>, DataError> {
    let mut names = Vec::new();
    let mut open = vec![String::new()];
    while let Some(at) = open.pop() {
        let place = folder.join(&at);
        for entry in std::fs::read_dir(&place).map_err(|e| DataError::io("list", &place, e))? {
            let entry = entry.map_err(|e| DataError::io("list", &place, e))?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            if name.starts_with('.') {
                continue;
            }
            let relative = if at.is_empty() { name } else { format!("{at}/{name}") };
            // A link to a folder is not followed: it may lead back.
            match entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                true => open.push(relative),
                false => names.push(relative),
            }
        }
    }
    Ok(names)
}

fn matching(pattern: &Path) -> Result<Vec<PathBuf>, DataError> {
    let is_plain = |part: &std::path::Component<'_>| !part.as_os_str().to_string_lossy().contains(['*', '?', '[', '{']);
    let base: PathBuf = pattern.components().take_while(is_plain).collect();
    let folder = if base.as_os_str().is_empty() { PathBuf::from(".") } else { base.clone() };
    let nothing = || DataError::invalid(pattern.display(), "no file matches this pattern").hint(known());
    if !folder.is_dir() {
        return Err(nothing());
    }
    let below = pattern.strip_prefix(&base).expect("the base is the pattern's own beginning");
    let test = glob(&below.to_string_lossy());
    let mut names: Vec<String> = names_below(&folder)?.into_iter().filter(|name| test.is_match(name)).collect();
    names.sort();
    if names.is_empty() {
        return Err(nothing());
    }
    Ok(names.iter().map(|name| base.join(name)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    fn chosen(list: &[&str], card: Option<&str>, subset: Option<&str>, split: &str) -> Vec<String> {
        choose(&names(list), card, subset, split).unwrap_or_else(|no| panic!("{no:?}")).names
    }

    #[test]
    fn names_tell_their_split() {
        let shards = ["data/train_sft-00000-of-00002-ab.parquet", "data/test_sft-00000-of-00001.parquet", "README.md"];
        assert_eq!(chosen(&shards, None, None, "train_sft"), [shards[0]]);
        let no = choose(&names(&shards), None, None, "train").unwrap_err();
        assert_eq!(no.hint, "splits here: test_sft, train_sft");
        let words = ["my-train.jsonl", "my_dev.jsonl", "test/a.jsonl", "dataset_infos.json", ".hidden/train.json"];
        assert_eq!(chosen(&words, None, None, "train"), [words[0]]);
        assert_eq!(chosen(&words, None, None, "validation"), [words[1]]);
        assert_eq!(chosen(&words, None, None, "test"), [words[2]]);
        let mixed = choose(&names(&["train.csv", "more.csv"]), None, None, "train").unwrap();
        assert_eq!((mixed.names, mixed.left_out), (names(&["train.csv"]), names(&["more.csv"])));
        assert_eq!(chosen(&["b.json", "a.jsonl.gz"], None, None, "train"), ["a.jsonl.gz", "b.json"]);
        assert!(choose(&names(&["a.bin", "README.md"]), None, None, "train").unwrap_err().problem.contains("no data"));
    }

    #[test]
    fn folders_are_subsets() {
        let list = ["main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet", "socratic/train.jsonl"];
        assert_eq!(chosen(&list, None, Some("main"), "test"), [list[1]]);
        assert_eq!(choose(&names(&list), None, Some("x"), "test").unwrap_err().hint, "folders here: main, socratic");
    }

    #[test]
    fn the_card_decides_where_it_lists_configs() {
        let card = "---\nlicense: mit\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/tr*\n\
                    - config_name: other\n  data_files: \"other/*.json\"\n---\n# A set\n";
        let list = ["main/tr-1.parquet", "main/x.parquet", "other/a.json", "other/sub/b.json"];
        assert_eq!(chosen(&list, Some(card), Some("main"), "train"), [list[0]]);
        assert_eq!(chosen(&list, Some(card), Some("other"), "train"), [list[2]]);
        let several = choose(&names(&list), Some(card), None, "train").unwrap_err();
        assert!(several.hint.contains("set `subset`; subsets here: main, other"), "{several:?}");
        assert_eq!(choose(&names(&list), Some(card), Some("main"), "x").unwrap_err().hint, "splits here: train");
        assert_eq!(chosen(&list, Some("# no head"), Some("main"), "train").len(), 2);
    }

    #[test]
    fn a_card_that_somebody_spoiled_is_none() {
        let list = ["main/tr-1.parquet", "main/x.parquet"];
        let head = |patterns: &str| format!("---\nconfigs:\n- config_name: main\n  data_files: {patterns}\n---\n");
        let long = head(&"\u{1f999}".repeat(200_000));
        assert!(choose(&names(&list), Some(&long), None, "train").unwrap_err().problem.starts_with("no data file"));
        for pattern in
            ["{".repeat(4000), "[".repeat(4000), "{,".repeat(2000) + &"}".repeat(9), "\u{10ffff}".repeat(1000)]
        {
            assert!(!glob(&pattern).is_match("main/x.parquet"), "{pattern}");
        }
        let laughs = |i: usize| format!("a{i}: &a{i} [{}]\n", vec![format!("*a{}", i.max(1) - 1); 10].join(", "));
        let bomb = format!("---\na0: &a0 ha\n{}---\n", (1..12).map(laughs).collect::<String>());
        assert_eq!(chosen(&list, Some(&bomb), None, "train").len(), 2);
    }

    #[test]
    fn patterns_are_those_of_shells() {
        for (pattern, name, matches) in [
            ("*.json", "a.json", true),
            ("*.json", "a/b.json", false),
            ("**/*.json", "a/b.json", true),
            ("**/*.json", "b.json", true),
            ("a?[0-9].{json,csv}", "ab1.csv", true),
            ("a?[!0-9].csv", "ab1.csv", false),
            ("a[.csv", "a[.csv", true),
            ("a+(b).csv", "a+(b).csv", true),
        ] {
            assert_eq!(glob(pattern).is_match(name), matches, "{pattern} {name}");
        }
    }
}
