//! Cleanup of the cache: removes folders with the cache's own names that hold its own files, file by file.
//!
//! The cache folder may be any folder of the user. Anything with another name, that does not parse as an entry, is
//! reached through a link, or was put next to the cache's files stays. Knows names and formats, no rows.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::time::Duration;

use super::entry::{Entry, is_segment_name};
use super::files::{ENDING, ENTRY, IMAGES, PARTIAL, VERIFIED};

/// Entries that no run has used for so long are removed.
const KEPT: Duration = Duration::from_secs(60 * 60 * 24 * 30);

/// Unfinished values that were last written before this time are removed.
const ABANDONED: Duration = Duration::from_secs(60 * 60 * 24);

/// True for the name of a cache entry: a digest in the cache's spelling.
pub(super) fn is_entry_name(name: &str) -> bool {
    name.len() == 2 * blake3::OUT_LEN && name.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'))
}

/// True for the name of an unfinished entry of this key: `KEY.PROCESS-NUMBER.partial`.
fn is_partial_name(name: &str, key: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|c| c.is_ascii_digit());
    let inside = name.strip_prefix(key).and_then(|rest| rest.strip_prefix('.'));
    let inside = inside.and_then(|rest| rest.strip_suffix(PARTIAL)?.strip_suffix('.'));
    inside.and_then(|rest| rest.split_once('-')).is_some_and(|(process, count)| number(process) && number(count))
}

/// True for a folder that is not a link.
pub(super) fn is_folder(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|of| of.is_dir())
}

/// Removes the cache's own files of a folder, the list first, so that no process finds a part of an entry; then the
/// folder, if nothing else is in it. Errors: it is a link, a file cannot be removed, or something else is there.
pub(super) fn remove_own(place: &Path) -> io::Result<()> {
    if !is_folder(place) {
        return Err(io::Error::other(format!("{} is no folder of the cache", place.display())));
    }
    let remove = |name: &str| match fs::remove_file(place.join(name)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    };
    remove(ENTRY)?;
    for file in fs::read_dir(place)?.flatten() {
        let is_plain = file.file_type().is_ok_and(|kind| kind.is_file());
        if let Some(name) = file.file_name().to_str().filter(|name| is_plain && is_own(name)) {
            remove(name)?;
        }
    }
    fs::remove_dir(place)
}

/// Names of files inside an entry: its list, its stamps and images (also half written), its segments.
fn is_own(name: &str) -> bool {
    let half =
        |rest: &str| rest.strip_prefix('.').is_some_and(|rest| rest.bytes().all(|c| matches!(c, b'0'..=b'9' | b'-')));
    name == ENTRY
        || is_segment_name(name)
        || [VERIFIED, IMAGES]
            .iter()
            .filter_map(|list| name.strip_prefix(list))
            .any(|rest| rest.is_empty() || half(rest))
}

/// Removes what processes left of an entry that did not come to an end; only the holder of its lock may.
pub(super) fn clear_unfinished(folder: &Path, key: &str) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(|name| is_partial_name(name, key)) {
            let _ = remove_own(&entry.path());
        }
    }
}

/// Removes entries that no one has used for long and no one writes.
pub(super) fn clear_unused(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_name().to_str().is_some_and(is_entry_name) && is_unused(&path) {
            let lock = path.with_extension("lock");
            let opened = File::options().create(true).truncate(false).write(true).open(&lock);
            // Looked at again under the lock: another process may have used or replaced it meanwhile.
            if opened.is_ok_and(|file| file.try_lock().is_ok() && is_unused(&path) && remove_own(&path).is_ok()) {
                let _ = fs::remove_file(lock);
            }
        }
        let name = entry.file_name();
        let is_left = |name: &str| is_temporary_name(name) && is_older(&path, ABANDONED);
        if name.to_str().is_some_and(|name| (is_values_name(name) && is_old(&path)) || is_left(name)) {
            let _ = fs::remove_file(&path);
        }
    }
}

/// True for a file of the cache that was last used too long ago.
fn is_old(file: &Path) -> bool {
    is_older(file, KEPT)
}

/// True for a file that was last written before this time.
fn is_older(file: &Path, time: Duration) -> bool {
    let written = fs::symlink_metadata(file).ok().filter(|of| of.is_file());
    written.and_then(|of| of.modified().ok()?.elapsed().ok()).is_some_and(|age| age > time)
}

/// True for the name of values that are being written, or whose process ended meanwhile: `KEY.PROCESS-NUMBER`.
fn is_temporary_name(name: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|c| c.is_ascii_digit());
    let is_writer = |text: &str| text.split_once('-').is_some_and(|(process, count)| number(process) && number(count));
    name.rsplit_once('.').is_some_and(|(key, writer)| is_entry_name(key) && is_writer(writer))
}

/// True for the name of kept values: `KEY.values`.
fn is_values_name(name: &str) -> bool {
    name.rsplit_once('.').is_some_and(|(key, ending)| is_entry_name(key) && ending == ENDING)
}

/// True for an entry of the cache that was last used too long ago.
fn is_unused(place: &Path) -> bool {
    let list = place.join(ENTRY);
    let is_entry = || {
        let text = fs::read_to_string(&list).ok();
        let key = text.and_then(|text| Entry::of_text(&text)).map(|entry| entry.key);
        key.is_some_and(|key| place.file_name() == Some(blake3::hash(key.as_bytes()).to_hex().as_str().as_ref()))
    };
    is_folder(place) && is_old(&list) && is_entry()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_cache_are_distinguished_from_others() {
        let key = "0123456789abcdef".repeat(4);
        assert!(is_entry_name(&key));
        for other in ["", "rows", &key[1..], &key.to_uppercase(), &format!("{}.", &key[1..])] {
            assert!(!is_entry_name(other), "{other}");
        }
        assert!(is_partial_name(&format!("{key}.17-0.partial"), &key));
        for other in ["17-0", "17-0.partial.", "x-0.partial", "17-.partial", "a.17-0.partial", "mine.partial"] {
            assert!(!is_partial_name(&format!("{key}.{other}"), &key), "{other}");
        }
        assert!(is_values_name(&format!("{key}.values")) && !is_values_name(&key) && !is_values_name("mine.values"));
        assert!(is_temporary_name(&format!("{key}.17-0")));
        for other in ["17-0", &format!("{key}.17-"), &format!("{key}.17"), &format!("{key}.values"), "mine.17-0"] {
            assert!(!is_temporary_name(other), "{other}");
        }
        assert!(
            ["entry", "verified", "verified.12-3", "images", "images.12-3", "0.rows", "17.rows"]
                .into_iter()
                .all(is_own)
        );
        assert!(
            !["entry.txt", "verified.txt", "images.txt", "a.rows", "0.rows.bak", ".rows", "thesis"]
                .into_iter()
                .any(is_own)
        );
    }
}
