//! Caches of the user: where they are, and whether their contents can be trusted. Contents are executed (kernels) or
//! trained on (rows), so they must belong to this user or to the system's owner.
//!
//! Knows environment, owners and modes; not what any cache holds.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::process::geteuid;

/// The permission bits of a group and of others to write.
const OTHERS_WRITE: u32 = 0o022;

/// Returns `$XDG_CACHE_HOME/surogate/NAME`, else `~/.cache/surogate/NAME`. Paths that are empty or relative count as
/// not set: they would mean the working directory. The error says why there is no such place.
pub fn folder_of_user(name: &str) -> Result<PathBuf, String> {
    chosen(std::env::var_os("XDG_CACHE_HOME").as_deref(), std::env::var_os("HOME").as_deref(), name)
}

fn chosen(cache: Option<&OsStr>, home: Option<&OsStr>, name: &str) -> Result<PathBuf, String> {
    let absolute = |value: Option<&OsStr>| value.map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute(cache).or_else(|| Some(absolute(home)?.join(".cache")));
    let base = base.ok_or("neither XDG_CACHE_HOME nor HOME names a folder in full")?;
    Ok(base.join("surogate").join(name))
}

/// Makes a cache's folder, for this user alone, or checks the one that is there: a folder of this user's or of the
/// system's owner. From one of this user's the right of others to write is taken away. The error is a sentence.
pub fn prepare(folder: &Path) -> Result<(), String> {
    let failed = |error: io::Error| format!("{}: {error}", folder.display());
    match fs::symlink_metadata(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)
        }
        Err(error) => Err(failed(error)),
        Ok(_) => checked(folder),
    }
}

/// Checks an existing folder for [`prepare`].
fn checked(folder: &Path) -> Result<(), String> {
    let failed = |error: io::Error| format!("{}: {error}", folder.display());
    if !folder.is_dir() {
        return Err(format!("{} is not a folder", folder.display()));
    }
    let opened = OpenOptions::new().read(true).custom_flags(OFlags::DIRECTORY.bits() as i32).open(folder);
    let opened = opened.map_err(failed)?;
    let data = opened.metadata().map_err(failed)?;
    if !is_ours(data.uid()) {
        return Err(format!("{} belongs to another user (number {})", folder.display(), data.uid()));
    }
    if data.mode() & OTHERS_WRITE != 0 {
        let mut rights = data.permissions();
        rights.set_mode(data.mode() & !OTHERS_WRITE);
        let taken = opened.set_permissions(rights);
        taken.map_err(|error| format!("{} can be written by other users ({error})", folder.display()))?;
    }
    Ok(())
}

/// True if a file or folder of a cache can be trusted: it belongs to this user or to the system's owner, and no one
/// else may write it.
pub fn is_trusted(data: &Metadata) -> bool {
    is_ours(data.uid()) && data.mode() & OTHERS_WRITE == 0
}

fn is_ours(owner: u32) -> bool {
    owner == 0 || owner == geteuid().as_raw()
}

/// Returns the bytes of an entry; `None` where there is no such file, or one that can not be trusted. Links are not
/// followed.
pub fn read_trusted(path: &Path) -> Option<Vec<u8>> {
    let mut file = open_trusted(path)?;
    let mut bytes = Vec::with_capacity(usize::try_from(file.metadata().ok()?.len()).ok()?);
    file.read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// Opens a file of the cache, if it is one that only this user can have written.
pub fn open_trusted(path: &Path) -> Option<File> {
    // Without O_NONBLOCK a pipe of that name would block whoever opens it.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    let data = file.metadata().ok()?;
    (data.is_file() && is_trusted(&data)).then_some(file)
}

/// Creates a file for this user alone that was not there before: a link in its place is an error.
pub fn create_new(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_full_paths_name_a_cache() {
        let chosen = |cache: Option<&str>, home: Option<&str>| {
            super::chosen(cache.map(OsStr::new), home.map(OsStr::new), "cuda").map(|path| path.display().to_string())
        };
        assert_eq!(chosen(Some("/c"), Some("/h")).unwrap(), "/c/surogate/cuda");
        for cache in [None, Some(""), Some("."), Some("relative")] {
            assert_eq!(chosen(cache, Some("/h")).unwrap(), "/h/.cache/surogate/cuda");
            for home in [None, Some(""), Some("home")] {
                assert!(chosen(cache, home).unwrap_err().contains("HOME"), "{cache:?} {home:?}");
            }
        }
    }

    #[test]
    fn a_folder_is_made_for_its_user_alone() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("surogate/cuda");
        prepare(&folder).unwrap();
        for made in [&folder, &place.path().join("surogate")] {
            assert_eq!(fs::metadata(made).unwrap().mode() & 0o777, 0o700);
        }
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
        prepare(&folder).unwrap();
        assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o755);
        fs::write(place.path().join("file"), "").unwrap();
        assert!(prepare(&place.path().join("file")).unwrap_err().ends_with("is not a folder"));
        assert!(prepare(&place.path().join("file/below")).is_err());
    }

    #[test]
    fn a_folder_of_others_is_refused() {
        let place = tempfile::tempdir().unwrap();
        // Only the system's owner can give a folder away.
        if std::os::unix::fs::chown(place.path(), Some(12345), None).is_err() {
            return assert!(!geteuid().is_root());
        }
        assert!(prepare(place.path()).unwrap_err().contains("belongs to another user (number 12345)"));
        assert!(!is_trusted(&fs::metadata(place.path()).unwrap()));
    }

    #[test]
    fn only_files_that_nobody_else_can_write_are_read() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("entry");
        assert_eq!(read_trusted(&path), None);
        io::Write::write_all(&mut create_new(&path).unwrap(), b"code").unwrap();
        assert_eq!(create_new(&path).unwrap_err().kind(), ErrorKind::AlreadyExists);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(read_trusted(&path).as_deref(), Some(&b"code"[..]));
        std::os::unix::fs::symlink(&path, place.path().join("link")).unwrap();
        assert_eq!(read_trusted(&place.path().join("link")), None);
        assert_eq!(read_trusted(place.path()), None);
        for (mode, readable) in [(0o644, true), (0o664, false), (0o646, false)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(read_trusted(&path).is_some(), readable, "{mode:o}");
        }
        if std::os::unix::fs::chown(&path, Some(12345), None).is_ok() {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
            assert_eq!(read_trusted(&path), None);
        }
    }
}
