//! Reads files that describe a model, an adapter or a checkpoint: regular files of a bounded size. A link to a device or a
//! pipe in their place would never end.
//!
//! Knows no format.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::Path;

/// Bytes of such a file: the largest tokenizers have some ten million.
const MOST: u64 = 256 << 20;

/// Returns the content of a file. Errors: it cannot be read, is no regular file, or is larger than any that is meant.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.take(MOST + 1).read_to_end(&mut bytes)?;
    check_size(bytes.len() as u64)?;
    Ok(bytes)
}

/// Reads a file like [`read`], as a text.
pub fn read_text(path: &Path) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(|_| io::Error::new(ErrorKind::InvalidData, "it is not UTF-8"))
}

/// Opens a file for [`read`].
pub(crate) fn open(path: &Path) -> io::Result<File> {
    let data = fs::metadata(path)?;
    // Opening a pipe waits for a writer.
    if !data.is_file() {
        return Err(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file"));
    }
    check_size(data.len())?;
    File::open(path)
}

fn check_size(bytes: u64) -> io::Result<()> {
    if bytes <= MOST {
        return Ok(());
    }
    Err(io::Error::new(ErrorKind::InvalidData, format!("it has {bytes} bytes, expected at most {MOST}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_of_a_bounded_size_are_read() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name);
        std::fs::write(path("text"), "words").unwrap();
        std::os::unix::fs::symlink(path("text"), path("link")).unwrap();
        assert_eq!(
            (read_text(&path("text")).unwrap(), read(&path("link")).unwrap()),
            ("words".into(), b"words".to_vec())
        );
        assert_eq!(read(&path("none")).unwrap_err().kind(), ErrorKind::NotFound);
        std::os::unix::fs::symlink("/dev/zero", path("endless")).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(path("pipe")).status().unwrap().success());
        for name in ["endless", "pipe", "."] {
            assert!(read(&path(name)).unwrap_err().to_string().contains("not a regular file"), "{name}");
        }
        File::create(path("sparse")).unwrap().set_len(MOST + 1).unwrap();
        assert!(read(&path("sparse")).unwrap_err().to_string().contains("expected at most"));
        std::fs::write(path("bytes"), [0xff]).unwrap();
        assert!(read_text(&path("bytes")).unwrap_err().to_string().contains("not UTF-8"));
    }
}
