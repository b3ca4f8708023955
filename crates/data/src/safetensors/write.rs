//! Writing: the same tensors give the same bytes, and a file appears under its name only when it is complete.
//!
//! [`FolderWriter`] takes the tensors one after the other, so that no more than one has to be in memory.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tensor::{DType, HostTensor};

use super::header_name;
use crate::error::DataError;
use crate::new_file::create_beside;

/// One tensor to be written.
#[derive(Clone, Debug)]
pub struct NamedTensor<'a> {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// The values, row-major and little-endian.
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

    fn info(&self) -> TensorInfo {
        TensorInfo { name: self.name.clone(), dtype: self.dtype, shape: self.shape.clone() }
    }
}

/// A tensor's entry in the header of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
}

impl TensorInfo {
    /// Bytes of the elements.
    ///
    /// # Panics
    /// If they are more than can be addressed.
    pub fn bytes(&self) -> usize {
        let bytes = self.shape.iter().try_fold(self.dtype.size(), |product, extent| product.checked_mul(*extent));
        bytes.expect("the extents of a tensor that is written fit memory")
    }
}

/// Writes one file: wide elements first, then by name, so that every tensor is aligned. The file is written under a
/// temporary name in the same folder, synced, then renamed. Metadata `{"format": "pt"}` is added, as the readers of
/// the field demand it. Panics if a tensor's bytes do not fit its shape.
pub fn write(path: &Path, tensors: &[NamedTensor<'_>], metadata: &BTreeMap<String, String>) -> Result<(), DataError> {
    let mut infos: Vec<TensorInfo> = tensors.iter().map(NamedTensor::info).collect();
    sort(&mut infos);
    let by_name: BTreeMap<&str, &NamedTensor> = tensors.iter().map(|t| (t.name.as_str(), t)).collect();
    let mut file = ShardWriter::create(path, &infos, metadata)?;
    for info in &infos {
        file.put(info, &by_name[info.name.as_str()].bytes)?;
    }
    file.finish()
}

/// Writes a model folder's weights: `model.safetensors` if they fit `max_shard_bytes`, otherwise numbered shards and
/// `model.safetensors.index.json`. Tensors keep their given order across shards.
pub fn write_folder(folder: &Path, tensors: &[NamedTensor<'_>], max_shard_bytes: usize) -> Result<(), DataError> {
    let infos = tensors.iter().map(NamedTensor::info).collect();
    let by_name: BTreeMap<&str, &NamedTensor> = tensors.iter().map(|t| (t.name.as_str(), t)).collect();
    let mut writer = FolderWriter::new(folder, infos, max_shard_bytes);
    while let Some(info) = writer.upcoming() {
        writer.put(&by_name[info.name.as_str()].bytes)?;
    }
    writer.finish()
}

fn sort(infos: &mut [TensorInfo]) {
    infos.sort_by(|a, b| b.dtype.size().cmp(&a.dtype.size()).then_with(|| a.name.cmp(&b.name)));
}

/// A model folder's weights in progress, laid out as [`write_folder`] does: ask for the next tensor, put its bytes.
///
/// ```text
/// while let Some(info) = writer.upcoming() { writer.put(&bytes_of(&info))? }
/// writer.finish()?
/// ```
#[derive(Debug)]
pub struct FolderWriter {
    folder: PathBuf,
    /// Name of each file and what it holds.
    shards: Vec<(String, Vec<TensorInfo>)>,
    /// The next tensor: shard, place in it.
    at: (usize, usize),
    open: Option<ShardWriter>,
}

impl FolderWriter {
    /// Divides the tensors, in their order, among as many files as are needed.
    pub fn new(folder: &Path, infos: Vec<TensorInfo>, max_shard_bytes: usize) -> FolderWriter {
        let mut shards: Vec<Vec<TensorInfo>> = vec![Vec::new()];
        let mut size = 0;
        for info in infos {
            let shard = shards.last_mut().expect("there is a first shard");
            if !shard.is_empty() && size + info.bytes() > max_shard_bytes {
                size = info.bytes();
                shards.push(vec![info]);
            } else {
                size += info.bytes();
                shard.push(info);
            }
        }
        let count = shards.len();
        let name = |number: usize| match count {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
        };
        for shard in &mut shards {
            sort(shard);
        }
        let shards = shards.into_iter().enumerate().map(|(number, infos)| (name(number), infos)).collect();
        FolderWriter { folder: folder.to_owned(), shards, at: (0, 0), open: None }
    }

    /// The tensor whose bytes are put next; none when all are there.
    pub fn upcoming(&self) -> Option<TensorInfo> {
        let (shard, place) = self.at;
        self.shards.get(shard)?.1.get(place).cloned()
    }

    /// Writes the bytes of the next tensor: row-major, little-endian.
    ///
    /// # Panics
    /// If their number does not fit the tensor, or if there is no next one.
    pub fn put(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        let (shard, place) = self.at;
        let (name, infos) = &self.shards[shard];
        if self.open.is_none() {
            self.open = Some(ShardWriter::create(&self.folder.join(name), infos, &BTreeMap::new())?);
        }
        self.open.as_mut().expect("just opened").put(&infos[place], bytes)?;
        self.at.1 += 1;
        if self.at.1 == infos.len() {
            self.at = (shard + 1, 0);
            return self.open.take().expect("it was written to").finish();
        }
        Ok(())
    }

    /// Completes the folder: the index, where there is more than one file.
    ///
    /// # Panics
    /// If tensors are missing.
    pub fn finish(mut self) -> Result<(), DataError> {
        assert!(self.upcoming().is_none(), "every tensor is put before a folder is finished");
        if let [(name, infos)] = self.shards.as_slice() {
            // A folder without tensors still has its file.
            return match infos.is_empty() {
                true => ShardWriter::create(&self.folder.join(name), infos, &BTreeMap::new())?.finish(),
                false => Ok(()),
            };
        }
        let mut weight_map = BTreeMap::new();
        let mut total = 0;
        for (name, infos) in std::mem::take(&mut self.shards) {
            total += infos.iter().map(TensorInfo::bytes).sum::<usize>();
            weight_map.extend(infos.into_iter().map(|info| (info.name, name.clone())));
        }
        let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
        let path = self.folder.join("model.safetensors.index.json");
        let text = serde_json::to_string_pretty(&index).expect("an index is plain JSON");
        let written = File::create_new(&path).and_then(|mut file| file.write_all((text + "\n").as_bytes()));
        written.map_err(|e| DataError::io("write", &path, e))
    }
}

/// One file in progress. Dropped before [`ShardWriter::finish`], it removes its file.
#[derive(Debug)]
struct ShardWriter {
    path: PathBuf,
    temporary: PathBuf,
    out: Option<BufWriter<File>>,
}

impl ShardWriter {
    /// Starts a file with tensors in this order.
    fn create(path: &Path, order: &[TensorInfo], metadata: &BTreeMap<String, String>) -> Result<Self, DataError> {
        let header = header(order, metadata);
        let failed = |e| DataError::io("write", path, e);
        let (temporary, file) = create_beside(path).map_err(failed)?;
        let mut writer = ShardWriter { path: path.to_owned(), temporary, out: Some(BufWriter::new(file)) };
        let out = writer.out.as_mut().expect("just made");
        out.write_all(&(header.len() as u64).to_le_bytes()).and_then(|()| out.write_all(&header)).map_err(failed)?;
        Ok(writer)
    }

    fn put(&mut self, info: &TensorInfo, bytes: &[u8]) -> Result<(), DataError> {
        assert_eq!(bytes.len(), info.bytes(), "bytes of `{}` must fit its shape {:?}", info.name, info.shape);
        let out = self.out.as_mut().expect("a file is written to before it is finished");
        out.write_all(bytes).map_err(|e| DataError::io("write", &self.path, e))
    }

    fn finish(mut self) -> Result<(), DataError> {
        let out = self.out.take().expect("a file is finished once");
        let complete = || -> io::Result<()> {
            out.into_inner().map_err(|e| e.into_error())?.sync_all()?;
            fs::rename(&self.temporary, &self.path)?;
            File::open(folder_of(&self.path))?.sync_all()
        };
        complete().map_err(|e| DataError::io("write", &self.path, e))
    }
}

impl Drop for ShardWriter {
    fn drop(&mut self) {
        // After the rename there is nothing under this name.
        let _ = fs::remove_file(&self.temporary);
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn header(order: &[TensorInfo], metadata: &BTreeMap<String, String>) -> Vec<u8> {
    let mut entries = Map::new();
    let mut notes = metadata.clone();
    notes.entry("format".to_owned()).or_insert_with(|| "pt".to_owned());
    entries.insert("__metadata__".to_owned(), json!(notes));
    let mut offset = 0;
    for tensor in order {
        let size = tensor.bytes();
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
