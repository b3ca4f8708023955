//! Creates files under a temporary name next to their final path. Never writes to an existing file.
//!
//! Knows file names, not contents.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// A hidden file next to `path` that was not there: another one of that name, or a link, is left alone.
pub(crate) fn create_beside(path: &Path) -> io::Result<(PathBuf, File)> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let name = path.file_name().expect("a file to write has a name").to_string_lossy();
    loop {
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let temporary = path.with_file_name(format!(".{name}.{}-{number}.tmp", std::process::id()));
        match File::create_new(&temporary) {
            Ok(file) => return Ok((temporary, file)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}

/// Gives a file its name, unless something has come there.
pub(crate) fn name_new(temporary: &Path, path: &Path) -> io::Result<()> {
    match fs::hard_link(temporary, path) {
        Ok(()) => fs::remove_file(temporary),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(error),
        // A file system that has no second names.
        Err(_) if fs::symlink_metadata(path).is_err() => fs::rename(temporary, path),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_is_there_is_written_to() {
        let place = tempfile::tempdir().unwrap();
        let (path, mine) = (place.path().join("model.gguf"), place.path().join("mine"));
        fs::write(&mine, "important").unwrap();
        let name = |number: u64| place.path().join(format!(".model.gguf.{}-{number}.tmp", std::process::id()));
        (0..64).for_each(|number| std::os::unix::fs::symlink(&mine, name(number)).unwrap());
        let (temporary, mut file) = create_beside(&path).unwrap();
        io::Write::write_all(&mut file, b"new").unwrap();
        assert!(fs::symlink_metadata(&temporary).unwrap().is_file());
        assert_eq!(fs::read_to_string(&mine).unwrap(), "important");
        fs::write(&path, "came meanwhile").unwrap();
        assert_eq!(name_new(&temporary, &path).unwrap_err().kind(), ErrorKind::AlreadyExists);
        assert_eq!(fs::read_to_string(&path).unwrap(), "came meanwhile");
        fs::remove_file(&path).unwrap();
        name_new(&temporary, &path).unwrap();
        assert!(fs::read_to_string(&path).unwrap() == "new" && !temporary.exists());
    }
}
