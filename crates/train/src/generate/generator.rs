//! A model on a device that goes on where its sequences were. Compiled when it is first needed, and again when sequences need
//! more than it holds. Knows pages and rows by number, not whose they are.

use std::path::PathBuf;
use std::sync::Arc;

use compiler::sampling::Draw;
use compiler::{AdapterOptions, CompileOptions, PlanOptions, Recipe, Sharding};
use data::Batch;
use program::{Choices, EntryKind, Variant, generation};
use tensor::{DType, HostTensor};

use super::capacity::{Capacity, Need, variant};
use super::defaults::{self, Defaults};
use super::prompt::PromptEncoder;
use crate::device::Device;
use crate::engine::{Compiled, Engine};
use crate::error::{Result, TrainError};
use crate::model::{load_weights, read_adapter};
use crate::quantised_base;
use crate::source::ModelSource;

pub(crate) const LOGITS: &str = "logits";

/// Weights on a device, with programs that read prompts and add token after token.
pub struct Generator {
    device: Arc<Device>,
    source: Arc<ModelSource>,
    adapter: Option<PathBuf>,
    options: CompileOptions,
    engine: Option<Engine>,
    /// What the engine is compiled for; nothing where it was made for something else.
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

/// What follows the tokens of rows; rows of padding are after those that were requested.
pub(super) struct Following {
    /// The token that was drawn for each row.
    pub ids: Vec<u32>,
    /// The log-probability of each of them.
    pub logps: Vec<f32>,
    /// Logits row by row, as they are on the device.
    pub logits: Option<HostTensor>,
}

/// The parts of [`Following`] that are read from the device besides the tokens.
#[derive(Clone, Copy, Default)]
pub(super) struct Wanted {
    pub logps: bool,
    pub logits: bool,
}

/// The logits of each row as f32, converted where they are used.
pub(super) fn rows_of(logits: &HostTensor, rows: usize) -> impl Fn(usize) -> Vec<f32> + Sync {
    let vocabulary = logits.len() / rows;
    let bytes = vocabulary * logits.dtype.size();
    move |row| {
        let bytes = &logits.bytes[row * bytes..][..bytes];
        let widened = |x: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*x)) << 16);
        match logits.dtype {
            DType::BF16 => bytes.as_chunks().0.iter().map(widened).collect(),
            dtype => HostTensor { dtype, shape: vec![vocabulary], bytes: bytes.to_vec() }.to_f32(),
        }
    }
}

/// The tokens of one row that are read at once.
pub(super) struct Row<'a> {
    pub ids: &'a [i32],
    /// The place of the first in its sequence.
    pub position: usize,
    pub pages: &'a [u32],
    pub slot: u32,
    /// Time, row and column of each token, where these are not its place in the sequence.
    pub axes: Option<Vec<i32>>,
    /// The tokens as one row with the images among them, laid out.
    pub images: Option<Batch>,
    /// How the token after the last one is drawn.
    pub draw: Draw,
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
            quantised: adapter.as_deref().map(quantised_base::read).transpose()?.flatten().map(|base| base.made),
            stored: Default::default(),
            compute: dtype,
            recipe: Recipe::Uniform,
            training: None,
            adapter: adapter_options,
            entries: Vec::new(),
            seed: 0,
            plan: PlanOptions::default(),
            sharding: Sharding::default(),
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

    /// Whether these compiled weights are the ones that this reads: then it need not load them again.
    pub(crate) fn shares(&self, engine: &Engine) -> bool {
        engine.options().has_weights_of(&self.options)
    }

    /// Whether it has the weights.
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

    /// What reads tokens.
    pub(super) fn reader(&mut self) -> Reader<'_> {
        let engine = self.engine.as_mut().expect("room was made");
        Reader { engine, capacity: self.capacity.as_ref().expect("room was made") }
    }
}

/// A compiled model that goes on where its sequences were, whoever has it.
pub(crate) struct Reader<'a> {
    pub engine: &'a mut Engine,
    /// The entries and shapes that it is compiled for.
    pub capacity: &'a Capacity,
}

impl Reader<'_> {
    /// Whether what the model computes depends on the longest sequence of a batch: then each is alone in its batch.
    pub fn runs_alone(&self) -> bool {
        let mut inputs = self.engine.program().entries.iter().flat_map(|entry| &entry.inputs);
        inputs.any(|(name, _)| name == generation::LARGEST_POSITION)
    }

    /// Whether a sequence has state besides its pages, which another one with the same beginning cannot read.
    pub fn has_slots(&self) -> bool {
        let mut inputs = self.engine.program().entries.iter().flat_map(|entry| &entry.inputs);
        inputs.any(|(name, _)| name == generation::SLOTS)
    }

    /// Reads tokens, which the cache then holds. Gives what follows the last token of each row where that is wanted.
    /// `whole`: tokens that the longest sequence has, of which only some may be read.
    pub(super) fn read(&mut self, rows: &[Row<'_>], whole: usize, wanted: Option<Wanted>) -> Result<Option<Following>> {
        let Reader { engine, capacity } = self;
        let images = rows.first().and_then(|row| row.images.as_ref());
        let shape = match rows {
            [Row { images: Some(of), .. }] => Variant { patches: of.patches.count(), ..variant(1, of.seq_len) },
            [row] if row.ids.len() > 1 => variant(1, capacity.chunk(row.ids.len())),
            _ => variant(capacity.batch(rows.len()), 1),
        };
        if images.is_some() {
            // What was compiled for text stays: the sequences that run need it.
            engine.prepare_all(&capacity.variants().into_iter().chain([shape]).collect::<Vec<_>>())?;
        }
        let (tokens, width) = (shape.seq_len, capacity.cache.pages_per_sequence);
        let size = shape.batch * tokens;
        let (mut ids, mut positions, mut in_cache) = (vec![0; size], vec![0; size], vec![-1; size]);
        let (mut table, mut last) = (vec![0; shape.batch * width], vec![0; shape.batch]);
        let (mut slots, mut last_keys, mut axes) = (last.clone(), in_cache.clone(), vec![0; 3 * size]);
        let mut largest = whole.saturating_sub(1);
        let likeliest = Draw { temperature: 0.0, ..Draw::ALL };
        let draws = (0..shape.batch).flat_map(|row| rows.get(row).map_or(likeliest, |row| row.draw).to_row());
        let sampling: Vec<i32> = draws.map(|number| number.to_bits() as i32).collect();
        for (index, row) in rows.iter().enumerate() {
            for (t, id) in row.ids.iter().enumerate() {
                let (at, position) = (index * tokens + t, row.position + t);
                (ids[at], positions[at], in_cache[at]) = (*id, position as i32, position as i32);
                largest = largest.max(position);
                let last = images.map_or(t, |batch| batch.patches.last_key[t] as usize);
                last_keys[at] = (row.position + last) as i32;
                let own =
                    row.axes.as_ref().map_or([position as i32; 3], |of| [of[3 * t], of[3 * t + 1], of[3 * t + 2]]);
                axes[3 * at..][..3].copy_from_slice(&own);
            }
            (last[index], slots[index]) = (row.ids.len() as i32 - 1, row.slot as i32);
            for (page, own) in table[index * width..].iter_mut().zip(row.pages) {
                *page = *own as i32;
            }
        }
        let inputs: [(&str, &[i32]); 11] = [
            ("input_ids", &ids),
            ("position_ids", &positions),
            ("token_axes", &axes),
            ("text_ids", &ids),
            (generation::LAST_KEYS, &last_keys),
            (generation::POSITIONS, &in_cache),
            (generation::TABLE, &table),
            (generation::SLOTS, &slots),
            (generation::LAST_TOKEN, &last),
            (generation::LARGEST_POSITION, &[largest as i32]),
            (generation::SAMPLING, &sampling),
        ];
        run(engine, shape, images, &inputs)?;
        let Some(wanted) = wanted else { return Ok(None) };
        let mut result = |name: &str| engine.output_as_stored(EntryKind::Forward, shape, name);
        let words = |of: HostTensor| -> Vec<u32> {
            of.bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
        };
        let ids = words(result(generation::NEXT_TOKEN)?);
        let logps = wanted.logps.then(|| result(generation::NEXT_LOGP)).transpose()?.map(words).unwrap_or_default();
        let logits = wanted.logits.then(|| result(LOGITS)).transpose()?;
        Ok(Some(Following { ids, logps: logps.into_iter().map(f32::from_bits).collect(), logits }))
    }
}

fn entry(engine: &Engine, shape: Variant) -> usize {
    let found = engine.program().entry(EntryKind::Forward, Some(shape));
    found.expect("the shapes of a capacity are compiled together")
}

/// Inputs that rows with images bring themselves, though rows of text have them too.
const OF_IMAGES: [&str; 2] = ["input_ids", "text_ids"];

/// Writes numbers to where the entry of a shape reads them, by name, and runs it. What it does not read is left out.
fn run(engine: &mut Engine, shape: Variant, images: Option<&Batch>, inputs: &[(&str, &[i32])]) -> Result<()> {
    let (entry, program) = (entry(engine, shape), engine.program().clone());
    for (name, at) in &program.entries[entry].inputs {
        let of_images =
            images.filter(|_| OF_IMAGES.contains(&name.as_str()) || !inputs.iter().any(|(own, _)| own == name));
        let bytes = match (of_images, inputs.iter().find(|(own, _)| own == name)) {
            (Some(batch), _) => data::inputs::input(name).and_then(|input| input.bytes(batch)),
            (None, Some((_, numbers))) => Some(numbers.iter().flat_map(|number| number.to_le_bytes()).collect()),
            (None, None) if name == "text" => Some(1f32.to_le_bytes().repeat(at.len())),
            (None, None) => None,
        };
        if let Some(bytes) = bytes {
            engine.session().write(at, &bytes)?;
        }
    }
    Ok(engine.session().run(entry)?)
}
