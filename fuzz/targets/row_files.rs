//! Files of rows, and the card that says which of them are a dataset.

use std::path::PathBuf;

use data::rows;
use data::rows::files::choose;

use super::{file, written};

/// Rows that are read of a file; more than any input of the fuzzer's size can honestly hold.
const MOST_ROWS: usize = 200_000;

/// The head of a dataset's `README.md`.
pub fn card(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    let names =
        ["README.md", "data/train-00000-of-00001.parquet", "main/tr-1.parquet", "other/a.json", "other/sub/b.json"];
    let names = names.map(str::to_owned);
    let asked = [(None, "train"), (Some("main"), "train"), (Some("other"), "test")];
    asked.into_iter().filter(|(subset, split)| choose(&names, Some(text), *subset, split).is_ok()).count() > 0
}

pub fn card_seeds() -> Vec<Vec<u8>> {
    let card = "---\nlicense: mit\nconfigs:\n- config_name: main\n  default: true\n  data_dir: main\n  data_files:\n\
                \x20 - split: train\n    path: tr*\n  - split: test\n    path: ['**/x[0-9].{json,csv}', '?.parquet']\n\
                - config_name: other\n  data_files: \"other/**/*.json\"\n---\n# A set\n";
    let aliases = "---\na: &a [main/*.parquet]\nb: [*a, *a]\nconfigs: [{config_name: main, data_files: *a}]\n---\n";
    vec![card.into(), aliases.into()]
}

/// Reads every row of a file with this content. True if a row was read.
fn drain(path: PathBuf) -> bool {
    let Ok(stream) = rows::open(std::slice::from_ref(&path), "text") else { return false };
    let (mut read, mut whole) = (0, false);
    for row in stream {
        whole |= row.fields.is_ok();
        read += 1;
        assert!(read < MOST_ROWS, "the rows of {} do not end", path.display());
    }
    whole
}

/// Names by which the first byte of an input says how the rest is read.
const NAMES: [&str; 9] =
    ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt", "a.jsonl.gz", "a.json.zst", "a.csv.zst", "a.txt.gz"];

/// Rows of text in every form and packing.
pub fn rows(bytes: &[u8]) -> bool {
    let Some((first, rest)) = bytes.split_first() else { return false };
    drain(written("rows", NAMES[*first as usize % NAMES.len()], rest))
}

pub fn rows_seeds() -> Vec<Vec<u8>> {
    let lines = "{\"text\": \"one\", \"n\": [1, 2.5e3, null, {\"a\": \"\\u00fc\"}]}\n{\"text\": \"two\"}\n";
    let list = "[{\"text\": \"one\"}, {\"text\": \"two\", \"more\": {\"deep\": [[]]}}]";
    let table = "text,number\n\"a, \"\"b\"\"\nc\",1\nd,2\n";
    let plain: [&str; 5] = [lines, list, table, "text\tnumber\na\t1\n", "A text.\n\nAnother.\n"];
    // Packed ones are in the corpus.
    let numbered = plain.into_iter().enumerate();
    numbered.map(|(number, text)| [&[number as u8], text.as_bytes()].concat()).collect()
}

/// Arrow's file and stream forms.
pub fn arrow(bytes: &[u8]) -> bool {
    drain(written("arrow", "a.arrow", bytes))
}

pub fn arrow_seeds() -> Vec<Vec<u8>> {
    ["types.arrow", "batches.arrow", "zstd.arrow", "saved/train/data-00000-of-00002.arrow"]
        .map(|name| file(&format!("crates/data/tests/fixtures/arrow/{name}")))
        .into()
}

/// Reads the bytes as a Parquet file.
pub fn parquet(bytes: &[u8]) -> bool {
    drain(written("parquet", "a.parquet", bytes))
}

pub fn parquet_seeds() -> Vec<Vec<u8>> {
    vec![file("crates/data/tests/fixtures/parquet/rows.parquet")]
}
