//! Small files that unpack to more than memory holds: each is an error with its place and what helps, at little memory.
//!
//! The files of `fixtures` were written with pyarrow: `nested.arrow` has lists of lists of 300 million nulls in one
//! row, `packed.arrow` three buffers of a GiB of zeros, `long_list.parquet` a list of 40 million equal numbers,
//! `times.parquet` times and dates that no calendar has; `rows_without_bytes.arrow` was damaged so that its batch
//! claims rows for which it has no bytes.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use data::rows::{self, Row, RowLimit};
use data::{DatasetKind, DatasetSpec, DialogueOptions, PrepareOptions, RowReason, Tokenizer, Truncation, prepare};
use serde_json::{Value, json};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn read(path: &Path, limit: u64) -> Vec<Row> {
    rows::open_within(&[path.to_owned()], "text", RowLimit(limit)).unwrap().collect()
}

/// Most memory that this process has held, in bytes.
fn peak() -> usize {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

/// Fails if the work takes more memory than two GiB; tests run concurrently.
fn within_memory<T>(work: impl FnOnce() -> T) -> T {
    let before = peak();
    let outcome = work();
    let more = peak().saturating_sub(before);
    assert!(more < 1 << 31, "{} MiB", more >> 20);
    outcome
}

#[track_caller]
fn assert_too_large(row: &Row) {
    let error = row.fields.as_ref().unwrap_err();
    assert_eq!(error.reason, RowReason::TooLarge, "{error}");
    assert!(error.detail.contains("raise `max_row_size`"), "{error}");
}

#[test]
fn a_packed_line_that_does_not_end_is_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl.zst");
    let mut packed = zstd::Encoder::new(fs::File::create(&path).unwrap(), 1).unwrap();
    packed.write_all(b"{\"text\": \"first\"}\n{\"text\": \"").unwrap();
    let block = vec![b'a'; 1 << 20];
    (0..3000).for_each(|_| packed.write_all(&block).unwrap());
    packed.write_all(b"\"}\n{\"text\": \"last\"}\n").unwrap();
    packed.finish().unwrap();
    assert!(fs::metadata(&path).unwrap().len() < 1 << 18);
    let rows = within_memory(|| read(&path, RowLimit::default().0));
    assert_eq!(rows.len(), 3);
    assert_eq!(rows[0].fields.as_ref().unwrap()["text"], "first");
    assert_too_large(&rows[1]);
    assert_eq!((rows[2].fields.as_ref().unwrap()["text"].as_str(), rows[2].place.row), (Some("last"), 3));
}

#[test]
fn every_text_format_keeps_to_the_bound_and_reads_with_a_larger_one() {
    let folder = tempfile::tempdir().unwrap();
    let long = "x".repeat(50_000);
    let object = json!({"text": long}).to_string();
    let small = json!({"text": "s"}).to_string();
    for (name, content, good) in [
        ("a.jsonl", format!("{small}\n{object}\n{small}\n"), 2),
        ("a.json", format!("[{small}, {object},\n {small}]\n"), 2),
        ("b.json", object.clone(), 0),
        ("a.csv", format!("text\ns\n{long}\n"), 1),
        ("a.tsv", format!("text\tb\ns\t1\n\"{long}\n"), 1),
        ("a.txt", long.clone(), 0),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, &content).unwrap();
        let rows = read(&path, 40_000);
        assert_eq!(rows.iter().filter(|row| row.fields.is_ok()).count(), good, "{name}");
        assert_too_large(rows.iter().find(|row| row.fields.is_err()).unwrap());
        if name != "a.tsv" {
            assert!(read(&path, 60_000).iter().all(|row| row.fields.is_ok()), "{name}");
        }
    }
    // A list is read element by element: the whole file may be larger than a row.
    let path = folder.path().join("large.json");
    let list: Vec<Value> = (0..4000).map(|i| json!({"text": format!("{i}: {}", "y".repeat(1000))})).collect();
    fs::write(&path, Value::Array(list).to_string()).unwrap();
    let rows = read(&path, 2000);
    assert_eq!((rows.len(), rows[3999].fields.as_ref().unwrap()["text"].as_str().unwrap().len()), (4000, 1006));
}

#[test]
fn columns_of_nothing_and_packed_columns_are_bounded() {
    let nested = within_memory(|| read(&fixture("arrow/nested.arrow"), RowLimit::default().0));
    assert_eq!(nested.len(), 1);
    assert_too_large(&nested[0]);
    assert!(nested[0].fields.as_ref().unwrap_err().detail.contains("column `x`"), "{:?}", nested[0]);
    let rows = read(&fixture("arrow/rows_without_bytes.arrow"), RowLimit::default().0);
    assert!(rows.len() < 200_000, "{} rows", rows.len());
    let packed = within_memory(|| read(&fixture("arrow/packed.arrow"), 4 << 20));
    let reported = packed[0].fields.as_ref().unwrap_err().to_string();
    assert!(
        reported.contains("a batch unpacks to more than 256MiB") && reported.contains("`max_row_size`"),
        "{reported}"
    );
    let Err(long) = rows::open(&[fixture("parquet/long_list.parquet")], "text") else { panic!("it is refused") };
    let reported = long.to_string();
    assert!(reported.contains("40000000 values of `input_ids") && reported.contains("`max_row_size`"), "{reported}");
    let read = rows::open_within(&[fixture("parquet/long_list.parquet")], "text", RowLimit(1 << 30));
    assert!(read.is_ok(), "a larger bound opens it");
}

#[test]
fn times_that_no_calendar_has_are_null_and_the_rest_of_the_row_is_read() {
    let rows = read(&fixture("parquet/times.parquet"), 4000);
    let rows: Vec<_> = rows.into_iter().map(|row| row.fields.unwrap()).collect();
    let texts: Vec<&Value> = rows.iter().map(|row| &row["text"]).collect();
    assert_eq!(texts, ["a", "b", "c"]);
    assert!(rows[0]["ms"].is_null() && rows[2]["ms"].is_null() && rows[0]["day"].is_null());
    assert_eq!(rows[1]["at"], "1970-01-01 00:00:00.000000 +00:00");
    assert_eq!((&rows[1]["ms"], &rows[1]["day"]), (&json!("1970-01-01 00:00:00.005 +00:00"), &json!("1970-01-02")));
}

/// A tokenizer whose words are split by an expression, with what a test changes about it.
fn tokenizer(folder: &Path, change: impl FnOnce(&mut Value)) -> Result<Tokenizer, String> {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/stories/model");
    let text = fs::read_to_string(model.join("tokenizer.json")).unwrap();
    let mut json: Value = serde_json::from_str(&text).unwrap();
    change(&mut json);
    fs::write(folder.join("tokenizer.json"), json.to_string()).unwrap();
    Tokenizer::from_folder(folder).map_err(|e| e.to_string())
}

#[test]
fn a_tokenizer_that_asks_for_too_much_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let added = |id: u64| {
        json!({"id": id, "content": "<far>", "single_word": false, "lstrip": false, "rstrip": false,
                                 "normalized": false, "special": true})
    };
    let doubling = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
    let reported = tokenizer(folder.path(), |json| {
        json["normalizer"] = json!({"type": "Sequence", "normalizers": vec![doubling; 40]});
    });
    assert!(reported.is_err_and(|reported| reported.contains("tokenizer.json") && reported.contains("times as long")));
    let reported = within_memory(|| tokenizer(folder.path(), |json| json["model"]["vocab"]["far"] = json!(u32::MAX)));
    assert!(reported.is_err_and(|reported| reported.contains("has the number 4294967295")));
    let _ = within_memory(|| tokenizer(folder.path(), |json| json["added_tokens"] = json!([added(u32::MAX.into())])));
    // The library unwraps what it reads of a decoder.
    let text =
        r###"{"added_tokens": [], "decoder": {"type": "WordPiece", "prefix": "##", #"cleanup": true}, "model": {}}"###;
    fs::write(folder.path().join("tokenizer.json"), text).unwrap();
    assert!(Tokenizer::from_folder(folder.path()).is_err_and(|e| e.to_string().contains("no readable tokenizer")));
    for charsmap in ["", "AAAA", "/////w==", "CAAAAP////8AAAAA"] {
        let spoiled = json!({"type": "Precompiled", "precompiled_charsmap": charsmap});
        if let Ok(tokenizer) = tokenizer(folder.path(), |json| json["normalizer"] = spoiled) {
            let _ = tokenizer.encoder().encode("ａ text ﷺ", false);
        }
    }
}

#[test]
fn a_text_on_which_a_tokenizer_gives_up_is_a_row_in_error() {
    let folder = tempfile::tempdir().unwrap();
    // Ends in the library's limit on a text of blanks, as expressions of real tokenizers do on twelve million of them.
    let split = json!({"type": "Split", "pattern": {"Regex": "(a|b|ab)*bc"}, "behavior": "Isolated", "invert": false});
    let tokenizer = tokenizer(folder.path(), |json| json["pre_tokenizer"] = split).unwrap();
    let text = "ab".repeat(28) + "ac" + "bc";
    let path = folder.path().join("a.jsonl");
    let lines = [json!({"text": "good"}), json!({"text": text}), json!({"text": "good"})];
    fs::write(&path, lines.map(|line| line.to_string() + "\n").concat()).unwrap();
    let options = PrepareOptions {
        max_length: 64,
        truncation: Truncation::Delete,
        vocab_size: 1 << 20,
        positions: None,
        workers: 2,
        dialogue: DialogueOptions::default(),
        preference: data::PreferenceOptions::default(),
    };
    let spec = DatasetSpec::new(path, DatasetKind::Text { field: "text".to_owned() });
    let prepared = prepare(&[spec], Some(&std::sync::Arc::new(tokenizer)), &options).unwrap();
    let of = &prepared.summary.datasets[0];
    assert_eq!((of.rows_read, of.rows_kept), (3, 2));
    let reported = &of.dropped[&RowReason::Tokenizer].detail;
    assert!(reported.contains("the tokenizer gave up") && reported.contains("retry-limit"), "{reported}");
}
