//! The trained part of a model as files: an adapter in PEFT format, or a model in transformers format.
//!
//! Knows names and forms; the tensors come from whoever holds them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use compiler::AdapterOptions;
use data::safetensors::{NamedTensor, TensorInfo, Weights, exchange, write};
use program::{ParameterSlot, Program, TensorRef};
use tensor::{DType, HostTensor};

use crate::error::{Result, TrainError};
use crate::files::staged::write_synced;
use crate::inference::generate::write_end_tokens;
use crate::model::base_format;
use crate::model::folder::{write_companions, write_files, write_weights};
use crate::model::json_files::pretty;
use crate::model::other_parts;
use crate::model::peft;
use crate::model::source::ModelSource;
use crate::model::weight_set::WeightSet;

/// The contents of the files of a whole model: its parameters, and tensors taken over from its own files.
pub(super) struct Contents<'a> {
    pub(super) infos: Vec<TensorInfo>,
    /// The parameters that lie one after another in a tensor, by its name and their first elements.
    pub(super) slots: HashMap<String, BTreeMap<usize, &'a ParameterSlot>>,
    /// The parameters whose matrices the files have with exchanged axes, by their names in files.
    pub(super) swapped: HashSet<String>,
    /// Tensors that are taken over, and their names by those in files.
    pub(super) own: Weights,
    pub(super) carried: HashMap<String, String>,
}

impl<'a> Contents<'a> {
    /// Matrices that the model's own files have in stacks are stacked again.
    pub(super) fn new(source: &ModelSource, program: &'a Program) -> Result<Contents<'a>> {
        let form = &source.model;
        let is_plain = form.files.renamed.is_empty() && form.adapters.stacks.is_empty();
        let own = if is_plain { Weights::none() } else { source.own(&source.folder)? };
        let carried = source.carried(&source.folder)?;
        let mut infos = Vec::new();
        let mut slots: HashMap<String, BTreeMap<usize, &ParameterSlot>> = HashMap::new();
        let mut swapped = HashSet::new();
        for slot in WeightSet::Base.of(program) {
            let (whole, first) = own.whole_of(&slot.name).unwrap_or((&slot.name, 0));
            let name = source.file_name(&own, whole);
            let parts = slots.entry(name.clone()).or_default();
            if parts.is_empty() {
                let stored = source.stored_shape(&slot.name);
                let held = own.swapped_in_file(&slot.name);
                swapped.extend(held.is_some().then(|| name.clone()));
                let shape = match whole == slot.name {
                    true => held.or(stored.map(<[usize]>::to_vec)).unwrap_or_else(|| slot.shape().clone()),
                    false => own.get(whole).map_err(TrainError::model_file)?.shape.to_vec(),
                };
                infos.push(TensorInfo { name, dtype: slot.dtype(), shape });
            }
            parts.insert(first, slot);
        }
        let mut names = HashMap::new();
        for name in carried.names() {
            let (view, there) = (carried.get(name).map_err(TrainError::model_file)?, source.file_name(&carried, name));
            infos.push(TensorInfo { name: there.clone(), dtype: view.dtype, shape: view.shape.to_vec() });
            names.insert(there, name.to_owned());
        }
        Ok(Contents { infos, slots, swapped, own: carried, carried: names })
    }

    /// The bytes of a tensor; `of` gives those of a parameter.
    pub(super) fn bytes(
        &self,
        tensor: &TensorInfo,
        of: &mut dyn FnMut(&ParameterSlot) -> Result<Vec<u8>>,
    ) -> Result<Vec<u8>> {
        let Some(parts) = self.slots.get(&tensor.name) else {
            let view = self.own.get(&self.carried[&tensor.name]).map_err(TrainError::model_file)?;
            return Ok(view.to_host().map_err(TrainError::unreadable)?.bytes);
        };
        let mut bytes = Vec::with_capacity(tensor.bytes());
        for slot in parts.values() {
            bytes.append(&mut of(slot)?);
        }
        Ok(if self.swapped.contains(&tensor.name) { exchanged(&bytes, tensor) } else { bytes })
    }
}

/// The bytes of a tensor [groups, columns, rows] from those of its matrices [rows, columns].
fn exchanged(bytes: &[u8], tensor: &TensorInfo) -> Vec<u8> {
    let [_, columns, rows] = *tensor.shape else { unreachable!("stacks have three axes") };
    let (size, mut result) = (tensor.dtype.size(), vec![0; bytes.len()]);
    let length = rows * columns * size;
    for (from, to) in bytes.chunks_exact(length).zip(result.chunks_exact_mut(length)) {
        exchange(from, to, rows, size);
    }
    result
}

/// The trained part of a model and how it is written; the tensors themselves come from elsewhere.
#[derive(Debug)]
pub(crate) struct Trained {
    pub program: Arc<Program>,
    pub(super) adapter: Option<AdapterOptions>,
    /// The adapter that the run goes on with: what it holds for parts that are not computed is handed on.
    pub(super) began: Option<PathBuf>,
    pub(super) base: String,
    pub(super) source: Arc<ModelSource>,
    pub(super) dtype: DType,
    /// The chat template of the data, where it is not the model's own.
    pub(super) template: Option<String>,
    /// Answers to messages are trained, not texts.
    pub(super) conversations: bool,
}

/// Gives the contents of a place in a program's memory.
pub(crate) type ReadTensor<'a> = dyn FnMut(&TensorRef) -> Result<HostTensor> + 'a;

impl Trained {
    fn part(&self) -> WeightSet {
        if self.adapter.is_some() { WeightSet::Adapter } else { WeightSet::Base }
    }

    /// The weights that are written.
    pub fn weights(&self) -> impl Iterator<Item = &TensorRef> {
        self.part().of(&self.program).map(|slot| &slot.weight)
    }

    /// Writes the adapter in PEFT's form, or the model in Hugging Face's, into an existing folder, with tokenizer, template
    /// and end tokens.
    pub fn write(&self, folder: &Path, read: &mut ReadTensor<'_>) -> Result<()> {
        self.write_weights(folder, read)?;
        let (config, from, template) = (&self.source.config, &self.source.folder, self.template.as_deref());
        match self.part() {
            WeightSet::Base => write_files(config, self.dtype, from, template, folder)?,
            WeightSet::Adapter => write_companions(from, template, folder)?,
        }
        write_end_tokens(folder, config, self.conversations)
    }

    fn write_weights(&self, folder: &Path, read: &mut ReadTensor<'_>) -> Result<()> {
        let slots: Vec<&ParameterSlot> = self.part().of(&self.program).collect();
        let Some(adapter) = &self.adapter else {
            let contents = Contents::new(&self.source, &self.program)?;
            let mut bytes_of = |slot: &ParameterSlot| Ok(read(&slot.weight)?.bytes);
            return write_weights(folder, contents.infos.clone(), |tensor| contents.bytes(tensor, &mut bytes_of));
        };
        let tensors = slots.iter().map(|slot| Ok((WeightSet::Adapter.name(slot), read(&slot.weight)?)));
        let (mut tensors, path) = (tensors.collect::<Result<Vec<_>>>()?, folder.join("adapter_model.safetensors"));
        for (name, tensor) in &mut tensors {
            self.give_axes_of_convolution(name, tensor);
        }
        let embedding = compiler::tied(&self.source.model);
        let tied = slots.iter().position(|slot| slot.saved && Some(slot.name.as_str()) == embedding);
        if let Some(index) = tied {
            tensors.push((peft::TIED_HEAD.to_owned(), tensors[index].1.clone()));
        }
        let form = &self.source.model.files;
        let mut others = Vec::new();
        if let Some(began) = self.began.as_deref().filter(|_| !form.carried.is_empty()) {
            let files = peft::weights(began)?;
            for name in files.names().into_iter().filter(|name| other_parts::is_other(name, form)) {
                let view = files.get(name).map_err(TrainError::model_file)?;
                tensors.push((name.to_owned(), view.to_host().map_err(TrainError::unreadable)?));
            }
            others = other_parts::modules(&files, form);
        }
        write_with(&path, &tensors, &base_format::metadata(&self.program))?;
        let parts = (!form.carried.is_empty(), others);
        let config = peft::config(adapter, &self.program, &self.base, parts, embedding)?;
        write_synced(&folder.join("adapter_config.json"), pretty(&config).as_bytes())
    }
}

impl Trained {
    /// Gives the matrices of an adapter on a convolution the shapes that PEFT has for them: A those of the kernel for each
    /// rank, B a kernel of one element.
    fn give_axes_of_convolution(&self, name: &str, tensor: &mut HostTensor) {
        let Some(name) = name.strip_prefix(peft::PREFIX) else { return };
        let of = [".lora_A.weight", ".lora_B.weight"].map(|end| name.strip_suffix(end));
        let Some(module) = of[0].or(of[1]) else { return };
        let Some([_, kernel @ ..]) = self.source.stored_shape(&format!("{module}.weight")) else { return };
        if kernel.len() > 1 && of[0].is_some() {
            tensor.shape.splice(1.., kernel.iter().copied());
        } else if kernel.len() > 1 {
            tensor.shape.extend(kernel[1..].iter().map(|_| 1));
        }
    }
}

/// Writes tensors to one file.
pub(crate) fn write_tensors(path: &Path, tensors: &[(String, HostTensor)]) -> Result<()> {
    write_with(path, tensors, &BTreeMap::new())
}

fn write_with(path: &Path, tensors: &[(String, HostTensor)], metadata: &BTreeMap<String, String>) -> Result<()> {
    let named: Vec<NamedTensor<'_>> = tensors.iter().map(|(name, t)| NamedTensor::new(name.clone(), t)).collect();
    write(path, &named, metadata).map_err(|e| TrainError::Failed(e.to_string()))
}
