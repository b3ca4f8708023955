//! The room on a disk.

use std::path::Path;

use rustix::fs::statvfs;

use crate::error::{Result, TrainError};
use crate::words::size;

/// Errors: the disk of a folder has less room than a result that will be written there takes.
pub fn require_room(folder: &Path, bytes: usize) -> Result<()> {
    room(folder, bytes, free(folder))
}

fn room(folder: &Path, bytes: usize, free: Option<usize>) -> Result<()> {
    match free.filter(|free| *free < bytes) {
        None => Ok(()),
        Some(free) => Err(TrainError::Failed(format!(
            "not enough space in {}: the result takes {}, {} are free\n  hint: free some space, or choose another `--output`",
            folder.display(),
            size(bytes),
            size(free)
        ))),
    }
}

/// Bytes that are free for this user; none where the system does not say.
pub(crate) fn free(folder: &Path) -> Option<usize> {
    let of = statvfs(folder).ok()?;
    // A file system without blocks, such as some that are mounted from elsewhere, counts nothing.
    (of.f_blocks > 0).then(|| usize::try_from(of.f_bavail.saturating_mul(of.f_frsize)).unwrap_or(usize::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_needs_room() {
        let place = Path::new("/place");
        assert!(room(place, 1 << 30, Some(1 << 30)).is_ok() && room(place, 1 << 30, None).is_ok());
        let text = room(place, 2 << 30, Some(1 << 30)).unwrap_err().to_string();
        assert!(text.starts_with("not enough space in /place: the result takes 2.00 GiB, 1.00 GiB are free"), "{text}");
    }

    #[test]
    fn this_machine_has_a_disk() {
        assert!(free(&std::env::temp_dir()).is_some_and(|bytes| bytes > 0));
    }
}
