//! Images as rows of data hold them: paths, bytes, base64, and the spellings of all of these.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde_json::Value;

use crate::boxes::ImageObject;
use crate::error::shown;
use crate::image_folders::ImageFolders;

/// Base64 with its padding or without.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The place of an image's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageSource {
    Path(PathBuf),
    Bytes(Arc<[u8]>),
}

impl ImageSource {
    /// The image that a value of a row stands for. Relative paths are those of one of the `folders`. Errors say what is
    /// wrong with the value.
    pub fn of(value: &Value, folders: &ImageFolders) -> Result<ImageSource, String> {
        match value {
            Value::String(text) => ImageSource::of_text(text, folders),
            Value::Object(fields) => {
                let held = |name: &str| fields.get(name).filter(|value| !value.is_null());
                match (held("bytes"), held("path").or(held("url")).or(held("image"))) {
                    (Some(Value::String(bytes)), _) => decoded(bytes),
                    (Some(Value::Array(bytes)), _) => {
                        let bytes: Option<Vec<u8>> =
                            bytes.iter().map(|byte| byte.as_u64().and_then(|byte| byte.try_into().ok())).collect();
                        bytes.map(|bytes| ImageSource::Bytes(bytes.into())).ok_or("its `bytes` are no bytes".to_owned())
                    }
                    (None, Some(Value::String(path))) => ImageSource::of_text(path, folders),
                    _ => Err("an object without `bytes` and `path`".to_owned()),
                }
            }
            other => {
                Err(format!("{}, expected a path or an object with `bytes` or `path`", crate::json_values::kind(other)))
            }
        }
    }

    fn of_text(text: &str, folders: &ImageFolders) -> Result<ImageSource, String> {
        if let Some(rest) = text.strip_prefix("data:") {
            let (_, data) = rest.split_once(";base64,").ok_or("a data URI that is no base64")?;
            return decoded(data);
        }
        if text.starts_with("http://") || text.starts_with("https://") {
            let url = shown(text);
            return Err(format!(
                "`{url}` is a URL, and nothing is fetched while rows are read: download it, and give its path"
            ));
        }
        let path = Path::new(text.strip_prefix("file://").unwrap_or(text));
        folders.find(path).map(ImageSource::Path).ok_or_else(|| {
            let near =
                folders.first().map_or(String::new(), |folder| format!(" (relative to {})", shown(folder.display())));
            format!("there is no file `{}`{near}", shown(path.display()))
        })
    }

    /// The image in base64.
    pub fn of_base64(text: &str) -> Result<ImageSource, String> {
        decoded(text)
    }

    /// The bytes of the file; an error names it.
    pub fn read(&self) -> Result<Arc<[u8]>, String> {
        match self {
            ImageSource::Bytes(bytes) => Ok(bytes.clone()),
            ImageSource::Path(path) => {
                let bytes = std::fs::read(path);
                bytes.map(Arc::from).map_err(|error| format!("cannot read {}: {error}", shown(path.display())))
            }
        }
    }

    /// The name of the file in messages.
    pub fn name(&self) -> String {
        match self {
            ImageSource::Path(path) => shown(path.display()),
            ImageSource::Bytes(bytes) => format!("an image of {} bytes", bytes.len()),
        }
    }
}

/// Returns true if bytes begin as the file of an image does.
pub(crate) fn is_image_file(bytes: &[u8]) -> bool {
    let begins = |magic: &[u8]| bytes.starts_with(magic);
    let is_webp = begins(b"RIFF") && bytes.get(8..12) == Some(b"WEBP");
    begins(b"\xff\xd8\xff") || begins(b"\x89PNG\r\n\x1a\n") || begins(b"GIF87a") || begins(b"GIF89a") || is_webp
}

/// The bytes of a JPEG as pages have them.
pub fn jpeg_uri(bytes: &[u8]) -> String {
    format!("data:image/jpeg;base64,{}", BASE64.encode(bytes))
}

/// The bytes as rows have them, which are JSON.
pub fn data_uri(bytes: &[u8]) -> String {
    format!("data:;base64,{}", BASE64.encode(bytes))
}

fn decoded(text: &str) -> Result<ImageSource, String> {
    let text = text.strip_prefix("data:").and_then(|rest| rest.split_once(";base64,")).map_or(text, |(_, data)| data);
    let bytes = BASE64.decode(text.trim()).map_err(|error| format!("no base64: {error}"))?;
    Ok(ImageSource::Bytes(bytes.into()))
}

/// An image of a document.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageRef {
    pub source: ImageSource,
    /// BLAKE3 digest of the file's bytes.
    pub digest: [u8; 32],
    /// The objects that the row names in it; nothing reads them but what shows rows.
    pub objects: Vec<ImageObject>,
}

/// Bytes that stand before those of a source: its kind, its length, its digest.
const HEAD: usize = 1 + 8 + 32;
/// Bits of the kind: the source is bytes, not a path; objects follow.
const BYTES: u8 = 1;
const OBJECTS: u8 = 2;

impl ImageRef {
    /// An image of a file with these bytes, without objects.
    pub fn new(source: ImageSource, bytes: &[u8]) -> ImageRef {
        ImageRef { source, digest: *blake3::hash(bytes).as_bytes(), objects: Vec::new() }
    }

    /// The file's bytes; an error where they are not those that the row was encoded with.
    pub fn read(&self) -> Result<Arc<[u8]>, String> {
        let bytes = self.source.read()?;
        match blake3::hash(&bytes).as_bytes() == &self.digest {
            true => Ok(bytes),
            false => Err(format!("{} has changed since the row was read", self.source.name())),
        }
    }

    /// Keeps the bytes themselves in the place of a path. An error as for [`ImageRef::read`].
    pub fn hold(&mut self) -> Result<(), String> {
        self.source = ImageSource::Bytes(self.read()?);
        Ok(())
    }

    /// Writes several references as bytes.
    pub(crate) fn pack(all: &[ImageRef]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for of in all {
            let (kind, content) = match &of.source {
                ImageSource::Path(path) => (0, path.as_os_str().as_bytes().to_vec()),
                ImageSource::Bytes(bytes) => (BYTES, bytes.to_vec()),
            };
            bytes.push(if of.objects.is_empty() { kind } else { kind | OBJECTS });
            bytes.extend((content.len() as u64).to_le_bytes());
            bytes.extend(of.digest);
            bytes.extend(content);
            if !of.objects.is_empty() {
                pack_objects(&of.objects, &mut bytes);
            }
        }
        bytes
    }

    /// Reads the references of packed bytes; `None` if these are none.
    pub(crate) fn unpack(mut bytes: &[u8]) -> Option<Vec<ImageRef>> {
        let mut all = Vec::new();
        while !bytes.is_empty() {
            let (head, rest) = bytes.split_at_checked(HEAD)?;
            let length = usize::try_from(u64::from_le_bytes(head[1..9].try_into().ok()?)).ok()?;
            let (content, rest) = rest.split_at_checked(length)?;
            let source = match head[0] & !OBJECTS {
                0 => ImageSource::Path(PathBuf::from(OsString::from_vec(content.to_vec()))),
                BYTES => ImageSource::Bytes(content.into()),
                _ => return None,
            };
            bytes = rest;
            let objects = if head[0] & OBJECTS != 0 { unpack_objects(&mut bytes)? } else { Vec::new() };
            all.push(ImageRef { source, digest: head[9..].try_into().ok()?, objects });
        }
        Some(all)
    }
}

/// Writes objects as bytes: their number, then of each four corners, the length of its name, the name.
fn pack_objects(objects: &[ImageObject], bytes: &mut Vec<u8>) {
    bytes.extend((objects.len() as u32).to_le_bytes());
    for ImageObject { name, corners } in objects {
        corners.iter().for_each(|corner| bytes.extend(corner.to_le_bytes()));
        bytes.extend((name.len() as u32).to_le_bytes());
        bytes.extend(name.as_bytes());
    }
}

/// Reads objects off the beginning of bytes; `None` if these are none.
fn unpack_objects(bytes: &mut &[u8]) -> Option<Vec<ImageObject>> {
    let count = u32::from_le_bytes(*bytes.split_off(..4)?.first_chunk()?);
    let mut objects = Vec::new();
    for _ in 0..count {
        let mut corners = [0f32; 4];
        for corner in &mut corners {
            *corner = f32::from_le_bytes(*bytes.split_off(..4)?.first_chunk()?);
        }
        let length = usize::try_from(u32::from_le_bytes(*bytes.split_off(..4)?.first_chunk()?)).ok()?;
        let name = String::from_utf8(bytes.split_off(..length)?.to_vec()).ok()?;
        objects.push(ImageObject { name, corners });
    }
    Some(objects)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_spelling_of_bytes_and_paths_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a b.png");
        std::fs::write(&file, b"abc").unwrap();
        let folders = ImageFolders::from(vec![PathBuf::from("/nowhere"), folder.path().to_owned()]);
        let path = ImageSource::Path(file.clone());
        for value in [
            json!("a b.png"),
            json!(file),
            json!({"path": "a b.png", "bytes": null}),
            json!(format!("file://{}", file.display())),
            json!({"url": "a b.png"}),
        ] {
            assert_eq!(ImageSource::of(&value, &folders).unwrap(), path, "{value}");
        }
        let bytes = ImageSource::Bytes(b"abc".as_slice().into());
        for value in
            [json!("data:image/png;base64,YWJj"), json!({"bytes": "YWJj", "path": "x"}), json!({"bytes": [97, 98, 99]})]
        {
            assert_eq!(ImageSource::of(&value, &folders).unwrap(), bytes, "{value}");
        }
        for (value, problem) in [
            (json!("no.png"), "there is no file `no.png` (relative to /nowhere)"),
            (json!("https://a/b.png"), "is a URL"),
            (json!({"bytes": null}), "without `bytes`"),
            (json!(7), "a number, expected a path"),
            (json!("data:image/png,abc"), "no base64"),
            (json!({"bytes": "!"}), "no base64"),
        ] {
            let error = ImageSource::of(&value, &folders).unwrap_err();
            assert!(error.contains(problem), "{value}: {error}");
        }
    }

    #[test]
    fn packed_references_come_back_and_changed_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("x.png");
        std::fs::write(&file, b"abc").unwrap();
        let mut all = [ImageSource::Path(file.clone()), ImageSource::Bytes(b"abc".as_slice().into())]
            .map(|source| ImageRef::new(source, b"abc"));
        let object = |name: &str| ImageObject { name: name.to_owned(), corners: [0.0, 0.25, 0.5, 1.0] };
        for objects in [vec![], vec![object("a cät"), object("")]] {
            all[1].objects = objects;
            let packed = ImageRef::pack(&all);
            assert_eq!(ImageRef::unpack(&packed).unwrap(), all);
            assert!(ImageRef::unpack(&packed[..packed.len() - 1]).is_none());
        }
        assert!(all.iter().all(|of| of.read().is_ok()));
        std::fs::write(&file, b"abd").unwrap();
        assert!(all[0].read().unwrap_err().contains("has changed"));
    }
}
