//! Writing of a model folder's weights in any order: each tensor goes to its place in its file as it is made. Types are those
//! of headers, also such as the engine has no name for.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::error::DataError;
use crate::new_file::create_beside;

/// A tensor as a header describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawTensor {
    pub name: String,
    /// The header's spelling of its type.
    pub dtype: &'static str,
    pub shape: Vec<usize>,
    pub bytes: usize,
}

impl RawTensor {
    /// Returns the bytes of an element; those of an empty tensor count as 1.
    fn size(&self) -> usize {
        self.bytes / self.shape.iter().product::<usize>().max(1)
    }
}

/// A model folder's weights in progress. Dropped before [`PlacedWriter::finish`], it leaves no file under its name.
#[derive(Debug)]
pub struct PlacedWriter {
    folder: PathBuf,
    files: Vec<Shard>,
    /// The file of each tensor, its first byte there, and its length.
    places: BTreeMap<String, (usize, u64, usize)>,
    total: usize,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    header: Vec<u8>,
    /// Tensors that were not put yet.
    left: usize,
    open: Option<(PathBuf, File)>,
}

impl PlacedWriter {
    /// Divides groups of tensors, in their order, among as many files as are needed. The tensors of a group share a file.
    ///
    /// # Panics
    /// If a name is given twice.
    pub fn new(folder: &Path, groups: Vec<Vec<RawTensor>>, max_shard_bytes: usize) -> PlacedWriter {
        let mut shards: Vec<Vec<RawTensor>> = vec![Vec::new()];
        let (mut size, mut total) = (0, 0);
        for group in groups {
            let bytes: usize = group.iter().map(|of| of.bytes).sum();
            if size > 0 && size + bytes > max_shard_bytes {
                shards.push(Vec::new());
                size = 0;
            }
            size += bytes;
            total += bytes;
            shards.last_mut().expect("there is a first shard").extend(group);
        }
        let count = shards.len();
        let mut places = BTreeMap::new();
        let mut files = Vec::new();
        for (number, mut tensors) in shards.into_iter().enumerate() {
            tensors.sort_by(|a, b| b.size().cmp(&a.size()).then_with(|| a.name.cmp(&b.name)));
            let name = match count {
                1 => "model.safetensors".to_owned(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
            };
            let header = header(&tensors);
            let mut at = header.len() as u64;
            for tensor in &tensors {
                let before = places.insert(tensor.name.clone(), (number, at, tensor.bytes));
                assert!(before.is_none(), "tensor `{}` is given twice", tensor.name);
                at += tensor.bytes as u64;
            }
            files.push(Shard { path: folder.join(name), header, left: tensors.len(), open: None });
        }
        PlacedWriter { folder: folder.to_owned(), files, places, total }
    }

    /// Returns the bytes of all tensors together.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Writes the bytes of a tensor: row-major, little-endian.
    ///
    /// # Panics
    /// If there is no such tensor, or their number does not fit it.
    pub fn put(&mut self, name: &str, bytes: &[u8]) -> Result<(), DataError> {
        let (number, at, length) = *self.places.get(name).unwrap_or_else(|| panic!("`{name}` is not in the header"));
        assert_eq!(bytes.len(), length, "bytes of `{name}` must fit its shape");
        let shard = &mut self.files[number];
        let failed = |e| DataError::io("write", &shard.path, e);
        if shard.open.is_none() {
            let (temporary, mut file) = create_beside(&shard.path).map_err(failed)?;
            file.write_all(&shard.header).map_err(failed)?;
            shard.open = Some((temporary, file));
        }
        let (_, file) = shard.open.as_ref().expect("just opened");
        file.write_all_at(bytes, at).map_err(failed)?;
        shard.left -= 1;
        if shard.left == 0 { shard.finish() } else { Ok(()) }
    }

    /// Completes the folder: the index, where there is more than one file.
    ///
    /// # Panics
    /// If tensors are missing.
    pub fn finish(self) -> Result<(), DataError> {
        assert!(self.files.iter().all(|shard| shard.left == 0), "every tensor is put before a folder is finished");
        if self.files.len() == 1 {
            return Ok(());
        }
        let file_of = |number: usize| self.files[number].path.file_name().map(|name| name.to_string_lossy());
        let map: BTreeMap<_, _> = self.places.iter().map(|(name, (number, ..))| (name, file_of(*number))).collect();
        let index = json!({ "metadata": { "total_size": self.total }, "weight_map": map });
        let path = self.folder.join("model.safetensors.index.json");
        let text = serde_json::to_string_pretty(&index).expect("an index is plain JSON");
        let written = File::create_new(&path).and_then(|mut file| file.write_all((text + "\n").as_bytes()));
        written.map_err(|e| DataError::io("write", &path, e))
    }
}

impl Shard {
    fn finish(&mut self) -> Result<(), DataError> {
        let (temporary, file) = self.open.take().expect("a tensor was put into it");
        let complete = file.sync_all().and_then(|()| fs::rename(&temporary, &self.path));
        complete.map_err(|e| DataError::io("write", &self.path, e))
    }
}

impl Drop for Shard {
    fn drop(&mut self) {
        if let Some((temporary, _)) = &self.open {
            // Removing what is unfinished is all that can be done here.
            let _ = fs::remove_file(temporary);
        }
    }
}

/// The length and the header of a file with tensors in this order.
fn header(order: &[RawTensor]) -> Vec<u8> {
    let mut entries = Map::new();
    entries.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut offset = 0;
    for tensor in order {
        let offsets = [offset, offset + tensor.bytes];
        let entry = json!({ "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets });
        entries.insert(tensor.name.clone(), entry);
        offset += tensor.bytes;
    }
    let mut bytes = serde_json::to_vec(&Value::Object(entries)).expect("a header is plain JSON");
    bytes.resize(bytes.len().next_multiple_of(8), b' ');
    let mut whole = (bytes.len() as u64).to_le_bytes().to_vec();
    whole.append(&mut bytes);
    whole
}
