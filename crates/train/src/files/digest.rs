//! Digests by which a later process recognizes files: BLAKE3 in hexadecimal.
//!
//! Knows bytes and names; not what a file means, with one exception: a folder with a list of its own files' digests is
//! identified by that list.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rayon::prelude::*;

/// A file that names the digests of those next to it.
pub const LIST: &str = "state.json";

/// Bytes that are read, and then hashed, at once by all threads; and by one of them.
const BLOCK: usize = 16 << 20;
const PART: usize = 1 << 20;

/// The digest of bytes in memory.
pub fn of_bytes(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

/// The digest of a file's content.
pub fn of_file(path: &Path) -> io::Result<String> {
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; length.min(BLOCK as u64) as usize];
    for begin in (0..length).step_by(BLOCK) {
        let block = &mut buffer[..(length - begin).min(BLOCK as u64) as usize];
        let parts = block.par_chunks_mut(PART).enumerate();
        parts.try_for_each(|(part, bytes)| file.read_exact_at(bytes, begin + (part * PART) as u64))?;
        hasher.update_rayon(block);
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// The digests of the regular files of a folder that `wanted` lets through: (name, bytes, digest), by name.
pub fn of_files(folder: &Path, wanted: impl Fn(&str) -> bool) -> io::Result<Vec<(String, u64, String)>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if fs::metadata(entry.path())?.is_file() && wanted(&name) {
            names.push(name);
        }
    }
    names.sort_unstable();
    let digest = |name: String| {
        let path = folder.join(&name);
        Ok((name, fs::metadata(&path)?.len(), of_file(&path)?))
    };
    names.into_par_iter().map(digest).collect()
}

/// The digest of a folder as a whole: names and sizes of everything in it, and contents. If there is a [`LIST`], its
/// content stands for all.
pub fn of_folder(folder: &Path) -> io::Result<String> {
    let mut text = String::new();
    let mut entries = fs::read_dir(folder)?.collect::<io::Result<Vec<_>>>()?;
    entries.sort_unstable_by_key(|entry| entry.file_name());
    for entry in &entries {
        let data = fs::symlink_metadata(entry.path())?;
        let bytes = if data.is_file() { data.len() } else { 0 };
        text += &format!("{:?} {:?} {bytes}\n", entry.file_name(), data.file_type());
    }
    let listed = entries.iter().any(|entry| entry.file_name() == LIST);
    for (name, _, digest) in of_files(folder, |name| !listed || name == LIST)? {
        text += &format!("{name} {digest}\n");
    }
    Ok(of_bytes(text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_several_blocks_has_the_digest_of_its_bytes() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("a");
        for bytes in [0, 1, PART + 1, BLOCK, BLOCK + PART + 3] {
            let content: Vec<u8> = (0..bytes).map(|i| ((i * 31) >> 3) as u8).collect();
            fs::write(&path, &content).unwrap();
            assert_eq!(of_file(&path).unwrap(), of_bytes(&content), "{bytes}");
        }
    }

    #[test]
    fn a_folder_is_known_by_names_sizes_and_contents() {
        let place = tempfile::tempdir().unwrap();
        let digest = || of_folder(place.path()).unwrap();
        fs::write(place.path().join("a"), "1").unwrap();
        let first = digest();
        assert_eq!(first, digest());
        fs::write(place.path().join("a"), "2").unwrap();
        assert_ne!(first, digest());
        fs::write(place.path().join("a"), "1").unwrap();
        assert_eq!(first, digest());
        fs::write(place.path().join("b"), "").unwrap();
        assert_ne!(first, digest());

        fs::write(place.path().join(LIST), "digests").unwrap();
        let listed = digest();
        fs::write(place.path().join("a"), "2").unwrap();
        assert_eq!(listed, digest(), "the list stands for the contents");
        fs::write(place.path().join(LIST), "others").unwrap();
        assert_ne!(listed, digest());
    }
}
