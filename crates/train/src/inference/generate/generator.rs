//! A model on a device that goes on where its sequences were. Compiled when it is first needed, and again when sequences need
//! more than it holds. Knows pages and rows by number, not whose they are.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use compiler::{AdapterOptions, CompileOptions, PlanOptions, Recipe, Sharding};
use program::Choices;
use tensor::DType;

use super::capacity::{Capacity, Need};
use super::defaults::{self, Defaults};
use super::prompt::PromptEncoder;
use super::reader::{LOGITS, Reader};
use crate::engine::device::Device;
use crate::engine::{Compiled, Engine};
use crate::error::{Result, TrainError};
use crate::inference::loading::{load_weights, read_adapter};
use crate::inference::shared::{Matrices, Shared};
use crate::model::base_format;
use crate::model::source::ModelSource;

/// Weights on a device, with programs that read prompts and add token after token.
pub struct Generator {
    device: Arc<Device>,
    source: Arc<ModelSource>,
    adapter: Option<PathBuf>,
    options: CompileOptions,
    engine: Option<Engine>,
    /// The capacity that the engine is compiled for; None if it was made for something else.
    capacity: Option<Capacity>,
    /// The least pages for which there was no memory.
    refused: Option<usize>,
    /// The entries that the engine was compiled for when it was given away.
    kept: Option<(Compiled, Capacity)>,
    texts: Texts,
    /// Adapters that are on the device together; none where there is one for all sequences, or none.
    shared: Option<Shared>,
    /// The texts of those adapters, by slot.
    slot_texts: Vec<Option<Texts>>,
    /// Counts generations: one at a time owns the cache.
    pub(super) started: u64,
}

/// The encoder of prompts and the defaults of generation, of a model or of an adapter.
struct Texts {
    encoder: PromptEncoder,
    defaults: Defaults,
}

impl Texts {
    fn read(adapter: Option<&Path>, source: &ModelSource) -> Result<Texts> {
        let folders: Vec<_> = adapter.into_iter().chain([&*source.folder]).collect();
        let encoder = PromptEncoder::open(&folders)?;
        // An adapter's own file names the end tokens that it was trained with.
        let place = adapter.filter(|folder| folder.join(defaults::FILE).is_file()).unwrap_or(&source.folder);
        Ok(Texts { encoder, defaults: Defaults::read(place, &source.config.0)? })
    }
}

fn no_slot(slot: u32) -> TrainError {
    TrainError::Usage(format!("there is no adapter in the slot {slot}"))
}

impl Generator {
    /// A model that will be read from its folder, with an adapter folder in PEFT's form.
    pub fn new(
        device: Arc<Device>,
        source: Arc<ModelSource>,
        adapter: Option<PathBuf>,
        dtype: DType,
    ) -> Result<Generator> {
        let adapter_options: Option<AdapterOptions> =
            adapter.as_deref().map(|folder| read_adapter(folder, &source)).transpose()?;
        let options = CompileOptions {
            variants: Vec::new(),
            weights: dtype,
            // An adapter of weights in codes is one of their values.
            quantised: adapter.as_deref().map(base_format::read).transpose()?.flatten().map(|base| base.made),
            stored: Default::default(),
            compute: dtype,
            recipe: Recipe::Uniform,
            training: None,
            adapter: adapter_options,
            entries: Vec::new(),
            seed: 0,
            plan: PlanOptions::default(),
            sharding: Sharding::default(),
            branches: None,
            batch_invariant: false,
        };
        let Texts { encoder, defaults } = Texts::read(adapter.as_deref(), &source)?;
        Ok(Generator::of(device, source, adapter, options, encoder, defaults))
    }

    /// A generator with the options of its programs, of which entries and shapes follow from the prompts.
    pub(crate) fn of(
        device: Arc<Device>,
        source: Arc<ModelSource>,
        adapter: Option<PathBuf>,
        options: CompileOptions,
        encoder: PromptEncoder,
        defaults: Defaults,
    ) -> Generator {
        let (engine, capacity, refused, kept, shared) = (None, None, None, None, None);
        let (texts, slot_texts, started) = (Texts { encoder, defaults }, Vec::new(), 0);
        Generator {
            device,
            source,
            adapter,
            options,
            engine,
            capacity,
            refused,
            kept,
            texts,
            shared,
            slot_texts,
            started,
        }
    }

    /// Returns the reason why an adapter cannot be on the device together with others; none where it can. Errors: one that does
    /// not fit the model at all.
    pub fn obstacle(&self, folder: &Path) -> Result<Option<String>> {
        Ok(Matrices::read(folder, &self.source)?.err())
    }

    /// Makes `slots` places for adapters that are on the device together, for sequences that each name one; all of them are
    /// empty. Places are as large as the largest of these adapters. What was being generated is over. Errors: one of them that
    /// cannot be there.
    pub fn share(&mut self, folders: &[PathBuf], slots: usize) -> Result<()> {
        if self.adapter.is_some() || slots == 0 {
            return Err(TrainError::Usage("adapters are together over a model that is loaded without one".into()));
        }
        let shared = Shared::of(folders, slots, &self.source)?;
        self.options.adapter = Some(shared.options(&self.source, self.options.weights));
        self.shared = Some(shared);
        self.unload();
        Ok(())
    }

    /// Puts an adapter into a slot, from 1 on, which no sequence that runs may name. Returns the reason why it cannot be there,
    /// after which the slot is as before. Errors: an adapter that does not fit the model at all.
    pub fn place(&mut self, slot: u32, folder: &Path) -> Result<Option<String>> {
        let shared = self.shared.as_mut().filter(|of| (1..=of.slots.len()).contains(&(slot as usize)));
        let Some(shared) = shared else { return Err(no_slot(slot)) };
        let matrices = match Matrices::read(folder, &self.source)? {
            Ok(matrices) => matrices,
            Err(why) => return Ok(Some(why)),
        };
        if let Some(why) = shared.refusal(&matrices) {
            return Ok(Some(why));
        }
        let texts = Texts::read(Some(folder), &self.source)?;
        let waits = &mut shared.slots[slot as usize - 1];
        match &mut self.engine {
            None => *waits = Some(matrices),
            Some(engine) => shared.write(engine, slot, &matrices)?,
        }
        self.slot_texts[slot as usize - 1] = Some(texts);
        Ok(None)
    }

    /// The encoder and the defaults for prompts to the adapter in a slot; those of the model for 0.
    pub(super) fn texts_of(&self, adapter: u32) -> Result<(&PromptEncoder, &Defaults)> {
        let texts = match adapter.checked_sub(1) {
            None => Some(&self.texts),
            Some(index) => self.slot_texts.get(index as usize).and_then(Option::as_ref),
        };
        let texts = texts.ok_or_else(|| no_slot(adapter))?;
        Ok((&texts.encoder, &texts.defaults))
    }

    /// The compiled engine, once it has the weights.
    pub(super) fn engine(&self) -> Option<&Engine> {
        self.engine.as_ref()
    }

    pub fn encoder(&self) -> &PromptEncoder {
        &self.texts.encoder
    }

    /// Returns the fields of the model's `generation_config.json`, and of those of adapters that are on the device together, that
    /// would change its texts and are not applied.
    pub fn unused_defaults(&self) -> Vec<String> {
        let slots = self.slot_texts.iter().flatten();
        let mut unused: Vec<String> = slots.chain([&self.texts]).flat_map(|of| of.defaults.unused.clone()).collect();
        unused.sort_unstable();
        unused.dedup();
        unused
    }

    /// Returns a sentence on how far the model's weights were moved when they were loaded, if any was. Before that: none.
    pub fn rounded(&self) -> Option<String> {
        self.engine.as_ref()?.rounded()
    }

    pub fn defaults(&self) -> &Defaults {
        &self.texts.defaults
    }

    /// The longest sequence that the model allows.
    pub fn longest(&self) -> Option<usize> {
        self.source.position_limit()
    }

    pub(super) fn source(&self) -> &ModelSource {
        &self.source
    }

    /// True if this generator reads the weights that `engine` has loaded: then it need not load them again.
    pub(crate) fn shares(&self, engine: &Engine) -> bool {
        engine.options().has_weights_of(&self.options)
    }

    /// True if the weights are loaded.
    pub(crate) fn is_loaded(&self) -> bool {
        self.engine.is_some()
    }

    /// Takes weights that are on the device, with what they were last compiled for here.
    pub(crate) fn take(&mut self, engine: Engine) -> Result<()> {
        let engine = self.engine.insert(engine);
        if let Some((compiled, capacity)) = self.kept.take() {
            match engine.resume(compiled) {
                Ok(()) => self.capacity = Some(capacity),
                // What else is on the device takes more than it did: the next generation is compiled for what is left.
                Err(TrainError::Memory(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Gives the weights to something else: what was being generated is over.
    pub(crate) fn release(&mut self) -> Option<Engine> {
        let engine = self.engine.take()?;
        self.kept = self.capacity.take().map(|capacity| (engine.compiled(), capacity));
        self.started += 1;
        Some(engine)
    }

    /// Frees the memory of the device; the next generation reads the weights again. Slots of adapters become empty.
    pub fn unload(&mut self) {
        (self.engine, self.capacity, self.kept, self.refused) = (None, None, None, None);
        if let Some(shared) = &mut self.shared {
            shared.slots.iter_mut().for_each(|slot| *slot = None);
            self.slot_texts = shared.slots.iter().map(|_| None).collect();
        }
        self.started += 1;
    }

    /// Holds what these sequences need, of which up to `rows` run at a time, fewer where memory does not take as many.
    pub(super) fn make_room(&mut self, needs: &[Need], rows: usize) -> Result<Capacity> {
        let longest = self.longest();
        let refused = self.refused;
        let is_refused = |capacity: &Capacity| refused.is_some_and(|pages| capacity.cache.pages >= pages);
        let mut wanted = Capacity::of(needs, rows, longest, false);
        while is_refused(&wanted) && wanted.rows > 1 {
            wanted = Capacity::of(needs, wanted.rows.div_ceil(2), longest, false);
        }
        if let Some(capacity) = self.capacity.as_ref().filter(|capacity| capacity.suits(&wanted)) {
            return Ok(capacity.clone());
        }
        let mut rows = wanted.rows;
        let mut roomy = !is_refused(&Capacity::of(needs, rows, longest, true));
        loop {
            let capacity = Capacity::of(needs, rows, longest, roomy);
            match self.compile(&capacity) {
                Ok(()) => return Ok(capacity),
                Err(TrainError::Memory(_)) if roomy || rows > 1 => {
                    self.refused = Some(capacity.cache.pages);
                    (rows, roomy) = if roomy { (rows, false) } else { (rows.div_ceil(2), false) };
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn compile(&mut self, capacity: &Capacity) -> Result<()> {
        let entry = capacity.entry().keeping([LOGITS]);
        let others = self.options.entries.iter().map(|other| other.clone().keeping_cache(capacity.cache));
        let entries = others.chain([entry]).collect();
        let options = CompileOptions { variants: capacity.variants(), entries, ..self.options.clone() };
        self.capacity = None;
        match &mut self.engine {
            Some(engine) => engine.replace(options)?,
            None => {
                let mut engine = Engine::new(self.device.clone(), self.source.clone(), options, &Choices::new())?;
                load_weights(&mut engine, &self.source, self.adapter.as_deref())?;
                if let Some(shared) = &mut self.shared {
                    shared.write_all(&mut engine)?;
                }
                self.engine = Some(engine);
            }
        }
        self.capacity = Some(capacity.clone());
        Ok(())
    }

    /// The reader that runs tokens through the model.
    pub(super) fn reader(&mut self) -> Reader<'_> {
        let engine = self.engine.as_mut().expect("room was made");
        Reader { engine, capacity: self.capacity.as_ref().expect("room was made") }
    }
}
