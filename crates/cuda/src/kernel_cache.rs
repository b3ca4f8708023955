//! Compiled kernels on disk, keyed by everything that decides what a kernel compiles to.
//!
//! The cache knows bytes and keys. A damaged entry is compiled again; two processes that write the
//! same entry write the same bytes.

use crate::error::{Error, Result};
use crate::nvrtc::{Compiler, KernelSource, standard_options};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

const MAGIC: &[u8; 8] = b"SGKERN01";

/// A folder of CUBINs. Without a folder nothing is kept between processes.
pub struct KernelCache {
    folder: Option<PathBuf>,
}

/// Machine code and whether it had to be compiled now.
pub struct Fetched {
    pub cubin: Vec<u8>,
    pub compiled: bool,
}

impl KernelCache {
    /// `None`: compile always. The folder is made at the first write.
    pub fn new(folder: Option<PathBuf>) -> KernelCache {
        KernelCache { folder }
    }

    /// `$XDG_CACHE_HOME/surogate/kernels`, else `~/.cache/surogate/kernels`.
    pub fn default_folder() -> Option<PathBuf> {
        let base = std::env::var_os("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?;
        Some(base.join("surogate").join("kernels"))
    }

    /// The machine code of `source`, from disk or from the compiler.
    pub fn fetch(&self, compiler: &Compiler, source: &KernelSource, architecture: &str) -> Result<Fetched> {
        let key = key(source, compiler.version(), architecture);
        let path = self.folder.as_ref().map(|folder| folder.join(format!("{key}.cubin")));
        if let Some(cubin) = path.as_ref().and_then(|path| decode(&std::fs::read(path).ok()?)) {
            return Ok(Fetched { cubin, compiled: false });
        }
        let cubin = compiler.compile(source, architecture)?.cubin;
        if let Some(path) = path {
            write(&path, &encode(&cubin)).map_err(|e| Error::Cache { path, reason: e.to_string() })?;
        }
        Ok(Fetched { cubin, compiled: true })
    }
}

/// 64 hexadecimal digits. Every part is written with its length, so no two inputs run together.
pub fn key(source: &KernelSource, compiler_version: (u32, u32), architecture: &str) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut part = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    part(source.name.as_bytes());
    part(source.text.as_bytes());
    part(&(source.headers.len() as u64).to_le_bytes());
    for (name, text) in source.headers {
        part(name.as_bytes());
        part(text.as_bytes());
    }
    for option in standard_options(architecture).iter().chain(source.options) {
        part(option.as_bytes());
    }
    part(format!("{}.{}", compiler_version.0, compiler_version.1).as_bytes());
    hasher.finalize().to_hex().to_string()
}

fn encode(cubin: &[u8]) -> Vec<u8> {
    [MAGIC.as_slice(), blake3::hash(cubin).as_bytes(), cubin].concat()
}

/// `None` when the entry is not whole.
fn decode(entry: &[u8]) -> Option<Vec<u8>> {
    let (hash, cubin) = entry.strip_prefix(MAGIC)?.split_at_checked(blake3::OUT_LEN)?;
    (blake3::hash(cubin).as_bytes() == hash).then(|| cubin.to_vec())
}

/// Through a file of its own name in the same folder, so that readers never see half an entry.
fn write(path: &std::path::Path, bytes: &[u8]) -> std::io::Result<()> {
    std::fs::create_dir_all(path.parent().expect("an entry lies in the cache's folder"))?;
    static WRITES: AtomicU64 = AtomicU64::new(0);
    let (process, write) = (std::process::id(), WRITES.fetch_add(1, Ordering::Relaxed));
    let partial = path.with_extension(format!("{process}.{write}.partial"));
    std::fs::write(&partial, bytes)?;
    std::fs::rename(&partial, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_depends_on_every_part() {
        let options = ["-DH=64".to_owned()];
        let base = KernelSource { name: "a.cu", text: "body", headers: &[("x.cuh", "text")], options: &options };
        let keys = [
            key(&base, (13, 0), "sm_90a"),
            key(&KernelSource { text: "body ", ..base.clone() }, (13, 0), "sm_90a"),
            key(&KernelSource { headers: &[("x.cuh", "Text")], ..base.clone() }, (13, 0), "sm_90a"),
            key(&KernelSource { headers: &[("x.cuht", "ext")], ..base.clone() }, (13, 0), "sm_90a"),
            key(&KernelSource { options: &[], ..base.clone() }, (13, 0), "sm_90a"),
            key(&base, (13, 1), "sm_90a"),
            key(&base, (13, 0), "sm_100a"),
        ];
        for (i, a) in keys.iter().enumerate() {
            assert!(keys[i + 1..].iter().all(|b| a != b), "key {i} is not its own");
        }
        assert_eq!(keys[0], key(&base.clone(), (13, 0), "sm_90a"));
    }

    #[test]
    fn damaged_entries_are_not_used() {
        let entry = encode(b"machine code");
        assert_eq!(decode(&entry).as_deref(), Some(&b"machine code"[..]));
        let mut flipped = entry.clone();
        *flipped.last_mut().unwrap() ^= 1;
        assert_eq!(decode(&flipped), None);
        assert_eq!(decode(&entry[..entry.len() - 1]), None);
        assert_eq!(decode(b"SGKERN01"), None);
        assert_eq!(decode(b""), None);
    }
}
