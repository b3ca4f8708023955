//! Writing: metadata and the tensor table first, then the tensors. The file appears under its name only when it is
//! complete.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use super::{ALIGNMENT, Encoding, MAGIC, VERSION, kind};
use crate::error::DataError;
use crate::in_making::InMaking;
use crate::new_file::{clear_abandoned, create_beside, name_new};

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    U32(u32),
    U64(u64),
    I32(i32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Bools(Vec<bool>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
}

impl GgufValue {
    fn write(&self, out: &mut Vec<u8>) {
        let list = |out: &mut Vec<u8>, kind: u32, length: usize| {
            out.extend(kind::LIST.to_le_bytes());
            out.extend(kind.to_le_bytes());
            out.extend((length as u64).to_le_bytes());
        };
        match self {
            GgufValue::U32(x) => [kind::U32, *x].iter().for_each(|word| out.extend(word.to_le_bytes())),
            GgufValue::I32(x) => [kind::I32, *x as u32].iter().for_each(|word| out.extend(word.to_le_bytes())),
            GgufValue::F32(x) => [kind::F32, x.to_bits()].iter().for_each(|word| out.extend(word.to_le_bytes())),
            GgufValue::U64(x) => {
                out.extend(kind::U64.to_le_bytes());
                out.extend(x.to_le_bytes());
            }
            GgufValue::Bool(x) => {
                out.extend(kind::BOOL.to_le_bytes());
                out.push(u8::from(*x));
            }
            GgufValue::Text(text) => {
                out.extend(kind::TEXT.to_le_bytes());
                write_text(text, out);
            }
            GgufValue::Texts(texts) => {
                list(out, kind::TEXT, texts.len());
                texts.iter().for_each(|text| write_text(text, out));
            }
            GgufValue::Bools(values) => {
                list(out, kind::BOOL, values.len());
                out.extend(values.iter().map(|x| u8::from(*x)));
            }
            GgufValue::I32s(values) => {
                list(out, kind::I32, values.len());
                values.iter().for_each(|x| out.extend(x.to_le_bytes()));
            }
            GgufValue::F32s(values) => {
                list(out, kind::F32, values.len());
                values.iter().for_each(|x| out.extend(x.to_le_bytes()));
            }
        }
    }
}

fn write_text(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// A tensor of the table.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufTensor {
    pub name: String,
    /// Outermost axis first, as everywhere here; the format has it the other way round.
    pub shape: Vec<usize>,
    pub encoding: Encoding,
}

impl GgufTensor {
    /// Bytes of the elements.
    ///
    /// # Panics
    /// If they are more than can be addressed: see [`GgufTensor::checked_bytes`].
    pub fn bytes(&self) -> usize {
        self.checked_bytes().expect("the extents of a tensor that is written or was read fit memory")
    }

    /// The same; none if they are more than can be addressed.
    pub fn checked_bytes(&self) -> Option<usize> {
        let elements = self.shape.iter().try_fold(1usize, |product, extent| product.checked_mul(*extent))?;
        // No encoding takes more than four bytes an element.
        elements.checked_mul(4).map(|_| self.encoding.bytes(elements))
    }
}

/// A file in progress. Dropped before [`GgufWriter::finish`], it removes its file.
#[derive(Debug)]
pub struct GgufWriter {
    path: PathBuf,
    temporary: PathBuf,
    _in_making: InMaking,
    out: Option<BufWriter<File>>,
    tensors: Vec<GgufTensor>,
    written: usize,
}

impl GgufWriter {
    /// Writes metadata and table. `general.alignment` is the format's own value and is not given.
    ///
    /// # Panics
    /// If the rows of a tensor are not whole blocks of its encoding.
    pub fn create(
        path: &Path,
        metadata: &[(String, GgufValue)],
        tensors: Vec<GgufTensor>,
    ) -> Result<GgufWriter, DataError> {
        let header = header(metadata, &tensors);
        let failed = |e| DataError::io("write", path, e);
        clear_abandoned(path).map_err(failed)?;
        let (temporary, file) = create_beside(path).map_err(failed)?;
        let out = Some(BufWriter::new(file));
        let _in_making = InMaking::new(&temporary);
        let mut writer = GgufWriter { path: path.to_owned(), temporary, _in_making, out, tensors, written: 0 };
        writer.out.as_mut().expect("just made").write_all(&header).map_err(failed)?;
        Ok(writer)
    }

    /// Writes the elements of the next tensor of the table.
    ///
    /// # Panics
    /// If their number does not fit the tensor, or if there is no next one.
    pub fn put(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        let tensor = &self.tensors[self.written];
        assert_eq!(bytes.len(), tensor.bytes(), "bytes of `{}` must fit its shape {:?}", tensor.name, tensor.shape);
        let out = self.out.as_mut().expect("a file is written to before it is finished");
        let padding = [0; ALIGNMENT];
        let gap = bytes.len().next_multiple_of(ALIGNMENT) - bytes.len();
        let done = out.write_all(bytes).and_then(|()| out.write_all(&padding[..gap]));
        self.written += 1;
        done.map_err(|e| DataError::io("write", &self.path, e))
    }

    /// Brings all elements to the disk. Returns the file, which has its temporary name, to be checked.
    ///
    /// # Panics
    /// If tensors are missing.
    pub fn complete(&mut self) -> Result<&Path, DataError> {
        assert_eq!(self.written, self.tensors.len(), "every tensor is put before a file is complete");
        let out = self.out.as_mut().expect("a file is finished once");
        let done = out.flush().and_then(|()| out.get_ref().sync_all());
        done.map_err(|e| DataError::io("write", &self.path, e))?;
        Ok(&self.temporary)
    }

    /// Gives the file its name, which must still be free.
    ///
    /// # Panics
    /// If tensors are missing.
    pub fn finish(mut self) -> Result<(), DataError> {
        self.complete()?;
        self.out = None;
        name_new(&self.temporary, &self.path).map_err(|e| DataError::io("write", &self.path, e))
    }
}

impl Drop for GgufWriter {
    fn drop(&mut self) {
        // After the rename there is nothing under this name.
        let _ = fs::remove_file(&self.temporary);
    }
}

fn header(metadata: &[(String, GgufValue)], tensors: &[GgufTensor]) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend(VERSION.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        write_text(key, &mut out);
        value.write(&mut out);
    }
    let mut offset = 0;
    for tensor in tensors {
        let row = tensor.shape.last().copied().unwrap_or(1);
        assert!(row.is_multiple_of(tensor.encoding.block()), "rows of `{}` are whole blocks", tensor.name);
        write_text(&tensor.name, &mut out);
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        for extent in tensor.shape.iter().rev() {
            out.extend((*extent as u64).to_le_bytes());
        }
        out.extend(tensor.encoding.number().to_le_bytes());
        out.extend((offset as u64).to_le_bytes());
        offset += tensor.bytes().next_multiple_of(ALIGNMENT);
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
    out
}
