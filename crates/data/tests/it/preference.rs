//! Preferences to ids: every recorded row of `shared/golden/preference`, the forms of other tools, and what the data check
//! says of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use data::{
    AutoColumns, Cut, DatasetKind, DatasetSpec, DialogueOptions, Document, IGNORE, PreferenceColumns,
    PreferenceOptions, PrepareOptions, Purpose, Split, Tokenizer, Truncation, UnpairedColumns, prepare,
};
use serde_json::{Value, json};

use crate::shared::{assets, tokenizer_folder};

fn options(preference: PreferenceOptions, max_length: usize, vocab_size: usize) -> PrepareOptions {
    let dialogue = DialogueOptions::default();
    PrepareOptions { max_length, truncation: Truncation::Delete, vocab_size, workers: 1, dialogue, preference }
}

fn for_purpose(purpose: Purpose, split: Split) -> PreferenceOptions {
    PreferenceOptions { purpose, split, ..PreferenceOptions::default() }
}

fn file(folder: &Path, rows: &[Value]) -> PathBuf {
    let path = folder.join("rows.jsonl");
    let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
    fs::write(&path, lines.join("\n")).unwrap();
    path
}

fn auto() -> DatasetKind {
    DatasetKind::Auto(Box::new(AutoColumns::default()))
}

/// A copy of a tokenizer folder that cuts texts as the recorded ids were cut: `GPT2Tokenizer` of transformers 5 takes nothing
/// but vocabulary and merges out of `tokenizer.json`, and so does not separate digits.
fn as_recorded(source: &Path, scratch: &Path) -> PathBuf {
    let unpacked = tokenizer_folder(source, scratch);
    let folder = scratch.join("recorded");
    fs::create_dir(&folder).unwrap();
    for entry in fs::read_dir(&unpacked).unwrap().flatten().filter(|entry| entry.path().is_file()) {
        fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
    let settings = fs::read_to_string(folder.join("tokenizer_config.json")).unwrap();
    if settings.contains("GPT2Tokenizer") {
        let path = folder.join("tokenizer.json");
        let mut tokenizer: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        tokenizer["pre_tokenizer"] = tokenizer["pre_tokenizer"]["pretokenizers"][1].clone();
        fs::write(&path, tokenizer.to_string()).unwrap();
    }
    folder
}

/// One tokenizer with its recorded rows.
struct Recorded {
    tokenizer: Arc<Tokenizer>,
    rows: Vec<(String, Value)>,
    place: tempfile::TempDir,
}

impl Recorded {
    fn open(name: &str) -> Recorded {
        let place = tempfile::tempdir().unwrap();
        let folder = as_recorded(&assets().join("tokenizers").join(name), place.path());
        let path = assets().join(format!("../golden/preference/datasets_{name}.json"));
        let recorded: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        let rows = recorded["rows"].as_object().unwrap().clone().into_iter().collect();
        Recorded { tokenizer: Arc::new(Tokenizer::from_folder(&folder).unwrap()), rows, place }
    }

    /// The documents of a row; an error's text where there are none.
    fn documents(
        &self,
        row: &Value,
        kind: DatasetKind,
        preference: PreferenceOptions,
        limit: usize,
    ) -> Result<Vec<Document>, String> {
        let path = file(self.place.path(), std::slice::from_ref(row));
        let options = options(preference, limit, 1 << 20);
        let prepared = prepare(&[DatasetSpec::new(path, kind)], Some(&self.tokenizer), &options);
        let corpus = prepared.map_err(|error| error.to_string())?.corpus;
        Ok((0..corpus.len()).map(|i| corpus.document(i).unwrap()).collect())
    }
}

fn ids(value: &Value) -> Vec<i32> {
    value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap() as i32).collect()
}

/// Ids, and how many of them at the end are trained; all others are not.
fn split(document: &Document) -> (Vec<i32>, usize) {
    let trained = document.labels.iter().filter(|label| **label != IGNORE).count();
    let at = document.len() - trained;
    assert!(document.labels[..at].iter().all(|label| *label == IGNORE));
    assert_eq!(document.labels[at..], document.ids[at..]);
    (document.ids.clone(), trained)
}

fn recorded(prompt: &Value, answer: &Value) -> (Vec<i32>, usize) {
    ([ids(prompt), ids(answer)].concat(), ids(answer).len())
}

fn pair(document: &Document) -> [Document; 2] {
    let pair = data::Preference::of(document.clone()).expect("a pair");
    [pair.chosen, pair.rejected]
}

fn paired(split: Split) -> PreferenceOptions {
    for_purpose(Purpose::Pairs, split)
}

/// Whether a row is of the unpaired form.
fn is_unpaired(row: &Value) -> bool {
    row.get("label").is_some()
}

fn kind_of(row: &Value) -> DatasetKind {
    match is_unpaired(row) {
        true => DatasetKind::Unpaired(UnpairedColumns::default()),
        false => DatasetKind::Preference(PreferenceColumns::default()),
    }
}

fn check_row(of: &Recorded, name: &str, recorded_row: &Value) {
    let row = &recorded_row["row"];
    for kind in [kind_of(row), auto()] {
        if let Some(dpo) = recorded_row.get("dpo") {
            let found = of.documents(row, kind.clone(), paired(Split::CommonPrefix), 8192);
            match dpo.get("error") {
                Some(_) => assert!(found.is_err(), "{name}: TRL refuses it"),
                None => {
                    let found = pair(&found.unwrap_or_else(|error| panic!("{name}: {error}"))[0]);
                    let sides = ["chosen_ids", "rejected_ids"].map(|side| recorded(&dpo["prompt_ids"], &dpo[side]));
                    assert_eq!(found.each_ref().map(split), sides, "{name}, dpo");
                }
            }
        }
        let kto = for_purpose(Purpose::Answers, Split::CommonPrefix);
        let found = of.documents(row, kind.clone(), kto, 8192);
        match recorded_row["kto"].as_array() {
            None => assert!(found.is_err(), "{name}: TRL refuses it"),
            Some(answers) => {
                let found = found.unwrap_or_else(|error| panic!("{name}: {error}"));
                assert_eq!(found.len(), answers.len(), "{name}");
                for (document, answer) in found.into_iter().zip(answers) {
                    let unpaired = data::Unpaired::of(document).expect("an answer with a verdict");
                    let expected = recorded(&answer["prompt_ids"], &answer["completion_ids"]);
                    assert_eq!(split(&unpaired.document), expected, "{name}, kto");
                    assert_eq!(unpaired.prompt, ids(&answer["prompt_ids"]).len(), "{name}");
                    assert_eq!(json!(unpaired.desirable), answer["label"], "{name}");
                }
            }
        }
        if let Some(reward) = recorded_row.get("reward").filter(|reward| reward.get("error").is_none()) {
            let scores = for_purpose(Purpose::Scores, Split::CommonPrefix);
            let found = of.documents(row, kind.clone(), scores, 8192).unwrap();
            let found = data::Preference::of(found[0].clone()).unwrap();
            let sides = ["chosen_ids", "rejected_ids"].map(|side| ids(&reward[side]));
            assert_eq!([found.chosen.ids, found.rejected.ids], sides, "{name}, reward");
            assert_eq!(found.margin.map(f64::from), reward.get("margin").and_then(Value::as_f64), "{name}");
        }
    }
}

#[test]
#[ignore = "reads ../shared/assets"]
fn every_recorded_row_comes_to_its_ids_and_splits() {
    let mut count = 0;
    for name in ["qwen3", "smollm2"] {
        let of = Recorded::open(name);
        for (row_name, row) in &of.rows {
            check_row(&of, &format!("{name}, {row_name}"), row);
            count += 1;
        }
    }
    assert_eq!(count, 50);
}

#[test]
#[ignore = "reads ../shared/assets"]
fn every_recorded_row_is_cut_as_recorded() {
    let mut count = 0;
    for name in ["qwen3", "smollm2"] {
        let of = Recorded::open(name);
        for (row_name, row) in &of.rows {
            let limits = row.as_object().unwrap().iter().filter_map(|(key, expected)| {
                let (limit, mode) = key.strip_prefix("dpo_max_length_")?.split_once('_')?;
                Some((limit.parse::<usize>().unwrap(), mode.to_owned(), expected))
            });
            for (limit, mode, expected) in limits {
                let place = format!("{name}, {row_name}, {limit}, {mode}");
                let cut = if mode == "keep_start" { Cut::End } else { Cut::Beginning };
                let options = PreferenceOptions { cut, ..paired(Split::CommonPrefix) };
                let found = of.documents(&row["row"], kind_of(&row["row"]), options, limit);
                count += 1;
                if expected.get("dropped").is_some() {
                    assert!(found.unwrap_err().contains("the prompt alone has"), "{place}");
                    continue;
                }
                let found = pair(&found.unwrap_or_else(|error| panic!("{place}: {error}"))[0]);
                for (side, document) in ["chosen", "rejected"].into_iter().zip(&found) {
                    let tokens = expected[side]["completion_tokens"].as_u64().unwrap() as usize;
                    assert_eq!(split(document), (ids(&expected[side]["input_ids"]), tokens), "{place}, {side}");
                }
            }
        }
    }
    assert!(count > 100, "{count}");
}
