//! Detects whether a file is unchanged since it was last read, by size, timestamps and inode, without reading it.
//!
//! The change time (ctime) is included, which no program can set back. Knows no format.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A file that changed this recently may change again without another time.
const SETTLED: Duration = Duration::from_secs(2);

/// Device, number, size and times of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stamp(String);

impl Stamp {
    pub(crate) fn of(path: &Path) -> io::Result<Stamp> {
        let of = fs::metadata(path)?;
        let (mtime, ctime) = ((of.mtime(), of.mtime_nsec()), (of.ctime(), of.ctime_nsec()));
        let text = format!("{} {} {} {mtime:?} {ctime:?}", of.dev(), of.ino(), of.size());
        Ok(Stamp(text))
    }

    pub(crate) fn text(&self) -> &str {
        &self.0
    }
}

/// True if a file's last change is old enough that a further change gets another time stamp.
pub(crate) fn is_settled(path: &Path) -> bool {
    let changed = fs::metadata(path).map(|of| UNIX_EPOCH + Duration::from_secs(of.ctime().max(0) as u64));
    let age = changed.ok().and_then(|changed| SystemTime::now().duration_since(changed).ok());
    age.is_some_and(|age| age > SETTLED)
}
