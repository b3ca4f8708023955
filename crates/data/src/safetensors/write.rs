//! Writing: the same tensors give the same bytes, and a file appears under its name only when it is complete.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

use serde_json::{Map, Value, json};
use tensor::{DType, HostTensor};

use super::header_name;
use crate::error::DataError;

/// One tensor to be written.
#[derive(Clone, Debug)]
pub struct NamedTensor<'a> {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// Row-major, little-endian.
    pub bytes: Cow<'a, [u8]>,
}

impl<'a> NamedTensor<'a> {
    pub fn new(name: impl Into<String>, tensor: &'a HostTensor) -> Self {
        NamedTensor {
            name: name.into(),
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            bytes: Cow::Borrowed(&tensor.bytes),
        }
    }
}

/// Writes one file: wide elements first, then by name, so that every tensor is aligned. The file is written under a
/// temporary name in the same folder, synced, then renamed. Metadata `{"format": "pt"}` is added, as the readers of
/// the field demand it. Panics if a tensor's bytes do not fit its shape.
pub fn write(path: &Path, tensors: &[NamedTensor<'_>], metadata: &BTreeMap<String, String>) -> Result<(), DataError> {
    let mut order: Vec<&NamedTensor> = tensors.iter().collect();
    order.sort_by(|a, b| b.dtype.size().cmp(&a.dtype.size()).then_with(|| a.name.cmp(&b.name)));
    let header = header(&order, metadata);

    let io = |action, e| DataError::io(action, path, e);
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().expect("a file to write has a name").to_string_lossy();
    let temporary = folder.join(format!(".{name}.{}.tmp", std::process::id()));
    let written = (|| {
        let mut out = BufWriter::new(File::create(&temporary)?);
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for tensor in &order {
            out.write_all(&tensor.bytes)?;
        }
        out.into_inner().map_err(|e| e.into_error())?.sync_all()?;
        fs::rename(&temporary, path)?;
        File::open(folder)?.sync_all()
    })();
    written.map_err(|e| {
        let _ = fs::remove_file(&temporary);
        io("write", e)
    })
}

fn header(order: &[&NamedTensor<'_>], metadata: &BTreeMap<String, String>) -> Vec<u8> {
    let mut entries = Map::new();
    let mut notes = metadata.clone();
    notes.entry("format".to_owned()).or_insert_with(|| "pt".to_owned());
    entries.insert("__metadata__".to_owned(), json!(notes));
    let mut offset = 0;
    for tensor in order {
        let size = tensor.shape.iter().product::<usize>() * tensor.dtype.size();
        assert_eq!(tensor.bytes.len(), size, "bytes of `{}` must fit its shape {:?}", tensor.name, tensor.shape);
        let entry = json!({
            "dtype": header_name(tensor.dtype),
            "shape": tensor.shape,
            "data_offsets": [offset, offset + size],
        });
        let before = entries.insert(tensor.name.clone(), entry);
        assert!(before.is_none(), "tensor `{}` is given twice", tensor.name);
        offset += size;
    }
    let mut bytes = serde_json::to_vec(&Value::Object(entries)).expect("a header is plain JSON");
    bytes.resize(bytes.len().next_multiple_of(8), b' ');
    bytes
}

/// Writes a model folder's weights: `model.safetensors` if they fit `max_shard_bytes`, otherwise numbered shards and
/// `model.safetensors.index.json`. Tensors keep their given order across shards.
pub fn write_folder(folder: &Path, tensors: &[NamedTensor<'_>], max_shard_bytes: usize) -> Result<(), DataError> {
    let mut shards: Vec<&[NamedTensor]> = Vec::new();
    let (mut begin, mut size) = (0, 0);
    for (i, tensor) in tensors.iter().enumerate() {
        if i > begin && size + tensor.bytes.len() > max_shard_bytes {
            shards.push(&tensors[begin..i]);
            (begin, size) = (i, 0);
        }
        size += tensor.bytes.len();
    }
    shards.push(&tensors[begin..]);
    let notes = BTreeMap::new();
    if let [only] = shards.as_slice() {
        return write(&folder.join("model.safetensors"), only, &notes);
    }
    let mut weight_map = BTreeMap::new();
    for (number, shard) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", number + 1, shards.len());
        write(&folder.join(&name), shard, &notes)?;
        weight_map.extend(shard.iter().map(|tensor| (tensor.name.clone(), name.clone())));
    }
    let total: usize = tensors.iter().map(|tensor| tensor.bytes.len()).sum();
    let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
    let path = folder.join("model.safetensors.index.json");
    let text = serde_json::to_string_pretty(&index).expect("an index is plain JSON");
    fs::write(&path, text + "\n").map_err(|e| DataError::io("write", &path, e))
}
