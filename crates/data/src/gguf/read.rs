//! Reading: the head once from its beginning to its end, metadata passed over by type; tensors by name, when they are
//! requested.

use std::collections::BTreeMap;
use std::path::Path;

use super::{ALIGNMENT, Encoding, GgufTensor, MAGIC, VERSION, kind};
use crate::error::DataError;
use crate::part_file::PartFile;

/// One file. Texts of the metadata are kept; other values are only checked for their form.
#[derive(Debug)]
pub struct GgufFile {
    file: PartFile,
    texts: BTreeMap<String, String>,
    /// With the place of the first byte in the file.
    tensors: Vec<(GgufTensor, usize)>,
}

impl GgufFile {
    /// Opens a file and reads its head. Errors: a damaged head, a version, a type of values or an encoding that is not
    /// known, and tensors that lie outside of the file.
    pub fn open(path: &Path) -> Result<GgufFile, DataError> {
        let file = PartFile::open(path)?;
        let (texts, tensors) = parse(&file).map_err(|problem| DataError::invalid(path.display(), problem))?;
        Ok(GgufFile { file, texts, tensors })
    }

    /// A text of the metadata.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.texts.get(key).map(String::as_str)
    }

    /// The tensors in the order of the table.
    pub fn tensors(&self) -> impl Iterator<Item = &GgufTensor> {
        self.tensors.iter().map(|(tensor, _)| tensor)
    }

    /// The elements of a tensor as they lie in the file. Errors: there is none of this name, or the file cannot be read.
    pub fn bytes(&self, name: &str) -> Result<Vec<u8>, DataError> {
        let found = self.tensors.iter().find(|(tensor, _)| tensor.name == name);
        let missing = || DataError::invalid(self.file.path().display(), format!("there is no tensor `{name}`"));
        let (tensor, begin) = found.ok_or_else(missing)?;
        let mut bytes = vec![0; tensor.bytes()];
        self.file.read(*begin, &mut bytes)?;
        Ok(bytes)
    }
}

type Head = (BTreeMap<String, String>, Vec<(GgufTensor, usize)>);

fn parse(file: &PartFile) -> Result<Head, String> {
    let mut at = Cursor { file, ahead: Vec::new(), ahead_from: 0, at: 0 };
    if at.take(4)? != MAGIC {
        return Err("this is not a GGUF file".into());
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
        if end.is_none_or(|end| end > file.len()) {
            return Err(format!("`{}` lies outside of the file", tensor.name));
        }
    }
    Ok((texts, tensors))
}

/// Bytes that are read at once.
const AHEAD: usize = 1 << 18;

/// A place in the head.
struct Cursor<'a> {
    file: &'a PartFile,
    /// Bytes of the file from `ahead_from` on.
    ahead: Vec<u8>,
    ahead_from: usize,
    at: usize,
}

impl Cursor<'_> {
    fn take(&mut self, count: usize) -> Result<&[u8], String> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.file.len());
        let end = end.ok_or_else(|| "the file ends inside its head".to_owned())?;
        if end > self.ahead_from + self.ahead.len() {
            self.ahead_from = self.at;
            self.ahead.resize(count.max(AHEAD).min(self.file.len() - self.at), 0);
            self.file.read(self.at, &mut self.ahead).map_err(|e| e.to_string())?;
        }
        let begin = self.at - self.ahead_from;
        self.at = end;
        Ok(&self.ahead[begin..begin + count])
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
        assert_eq!(Encoding::F32.decode(&file.bytes("b").unwrap()), b);
        assert_eq!(file.bytes("a").unwrap(), Encoding::Q8_0.encode(&a));

        let whole = std::fs::read(&path).unwrap();
        let cut = std::fs::File::options().write(true).open(&path).unwrap();
        cut.set_len(whole.len() as u64 - 20).unwrap();
        assert_eq!(file.bytes("a").unwrap(), Encoding::Q8_0.encode(&a));
        assert!(file.bytes("b").unwrap_err().to_string().contains("cut short while it was in use"));
        assert!(file.bytes("c").unwrap_err().to_string().contains("there is no tensor `c`"));
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            assert!(GgufFile::open(&path).is_err() || length >= whole.len() - 12, "{length} bytes");
        }
        // 32 × 2⁵⁹ elements: their number wraps to 0.
        let extents = [32u64.to_le_bytes(), 3u64.to_le_bytes()].concat();
        let at = whole.windows(16).position(|part| part == extents).unwrap();
        let wrapping = [&whole[..at + 8], &(1u64 << 59).to_le_bytes(), &whole[at + 16..]].concat();
        std::fs::write(&path, wrapping).unwrap();
        assert!(GgufFile::open(&path).unwrap_err().to_string().contains("`a` lies outside of the file"));
        drop(GgufWriter::create(&place.path().join("half.gguf"), &metadata, tensors).unwrap());
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 1, "nothing is left over");
    }
}
