//! Adapters of one base that are on the device together, each in a slot of the matrices of every module.
//!
//! Knows what an adapter's files hold and where it goes; not which sequence has which.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use compiler::{
    AdapterOptions, AdapterRules, CompileOptions, EntryOptions, PlanOptions, RANKS_OF_SLOTS, Recipe, Sharding,
};
use graph::Parameter;
use program::TensorRef;
use tensor::{DType, HostTensor};

use crate::engine::Engine;
use crate::error::{Result, TrainError};
use crate::inference::loading::read_adapter;
use crate::model::peft::{self, PREFIX};
use crate::model::source::ModelSource;
use crate::model::weight_source::read_as_f32;
use crate::model::{base_format, other_parts};

/// The largest number of a first matrix. What it gives for a token of another adapter is multiplied by 0, and must be finite.
const LARGEST: f32 = 65504.0;

/// The matrices of an adapter that may be on the device with others.
pub(crate) struct Matrices {
    rank: usize,
    modules: BTreeMap<String, Factors>,
}

/// The matrices of one module: A [rank, inputs], and B [outputs, rank] multiplied by the scale.
#[derive(Default)]
struct Factors {
    rank: usize,
    a: Vec<f32>,
    b: Vec<f32>,
}

impl Matrices {
    /// Reads an adapter; the reason why it cannot be on the device with others, where it cannot. Errors: one that does not fit
    /// the model at all.
    pub fn read(folder: &Path, source: &ModelSource) -> Result<std::result::Result<Matrices, String>> {
        let options = read_adapter(folder, source)?;
        let parameters = parameters(source, &options)?;
        if let Some(why) = obstacle(folder, &options, source)? {
            return Ok(Err(why));
        }
        let (files, rules) = (other_parts::weights(folder, &source.model.files)?, AdapterRules::new(&options)?);
        let known: BTreeSet<&str> = parameters.iter().map(|of| of.name.as_str()).collect();
        if let Some(name) = files.names().into_iter().find(|name| !known.contains(name)) {
            return Ok(Err(format!("its file has `{name}` besides its matrices")));
        }
        let mut found = Matrices { rank: 0, modules: BTreeMap::new() };
        for parameter in &parameters {
            let name = &parameter.name;
            let wrong = |what: String| TrainError::Usage(format!("{}: `{name}` {what}", folder.display()));
            if !files.contains(name) {
                return Err(wrong("is missing".into()));
            }
            let view = files.get(name).map_err(TrainError::model_file)?;
            if view.shape != parameter.shape {
                return Err(wrong(format!("has shape {:?}, the model needs {:?}", view.shape, parameter.shape)));
            }
            if !view.dtype.is_float() {
                return Err(wrong(format!("holds {}, expected floating point", view.dtype)));
            }
            let mut numbers = vec![0.0; parameter.shape.iter().product()];
            read_as_f32(&view, 0, &mut numbers)?;
            if let Some(number) = numbers.iter().find(|x| x.is_nan() || x.abs() > LARGEST) {
                return Ok(Err(format!("`{name}` has {number}, expected numbers up to {LARGEST}")));
            }
            let (module, is_first) = module_of(name).expect("an adapter without magnitudes has matrices");
            let of = rules.of_module(module)?;
            let factors = found.modules.entry(module.to_owned()).or_default();
            factors.rank = of.rank;
            found.rank = found.rank.max(of.rank);
            match is_first {
                true => factors.a = numbers,
                false => {
                    let scale = of.scale as f32;
                    numbers.iter_mut().for_each(|x| *x *= scale);
                    factors.b = numbers;
                }
            }
        }
        Ok(Ok(found))
    }
}

/// The module of an adapter's matrix by its name, and whether the matrix is the first.
fn module_of(name: &str) -> Option<(&str, bool)> {
    let name = name.strip_prefix(PREFIX)?;
    let first = name.strip_suffix(".lora_A.weight").map(|module| (module, true));
    first.or_else(|| name.strip_suffix(".lora_B.weight").map(|module| (module, false)))
}

/// The parameters of an adapter of the model. Errors: targets that match nothing.
fn parameters(source: &ModelSource, options: &AdapterOptions) -> Result<Vec<Parameter>> {
    let options = CompileOptions {
        variants: Vec::new(),
        weights: DType::F32,
        quantised: None,
        stored: Default::default(),
        compute: DType::F32,
        recipe: Recipe::Uniform,
        training: None,
        adapter: Some(options.clone()),
        entries: vec![EntryOptions::forward()],
        seed: 0,
        plan: PlanOptions::default(),
        sharding: Sharding::default(),
        branches: None,
        batch_invariant: false,
    };
    let all = compiler::parameters(&source.model, &options)?;
    Ok(all.into_iter().filter(|of| of.adapter && of.name != RANKS_OF_SLOTS).collect())
}

/// The reason why an adapter of these options cannot be with others, whatever its numbers are.
fn obstacle(folder: &Path, options: &AdapterOptions, source: &ModelSource) -> Result<Option<String>> {
    let others = peft::weights(folder)?;
    let mut others = others.names().into_iter().filter(|name| other_parts::is_other(name, &source.model.files));
    let parameters = compiler::converted(options)?.parameters;
    Ok(if options.magnitudes {
        Some("it has magnitudes (DoRA)".into())
    } else if !options.saved.is_empty() {
        Some(format!("modules of it were trained in full: {}", options.saved.join(", ")))
    } else if !parameters.is_empty() {
        Some(format!("it is on parameters of experts: {}", parameters.join(", ")))
    } else if let Some(name) = others.next() {
        Some(format!("it is on a part besides the text: `{name}`"))
    } else if base_format::read(folder)?.is_some() {
        Some("it was trained on weights in codes (QLoRA)".into())
    } else {
        None
    })
}

/// The adapters that are on the device together, and what fits into a slot.
pub(crate) struct Shared {
    rank: usize,
    modules: BTreeSet<String>,
    /// The adapter of each slot that waits for an engine: its files may be gone by then, as those of a run's old checkpoints.
    pub slots: Vec<Option<Matrices>>,
}

impl Shared {
    /// Empty slots for adapters as large as these. Errors: one that cannot be with others.
    pub fn of(folders: &[PathBuf], slots: usize, source: &ModelSource) -> Result<Shared> {
        let slots = (0..slots).map(|_| None).collect();
        let mut shared = Shared { rank: 1, modules: BTreeSet::new(), slots };
        for folder in folders {
            let matrices = Matrices::read(folder, source)?.map_err(|why| apart(folder, &why))?;
            shared.rank = shared.rank.max(matrices.rank);
            shared.modules.extend(matrices.modules.into_keys());
            // An adapter that does not suit a slot fails alone.
            parameters(source, &shared.options(source, DType::F32)).map_err(|why| apart(folder, &why.to_string()))?;
        }
        Ok(shared)
    }

    /// The options of the matrices that hold all slots.
    pub fn options(&self, source: &ModelSource, dtype: DType) -> AdapterOptions {
        let rank = self.rank * self.slots.len();
        let mut form = source.model.adapters.clone();
        // Modules are named as a whole.
        form.converted.clear();
        AdapterOptions {
            rank,
            // The scale of each adapter is in its second matrix.
            alpha: rank as f64,
            rank_stabilised: false,
            magnitudes: false,
            dropout: 0.0,
            dtype,
            targets: self.modules.iter().cloned().collect(),
            parameters: Vec::new(),
            saved: Vec::new(),
            exceptions: Default::default(),
            slots: Some(self.slots.len()),
            form,
        }
    }

    /// Returns the reason why an adapter does not fit into a slot; none where it does.
    pub fn refusal(&self, of: &Matrices) -> Option<String> {
        if of.rank > self.rank {
            let text = format!("its rank is {}, and there is room for up to {}", of.rank, self.rank);
            return Some(text);
        }
        let module = of.modules.keys().find(|module| !self.modules.contains(*module))?;
        Some(format!("it is on `{module}`, and none of the adapters that were named first is"))
    }

    /// Writes the table of ranks, and every adapter that waited for the engine.
    pub fn write_all(&mut self, engine: &mut Engine) -> Result<()> {
        let (rank_of_slot, ranks) = (self.rank, self.rank * self.slots.len());
        let row = |slot: usize| (0..ranks).map(move |rank| f32::from(u8::from(rank / rank_of_slot + 1 == slot)));
        let table: Vec<f32> = (0..=self.slots.len()).flat_map(row).collect();
        let program = engine.program().clone();
        let at = &program.parameter(RANKS_OF_SLOTS).expect("slots have a table").weight;
        let table = HostTensor::from_f32([self.slots.len() + 1, ranks], &table).cast(at.dtype);
        engine.session().write(at, &table.bytes)?;
        for (index, matrices) in self.slots.iter().enumerate().filter_map(|(index, of)| Some((index, of.as_ref()?))) {
            self.write(engine, index as u32 + 1, matrices)?;
        }
        engine.weights_written()?;
        self.slots.iter_mut().for_each(|slot| *slot = None);
        Ok(())
    }

    /// Writes an adapter into a slot, from 1 on; what the adapter does not have becomes 0.
    pub fn write(&self, engine: &mut Engine, slot: u32, of: &Matrices) -> Result<()> {
        let (program, first, nothing) = (engine.program().clone(), (slot as usize - 1) * self.rank, Factors::default());
        for module in &self.modules {
            let place = |which: &str| {
                let slot = program.parameter(&format!("{PREFIX}{module}.{which}.weight"));
                &slot.expect("every module has its matrices").weight
            };
            let (a, b) = (place("lora_A"), place("lora_B"));
            let factors = of.modules.get(module).unwrap_or(&nothing);
            let inputs = a.shape[1];
            let mut rows = vec![0.0; self.rank * inputs];
            rows[..factors.a.len()].copy_from_slice(&factors.a);
            let begin = a.offset + first * inputs * a.dtype.size();
            let at = TensorRef::dense(a.arena, begin, a.dtype, [self.rank, inputs]);
            let rows = HostTensor::from_f32([self.rank, inputs], &rows).cast(a.dtype);
            engine.session().write(&at, &rows.bytes)?;
            let (outputs, ranks) = (b.shape[0], b.shape[1]);
            let mut columns = vec![0.0; outputs * self.rank];
            if factors.rank > 0 {
                for (to, from) in columns.chunks_mut(self.rank).zip(factors.b.chunks(factors.rank)) {
                    to[..from.len()].copy_from_slice(from);
                }
            }
            let columns = HostTensor::from_f32([outputs, self.rank], &columns).cast(b.dtype);
            let mut whole = engine.tensor(b)?;
            let (part, begin) = (self.rank * b.dtype.size(), first * b.dtype.size());
            for (to, from) in whole.bytes.chunks_mut(ranks * b.dtype.size()).zip(columns.bytes.chunks(part)) {
                to[begin..][..part].copy_from_slice(from);
            }
            engine.session().write(b, &whole.bytes)?;
            engine.give_back(whole);
        }
        engine.weights_written()
    }
}

fn apart(folder: &Path, why: &str) -> TrainError {
    TrainError::Usage(format!("{}: it cannot be on the device with other adapters: {why}", folder.display()))
}
