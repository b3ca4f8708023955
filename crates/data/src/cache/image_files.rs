//! The files of images that the rows of an entry were read from, and those that were not there: the rows hold as long as all
//! are what they were.
//!
//! Two lines: the digest of the second line, and JSON. Knows no rows.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::files::{IMAGES, replace};
use super::stamp::digest_of_file;
use crate::file_stamp::{Stamp, is_settled};
use crate::image_folders::Seen;

/// A path, which need not be text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
enum Name {
    Text(String),
    Bytes(Vec<u8>),
}

/// A file that a row names as that of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ImageFile {
    name: Name,
    /// BLAKE3 digest of its content; none for a file that was not there.
    digest: Option<String>,
    /// Its stamp, by which it is known without reading it; none where it had just been written.
    stamp: Option<String>,
}

/// The files of an entry's images.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ImageFiles(Vec<ImageFile>);

impl ImageFile {
    fn path(&self) -> PathBuf {
        match &self.name {
            Name::Text(text) => text.into(),
            Name::Bytes(bytes) => OsString::from_vec(bytes.clone()).into(),
        }
    }

    /// The file with its present stamp. An error if its content is another, or if it is there and was not.
    fn now(&self) -> Result<ImageFile, PathBuf> {
        let path = self.path();
        let Some(digest) = &self.digest else { return if path.is_file() { Err(path) } else { Ok(self.clone()) } };
        let Ok(stamp) = Stamp::of(&path) else { return Err(path) };
        if self.stamp.as_deref() == Some(stamp.text()) {
            return Ok(self.clone());
        }
        let is_same = digest_of_file(&path).is_ok_and(|now| now == *digest);
        match is_same && Stamp::of(&path).is_ok_and(|after| after == stamp) {
            true => Ok(ImageFile { stamp: is_settled(&path).then(|| stamp.text().to_owned()), ..self.clone() }),
            false => Err(path),
        }
    }
}

impl ImageFiles {
    /// The files that were seen; `known` are digests of what was read of some of them. Errors: a file has changed since it was
    /// seen, or cannot be read.
    pub fn of(seen: &Seen, known: &HashMap<PathBuf, [u8; 32]>) -> io::Result<ImageFiles> {
        let of = |(path, before): (&PathBuf, &Option<Stamp>)| {
            let name = path.to_str().map_or_else(
                || Name::Bytes(path.as_os_str().as_encoded_bytes().to_vec()),
                |text| Name::Text(text.to_owned()),
            );
            let changed = || io::Error::other(format!("{} changed while it was read", path.display()));
            let Some(before) = before else {
                return if path.is_file() { Err(changed()) } else { Ok(ImageFile { name, digest: None, stamp: None }) };
            };
            let digest = match known.get(path) {
                Some(digest) => blake3::Hash::from_bytes(*digest).to_hex().to_string(),
                None => digest_of_file(path)?,
            };
            let stamp = is_settled(path).then(|| before.text().to_owned());
            match Stamp::of(path)? == *before {
                true => Ok(ImageFile { name, digest: Some(digest), stamp }),
                false => Err(changed()),
            }
        };
        seen.par_iter().map(of).collect::<io::Result<_>>().map(ImageFiles)
    }

    /// Returns true if no row looked for a file.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn to_text(&self) -> String {
        let body = serde_json::to_string(self).expect("names and digests are representable as JSON");
        format!("{}\n{body}\n", blake3::hash(body.as_bytes()).to_hex())
    }

    /// Writes them into the folder of an entry.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        replace(&folder.join(IMAGES), |file| file.write_all(self.to_text().as_bytes()))
    }

    /// Reads them from the folder of an entry. None: the list is not what was written.
    pub fn read(folder: &Path) -> Option<ImageFiles> {
        let text = fs::read_to_string(folder.join(IMAGES)).ok()?;
        let (digest, body) = text.strip_suffix('\n')?.split_once('\n')?;
        if blake3::hash(body.as_bytes()).to_hex().as_str() != digest {
            return None;
        }
        serde_json::from_str(body).ok()
    }

    /// Compares them with what is there now. An error is the path of one that is another.
    pub fn check(&self, folder: &Path) -> Result<(), PathBuf> {
        let now = ImageFiles(self.0.par_iter().map(ImageFile::now).collect::<Result<_, _>>()?);
        if now != *self {
            // Not remembering costs another reading, nothing else.
            let _ = now.write(folder);
        }
        Ok(())
    }
}
