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
            Ok(file) => {
                // A process that clears up knows by it that the file is being written.
                let _ = file.try_lock();
                return Ok((temporary, file));
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}

/// Removes what processes that were killed left of a file. One that is being written is locked and stays; so does an empty
/// one, which may be about to be locked.
pub(crate) fn clear_abandoned(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().expect("a file to write has a name").to_string_lossy();
    let begin = format!(".{name}.");
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let middle = name.to_str().and_then(|name| name.strip_prefix(&begin)?.strip_suffix(".tmp"));
        let is_ours = middle.and_then(|of| of.split_once('-')).is_some_and(|(a, b)| number(a) && number(b));
        let data = entry.path().symlink_metadata();
        if is_ours && data.is_ok_and(|data| data.is_file() && data.len() > 0) {
            let file = File::open(entry.path())?;
            if file.try_lock().is_ok() {
                fs::remove_file(entry.path())?;
            }
        }
    }
    Ok(())
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
    fn what_a_killed_process_left_is_removed_and_nothing_else() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("model.gguf");
        let (written, mut file) = create_beside(&path).unwrap();
        io::Write::write_all(&mut file, b"half").unwrap();
        let at = |name: &str| place.path().join(name);
        let kept = [".model.gguf.7-1.tmp.mine", ".model.gguf.x-1.tmp", ".other.gguf.7-1.tmp", ".model.gguf.8-1.tmp"];
        for name in kept.iter().chain(&[".model.gguf.7-1.tmp"]) {
            fs::write(at(name), if *name == kept[3] { "" } else { "half" }).unwrap();
        }
        std::os::unix::fs::symlink(at(kept[0]), at(".model.gguf.9-1.tmp")).unwrap();
        clear_abandoned(&path).unwrap();
        assert!(!at(".model.gguf.7-1.tmp").exists() && written.exists() && at(".model.gguf.9-1.tmp").exists());
        assert!(kept.iter().all(|name| at(name).exists()));
        drop(file);
        clear_abandoned(&path).unwrap();
        assert!(!written.exists());
    }

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
