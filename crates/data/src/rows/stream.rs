//! The bytes of a file, decompressed according to its extension, and as UTF-8 where they are UTF-16.
//!
//! Knows compression formats, not contents.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use super::format::Packing;
use super::format::format_of;
use super::utf16;
use crate::error::DataError;

/// Bytes that are read at once.
const BLOCK: usize = 1 << 18;

/// A file's content as it is read: damage after its first bytes shows when it is reached.
pub(super) fn open(path: &Path) -> Result<Box<dyn BufRead + Send>, DataError> {
    let file = File::open(path).map_err(|e| DataError::io("open", path, e))?;
    let content: Box<dyn BufRead + Send> = match format_of(path).and_then(|(_, packing)| packing) {
        None => Box::new(BufReader::with_capacity(BLOCK, file)),
        Some(Packing::Gzip) => Box::new(BufReader::with_capacity(BLOCK, flate2::read::MultiGzDecoder::new(file))),
        Some(Packing::Zstd) => {
            let decoder = zstd::Decoder::new(file).map_err(|e| DataError::io("unpack", path, e))?;
            Box::new(BufReader::with_capacity(BLOCK, decoder))
        }
    };
    utf16::decoded(content).map_err(|e| DataError::io("read", path, e))
}

/// The whole content; `None`: it is larger.
pub(super) fn read(path: &Path, most: u64) -> Result<Option<Vec<u8>>, DataError> {
    let mut bytes = Vec::new();
    let reader = open(path)?;
    reader.take(most.saturating_add(1)).read_to_end(&mut bytes).map_err(|e| DataError::io("read", path, e))?;
    Ok(Some(bytes).filter(|bytes| bytes.len() as u64 <= most))
}
