//! Safetensors: what is written is read back; damaged files are refused by name.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use data::safetensors::{NamedTensor, SafeTensors, Weights, write, write_folder};
use tensor::{DType, HostTensor};

fn samples() -> Vec<(String, HostTensor)> {
    vec![
        ("b.weight".to_owned(), HostTensor::from_f32([2, 3], &[1.0, -2.0, 0.5, 3.0, 4.0, 5.0])),
        ("a.bias".to_owned(), HostTensor::from_f32([3], &[1.0, 2.0, 3.0]).cast(DType::BF16)),
        ("ids".to_owned(), HostTensor::from_i32([2], &[7, -7])),
        ("scalar".to_owned(), HostTensor::new(DType::I64, [], 9i64.to_le_bytes().to_vec())),
        ("empty".to_owned(), HostTensor::zeros(DType::F16, [0, 4])),
        ("bytes".to_owned(), HostTensor::new(DType::U8, [3], vec![1, 2, 3])),
    ]
}

fn named(tensors: &[(String, HostTensor)]) -> Vec<NamedTensor<'_>> {
    tensors.iter().map(|(name, tensor)| NamedTensor::new(name, tensor)).collect()
}

#[test]
fn a_file_is_read_back_and_its_bytes_do_not_depend_on_the_order() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = samples();
    let notes = BTreeMap::from([("made_by".to_owned(), "test".to_owned())]);
    let (first, second) = (folder.path().join("one.safetensors"), folder.path().join("two.safetensors"));
    write(&first, &named(&tensors), &notes).unwrap();
    let mut reversed = named(&tensors);
    reversed.reverse();
    write(&second, &reversed, &notes).unwrap();
    assert_eq!(fs::read(&first).unwrap(), fs::read(&second).unwrap());

    let file = SafeTensors::open(&first).unwrap();
    assert_eq!(file.names().collect::<Vec<_>>(), ["a.bias", "b.weight", "bytes", "empty", "ids", "scalar"]);
    assert_eq!(file.metadata()["format"], "pt");
    assert_eq!(file.metadata()["made_by"], "test");
    for (name, tensor) in &tensors {
        let view = file.get(name).unwrap();
        assert_eq!(&view.to_host().unwrap(), tensor, "{name}");
    }
    // Every tensor begins at a multiple of its element size.
    let bytes = fs::read(&first).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    assert_eq!(header % 8, 0);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "no temporary file is left");
}

#[test]
fn shards_are_seen_as_one() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = samples();
    write_folder(folder.path(), &named(&tensors), 24).unwrap();
    assert!(folder.path().join("model.safetensors.index.json").is_file());
    let weights = Weights::open(folder.path()).unwrap();
    assert_eq!(weights.names().len(), tensors.len());
    for (name, tensor) in &tensors {
        assert_eq!(&weights.get(name).unwrap().to_host().unwrap(), tensor, "{name}");
    }
    assert!(weights.get("lm_head.weight").unwrap_err().to_string().contains("there is no tensor `lm_head.weight`"));

    let single = tempfile::tempdir().unwrap();
    write_folder(single.path(), &named(&tensors), usize::MAX).unwrap();
    assert!(single.path().join("model.safetensors").is_file());
    assert_eq!(Weights::open(single.path()).unwrap().names(), weights.names());
}

fn with_header(path: &Path, header: &str, data: &[u8]) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    fs::write(path, bytes).unwrap();
}

#[test]
fn damaged_files_are_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let cases = [
        ("{}x", "not valid JSON"),
        (r#"{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 12]}}"#, "lies at 0..12"),
        (r#"{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}"#, "holds 8 bytes"),
        (r#"{"a": {"dtype": "F32", "shape": [9223372036854775807, 4], "data_offsets": [0, 8]}}"#, "holds 8 bytes"),
        (r#"{"a": {"dtype": "F32", "shape": [2]}}"#, "header of tensor `a` is damaged"),
        (
            r#"{"a": {"dtype": "U8", "shape": [6], "data_offsets": [0, 6]}, "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}"#,
            "overlaps",
        ),
    ];
    for (header, reason) in cases {
        with_header(&path, header, &[0; 8]);
        let error = SafeTensors::open(&path).unwrap_err().to_string();
        assert!(error.contains(reason), "{header}: {error}");
    }
    for bytes in [&[1u8, 2][..], &u64::MAX.to_le_bytes(), &[]] {
        fs::write(&path, bytes).unwrap();
        assert!(SafeTensors::open(&path).is_err());
    }
    with_header(&path, r#"{"a": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}"#, &[0; 8]);
    let error = SafeTensors::open(&path).unwrap().get("a").unwrap_err().to_string();
    assert!(error.contains("C64"), "{error}");
    assert!(Weights::open(folder.path()).unwrap_err().to_string().contains("no model.safetensors"));
}

#[test]
fn a_file_that_is_cut_short_while_it_is_read_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let header = r#"{"a": {"dtype": "U8", "shape": [8192], "data_offsets": [0, 8192]}, "b": {"dtype": "U8", "shape": [8192], "data_offsets": [8192, 16384]}}"#;
    with_header(&path, header, &[7; 16384]);
    let file = SafeTensors::open(&path).unwrap();
    let (a, b) = (file.get("a").unwrap(), file.get("b").unwrap());
    assert!(a.has_bytes_of(&b).unwrap());
    fs::File::options().write(true).open(&path).unwrap().set_len((8 + header.len() + 8192) as u64).unwrap();
    assert_eq!(a.bytes().unwrap(), [7; 8192]);
    let errors = [b.bytes().unwrap_err(), b.to_host().unwrap_err(), a.has_bytes_of(&b).unwrap_err()];
    for error in errors.map(|error| error.to_string()) {
        assert!(error.contains("x.safetensors: the file was cut short while it was in use"), "{error}");
    }
}

#[test]
fn the_shipped_model_opens() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/stories/model");
    let weights = Weights::open(&model).unwrap();
    let embedding = weights.get("model.embed_tokens.weight").unwrap();
    assert_eq!((embedding.dtype, embedding.shape), (DType::F32, &[512, 64][..]));
    assert!(embedding.to_host().unwrap().to_f32().iter().all(|x| x.is_finite()));
}
