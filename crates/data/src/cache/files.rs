//! Names and files of the cache.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

pub(super) const ENTRY: &str = "entry";

pub(super) const VERIFIED: &str = "verified";

pub(super) const IMAGES: &str = "images";

pub(super) const PARTIAL: &str = "partial";

/// Makes folders for this user alone: what lies in them is trained on.
pub(super) fn private() -> DirBuilder {
    let mut builder = DirBuilder::new();
    builder.mode(0o700);
    builder
}

/// Creates a file next to another, for its content until it is whole. A name that a process with the number of this one has
/// left, as processes of containers do, is passed over.
pub(super) fn create_temporary(path: &Path) -> io::Result<(PathBuf, File)> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    loop {
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let temporary = path.with_extension(format!("{}-{number}", std::process::id()));
        match options::cache::create_new(&temporary) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => return created.map(|file| (temporary, file)),
        }
    }
}

/// Writes a file next to its place and renames it, so that readers see the old one or the new one.
pub(super) fn replace(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let (temporary, mut file) = create_temporary(path)?;
    let renamed = write(&mut file).and_then(|()| fs::rename(&temporary, path));
    if renamed.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    renamed
}

/// The ending of the files' names.
pub(super) const ENDING: &str = "values";
