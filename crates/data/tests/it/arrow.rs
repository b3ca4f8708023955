//! Arrow files as pyarrow and the `datasets` library wrote them (`fixtures/arrow`), whole and cut short.

use std::fs;
use std::path::{Path, PathBuf};

use data::rows::{self, files};
use serde_json::{Value, json};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/arrow").join(name)
}

fn read(files: &[PathBuf]) -> Vec<Value> {
    let rows = rows::open(files, "text").unwrap();
    rows.map(|row| Value::Object(row.fields.unwrap_or_else(|e| panic!("{}: {e}", row.place)))).collect()
}

/// The contents of rows 0, 1 and 2 of every file with all types; `image` holds bytes that are not UTF-8.
fn expected(i: i64) -> Value {
    json!({
        "text": format!("row {i}"), "kind": if i == 0 { "x" } else { "y" }, "ids": [i, i + 1], "fixed": [0.5, 1.5],
        "nested": {"a": i, "b": [{"c": "d"}, {"c": null}]}, "flag": i == 0, "none": null, "half": 0.1,
        "when": "2024-01-02 03:04:05 +00:00", "day": "2024-01-02", "price": "1.25", "m": {"k": i},
        "view": if i == 0 { "a view that is longer than twelve bytes" } else { "short" },
        "big": (1u64 << 63) + i as u64, "ll": ["p", "q"],
    })
}

#[test]
fn streams_and_files_of_every_type_are_read() {
    for name in ["types.arrow", "zstd.arrow"] {
        let rows = read(&[fixture(name)]);
        assert_eq!(rows[..2], [expected(0), expected(1)], "{name}");
        assert_eq!(rows.len(), 3);
        assert!(rows[2].as_object().unwrap().values().all(Value::is_null), "{:?}", rows[2]);
    }
    let mut rows = rows::open(&[fixture("lz4.arrow")], "text").unwrap();
    let error = rows.next().unwrap().fields.unwrap_err();
    assert!(error.detail.contains("LZ4"), "{error}");
    assert!(rows.next().is_none());
    assert_eq!(read(&[fixture("batches.arrow")]), [expected(0), expected(1), expected(0)]);
}

#[test]
fn folders_that_datasets_saved_are_read_by_split() {
    let saved = fixture("saved");
    let (train, _) = files::find(&saved, None, "train").unwrap();
    assert_eq!(train.len(), 2);
    let rows = read(&train);
    assert_eq!(rows.len(), 5);
    let row = json!({
        "messages": [
            {"role": "user", "content": "Wie geht's 4?"},
            {"role": "assistant", "content": "Gut é 4."},
        ],
        "id": 4,
    });
    assert_eq!(rows[4], row);
    assert_eq!(read(&files::find(&saved, None, "test_sft").unwrap().0).len(), 2);
    let error = files::find(&saved, None, "test").unwrap_err().to_string();
    assert!(error.contains("no split `test`") && error.contains("test_sft, train"), "{error}");
    // One split alone is a set, and so is one of its files.
    assert_eq!(read(&files::find(&saved.join("train"), None, "train").unwrap().0).len(), 5);
    assert_eq!(read(&[saved.join("train/data-00001-of-00002.arrow")]).len(), 2);
}

#[test]
fn a_file_that_was_cut_short_is_named_and_never_read_as_whole() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["types.arrow", "zstd.arrow", "batches.arrow"] {
        let whole = fs::read(fixture(name)).unwrap();
        let path = folder.path().join(name);
        // The last eight bytes of a stream are its end mark, which the format lets writers leave out.
        for length in (0..whole.len() - 9).step_by(29) {
            fs::write(&path, &whole[..length]).unwrap();
            match rows::open(std::slice::from_ref(&path), "text") {
                Err(error) => assert!(error.to_string().contains(name), "{error}"),
                Ok(rows) => {
                    let rows: Vec<_> = rows.collect();
                    let broken = rows.iter().filter(|row| row.fields.is_err()).count();
                    let is_border = broken == 0 && rows.len() < 3;
                    assert!(broken == 1 || is_border, "{name}, {length} bytes: {} rows", rows.len());
                    assert!(rows.len() <= 3);
                }
            }
        }
    }
}

#[test]
fn damaged_bytes_give_errors_and_no_panic() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.arrow");
    let mut read = 0;
    for name in ["types.arrow", "zstd.arrow", "batches.arrow", "saved/train/data-00000-of-00002.arrow"] {
        let whole = fs::read(fixture(name)).unwrap();
        // Bytes by a value that depends on their place; `SUROGATE_ROUNDS` asks for every one.
        let step = if std::env::var_os("SUROGATE_ROUNDS").is_some() { 1 } else { 11 };
        for at in (0..whole.len()).step_by(step) {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (at % 8);
            if at % 3 == 0 {
                bytes[at] = 0xff;
            }
            fs::write(&path, &bytes).unwrap();
            if let Ok(rows) = rows::open(std::slice::from_ref(&path), "text") {
                let count = rows.take(100_000).count();
                assert!(count < 100_000, "{name}, byte {at}: the rows do not end");
                read += count;
            }
        }
    }
    assert!(read > 500, "most damage leaves most rows");
}
