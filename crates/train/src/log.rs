//! The log of a run: one JSON object on a line, appended and flushed as it happens. Bars, reports
//! and services read this stream.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{Result, TrainError};

/// An open log.
pub struct Log {
    path: PathBuf,
    file: File,
}

impl Log {
    /// Opens for appending; folders are made. A last line that a killed process did not finish is taken away.
    pub fn open(path: &Path) -> Result<Log> {
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(|e| TrainError::io("create", parent, e))?;
        }
        let file = OpenOptions::new().create(true).read(true).append(true).open(path);
        let mut file = file.map_err(|e| TrainError::io("open", path, e))?;
        drop_unfinished(&mut file).map_err(|e| TrainError::io("read", path, e))?;
        Ok(Log { path: path.to_owned(), file })
    }

    /// Takes back a log that says nothing: what it would have told of did not begin.
    pub fn withdraw(self) {
        if self.file.metadata().is_ok_and(|data| data.len() == 0) {
            let _ = std::fs::remove_file(&self.path);
        }
    }

    /// Writes an event with the time at which it happened, as RFC 3339 says it, and gives it with that.
    pub fn write(&mut self, mut event: Value) -> Result<Value> {
        event["time"] = jiff::Timestamp::now().to_string().into();
        let line = format!("{event}\n");
        self.file.write_all(line.as_bytes()).map_err(|e| TrainError::io("write", &self.path, e))?;
        Ok(event)
    }
}

/// Cuts a file after its last line end.
fn drop_unfinished(file: &mut File) -> io::Result<()> {
    let length = file.metadata()?.len();
    let mut end = length;
    let mut block = [0; 4096];
    while end > 0 {
        let start = end.saturating_sub(block.len() as u64);
        let part = &mut block[..(end - start) as usize];
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(part)?;
        if let Some(at) = part.iter().rposition(|byte| *byte == b'\n') {
            end = start + at as u64 + 1;
            break;
        }
        end = start;
    }
    if end < length { file.set_len(end) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_was_not_finished_is_taken_away() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("log");
        let long = "x".repeat(5000);
        for (before, kept) in [("", ""), ("{\"a\":1}\n", "{\"a\":1}\n"), ("{\"a\":1}\n{\"b", "{\"a\":1}\n"), ("{", "")]
        {
            for tail in ["", &long] {
                let torn = tail.len() > 0 && !before.is_empty();
                std::fs::write(&path, if torn { format!("{before}{tail}") } else { before.to_owned() }).unwrap();
                Log::open(&path).unwrap().write(serde_json::json!({})).unwrap();
                let text = std::fs::read_to_string(&path).unwrap();
                assert!(text.starts_with(&format!("{kept}{{\"time\":")) && text.ends_with("}\n"), "{text}");
            }
        }
    }
}
