//! Digests of files, which are remembered under their stamps. Knows no format.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use super::files::replace;
use crate::file_stamp::{Stamp, is_settled};

/// Files up to this size are read each time.
const SMALL: u64 = 1 << 20;

/// Bytes that are read at once.
const BLOCK: usize = 1 << 20;

/// BLAKE3 of a file's content.
pub(crate) fn digest_of_file(path: &Path) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    let mut file = File::open(path)?;
    let mut block = vec![0; BLOCK];
    loop {
        match file.read(&mut block)? {
            0 => return Ok(hasher.finalize().to_hex().to_string()),
            n => hasher.update(&block[..n]),
        };
    }
}

/// Digests of large files, remembered under their stamps.
#[derive(Clone, Debug)]
pub(crate) struct KnownFiles {
    folder: PathBuf,
}

impl KnownFiles {
    pub(crate) fn new(folder: PathBuf) -> Self {
        KnownFiles { folder }
    }

    /// The digest of a file's content; of a large file that has not changed since, without reading it.
    pub(crate) fn digest(&self, path: &Path) -> io::Result<String> {
        let path = fs::canonicalize(path)?;
        if fs::metadata(&path)?.len() <= SMALL {
            return digest_of_file(&path);
        }
        let name = blake3::hash(path.as_os_str().as_encoded_bytes()).to_hex().to_string();
        let note = self.folder.join(name);
        let before = Stamp::of(&path)?;
        if let Ok(text) = fs::read_to_string(&note)
            && let Some((stamp, digest)) = text.trim_end().split_once('\n')
            && stamp == before.text()
            && digest.len() == blake3::OUT_LEN * 2
        {
            return Ok(digest.to_owned());
        }
        let digest = digest_of_file(&path)?;
        if is_settled(&path) && Stamp::of(&path)? == before {
            // Not remembering costs another reading, nothing else.
            let _ = fs::create_dir_all(&self.folder)
                .and_then(|()| replace(&note, |file| writeln!(file, "{}\n{digest}", before.text())));
        }
        Ok(digest)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;

    /// Waits until the stamp of a file is trusted.
    fn age(path: &Path) {
        let start = SystemTime::now();
        while !is_settled(path) {
            assert!(start.elapsed().unwrap() < Duration::from_secs(10), "the clock stands still");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    #[test]
    fn a_changed_file_is_read_again_whatever_its_times_say() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("big");
        let mut content = vec![b'x'; SMALL as usize + 1];
        fs::write(&path, &content).unwrap();
        age(&path);
        let known = KnownFiles::new(place.path().join("files"));
        let first = known.digest(&path).unwrap();
        assert_eq!(first, digest_of_file(&path).unwrap());
        let notes = || fs::read_dir(place.path().join("files")).map_or(0, Iterator::count);
        assert_eq!(notes(), 1);

        // What is remembered is what answers.
        let note = fs::read_dir(place.path().join("files")).unwrap().next().unwrap().unwrap().path();
        let text = fs::read_to_string(&note).unwrap();
        fs::write(&note, text.replace(&first, &"0".repeat(64))).unwrap();
        assert_eq!(known.digest(&path).unwrap(), "0".repeat(64));

        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        content[7] = b'y';
        fs::write(&path, &content).unwrap();
        File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
        assert_eq!(known.digest(&path).unwrap(), digest_of_file(&path).unwrap());
        assert_ne!(known.digest(&path).unwrap(), first);
    }
}
