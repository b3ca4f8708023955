//! The log of a run: one JSON object on a line, appended and flushed as it happens. Bars, reports
//! and services read this stream.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{Result, TrainError};

/// An open log.
pub struct Log {
    path: PathBuf,
    file: File,
}

impl Log {
    /// Opens for appending; folders are made.
    pub fn open(path: &Path) -> Result<Log> {
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(|e| TrainError::io("create", parent, e))?;
        }
        let file = OpenOptions::new().create(true).append(true).open(path);
        let file = file.map_err(|e| TrainError::io("open", path, e))?;
        Ok(Log { path: path.to_owned(), file })
    }

    pub fn write(&mut self, event: &Value) -> Result<()> {
        let line = format!("{event}\n");
        self.file.write_all(line.as_bytes()).map_err(|e| TrainError::io("write", &self.path, e))
    }
}
