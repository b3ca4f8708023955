//! Encoded rows that are kept for the next run: a folder of entries, one for each dataset as some tokenizer and some
//! options encode it.
//!
//! ```text
//! FOLDER/KEY/entry        what it is, what became of the rows, digests of the segments
//! FOLDER/KEY/0.rows …     segments
//! FOLDER/KEY/images       files of images that the rows were read from, with digests and stamps
//! FOLDER/KEY/verified     stamps of the segments when their digests were last compared
//! FOLDER/KEY.lock         held by the process that writes the entry
//! FOLDER/KEY.N.partial/   an entry in the making
//! FOLDER/KEY.values       values that follow from rows and weights: all of them, or a record for each document
//! FOLDER/files/           digests of large data files, under their stamps
//! ```
//!
//! An entry appears by renaming, whole or not at all. What is damaged is removed and made again. Knows no tokenizer and
//! no template.

mod clearing;
mod entry;
mod files;
mod image_files;
mod key;
mod records;
mod stamp;
mod values;

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use self::clearing::remove_own;
use self::entry::{Entry, SegmentFile, segment_name};
use self::files::{ENTRY, PARTIAL, VERIFIED, private, replace};
pub(crate) use self::image_files::ImageFiles;
pub(crate) use self::key::Key;
pub use self::records::{RecordWriter, Records};
use self::stamp::{KnownFiles, digest_of_file};
use crate::corpus::Corpus;
use crate::dataset::DatasetSpec;
use crate::error::Stop;
use crate::file_stamp::Stamp;
use crate::prepare_options::PrepareOptions;
use crate::segment::Segment;
use crate::summary::DatasetSummary;
use crate::word_file::WordFile;

/// Between two looks at another process's lock.
const LOOK: Duration = Duration::from_millis(50);

/// A folder of encoded rows, shared by all runs that name it.
#[derive(Clone, Debug)]
pub struct RowCache {
    folder: PathBuf,
    known: KnownFiles,
}

/// The result of a lookup in the cache.
#[expect(clippy::large_enum_variant, reason = "there is one at a time")]
pub(crate) enum Lookup {
    Rows(Corpus, DatasetSummary),
    Nothing,
    /// The file of an image is another than the rows were read from.
    Changed(PathBuf),
    /// Something is wrong with what is there.
    Damaged(String),
}

impl RowCache {
    /// The folder is made at the first write.
    pub fn new(folder: PathBuf) -> Self {
        let known = KnownFiles::new(folder.join("files"));
        RowCache { folder, known }
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Errors: a file of the set cannot be read.
    pub(crate) fn key(
        &self,
        spec: &DatasetSpec,
        files: &[PathBuf],
        tokenizer: Option<&str>,
        options: &PrepareOptions,
    ) -> io::Result<Key> {
        key::key(spec, files, tokenizer, options, &self.known)
    }

    fn place(&self, key: &Key) -> PathBuf {
        self.folder.join(&key.digest)
    }

    /// Looks for an entry; needs no right to write. `clock` gives what a format reads now.
    pub(crate) fn find(&self, key: &Key, clock: &dyn Fn(&str) -> Option<String>) -> Lookup {
        let place = self.place(key);
        if fs::symlink_metadata(&place).is_err() {
            return Lookup::Nothing;
        }
        let found = open(&place, key, clock).unwrap_or_else(Lookup::Damaged);
        if let Lookup::Rows(..) = found {
            // The time of use; without the right to write, none is kept.
            let _ = File::options()
                .append(true)
                .open(place.join(ENTRY))
                .and_then(|file| file.set_modified(SystemTime::now()));
        }
        found
    }

    /// Waits until no other process writes the entry, and begins one in its place. Errors: the folder cannot be written,
    /// or the waiting was given up.
    pub(crate) fn begin(&self, key: &Key, waiting: &dyn Fn(), stop: Stop<'_>) -> io::Result<EntryWriter> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        private().recursive(true).create(&self.folder)?;
        let place = self.place(key);
        let lock = File::options().create(true).truncate(false).write(true).open(place.with_extension("lock"))?;
        let locked = match lock.try_lock() {
            Ok(()) => true,
            Err(TryLockError::WouldBlock) => {
                waiting();
                wait_for(&lock, stop)?
            }
            // A file system without locks: renaming alone keeps entries whole, at the cost of work done twice.
            Err(TryLockError::Error(_)) => false,
        };
        if locked {
            clearing::clear_unfinished(&self.folder, &key.digest);
        }
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let partial = place.with_extension(format!("{}-{number}.{PARTIAL}", std::process::id()));
        private().create(&partial)?;
        Ok(EntryWriter { partial, place, segments: Vec::new(), _lock: lock })
    }

    /// Removes entries that were not used for long and are not being written.
    pub(crate) fn clear_unused(&self) {
        clearing::clear_unused(&self.folder);
    }
}

/// Waits for a lock that another process holds; false where the file system has no locks.
fn wait_for(lock: &File, stop: Stop<'_>) -> io::Result<bool> {
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::WouldBlock) if stop() => return Err(ErrorKind::Interrupted.into()),
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOOK),
            Err(TryLockError::Error(_)) => return Ok(false),
        }
    }
}

/// Opens an entry. Nothing: what its templates read off the clock has changed since. Errors: what is damaged.
fn open(place: &Path, key: &Key, clock: &dyn Fn(&str) -> Option<String>) -> Result<Lookup, String> {
    let cannot = |what: &'static str| move |e: io::Error| format!("{what}: {e}");
    let of = fs::symlink_metadata(place).map_err(cannot("it cannot be read"))?;
    if !of.is_dir() || !options::cache::is_trusted(&of) {
        return Err("it is another user's, or others may write it".to_owned());
    }
    let text = fs::read_to_string(place.join(ENTRY)).map_err(cannot("its list cannot be read"))?;
    let entry = Entry::of_text(&text).filter(|entry| entry.key == key.text).ok_or("its list is damaged")?;
    if entry.clock.iter().any(|(format, reading)| clock(format).as_ref() != Some(reading)) {
        return Ok(Lookup::Nothing);
    }
    if entry.has_images {
        let images = ImageFiles::read(place).ok_or("its list of images is damaged")?;
        if let Err(path) = images.check(place) {
            return Ok(Lookup::Changed(path));
        }
    }
    let mut stamps = String::new();
    for file in &entry.segments {
        let stamp = Stamp::of(&place.join(&file.name)).map_err(cannot("a segment cannot be read"))?;
        stamps += &format!("{}\n", stamp.text());
    }
    let verified = fs::read_to_string(place.join(VERIFIED)).is_ok_and(|before| before == stamps);
    let mut corpus = Corpus::default();
    for file in &entry.segments {
        let path = place.join(&file.name);
        if !verified && digest_of_file(&path).map_err(cannot("a segment cannot be read"))? != file.digest {
            return Err(format!("the content of segment {} is not what was written", file.name));
        }
        corpus.append(segment(&path, file)?, file.digest.clone());
    }
    if !verified {
        // Not remembering costs another comparison, nothing else.
        let _ = replace(&place.join(VERIFIED), |file| file.write_all(stamps.as_bytes()));
    }
    Ok(Lookup::Rows(corpus, entry.summary))
}

fn segment(path: &Path, of: &SegmentFile) -> Result<Segment, String> {
    let file = WordFile::open(path).map_err(|e| e.to_string())?;
    let whole = 4 * file.words() as u64 == of.bytes;
    let found = Segment::of_file(file).map_err(|e| e.to_string())?;
    found.filter(|_| whole).ok_or_else(|| format!("segment {} is not whole", of.name))
}

/// An entry in the making; dropped unfinished, it leaves nothing.
pub(crate) struct EntryWriter {
    partial: PathBuf,
    place: PathBuf,
    segments: Vec<SegmentFile>,
    /// Held until the entry stands.
    _lock: File,
}

impl EntryWriter {
    /// Writes a segment and opens it.
    pub(crate) fn add(&mut self, words: &[i32], digest: &str) -> io::Result<Segment> {
        let name = segment_name(self.segments.len());
        let path = self.partial.join(&name);
        let mut file = File::create_new(&path)?;
        for block in words.chunks(1 << 18) {
            let bytes: Vec<u8> = block.iter().flat_map(|word| word.to_ne_bytes()).collect();
            file.write_all(&bytes)?;
        }
        file.sync_data()?;
        let listed = SegmentFile { name, bytes: 4 * words.len() as u64, digest: digest.to_owned() };
        let segment = segment(&path, &listed).map_err(io::Error::other)?;
        self.segments.push(listed);
        Ok(segment)
    }

    /// Makes the entry appear, with what its templates read off the clock and the files of its images. Open segments stay valid.
    pub(crate) fn commit(
        mut self,
        key: &Key,
        summary: &DatasetSummary,
        (clock, images): (Vec<(String, String)>, &ImageFiles),
    ) -> io::Result<()> {
        let segments = std::mem::take(&mut self.segments);
        let mut stamps = String::new();
        for file in &segments {
            stamps += &format!("{}\n", Stamp::of(&self.partial.join(&file.name))?.text());
        }
        fs::write(self.partial.join(VERIFIED), stamps)?;
        let has_images = !images.is_empty();
        if has_images {
            images.write(&self.partial)?;
        }
        let entry = Entry { key: key.text.clone(), summary: summary.clone(), segments, clock, has_images };
        let mut file = File::create_new(self.partial.join(ENTRY))?;
        file.write_all(entry.to_text().as_bytes())?;
        file.sync_data()?;
        if fs::symlink_metadata(&self.place).is_ok() {
            remove_own(&self.place)?;
        }
        fs::rename(&self.partial, &self.place)
    }
}

impl Drop for EntryWriter {
    fn drop(&mut self) {
        // Nothing is there after a commit.
        let _ = remove_own(&self.partial);
    }
}
