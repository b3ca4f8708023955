//! The log of a run: one JSON object per line, appended and flushed immediately. Progress bars, reports and trackers
//! read this stream.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde_json::Value;

use crate::error::{Result, TrainError};

/// Bytes of a log's first line, at most: it holds options, manifest and plan.
const LONGEST_OPENING: u64 = 64 << 20;

/// A log file that is open for writing.
pub struct Log {
    path: PathBuf,
    file: File,
    /// It was not there before.
    is_new: bool,
}

impl Log {
    /// Opens for appending; folders are made. A last line that a killed process did not finish is taken away, from a
    /// log only: any other file that is there already is an error. `is_own`: the run's manifest names it.
    pub fn open(path: &Path, is_own: bool) -> Result<Log> {
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(|e| TrainError::io("create", parent, e))?;
        }
        let failed = |e| TrainError::io("open", path, e);
        let made = OpenOptions::new().create_new(true).read(true).append(true).open(path);
        let (mut file, is_new) = match made {
            Ok(file) => (file, true),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                check(path, is_own).map_err(TrainError::Usage)?;
                (OpenOptions::new().read(true).append(true).open(path).map_err(failed)?, false)
            }
            Err(error) => return Err(failed(error)),
        };
        if flock(&file, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK) {
            return Err(TrainError::Usage(format!("{} is being written by another process", path.display())));
        }
        if file.metadata().map_err(failed)?.is_file() {
            drop_unfinished(&mut file).map_err(|e| TrainError::io("read", path, e))?;
        }
        Ok(Log { path: path.to_owned(), file, is_new })
    }

    /// Takes back a log that was made and says nothing: what it would have described did not begin.
    pub fn withdraw(self) {
        if self.is_new && self.file.metadata().is_ok_and(|data| data.len() == 0) {
            let _ = std::fs::remove_file(&self.path);
        }
    }

    /// Writes an event with the time at which it happened, as RFC 3339 says it, and gives it with that.
    pub fn write(&mut self, mut event: Value) -> Result<Value> {
        event["time"] = jiff::Timestamp::now().to_string().into();
        let line = format!("{}\n", options::visible(&event.to_string()));
        self.file.write_all(line.as_bytes()).map_err(|e| TrainError::io("write", &self.path, e))?;
        Ok(event)
    }
}

/// Checks that a log may be written to a path: nothing is there, or an empty file, or a log. Errors: a sentence.
pub fn check(path: &Path, is_own: bool) -> std::result::Result<(), String> {
    let refused = |what: &str| {
        let text = "expected nothing, an empty file, or a log: nothing else is written to";
        Err(format!("`{}` {what}, {text}", path.display()))
    };
    let failed = |e: io::Error| format!("`{}` cannot be read: {e}", path.display());
    match std::fs::symlink_metadata(path) {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(()),
        Err(error) => return Err(failed(error)),
        Ok(_) => {}
    }
    let Ok(data) = std::fs::metadata(path) else { return refused("is a link to nothing") };
    if data.is_dir() {
        return refused("is a folder");
    }
    // Whoever names /dev/null wants no log.
    if !data.is_file() && path != Path::new("/dev/null") {
        return refused("is no regular file");
    }
    if data.len() == 0 {
        return Ok(());
    }
    let mut line = Vec::new();
    let file = File::open(path).map_err(failed)?;
    BufReader::new(file).take(LONGEST_OPENING).read_until(b'\n', &mut line).map_err(failed)?;
    // The first line of a process that was killed while it wrote it.
    let is_torn = is_own && line.last() != Some(&b'\n') && is_beginning(&line);
    if is_torn || is_opening(&line) { Ok(()) } else { refused("is a file that holds something else") }
}

/// True for the first line of a log.
fn is_opening(line: &[u8]) -> bool {
    let event: Value = serde_json::from_slice(line).unwrap_or_default();
    matches!(event["event"].as_str(), Some("start" | "resume")) && event["time"].is_string()
}

/// Returns true if bytes are the beginning of a log, in which the kind of the event is first.
fn is_beginning(line: &[u8]) -> bool {
    let kinds = [&b"{\"event\":\"start\","[..], b"{\"event\":\"resume\","];
    kinds.iter().any(|kind| line.starts_with(kind) || kind.starts_with(line))
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

    const OPENING: &str = "{\"event\":\"start\",\"time\":\"2026-01-01T00:00:00Z\"}\n";

    #[test]
    fn a_line_that_was_not_finished_is_taken_away() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("log");
        let long = format!("{OPENING}{{{}", "x".repeat(5000));
        let torn = format!("{OPENING}{{\"b");
        for (before, kept) in [("", ""), (OPENING, OPENING), (&torn, OPENING), (&long, OPENING), ("{", "")] {
            std::fs::write(&path, before).unwrap();
            Log::open(&path, true).unwrap().write(serde_json::json!({})).unwrap();
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(text.starts_with(&format!("{kept}{{\"time\":")) && text.ends_with("}\n"), "{text}");
        }
    }

    #[test]
    fn what_is_no_log_is_left_alone() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("thesis.tex");
        let torn = "{\"event\":\"start\"";
        for text in ["\\chapter{One}\nno end of line", "{}\n", "{\"event\":\"start\"}\n", "\n", torn] {
            std::fs::write(&path, text).unwrap();
            let error = Log::open(&path, false).err().expect(text).to_string();
            assert!(error.contains("holds something else, expected nothing, an empty file, or a log"), "{error}");
            assert!(text == torn || Log::open(&path, true).is_err(), "a manifest may name what was replaced since");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        for text in ["{\"precious\": true}", "{\"event\": 1}", "{\"events\"", "{{"] {
            std::fs::write(&path, text).unwrap();
            assert!(Log::open(&path, true).is_err(), "{text}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        std::os::unix::fs::symlink(place.path().join("elsewhere"), place.path().join("link")).unwrap();
        std::fs::create_dir(place.path().join("folder")).unwrap();
        for (name, what) in [("link", "is a link to nothing"), ("folder", "is a folder"), ("thesis.tex/log", "")] {
            let error = Log::open(&place.path().join(name), false).err().expect(name).to_string();
            assert!(error.contains(what), "{error}");
        }
        assert!(!place.path().join("elsewhere").exists());
        Log::open(Path::new("/dev/null"), false).unwrap().write(serde_json::json!({})).unwrap();
    }

    #[test]
    fn only_a_log_that_was_made_is_withdrawn() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("log");
        std::fs::write(&path, "").unwrap();
        Log::open(&path, false).unwrap().withdraw();
        assert!(path.exists());
        std::fs::remove_file(&path).unwrap();
        let log = Log::open(&path, false).unwrap();
        let error = Log::open(&path, false).err().unwrap().to_string();
        assert!(error.contains("is being written by another process"), "{error}");
        log.withdraw();
        assert!(!path.exists());
    }
}
