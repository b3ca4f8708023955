//! A model on a device that goes on where its sequences were. Compiled when it is first needed, and again when sequences need
//! more than it holds. Knows pages and rows by number, not whose they are.

use std::path::PathBuf;
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
    encoder: PromptEncoder,
    defaults: Defaults,
    /// Counts generations: one at a time owns the cache.
    pub(super) started: u64,
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
        };
        let folders: Vec<_> = adapter.iter().chain([&source.folder]).map(PathBuf::as_path).collect();
        let encoder = PromptEncoder::open(&folders)?;
        // An adapter's own file names the end tokens that it was trained with.
        let place = adapter.as_deref().filter(|folder| folder.join(defaults::FILE).is_file()).unwrap_or(&source.folder);
        let defaults = Defaults::read(place, &source.config.0)?;
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
        let (engine, capacity, refused, kept) = (None, None, None, None);
        Generator { device, source, adapter, options, engine, capacity, refused, kept, encoder, defaults, started: 0 }
    }

    /// The compiled engine, once it has the weights.
    pub(super) fn engine(&self) -> Option<&Engine> {
        self.engine.as_ref()
    }

    pub fn encoder(&self) -> &PromptEncoder {
        &self.encoder
    }

    /// Returns the fields of the model's `generation_config.json` that would change its texts and are not applied.
    pub fn unused_defaults(&self) -> &[String] {
        &self.defaults.unused
    }

    /// Returns a sentence on how far the model's weights were moved when they were loaded, if any was. Before that: none.
    pub fn rounded(&self) -> Option<String> {
        self.engine.as_ref()?.rounded()
    }

    pub fn defaults(&self) -> &Defaults {
        &self.defaults
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
