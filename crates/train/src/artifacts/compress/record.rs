//! Decisions about a layer, and a folder that keeps them until the command is done: one that was killed goes on after the
//! last layer that is there.
//!
//! Knows files and their names; not how anything is decided.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use data::safetensors::{NamedTensor, SafeTensors, write};
use tensor::compressed::{Range, Scales};
use tensor::{DType, HostTensor};

use crate::error::{Result, TrainError};
use crate::files::staged;

/// The decisions of one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    /// Factors of channels by the name of their value.
    pub factors: BTreeMap<String, Vec<f32>>,
    /// The codes of matrices, one to a byte, by the name of the parameter.
    pub codes: BTreeMap<String, Vec<u8>>,
    /// The scales of those codes, where they are not those of the numbers.
    pub scales: BTreeMap<String, Scales>,
    /// The ranges of what matrices are multiplied with.
    pub ranges: BTreeMap<String, Range>,
    /// Matrices of experts that no token reached.
    pub unreached: Vec<String>,
}

/// Beginnings of the names of tensors.
const FACTORS: &str = "factors ";
const CODES: &str = "codes ";
const SCALES: [&str; 3] = ["scale factors ", "scale zeros ", "scale codes "];
const RANGE: &str = "range ";
const UNREACHED: &str = "unreached ";

/// A folder next to the result, with a file for each layer that is done.
pub struct Journal {
    folder: PathBuf,
    /// Locked as long as the command runs.
    _lock: Option<File>,
}

impl Journal {
    /// Opens the folder of an output, as an earlier command of the same digest left it or new. An error if another
    /// process has it.
    pub fn open(output: &Path, digest: &str) -> Result<Journal> {
        let name = output.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let folder = output.with_file_name(format!(".{name}.quantize.{}.layers", &digest[..16]));
        fs::create_dir_all(&folder).map_err(|e| TrainError::io("create", &folder, e))?;
        let lock = staged::lock(&folder);
        if lock.is_none() {
            let text = format!("{}: another command is writing the same result", output.display());
            return Err(TrainError::Usage(text));
        }
        Ok(Journal { folder, _lock: lock })
    }

    fn path(&self, layer: usize) -> PathBuf {
        self.folder.join(format!("layer.{layer}.safetensors"))
    }

    /// Returns what was decided for a layer, if it was.
    pub fn read(&self, layer: usize) -> Result<Option<Record>> {
        let path = self.path(layer);
        if !path.is_file() {
            return Ok(None);
        }
        let files = SafeTensors::open(&path).map_err(TrainError::unreadable)?;
        let mut record = Record::default();
        for name in files.names() {
            let tensor = files.get(name).and_then(|view| view.to_host()).map_err(TrainError::unreadable)?;
            if let Some(of) = name.strip_prefix(FACTORS) {
                record.factors.insert(of.to_owned(), tensor.to_f32());
            } else if let Some(of) = name.strip_prefix(CODES) {
                record.codes.insert(of.to_owned(), tensor.bytes);
            } else if let Some((part, of)) =
                SCALES.iter().enumerate().find_map(|(part, prefix)| Some((part, name.strip_prefix(prefix)?)))
            {
                let none = Scales { factors: Vec::new(), zeros: Vec::new(), codes: Vec::new() };
                let scales = record.scales.entry(of.to_owned()).or_insert(none);
                match part {
                    0 => scales.factors = tensor.to_f32(),
                    1 => scales.zeros = tensor.bytes.into_iter().map(|zero| zero as i8).collect(),
                    _ => scales.codes = tensor.bytes,
                }
            } else if let Some(of) = name.strip_prefix(RANGE) {
                let x = tensor.to_f32();
                record.ranges.insert(of.to_owned(), Range { least: x[0], most: x[1] });
            } else if let Some(of) = name.strip_prefix(UNREACHED) {
                record.unreached.push(of.to_owned());
            }
        }
        Ok(Some(record))
    }

    /// Keeps what was decided for a layer.
    pub fn write(&self, layer: usize, record: &Record) -> Result<()> {
        let mut tensors: Vec<(String, HostTensor)> = Vec::new();
        for (name, factors) in &record.factors {
            tensors.push((format!("{FACTORS}{name}"), HostTensor::from_f32([factors.len()], factors)));
        }
        for (name, codes) in &record.codes {
            let of = HostTensor::new(DType::U8, vec![codes.len()], codes.clone());
            tensors.push((format!("{CODES}{name}"), of));
        }
        for (name, scales) in &record.scales {
            let zeros = scales.zeros.iter().map(|zero| *zero as u8).collect();
            let bytes = |bytes: Vec<u8>| HostTensor::new(DType::U8, vec![bytes.len()], bytes);
            let parts = [
                HostTensor::from_f32([scales.factors.len()], &scales.factors),
                bytes(zeros),
                bytes(scales.codes.clone()),
            ];
            tensors.extend(SCALES.iter().zip(parts).map(|(prefix, of)| (format!("{prefix}{name}"), of)));
        }
        for (name, range) in &record.ranges {
            tensors.push((format!("{RANGE}{name}"), HostTensor::from_f32([2], &[range.least, range.most])));
        }
        for name in &record.unreached {
            tensors.push((format!("{UNREACHED}{name}"), HostTensor::from_f32([1], &[0.0])));
        }
        let named: Vec<NamedTensor<'_>> = tensors.iter().map(|(name, of)| NamedTensor::new(name.clone(), of)).collect();
        write(&self.path(layer), &named, &BTreeMap::new()).map_err(|e| TrainError::Failed(e.to_string()))
    }

    /// Removes the folder with all decisions, once the command is done.
    pub fn remove(self) -> Result<()> {
        fs::remove_dir_all(&self.folder).map_err(|e| TrainError::io("remove", &self.folder, e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_command_of_the_same_digest_finds_what_was_decided() {
        let place = tempfile::tempdir().unwrap();
        let output = place.path().join("out");
        let record = Record {
            factors: BTreeMap::from([("m.norm".to_owned(), vec![0.5, 2.0])]),
            codes: BTreeMap::from([("m.q.weight".to_owned(), vec![1, 255, 7])]),
            scales: BTreeMap::from([(
                "m.q.weight".to_owned(),
                Scales { factors: vec![0.25, 1e-8], zeros: vec![-8, 7], codes: Vec::new() },
            )]),
            ranges: BTreeMap::from([("m.q.weight".to_owned(), Range { least: -1.5, most: 3.0 })]),
            unreached: vec!["m.e.weight".to_owned()],
        };
        let journal = Journal::open(&output, &"a".repeat(64)).unwrap();
        journal.write(3, &record).unwrap();
        assert!(Journal::open(&output, &"a".repeat(64)).is_err(), "another process may not have it, too");
        drop(journal);
        let again = Journal::open(&output, &"a".repeat(64)).unwrap();
        assert_eq!((again.read(3).unwrap(), again.read(4).unwrap()), (Some(record), None));
        let other = Journal::open(&output, &"b".repeat(64)).unwrap();
        assert_eq!(other.read(3).unwrap(), None);
        again.remove().unwrap();
        other.remove().unwrap();
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
    }
}
