//! Compiled kernels on disk, keyed by everything that affects compilation.
//!
//! Knows kernels and keys. A damaged entry is recompiled; two processes that write the same entry write the same bytes.

use crate::disk_cache::{DiskCache, digest};
use crate::error::Result;
use crate::nvrtc::{Compiler, KernelSource, standard_options};
use crate::vendor::Vendor;

/// A cache of the compiler's results.
pub struct KernelCache {
    cache: DiskCache,
}

/// Machine code and whether it had to be compiled now.
pub struct Fetched {
    pub code: Vec<u8>,
    pub compiled: bool,
}

impl KernelCache {
    pub fn new(cache: DiskCache) -> KernelCache {
        KernelCache { cache }
    }

    /// Returns the machine code of `source`, from disk or from the compiler.
    pub fn fetch(&self, compiler: &Compiler, source: &KernelSource, architecture: &str) -> Result<Fetched> {
        let name = format!("{}.cubin", key(source, compiler.version(), architecture));
        if let Some(code) = self.cache.read(&name) {
            return Ok(Fetched { code, compiled: false });
        }
        let code = compiler.compile(source, architecture)?.code;
        self.cache.write(&name, &code);
        Ok(Fetched { code, compiled: true })
    }
}

/// Returns the name of an entry: 64 hexadecimal digits.
pub fn key(source: &KernelSource, compiler_version: (u32, u32), architecture: &str) -> String {
    let count = (source.headers.len() as u64).to_le_bytes();
    let standard = standard_options(architecture);
    let version = format!("{}.{}", compiler_version.0, compiler_version.1);
    let mut parts = vec![source.name.as_bytes(), source.text.as_bytes(), &count];
    let vendor = if architecture.starts_with("gfx") { Vendor::Amd } else { Vendor::Nvidia };
    parts.extend(source.all_headers(vendor).flat_map(|(name, text)| [name.as_bytes(), text.as_bytes()]));
    parts.extend(standard.iter().chain(source.options).map(|option| option.as_bytes()));
    parts.push(version.as_bytes());
    digest(&parts)
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
            key(&base, (13, 0), "gfx942"),
        ];
        for (i, a) in keys.iter().enumerate() {
            assert!(keys[i + 1..].iter().all(|b| a != b), "key {i} is not its own");
        }
        assert_eq!(keys[0], key(&base.clone(), (13, 0), "sm_90a"));
    }
}
