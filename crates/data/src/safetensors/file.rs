//! One safetensors file: its header, and its bytes.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;
use tensor::DType;

use crate::error::DataError;
use crate::part_file::PartFile;

/// The entry of a tensor in the header.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    pub(super) begin: usize,
    pub(super) end: usize,
}

/// One `.safetensors` file.
#[derive(Debug)]
pub struct SafeTensors {
    pub(super) file: PartFile,
    pub(super) data_start: usize,
    pub(super) entries: BTreeMap<String, Entry>,
    pub(super) metadata: BTreeMap<String, String>,
}

/// Headers above this size are refused: no real model needs it, and a damaged length must not ask for memory.
const MAX_HEADER_BYTES: u64 = 100_000_000;

impl SafeTensors {
    /// Opens the file and checks its header: every tensor lies inside the file, sizes fit shapes, nothing overlaps.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let file = PartFile::open(path)?;
        let invalid = |problem: String| DataError::invalid(path.display(), problem);
        let mut prefix = [0; 8];
        if file.len() < prefix.len() {
            return Err(invalid(format!("{} bytes are too few for a safetensors file", file.len())));
        }
        file.read(0, &mut prefix)?;
        let length = u64::from_le_bytes(prefix);
        if length > MAX_HEADER_BYTES || 8 + length > file.len() as u64 {
            return Err(invalid(format!("the header claims {length} bytes, the file has {}", file.len()))
                .hint("the file is truncated or not a safetensors file"));
        }
        let data_start = 8 + length as usize;
        let mut head = vec![0; length as usize];
        file.read(8, &mut head)?;
        let header: serde_json::Map<String, Value> =
            serde_json::from_slice(&head).map_err(|e| invalid(format!("header is not valid JSON: {e}")))?;
        let mut entries = BTreeMap::new();
        let mut metadata = BTreeMap::new();
        for (name, value) in header {
            if name == "__metadata__" {
                for (key, text) in value.as_object().into_iter().flatten() {
                    metadata.insert(key.clone(), text.as_str().unwrap_or_default().to_owned());
                }
                continue;
            }
            let entry = parse_entry(&value).ok_or_else(|| invalid(format!("header of tensor `{name}` is damaged")))?;
            entries.insert(name, entry);
        }
        check_layout(&entries, file.len() - data_start).map_err(invalid)?;
        Ok(SafeTensors { file, data_start, entries, metadata })
    }

    /// Tensor names in order of the alphabet.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    pub fn contains(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// The `__metadata__` entry.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The tensor as the header describes it, whatever its type.
    pub(crate) fn raw(&self, name: &str) -> Option<Raw<'_>> {
        let entry = self.entries.get(name)?;
        let (begin, length) = (self.data_start + entry.begin, entry.end - entry.begin);
        Some(Raw { dtype: &entry.dtype, shape: &entry.shape, begin, length })
    }

    /// Fills `bytes` with those of the file from `begin` on.
    pub(crate) fn read(&self, begin: usize, bytes: &mut [u8]) -> Result<(), DataError> {
        self.file.read(begin, bytes)
    }
}

/// A tensor of any type. Its bytes are inside of the file; whether they fit the shape is known only for types that the
/// engine knows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Raw<'a> {
    pub dtype: &'a str,
    pub shape: &'a [usize],
    pub begin: usize,
    pub length: usize,
}

fn parse_entry(value: &Value) -> Option<Entry> {
    let offsets = value.get("data_offsets")?.as_array()?;
    let [begin, end] = offsets.as_slice() else { return None };
    let extents = value.get("shape")?.as_array()?;
    let shape = extents.iter().map(|n| n.as_u64().map(|n| n as usize)).collect::<Option<Vec<_>>>()?;
    Some(Entry {
        dtype: value.get("dtype")?.as_str()?.to_owned(),
        shape,
        begin: begin.as_u64()? as usize,
        end: end.as_u64()? as usize,
    })
}

/// `data_bytes`: size of the part after the header.
fn check_layout(entries: &BTreeMap<String, Entry>, data_bytes: usize) -> Result<(), String> {
    let mut by_place: Vec<(&String, &Entry)> = entries.iter().collect();
    by_place.sort_by_key(|(_, entry)| (entry.begin, entry.end));
    let mut last_end = 0;
    for (name, entry) in by_place {
        if entry.end > data_bytes || entry.begin > entry.end {
            return Err(format!(
                "tensor `{name}` lies at {}..{}, the data has {data_bytes} bytes: the file is cut short, or damaged",
                entry.begin, entry.end
            ));
        }
        if entry.begin < last_end {
            return Err(format!("tensor `{name}` overlaps its predecessor"));
        }
        last_end = entry.end;
        if let Ok(dtype) = entry.dtype.parse::<DType>() {
            let elements = entry.shape.iter().try_fold(1usize, |n, &extent| n.checked_mul(extent));
            let expected = elements.and_then(|n| n.checked_mul(dtype.size()));
            if expected != Some(entry.end - entry.begin) {
                return Err(format!(
                    "tensor `{name}` of shape {:?} and type {dtype} holds {} bytes",
                    entry.shape,
                    entry.end - entry.begin
                ));
            }
        }
    }
    Ok(())
}
