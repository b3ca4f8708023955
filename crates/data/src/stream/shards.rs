//! Files of sets, handed out one by one. Those that are here stay where they are; others are fetched by an
//! implementation elsewhere.

use std::path::PathBuf;

use crate::error::{DataError, Stop};

/// A file of a streamed set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamFile {
    /// Path or address; its ending says the format.
    pub name: String,
    pub bytes: u64,
    /// A text that changes with the content, where the source has one.
    pub version: String,
}

/// Numbers of a set and of one of its files, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ShardId {
    pub set: usize,
    pub file: usize,
}

/// Hands out the files of sets, one by one, and takes them back.
pub trait Shards: Send {
    /// Returns the path of a file, once it is there. `next` are the files that are requested after it, in their order: they may
    /// be fetched meanwhile. Errors: the file cannot be had, or `stop` says so.
    fn get(&mut self, file: ShardId, next: &[ShardId], stop: Stop<'_>) -> Result<PathBuf, DataError>;

    /// Takes back a file that is read to its end, or given up.
    fn release(&mut self, file: ShardId);
}

/// Files on this machine, which stay where they are.
#[derive(Clone, Debug)]
pub struct LocalShards {
    /// The files of each set.
    pub files: Vec<Vec<PathBuf>>,
}

impl Shards for LocalShards {
    fn get(&mut self, file: ShardId, _: &[ShardId], _: Stop<'_>) -> Result<PathBuf, DataError> {
        Ok(self.files[file.set][file.file].clone())
    }

    fn release(&mut self, _: ShardId) {}
}
