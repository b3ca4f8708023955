//! Reads tensors of the recorded reference numbers. Knows the safetensors layout and nothing of what the numbers mean.

use std::path::{Path, PathBuf};

use serde_json::Value;

/// One file of recorded tensors.
pub struct Golden {
    header: Value,
    data: Vec<u8>,
}

/// The folder of recorded numbers: the full set next to the checkout, or the repository's trimmed one.
pub fn folder() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/ops lies in the repository");
    let full = root.join("../shared/golden");
    if full.is_dir() { full } else { root.join("tests/golden") }
}

impl Golden {
    /// Panics when there is no such file.
    pub fn open(file: &str) -> Golden {
        let path = folder().join(file);
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
        let header = serde_json::from_slice(&bytes[8..8 + length]).expect("a JSON header");
        Golden { header, data: bytes[8 + length..].to_vec() }
    }

    pub fn bytes(&self, name: &str) -> &[u8] {
        let offsets = &self.header[name]["data_offsets"];
        let at = |i: usize| offsets[i].as_u64().unwrap_or_else(|| panic!("no tensor `{name}`")) as usize;
        &self.data[at(0)..at(1)]
    }

    pub fn f32(&self, name: &str) -> Vec<f32> {
        assert_eq!(self.header[name]["dtype"], "F32", "{name}");
        self.bytes(name).chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect()
    }
}
