//! Folders written by `save_to_disk` of the `datasets` library: which files belong to a split.
//!
//! Such a folder holds `state.json` and shards `data-00000-of-00002.arrow`; with several splits it holds
//! `dataset_dict.json` and a folder for each. Knows names only.

use regex::Regex;

use super::choice::{Chosen, NoChoice, TRAIN, listed, no};

/// The files of a split, or `None` if the names are not those of such a folder. A single set is the split `train`.
/// Files that the library keeps besides the shards, such as `cache-….arrow`, are left out.
pub(super) fn choose(names: &[String], split: &str) -> Option<Result<Chosen, NoChoice>> {
    let is_single = names.iter().any(|name| name == "state.json");
    if !is_single && !names.iter().any(|name| name == "dataset_dict.json") {
        return None;
    }
    let shard = Regex::new(r"^(?:([^/]+)/)?data-\d{5}-of-\d{5}\.arrow$").expect("a valid pattern");
    let split_of = |name: &String| -> Option<String> {
        let found = shard.captures(name)?;
        let folder = found.get(1).map(|folder| folder.as_str());
        (folder.is_none() == is_single).then(|| folder.unwrap_or(TRAIN).to_owned())
    };
    let mut chosen: Vec<String> =
        names.iter().filter(|name| split_of(name).as_deref() == Some(split)).cloned().collect();
    chosen.sort();
    if chosen.is_empty() {
        let splits: Vec<String> = names.iter().filter_map(split_of).collect();
        let hint = format!("splits here: {}", listed(splits.iter().map(String::as_str)));
        return Some(Err(no(format!("there is no split `{split}`"), hint)));
    }
    Some(Ok(Chosen { names: chosen, left_out: Vec::new() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_of_a_split_and_nothing_else() {
        let names = |list: &[&str]| -> Vec<String> { list.iter().map(|name| (*name).to_owned()).collect() };
        let one = names(&["data-00001-of-00002.arrow", "data-00000-of-00002.arrow", "cache-3f.arrow", "state.json"]);
        let chosen = choose(&one, "train").unwrap().unwrap().names;
        assert_eq!(chosen, ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]);
        assert_eq!(choose(&one, "test").unwrap().unwrap_err().hint, "splits here: train");
        let two = ["dataset_dict.json", "train/state.json", "train/data-00000-of-00001.arrow"];
        let two = names(&[&two[..], &["train/cache-1.arrow", "test_sft/data-00000-of-00001.arrow"]].concat());
        assert_eq!(choose(&two, "test_sft").unwrap().unwrap().names, ["test_sft/data-00000-of-00001.arrow"]);
        assert_eq!(choose(&two, "test").unwrap().unwrap_err().hint, "splits here: test_sft, train");
        assert!(choose(&names(&["data-00000-of-00001.arrow"]), "train").is_none());
    }
}
