//! Parquet rows: nested columns as JSON, compressed or not; damaged files are counted, not fatal.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use data::RowReason;
use data::rows::open;
use parquet::basic::{Compression, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType, DataType, DoubleType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use serde_json::{Value, json};

const SCHEMA: &str = "message rows {
    REQUIRED BINARY text (UTF8);
    OPTIONAL group messages (LIST) {
        REPEATED group list {
            OPTIONAL group element { OPTIONAL BINARY role (UTF8); OPTIONAL BINARY content (UTF8); }
        }
    }
    OPTIONAL group input_ids (LIST) { REPEATED group list { OPTIONAL INT64 element; } }
    OPTIONAL DOUBLE score;
}";

fn column<T: DataType>(
    group: &mut SerializedRowGroupWriter<'_, File>,
    values: &[T::T],
    definition: Option<&[i16]>,
    repetition: Option<&[i16]>,
) {
    let mut writer = group.next_column().unwrap().unwrap();
    writer.typed::<T>().write_batch(values, definition, repetition).unwrap();
    writer.close().unwrap();
}

/// Two rows; the second has an empty list, a missing list and no score.
fn write(path: &Path, compression: Compression) {
    let schema = Arc::new(parse_message_type(SCHEMA).unwrap());
    let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
    let mut file = SerializedFileWriter::new(File::create(path).unwrap(), schema, properties).unwrap();
    let mut group = file.next_row_group().unwrap();
    let text = |texts: &[&str]| texts.iter().map(|text| ByteArray::from(*text)).collect::<Vec<_>>();
    column::<ByteArrayType>(&mut group, &text(&["naïve", "two"]), None, None);
    column::<ByteArrayType>(&mut group, &text(&["user", "assistant"]), Some(&[4, 4, 1]), Some(&[0, 1, 0]));
    column::<ByteArrayType>(&mut group, &text(&["hi"]), Some(&[4, 3, 1]), Some(&[0, 1, 0]));
    column::<Int64Type>(&mut group, &[5, 6, 7], Some(&[3, 3, 3, 0]), Some(&[0, 1, 1, 0]));
    column::<DoubleType>(&mut group, &[0.5], Some(&[1, 0]), None);
    group.close().unwrap();
    file.close().unwrap();
}

fn rows(path: &Path) -> Vec<Result<Value, RowReason>> {
    let rows = open(&[path.to_owned()], "text").unwrap();
    rows.map(|row| row.fields.map(Value::Object).map_err(|error| error.reason)).collect()
}

#[test]
fn nested_columns_become_json() {
    let folder = tempfile::tempdir().unwrap();
    for (name, compression) in [
        ("plain", Compression::UNCOMPRESSED),
        ("snappy", Compression::SNAPPY),
        ("gzip", Compression::GZIP(Default::default())),
        ("zstd", Compression::ZSTD(ZstdLevel::default())),
    ] {
        let path = folder.path().join(format!("{name}.parquet"));
        write(&path, compression);
        let expected = [
            json!({
                "text": "naïve",
                "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": null}],
                "input_ids": [5, 6, 7],
                "score": 0.5,
            }),
            json!({"text": "two", "messages": [], "input_ids": null, "score": null}),
        ];
        assert_eq!(rows(&path), expected.map(Ok), "{name}");
    }
}

#[test]
fn damage_is_refused_or_ends_the_rows() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.parquet");
    write(&path, Compression::SNAPPY);
    let whole = fs::read(&path).unwrap();
    let good = rows(&path);
    for cut in 0..whole.len() {
        fs::write(&path, &whole[..cut]).unwrap();
        assert!(open(std::slice::from_ref(&path), "text").is_err(), "cut at {cut}");
    }
    for at in (0..whole.len()).step_by(3) {
        for flip in [0x01, 0xff] {
            let mut damaged = whole.clone();
            damaged[at] ^= flip;
            fs::write(&path, &damaged).unwrap();
            if let Ok(stream) = open(std::slice::from_ref(&path), "text") {
                assert!(stream.take(100).count() < 100, "byte {at}");
            }
        }
    }
    fs::write(&path, &whole).unwrap();
    assert_eq!(rows(&path), good);
}
