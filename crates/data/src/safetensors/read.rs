//! Reading: one file, or a folder of shards seen as one. Headers are read at once, tensors when requested; weights
//! that are codes and scales are seen as the numbers that these stand for.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use serde_json::Value;
use tensor::storage::Packing;
use tensor::{DType, HostTensor};

use super::file::SafeTensors;
use super::stacks::{self, Member, Stack};
use super::swapped;
use crate::error::DataError;
use crate::part_file::PartFile;
use crate::quantised::{self, Linear, Scheme};
use crate::small_file;

/// Bytes that two tensors are compared by at a time.
const BLOCK: usize = 1 << 20;

/// A tensor inside a file. Its bytes, row-major and little-endian, are read when they are requested.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    pub dtype: DType,
    pub shape: &'a [usize],
    source: Source<'a>,
    length: usize,
}

/// The source of a tensor's bytes.
#[derive(Clone, Copy, Debug)]
enum Source<'a> {
    /// Bytes of a file as they are, from this one on.
    File(&'a PartFile, usize),
    /// The values of codes, in f32; of a part of them where it has a first element.
    Codes(&'a Linear, &'a [SafeTensors], Option<usize>),
    /// Matrices that the file holds as [columns, rows], from this byte on, and their rows and columns.
    Swapped(&'a PartFile, usize, [usize; 2]),
}

impl<'a> TensorView<'a> {
    /// Elements from one on, in another shape.
    fn part(self, first: usize, shape: &'a [usize]) -> TensorView<'a> {
        let source = match self.source {
            Source::File(file, start) => Source::File(file, start + first * self.dtype.size()),
            Source::Codes(linear, files, _) => Source::Codes(linear, files, Some(first)),
            Source::Swapped(..) => unreachable!("tensors of other axes have no parts"),
        };
        let length = shape.iter().product::<usize>() * self.dtype.size();
        assert!(first * self.dtype.size() + length <= self.length, "a part lies inside of its tensor");
        TensorView { shape, source, length, ..self }
    }

    /// Bytes of all elements together.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Fills `bytes` with those of the tensor from byte `begin` on. Errors: the file cannot be read, or has become
    /// shorter.
    ///
    /// # Panics
    /// If the tensor ends before that, or a dequantised one is read in other parts than whole elements.
    pub fn read(&self, begin: usize, bytes: &mut [u8]) -> Result<(), DataError> {
        assert!(begin + bytes.len() <= self.length, "what is read of a tensor lies inside of it");
        match self.source {
            Source::File(file, start) => file.read(start + begin, bytes),
            Source::Codes(linear, files, first) => {
                let size = self.dtype.size();
                assert!(begin.is_multiple_of(size) && bytes.len().is_multiple_of(size), "whole elements are read");
                linear.read(files, first.unwrap_or(0) + begin / size, bytes)
            }
            Source::Swapped(file, start, shape) => swapped::read(file, start, shape, self.dtype.size(), begin, bytes),
        }
    }

    /// True if the file holds codes and scales in place of the numbers.
    pub fn is_dequantised(&self) -> bool {
        matches!(self.source, Source::Codes(..))
    }

    /// The packed form that has the values of a dequantised tensor to the bit, if there is one.
    pub fn packing(&self) -> Option<Packing> {
        match self.source {
            Source::File(..) | Source::Swapped(..) | Source::Codes(_, _, Some(_)) => None,
            Source::Codes(linear, _, None) => linear.packing(),
        }
    }

    /// The planes of that form, one after another.
    ///
    /// # Panics
    /// If there is no such form.
    pub fn planes(&self) -> Result<Vec<u8>, DataError> {
        match self.source {
            Source::File(..) | Source::Swapped(..) | Source::Codes(_, _, Some(_)) => {
                panic!("a plain tensor or a part has no planes")
            }
            Source::Codes(linear, files, None) => linear.planes(files),
        }
    }

    /// Reads all bytes of the tensor.
    pub fn bytes(&self) -> Result<Vec<u8>, DataError> {
        let mut bytes = vec![0; self.length];
        self.read(0, &mut bytes)?;
        Ok(bytes)
    }

    /// A copy in host memory.
    pub fn to_host(&self) -> Result<HostTensor, DataError> {
        Ok(HostTensor::new(self.dtype, self.shape, self.bytes()?))
    }

    /// True if the bytes of another tensor are the same.
    pub fn has_bytes_of(&self, other: &TensorView<'_>) -> Result<bool, DataError> {
        if self.length != other.length {
            return Ok(false);
        }
        let (mut own, mut others) = (vec![0; BLOCK.min(self.length)], vec![0; BLOCK.min(self.length)]);
        for begin in (0..self.length).step_by(BLOCK) {
            let count = BLOCK.min(self.length - begin);
            self.read(begin, &mut own[..count])?;
            other.read(begin, &mut others[..count])?;
            if own[..count] != others[..count] {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The weights of a model folder: `model.safetensors`, or the shards that `model.safetensors.index.json` names.
/// An adapter folder (`adapter_model.safetensors`) is read the same way.
#[derive(Debug)]
pub struct Weights {
    folder: PathBuf,
    files: Vec<SafeTensors>,
    /// For each name its file, and the name there.
    place: HashMap<String, (usize, String)>,
    /// Weights that are codes and scales, by their names in the files.
    linears: BTreeMap<String, Linear>,
    /// Matrices of stacks, by name; their wholes have their places in `wholes`.
    members: BTreeMap<String, Member>,
    wholes: BTreeMap<String, (usize, String)>,
    /// Shapes of the tensors whose matrices are read with exchanged axes.
    swapped: BTreeMap<String, Vec<usize>>,
}

impl Weights {
    /// The tensors of a model without files: none.
    pub fn none() -> Self {
        Self::of(PathBuf::new(), Vec::new(), HashMap::new())
    }

    fn of(folder: PathBuf, files: Vec<SafeTensors>, place: HashMap<String, (usize, String)>) -> Self {
        let (linears, members, wholes) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Weights { folder, files, place, linears, members, wholes, swapped: BTreeMap::new() }
    }

    /// Opens a folder, or a single `.safetensors` file.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        if path.is_file() {
            return Self::from_files(path, vec![path.to_owned()]);
        }
        let index = path.join("model.safetensors.index.json");
        if index.is_file() {
            return Self::from_files(path, shard_paths(path, &index)?);
        }
        for name in ["model.safetensors", "adapter_model.safetensors"] {
            let file = path.join(name);
            if file.is_file() {
                return Self::from_files(path, vec![file]);
            }
        }
        Err(DataError::invalid(path.display(), "no model.safetensors and no model.safetensors.index.json there")
            .hint("only safetensors weights are read; convert .bin or .gguf files first"))
    }

    fn from_files(folder: &Path, paths: Vec<PathBuf>) -> Result<Self, DataError> {
        let files = paths.iter().map(|p| SafeTensors::open(p)).collect::<Result<Vec<_>, _>>()?;
        let mut place = HashMap::new();
        for (number, file) in files.iter().enumerate() {
            for name in file.names() {
                if place.insert(name.to_owned(), (number, name.to_owned())).is_some() {
                    return Err(DataError::invalid(folder.display(), format!("tensor `{name}` is in two shards")));
                }
            }
        }
        Ok(Self::of(folder.to_owned(), files, place))
    }

    /// With the numbers of quantised weights, under the weights' names, in place of the tensors that these consist of.
    /// `transposed`: models of the scheme's folder have the transposes of the matrices that it holds.
    ///
    /// Errors: a weight of which something is missing or does not fit the rest, and files without any.
    pub fn dequantised(mut self, scheme: Scheme, transposed: bool) -> Result<Self, DataError> {
        let folder = self.folder.display().to_string();
        let tensors = quantised::Tensors { folder: &folder, files: &self.files, place: &self.place };
        let quantised::Found { mut linears, parts } = quantised::find(scheme, &tensors)?;
        linears.values_mut().filter(|_| transposed).for_each(Linear::turn);
        self.place.retain(|name, _| !parts.contains(name));
        self.place.extend(linears.keys().map(|name| (name.clone(), (0, name.clone()))));
        self.linears = linears;
        Ok(self)
    }

    /// Names of the weights that are quantised.
    pub fn quantised_names(&self) -> impl Iterator<Item = &str> {
        self.linears.keys().map(String::as_str)
    }

    /// The number of quantized weights, and the bytes of their codes and scales.
    pub fn quantised(&self) -> (usize, usize) {
        (self.linears.len(), self.linears.values().map(Linear::stored).sum())
    }

    /// With `prefix` before every name, unless a name has it already: published base models lack the
    /// name of the part that they are.
    pub fn prefixed(mut self, prefix: &str) -> Self {
        if !self.place.keys().any(|name| name.starts_with(prefix)) {
            self.place = self.place.into_iter().map(|(name, at)| (format!("{prefix}{name}"), at)).collect();
        }
        self
    }

    /// With other beginnings of names: each pair is that of a file and what stands for it.
    pub fn renamed(mut self, pairs: &[[String; 2]]) -> Self {
        let other = |name: String| {
            let found = pairs.iter().find_map(|[from, to]| Some(format!("{to}{}", name.strip_prefix(from.as_str())?)));
            found.unwrap_or(name)
        };
        self.place = self.place.into_iter().map(|(name, at)| (other(name), at)).collect();
        self
    }

    /// With the matrices of stacks, one by one, in place of these. After all changes of names. Errors: a matrix that is there by
    /// itself, too.
    pub fn unstacked(mut self, stacks: &[Stack<'_>]) -> Result<Self, DataError> {
        for name in self.names().into_iter().map(str::to_owned).collect::<Vec<_>>() {
            let Ok(view) = self.get(&name) else { continue };
            let Some(members) = stacks::members(stacks, &name, view.shape) else { continue };
            let place = self.place.remove(&name).expect("one of the names");
            if let Some(twice) = members.keys().find(|member| self.place.contains_key(*member)) {
                let problem = format!("`{twice}` is there, and is a part of `{name}`, too");
                return Err(DataError::invalid(self.folder.display(), problem));
            }
            self.place.extend(members.keys().map(|member| (member.clone(), place.clone())));
            self.members.extend(members);
            self.wholes.insert(name, place);
        }
        Ok(self)
    }

    /// Gives tensors other axes: `shape_of` a name, where it has any. A tensor with another number of elements stays as it is.
    pub fn reshaped<'a>(mut self, shape_of: impl Fn(&str) -> Option<&'a [usize]>) -> Self {
        let elements = |shape: &[usize]| shape.iter().product::<usize>();
        let fitting = |name: &str| {
            let (shape, view) = (shape_of(name)?, self.get(name).ok()?);
            (elements(view.shape) == elements(shape)).then(|| shape.to_vec())
        };
        let with_shape = |name: &str| Some((name.to_owned(), fitting(name)?));
        let found: Vec<_> = self.names().into_iter().filter_map(with_shape).collect();
        let member = |(name, shape): (String, _)| (name.clone(), Member { whole: name, first: 0, shape });
        self.members.extend(found.into_iter().map(member));
        self
    }

    /// Reads matrices with their axes exchanged where the files hold them so: `shape_of` a name is the wanted shape
    /// [groups, rows, columns], where it has one.
    pub fn swapped<'a>(mut self, shape_of: impl Fn(&str) -> Option<&'a [usize]>) -> Self {
        let held = |name: &str| {
            let (&[groups, rows, columns], view) = (shape_of(name)?, self.get(name).ok()?) else { return None };
            let other =
                rows != columns && view.shape == [groups, columns, rows] && matches!(view.source, Source::File(..));
            other.then(|| (name.to_owned(), vec![groups, rows, columns]))
        };
        self.swapped = self.names().into_iter().filter_map(held).collect();
        self
    }

    /// The shape that a tensor has in its file where its matrices are read with exchanged axes.
    pub fn swapped_in_file(&self, name: &str) -> Option<Vec<usize>> {
        self.swapped.get(name).map(|of| vec![of[0], of[2], of[1]])
    }

    /// The stack that a matrix is a part of, and the matrix's first element in it.
    pub fn whole_of(&self, name: &str) -> Option<(&str, usize)> {
        self.members.get(name).map(|member| (member.whole.as_str(), member.first))
    }

    /// The name that a tensor has in its file; of a stack, too.
    pub fn name_in_file(&self, name: &str) -> Option<&str> {
        self.wholes.get(name).or_else(|| self.place.get(name)).map(|(_, there)| there.as_str())
    }

    /// Only the tensors whose names are wanted.
    pub fn filtered(mut self, wanted: impl Fn(&str) -> bool) -> Self {
        self.place.retain(|name, _| wanted(name));
        self
    }

    /// Without the tensors whose names end in one of these.
    pub fn without(mut self, endings: &[String]) -> Self {
        self.place.retain(|name, _| !endings.iter().any(|ending| name.ends_with(ending)));
        self
    }

    /// Names of all tensors, in order of the alphabet.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.place.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    pub fn contains(&self, name: &str) -> bool {
        self.place.contains_key(name)
    }

    /// The tensor, not yet read; a stack, too.
    pub fn get(&self, name: &str) -> Result<TensorView<'_>, DataError> {
        let Some((number, there)) = self.wholes.get(name).or_else(|| self.place.get(name)) else {
            return Err(DataError::invalid(self.folder.display(), format!("there is no tensor `{name}`")));
        };
        let whole = match self.linears.get(there) {
            Some(linear) => {
                let length = linear.len() * DType::F32.size();
                let source = Source::Codes(linear, &self.files, None);
                TensorView { dtype: DType::F32, shape: linear.shape(), source, length }
            }
            None => self.files[*number].get(there)?,
        };
        if let (Some(shape), Source::File(file, start)) = (self.swapped.get(name), whole.source) {
            let source = Source::Swapped(file, start, [shape[1], shape[2]]);
            return Ok(TensorView { shape, source, ..whole });
        }
        Ok(match self.members.get(name) {
            Some(member) => whole.part(member.first, &member.shape),
            None => whole,
        })
    }
}

/// Returns true if a text can be the name of a file in a folder: the only part of a path, and not the folder itself.
fn is_file_name(name: &str) -> bool {
    !name.is_empty() && ![".", ".."].contains(&name) && !name.contains(['/', '\\', '\0'])
}

fn shard_paths(folder: &Path, index: &Path) -> Result<Vec<PathBuf>, DataError> {
    let bytes = small_file::read(index).map_err(|e| DataError::io("read", index, e))?;
    let value: Value =
        serde_json::from_slice(&bytes).map_err(|e| DataError::invalid(index.display(), format!("no JSON: {e}")))?;
    let map = value
        .get("weight_map")
        .and_then(Value::as_object)
        .ok_or_else(|| DataError::invalid(index.display(), "there is no `weight_map`"))?;
    let mut shards = std::collections::BTreeSet::new();
    for (tensor, file) in map {
        match file.as_str() {
            Some(name) if is_file_name(name) => shards.insert(name),
            _ => {
                let problem = format!("the shard of `{tensor}` is not a plain file name");
                return Err(DataError::invalid(index.display(), problem));
            }
        };
    }
    Ok(shards.into_iter().map(|name| folder.join(name)).collect())
}

impl SafeTensors {
    /// The tensor, not yet read. Errors: no such name, or an element type that the engine does not know.
    pub fn get(&self, name: &str) -> Result<TensorView<'_>, DataError> {
        let entry = self
            .entries
            .get(name)
            .ok_or_else(|| DataError::invalid(self.file.path().display(), format!("there is no tensor `{name}`")))?;
        let dtype = entry.dtype.parse().map_err(|_| {
            DataError::invalid(
                self.file.path().display(),
                format!("tensor `{name}` has elements of type {}, which is not supported", entry.dtype),
            )
        })?;
        let (begin, length) = (self.data_start + entry.begin, entry.end - entry.begin);
        Ok(TensorView { dtype, shape: &entry.shape, source: Source::File(&self.file, begin), length })
    }
}
