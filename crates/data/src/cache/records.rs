//! Values of many documents that were computed from rows and weights, kept for later runs in one file that may be larger
//! than memory, next to the encoded rows:
//!
//! ```text
//! FOLDER/KEY.values       the records, one after another; of each its name, place, size and digest; their number; the
//!                         digest of the key and of what follows the records
//! ```
//!
//! A file appears by renaming, whole or not at all. One that is damaged, or that others can write, is not read; a record
//! is compared with its digest when it is read.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::RowCache;
use super::files::{create_temporary, private};
use crate::in_making::InMaking;

/// The name of a record: a digest of what its values are of.
pub type Name = [u8; 32];

/// Bytes of an entry of the list: name, place, size, digest.
const ENTRY: usize = 32 + 8 + 8 + 32;

/// Bytes after the list: its number of entries, and the digest of the key and the list.
const END: usize = 8 + 32;

/// Records that are being written.
pub struct RecordWriter {
    file: BufWriter<File>,
    temporary: PathBuf,
    path: PathBuf,
    key: String,
    list: Vec<u8>,
    end: u64,
    is_kept: bool,
    _in_making: InMaking,
}

/// Records that are read one at a time.
pub struct Records {
    file: File,
    places: HashMap<Name, (u64, usize, [u8; 32])>,
}

impl RowCache {
    /// Returns the records that were kept under a key, if there are any and their list is whole.
    pub fn records(&self, key: &str) -> Option<Records> {
        let path = self.values_path(key);
        let records = Records::open(options::cache::open_trusted(&path)?, key)?;
        super::values::mark_as_used(&path);
        Some(records)
    }

    /// Begins to keep records under a key. Errors: the folder cannot be written.
    pub fn keep_records(&self, key: &str) -> io::Result<RecordWriter> {
        private().recursive(true).create(self.folder())?;
        self.clear_unused();
        let path = self.values_path(key);
        let (temporary, file) = create_temporary(&path)?;
        let in_making = InMaking::new(&temporary);
        Ok(RecordWriter {
            file: BufWriter::new(file),
            temporary,
            path,
            key: key.to_owned(),
            list: Vec::new(),
            end: 0,
            is_kept: false,
            _in_making: in_making,
        })
    }
}

impl RecordWriter {
    /// Adds the values of a document. Errors: the file cannot be written.
    pub fn add(&mut self, name: &Name, content: &[u8]) -> io::Result<()> {
        self.file.write_all(content)?;
        self.list.extend_from_slice(name);
        self.list.extend_from_slice(&self.end.to_le_bytes());
        self.list.extend_from_slice(&(content.len() as u64).to_le_bytes());
        self.list.extend_from_slice(blake3::hash(content).as_bytes());
        self.end += content.len() as u64;
        Ok(())
    }

    /// Gives the file its name, and returns its records.
    pub fn finish(mut self) -> io::Result<Records> {
        self.file.write_all(&self.list)?;
        self.file.write_all(&((self.list.len() / ENTRY) as u64).to_le_bytes())?;
        self.file.write_all(&digest(&self.key, &self.list))?;
        self.file.flush()?;
        self.file.get_ref().sync_data()?;
        fs::rename(&self.temporary, &self.path)?;
        self.is_kept = true;
        let opened = File::open(&self.path)?;
        Records::open(opened, &self.key).ok_or_else(|| io::Error::other("the file is not what was written"))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for RecordWriter {
    fn drop(&mut self) {
        if !self.is_kept {
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

impl Records {
    fn open(file: File, key: &str) -> Option<Records> {
        let size = file.metadata().ok()?.len();
        let mut end = [0; END];
        file.read_exact_at(&mut end, size.checked_sub(END as u64)?).ok()?;
        let count = u64::from_le_bytes(end[..8].try_into().expect("eight bytes"));
        let length = count.checked_mul(ENTRY as u64)?;
        let begin = size.checked_sub(END as u64)?.checked_sub(length)?;
        let mut list = vec![0; usize::try_from(length).ok()?];
        file.read_exact_at(&mut list, begin).ok()?;
        if end[8..] != digest(key, &list) {
            return None;
        }
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        let entry = |of: &[u8]| {
            let [name, digest] = [&of[..32], &of[48..]].map(|bytes| bytes.try_into().expect("a digest"));
            (name, (number(&of[32..40]), number(&of[40..48]) as usize, digest))
        };
        let places: HashMap<_, _> = list.chunks_exact(ENTRY).map(entry).collect();
        let ends = |(at, size, _): &(u64, usize, _)| at.checked_add(*size as u64).is_some_and(|end| end <= begin);
        places.values().all(ends).then_some(Records { file, places })
    }

    /// Returns a record; none if it was not written. Errors: it cannot be read, or is not what was written.
    pub fn get(&self, name: &Name) -> io::Result<Option<Vec<u8>>> {
        let Some((at, size, digest)) = self.places.get(name) else { return Ok(None) };
        let mut content = vec![0; *size];
        self.file.read_exact_at(&mut content, *at)?;
        match blake3::hash(&content).as_bytes() == digest {
            true => Ok(Some(content)),
            false => Err(io::Error::new(io::ErrorKind::InvalidData, "the content is not what was written")),
        }
    }
}

fn digest(key: &str, list: &[u8]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"records\n").update(key.as_bytes()).update(b"\n").update(list);
    *hasher.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_under_their_key_while_they_are_whole() {
        let place = tempfile::tempdir().unwrap();
        let cache = RowCache::new(place.path().join("rows"));
        assert!(cache.records("a").is_none());
        let mut writer = cache.keep_records("a").unwrap();
        writer.add(&[1; 32], b"first").unwrap();
        writer.add(&[2; 32], b"").unwrap();
        assert!(cache.records("a").is_none(), "not before it is whole");
        writer.finish().unwrap();
        let records = cache.records("a").unwrap();
        assert_eq!(records.get(&[1; 32]).unwrap().as_deref(), Some(&b"first"[..]));
        assert_eq!(records.get(&[2; 32]).unwrap().as_deref(), Some(&b""[..]));
        assert_eq!(records.get(&[3; 32]).unwrap(), None);
        assert!(cache.values("a").is_none(), "not a file of another form");
        assert!(cache.records("b").is_none());

        drop(cache.keep_records("b").unwrap());
        assert_eq!(fs::read_dir(cache.folder()).unwrap().count(), 1, "no temporary file stays");

        // A process of a container has the number of the one before it, which was killed.
        for number in 0..100 {
            let left = cache.values_path("c").with_extension(format!("{}-{number}", std::process::id()));
            fs::write(left, "left").unwrap();
        }
        cache.keep_records("c").unwrap().finish().unwrap();
        cache.keep_values("c", b"other").unwrap();
        let path = cache.values_path("a");
        let mut bytes = fs::read(&path).unwrap();
        bytes[0] ^= 1;
        fs::write(&path, &bytes).unwrap();
        assert!(cache.records("a").unwrap().get(&[1; 32]).is_err(), "a record that was changed");
        bytes[10] ^= 1;
        fs::write(&path, &bytes).unwrap();
        assert!(cache.records("a").is_none(), "a list that was changed");
        fs::write(&path, b"short").unwrap();
        assert!(cache.records("a").is_none());
        fs::write(&path, [0xff; 100]).unwrap();
        assert!(cache.records("a").is_none(), "absurd numbers");
    }
}
