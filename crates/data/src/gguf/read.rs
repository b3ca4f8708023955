//! Reading: a mapped file, its metadata passed over by type, its tensors by name.

use std::collections::BTreeMap;
use std::path::Path;

use super::{ALIGNMENT, Encoding, GgufTensor, MAGIC, VERSION, kind};
use crate::error::DataError;
use crate::mmap::MappedFile;

/// One mapped file. Texts of the metadata are kept; other values are only checked for their form.
#[derive(Debug)]
pub struct GgufFile {
    map: MappedFile,
    texts: BTreeMap<String, String>,
    /// With the place of the first byte in the file.
    tensors: Vec<(GgufTensor, usize)>,
}

impl GgufFile {
    /// Maps a file and reads its head. Errors: a damaged head, a version, a type of values or an encoding that is not
    /// known, and tensors that lie outside of the file.
    pub fn open(path: &Path) -> Result<GgufFile, DataError> {
        let map = MappedFile::open(path)?;
        let (texts, tensors) = parse(&map).map_err(|problem| DataError::invalid(path.display(), problem))?;
        Ok(GgufFile { map, texts, tensors })
    }

    /// A text of the metadata.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.texts.get(key).map(String::as_str)
    }

    /// The tensors in the order of the table.
    pub fn tensors(&self) -> impl Iterator<Item = &GgufTensor> {
        self.tensors.iter().map(|(tensor, _)| tensor)
    }

    /// The elements of a tensor as they lie in the file.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        let (tensor, begin) = self.tensors.iter().find(|(tensor, _)| tensor.name == name)?;
        Some(&self.map[*begin..*begin + tensor.bytes()])
    }
}

type Head = (BTreeMap<String, String>, Vec<(GgufTensor, usize)>);

fn parse(bytes: &[u8]) -> Result<Head, String> {
    let mut at = Cursor { bytes, at: 0 };
    if at.take(4)? != MAGIC {
        return Err("this is no GGUF file".into());
    }
    match at.u32()? {
        VERSION => {}
        other => return Err(format!("this is version {other} of GGUF, version {VERSION} is read")),
    }
    let (tensor_count, value_count) = (at.u64()?, at.u64()?);
    let mut texts = BTreeMap::new();
    for _ in 0..value_count {
        let key = at.text()?;
        let kind = at.u32()?;
        if let Some(text) = at.value(kind).map_err(|problem| format!("`{key}`: {problem}"))? {
            texts.insert(key, text);
        }
    }
    let mut tensors = Vec::new();
    for _ in 0..tensor_count {
        let name = at.text()?;
        let axes = at.u32()?;
        let mut shape = (0..axes).map(|_| at.u64().map(|n| n as usize)).collect::<Result<Vec<_>, _>>()?;
        shape.reverse();
        let number = at.u32()?;
        let encoding = Encoding::numbered(number).ok_or_else(|| format!("`{name}` has the unknown type {number}"))?;
        let offset = at.u64()? as usize;
        tensors.push((GgufTensor { name, shape, encoding }, offset));
    }
    let start = at.at.next_multiple_of(ALIGNMENT);
    for (tensor, offset) in &mut tensors {
        *offset = start.checked_add(*offset).ok_or("a tensor lies outside of the file")?;
        let end = tensor.checked_bytes().and_then(|size| offset.checked_add(size));
        if end.is_none_or(|end| end > bytes.len()) {
            return Err(format!("`{}` lies outside of the file", tensor.name));
        }
    }
    Ok((texts, tensors))
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.bytes.len());
        let end = end.ok_or_else(|| "the file ends inside its head".to_owned())?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.take(4)?.try_into().expect("four bytes")))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.take(8)?.try_into().expect("eight bytes")))
    }

    fn text(&mut self) -> Result<String, String> {
        let length = self.u64()? as usize;
        String::from_utf8(self.take(length)?.to_vec()).map_err(|_| "a text is not UTF-8".to_owned())
    }

    /// Passes a value over; gives it if it is a text.
    fn value(&mut self, kind: u32) -> Result<Option<String>, String> {
        match kind {
            kind::TEXT => return self.text().map(Some),
            kind::LIST => {
                let (of, length) = (self.u32()?, self.u64()?);
                if of == kind::LIST {
                    return Err("lists of lists are not known".into());
                }
                for _ in 0..length {
                    self.value(of)?;
                }
            }
            kind::U32 | kind::I32 | kind::F32 => drop(self.take(4)?),
            kind::U64 => drop(self.take(8)?),
            kind::BOOL => drop(self.take(1)?),
            other => return Err(format!("values of type {other} are not known")),
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{GgufValue, GgufWriter};
    use super::*;

    #[test]
    fn what_is_written_is_read_back() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("model.gguf");
        let tensor =
            |name: &str, shape: &[usize], encoding| GgufTensor { name: name.into(), shape: shape.into(), encoding };
        let tensors = vec![tensor("a", &[3, 32], Encoding::Q8_0), tensor("b", &[5], Encoding::F32)];
        let metadata = [
            ("general.name".to_owned(), GgufValue::Text("tiny".into())),
            ("list".to_owned(), GgufValue::Texts(vec!["x".into(), "ü".into()])),
            ("flag".to_owned(), GgufValue::Bool(true)),
            ("numbers".to_owned(), GgufValue::I32s(vec![-1, 2])),
            ("large".to_owned(), GgufValue::U64(1 << 40)),
        ];
        let a: Vec<f32> = (0..96).map(|i| i as f32 - 40.0).collect();
        let b = [1.5, -2.0, 0.0, 3.25, 1e-9];
        let mut writer = GgufWriter::create(&path, &metadata, tensors.clone()).unwrap();
        writer.put(&Encoding::Q8_0.encode(&a)).unwrap();
        assert!(!path.exists());
        writer.put(&Encoding::F32.encode(&b)).unwrap();
        writer.finish().unwrap();
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 1);

        let file = GgufFile::open(&path).unwrap();
        assert_eq!(file.tensors().cloned().collect::<Vec<_>>(), tensors);
        assert_eq!((file.text("general.name"), file.text("flag")), (Some("tiny"), None));
        assert_eq!(Encoding::F32.decode(file.bytes("b").unwrap()), b);
        assert_eq!(file.bytes("a").unwrap(), Encoding::Q8_0.encode(&a));

        let whole = std::fs::read(&path).unwrap();
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            assert!(GgufFile::open(&path).is_err() || length >= whole.len() - 12, "{length} bytes");
        }
        drop(GgufWriter::create(&place.path().join("half.gguf"), &metadata, tensors).unwrap());
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 1, "nothing is left over");
    }
}
