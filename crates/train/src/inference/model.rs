//! A model in evaluation mode: logits, hidden states, loss and gradients for batches of any shape.
//! Nothing is updated and nothing is dropped.

use std::path::{Path, PathBuf};
use std::slice::from_ref;
use std::sync::{Arc, OnceLock};

use compiler::{CompileOptions, EntryOptions, PlanOptions, Rates, Recipe, Sharding, Training};
use data::Batch;
use data::image::Pixels;
use options::Setting;
use program::{Arch, Choices, EntryKind, ParameterSlot, scalar};
use tensor::packed::Quantisation;
use tensor::{DType, HostTensor};

use crate::config::CAUSAL_LM;
use crate::engine::device::Device;
use crate::engine::weights;
use crate::engine::{Compiled, Engine};
use crate::error::{Result, TrainError};
use crate::inference::generate::{Generator, PromptEncoder};
use crate::inference::loading::{load_weights, read_adapter};
use crate::model::source::ModelSource;
use crate::model::weight_set::WeightSet;

/// The residual stream, in the order of the layers.
const HIDDEN: &str = "hidden.*";
const LOGITS: &str = "logits";
pub(crate) const TOKEN_LOSS: &str = "token_loss";

/// The task's name for the likeliest token after each.
const LIKELIEST: &str = "likeliest";

/// Weights on a device, with programs for the shapes that were requested.
pub struct Model {
    device: Arc<Device>,
    source: Arc<ModelSource>,
    adapter: Option<PathBuf>,
    options: CompileOptions,
    engine: Option<Engine>,
    /// The engine was compiled for something else meanwhile.
    is_strange: bool,
    /// The entries that the engine was compiled for when it was given away.
    kept: Option<Compiled>,
    /// Opened when texts are first scored.
    encoder: OnceLock<PromptEncoder>,
}

/// The result of [`Model::forward`].
pub struct Forward {
    /// f32 [B, T, V]
    pub logits: HostTensor,
    /// f32 [B, T, H] each: embedding output, then after each layer. Empty when not requested.
    pub hidden: Vec<HostTensor>,
}

/// The result of [`Model::loss_and_gradients`].
pub struct LossAndGradients {
    /// Weighted mean over the trained tokens.
    pub loss: f32,
    /// f32 [B, T]: entry t is the loss of predicting token t + 1; 0 where nothing is trained.
    pub token_loss: HostTensor,
    /// By tensor name, f32, in the shape of the file.
    pub gradients: Vec<(String, HostTensor)>,
}

/// The result of [`Model::token_scores`], both [B, T].
pub(crate) struct TokenScores {
    /// The loss of each target; 0 where there is none.
    pub losses: Vec<f32>,
    /// The likeliest token after each.
    pub likeliest: Vec<i32>,
}

impl Model {
    /// A model that will be read from its folder, with an adapter folder in PEFT's form. Weights and
    /// activations are stored as `dtype`, adapters in f32 as PEFT does; `auto` is the type of the model's files in 16 bits on
    /// a GPU, f32 elsewhere. Nothing is compiled before the first batch.
    pub fn load(
        device: Arc<Device>,
        source: Arc<ModelSource>,
        adapter: Option<&Path>,
        dtype: impl Into<Setting<DType>>,
    ) -> Result<Model> {
        let dtype = match dtype.into() {
            Setting::Value(dtype) => dtype,
            Setting::Auto if device.machine.arch == Arch::Cpu => DType::F32,
            Setting::Auto => match source.dtype() {
                Some(DType::BF16 | DType::F16) => DType::BF16,
                _ => DType::F32,
            },
        };
        let adapter_options = adapter.map(|folder| read_adapter(folder, &source)).transpose()?;
        let options = CompileOptions {
            variants: Vec::new(),
            weights: dtype,
            quantised: None,
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
        Ok(Model::of(device, source, adapter.map(Path::to_owned), options))
    }

    /// A model with the options of its programs, of which entries and shapes follow from what is requested.
    pub(crate) fn of(
        device: Arc<Device>,
        source: Arc<ModelSource>,
        adapter: Option<PathBuf>,
        options: CompileOptions,
    ) -> Model {
        let (engine, kept, encoder) = (None, None, OnceLock::new());
        Model { device, source, adapter, options, engine, is_strange: false, kept, encoder }
    }

    /// Returns a generator that uses the same weights.
    pub fn generator(&self) -> Result<Generator> {
        let dtype = self.options.weights;
        Generator::new(self.device.clone(), self.source.clone(), self.adapter.clone(), dtype)
    }

    /// Takes weights that are on the device, with what they were last compiled for here.
    pub(crate) fn take(&mut self, engine: Engine) -> Result<()> {
        let engine = self.engine.insert(engine);
        self.is_strange = true;
        if let Some(kept) = self.kept.take() {
            engine.resume(kept)?;
            self.is_strange = false;
        }
        Ok(())
    }

    /// Moves the loaded weights out of the model.
    pub(crate) fn release(&mut self) -> Option<Engine> {
        let engine = self.engine.take()?;
        self.kept = (!self.is_strange).then(|| engine.compiled());
        Some(engine)
    }

    /// Frees the memory of the device; the next call reads the weights again.
    pub fn unload(&mut self) {
        (self.engine, self.kept) = (None, None);
    }

    /// Gives the weights to what generates, so that they are on the device once. What keeps them in another form reads them
    /// again.
    pub fn lend(&mut self, generator: &mut Generator) -> Result<()> {
        if generator.is_loaded() {
            return Ok(());
        }
        match self.release().filter(|engine| generator.shares(engine)) {
            Some(engine) => generator.take(engine),
            None => Ok(()),
        }
    }

    /// Takes the weights back; what is being generated is over.
    pub fn take_back(&mut self, generator: &mut Generator) -> Result<()> {
        match generator.release().filter(|engine| engine.options().has_weights_of(&self.options)) {
            Some(engine) => self.take(engine),
            None => Ok(()),
        }
    }

    /// The same model, its frozen linears in codes.
    pub fn quantised(mut self, quantised: Option<Quantisation>) -> Model {
        self.options.quantised = quantised;
        self
    }

    /// The same, with matrices multiplied as a recipe says. Before the first batch.
    pub fn with_recipe(mut self, recipe: Recipe) -> Model {
        assert!(self.engine.is_none(), "the recipe is chosen before anything is compiled");
        self.options.recipe = recipe;
        self
    }

    /// The same, with another key of the random numbers that a recipe rounds by. Before the first batch.
    pub fn with_seed(mut self, seed: u64) -> Model {
        assert!(self.engine.is_none(), "the key is chosen before anything is compiled");
        self.options.seed = seed;
        self
    }

    /// The batch with images, in the order of their tokens.
    pub fn with_images(&self, batch: Batch, images: &[Pixels]) -> Result<Batch> {
        self.source.with_images(batch, &self.source.pictures(images)?)
    }

    /// Logits of a batch, and with `hidden` the residual stream.
    pub fn forward(&mut self, batch: &Batch, hidden: bool) -> Result<Forward> {
        self.source.check_ids(std::slice::from_ref(batch))?;
        let wanted: &[&str] = if hidden { &[LOGITS, HIDDEN] } else { &[LOGITS] };
        let engine = self.engine_for(batch, EntryOptions::forward().keeping(wanted.iter().copied()))?;
        let variant = engine.prepare(engine.variant_of(from_ref(batch), false))?;
        engine.run(EntryKind::Forward, variant, &round(engine, batch))?;
        let logits = engine.output(EntryKind::Forward, variant, LOGITS)?;
        let mut states = Vec::new();
        for name in if hidden { hidden_names(engine) } else { Vec::new() } {
            states.push(engine.output(EntryKind::Forward, variant, &name)?);
        }
        Ok(Forward { logits, hidden: states })
    }

    /// The loss of a batch and its gradients: of the adapter where there is one, and of what is trained with it, of every
    /// weight otherwise.
    pub fn loss_and_gradients(&mut self, batch: &Batch) -> Result<LossAndGradients> {
        self.source.check_ids(std::slice::from_ref(batch))?;
        let (adapted, source) = (self.options.adapter.is_some(), self.source.clone());
        let engine = self.engine_for(batch, EntryOptions::train(CAUSAL_LM).keeping([TOKEN_LOSS]))?;
        if engine.ranks() > 1 {
            let text = "the gradients of a model in training on several devices are shared out among them: only \
                        `forward`, `score` and `generate` are available";
            return Err(TrainError::Usage(text.into()));
        }
        let variant = engine.prepare(engine.variant_of(from_ref(batch), false))?;
        engine.set_i32(scalar::MICRO_STEP, 0)?;
        engine.run(EntryKind::FirstMicroStep, variant, from_ref(batch))?;
        let (sum, weight) = (engine.sum_f32(scalar::LOSS_SUM)? as f32, engine.sum_f32(scalar::WEIGHT_SUM)? as f32);
        if weight == 0.0 {
            return Err(TrainError::Usage(
                "no token of the batch is trained: every label is -100 or has no token before it".into(),
            ));
        }
        let token_loss = engine.output(EntryKind::FirstMicroStep, variant, TOKEN_LOSS)?;
        let program = engine.program().clone();
        let part = if adapted { WeightSet::Adapter } else { WeightSet::Base };
        let loss_scale = if engine.scales_loss() { engine.sum_f32(scalar::LOSS_SCALE)? as f32 } else { 1.0 };
        let own = if adapted || source.model.files.renamed.is_empty() {
            data::safetensors::Weights::none()
        } else {
            source.own(&source.folder)?
        };
        let mut gradients = Vec::new();
        for slot in &program.layout.parameters {
            if let Some(mut gradient) = weights::read_gradient(engine.session(), slot, 1.0 / weight / loss_scale)? {
                if let Some(stored) = source.stored_shape(&slot.name).filter(|_| !adapted) {
                    gradient.shape = stored.to_vec();
                }
                let name = part.name(slot);
                gradients.push((if adapted { name } else { source.file_name(&own, &name) }, gradient));
            }
        }
        Ok(LossAndGradients { loss: sum / weight, token_loss, gradients })
    }

    /// The loss of each target of a batch, and what the model takes for the next token: logits do not leave the device.
    pub(crate) fn token_scores(&mut self, batch: &Batch) -> Result<TokenScores> {
        let engine = self.engine_for(batch, EntryOptions::evaluate(CAUSAL_LM).keeping([TOKEN_LOSS, LIKELIEST]))?;
        let variant = engine.prepare(engine.variant_of(from_ref(batch), false))?;
        engine.run(EntryKind::Evaluate, variant, &round(engine, batch))?;
        let losses = engine.output(EntryKind::Evaluate, variant, TOKEN_LOSS)?.to_f32();
        let likeliest = engine.output_as_stored(EntryKind::Evaluate, variant, LIKELIEST)?;
        let ids = likeliest.bytes.as_chunks().0.iter().map(|id| i32::from_le_bytes(*id));
        Ok(TokenScores { losses, likeliest: ids.collect() })
    }

    /// Log-probabilities of the targets of a batch, f32 [B, T]: entry t is of token t + 1; 0 where there is no target.
    pub fn logps(&mut self, batch: &Batch) -> Result<HostTensor> {
        self.source.check_ids(from_ref(batch))?;
        let losses = self.token_scores(batch)?.losses;
        let mut logps = HostTensor::zeros(DType::F32, vec![batch.batch, batch.seq_len]);
        logps.bytes = losses.iter().flat_map(|loss| (0.0 - loss).to_le_bytes()).collect();
        Ok(logps)
    }

    /// The encoder of texts, opened when it is first needed.
    pub(crate) fn encoder(&self) -> Result<&PromptEncoder> {
        if let Some(encoder) = self.encoder.get() {
            return Ok(encoder);
        }
        let folders: Vec<&Path> = self.adapter.as_deref().into_iter().chain([&*self.source.folder]).collect();
        let opened = PromptEncoder::open(&folders)?;
        Ok(self.encoder.get_or_init(|| opened))
    }

    /// Describes the model: architecture, size, device.
    pub fn summary(&self) -> String {
        let adapter = self.options.adapter.as_ref().map(|of| format!(" with an adapter of rank {}", of.rank));
        let (family, dtype, machine) = (self.source.model_type(), self.options.weights, &self.device.machine.name);
        format!("{}: {family}{} in {dtype} on {machine}", self.source.folder.display(), adapter.unwrap_or_default())
    }

    /// The longest sequence that the model allows.
    pub fn longest(&self) -> Option<usize> {
        self.source.position_limit()
    }

    /// The longest sequence that is rotated as every other of its batch, where the rotation follows from the longest one.
    pub(crate) fn shares_rotation_to(&self) -> Option<usize> {
        self.source.config.shares_rotation_to()
    }

    /// Refuses ids that the model does not know.
    pub(crate) fn check_ids(&self, ids: &[i32]) -> Result<()> {
        let vocabulary = self.source.vocab_size()?;
        match ids.iter().find(|id| **id < 0 || **id as usize >= vocabulary) {
            Some(id) => Err(TrainError::Usage(format!("token id {id} is outside of the vocabulary of {vocabulary}"))),
            None => Ok(()),
        }
    }

    /// The tensors that [`Model::loss_and_gradients`] gives gradients for.
    pub fn parameter_names(&mut self) -> Result<Vec<String>> {
        let batch = Batch::from_labels(1, 2, vec![0; 2], &[0; 2], None, None).expect("a batch of two tokens");
        let batch = self.with_images(batch, &[])?;
        let program = self.engine_for(&batch, EntryOptions::forward())?.program().clone();
        let is_trained = |slot: &&ParameterSlot| slot.trainable || self.options.training.is_none();
        if self.options.adapter.is_some() {
            return Ok(WeightSet::Adapter
                .of(&program)
                .filter(is_trained)
                .map(|of| WeightSet::Adapter.name(of))
                .collect());
        }
        let own = self.source.own(&self.source.folder)?;
        let of_file = |slot: &ParameterSlot| self.source.file_name(&own, &WeightSet::Base.name(slot));
        Ok(WeightSet::Base.of(&program).filter(is_trained).map(of_file).collect())
    }

    /// The engine, with an entry and its outputs compiled in.
    fn engine_for(&mut self, batch: &Batch, wanted: EntryOptions) -> Result<&mut Engine> {
        let mut options = self.options.clone();
        if wanted.kind == EntryKind::FirstMicroStep && options.training.is_none() {
            let rates = Rates::default();
            options.training = Some(Training { rates, dropout: false, embedding_noise: 0.0, optimizer: None });
        }
        match options.entries.iter_mut().find(|entry| entry.kind == wanted.kind) {
            Some(known) if known.task != wanted.task => {
                let task = known.task.as_deref().unwrap_or("no task");
                let text = format!(
                    "a model that is trained for `{task}` has no gradients of a language model's loss: save it, and \
                     call `surogate.load` on the result"
                );
                return Err(TrainError::Usage(text));
            }
            Some(known) => known.keep(wanted.outputs.iter().map(String::as_str)),
            // An entry that trains is the first: it has what all of them report.
            None => {
                let trains = |entry: &EntryOptions| entry.kind == EntryKind::FirstMicroStep;
                let first = if trains(&wanted) { 0 } else { options.entries.iter().filter(|of| trains(of)).count() };
                options.entries.insert(first, wanted);
            }
        }
        match &mut self.engine {
            Some(_) if options == self.options && !self.is_strange => {
                return Ok(self.engine.as_mut().expect("just seen"));
            }
            Some(engine) => {
                let variants = match self.is_strange {
                    true => vec![crate::engine::variant_of(from_ref(batch), false)],
                    false => engine.options().variants.clone(),
                };
                engine.replace(CompileOptions { variants, ..options.clone() })?;
            }
            None => self.engine = Some(self.start(&options, batch)?),
        }
        (self.options, self.is_strange) = (options, false);
        Ok(self.engine.as_mut().expect("just made"))
    }

    fn start(&self, options: &CompileOptions, batch: &Batch) -> Result<Engine> {
        let first = crate::engine::variant_of(from_ref(batch), false);
        let options = CompileOptions { variants: vec![first], ..options.clone() };
        let mut engine = Engine::new(self.device.clone(), self.source.clone(), options, &Choices::new())?;
        load_weights(&mut engine, &self.source, self.adapter.as_deref())?;
        Ok(engine)
    }
}

/// The batch as often as there are replicas: all compute the same.
fn round(engine: &Engine, batch: &Batch) -> Vec<Batch> {
    vec![batch.clone(); engine.replicas()]
}

/// Names of the residual stream's values in order: `hidden.embed`, `hidden.layer.0`, …
fn hidden_names(engine: &Engine) -> Vec<String> {
    let outputs = engine.program().entries.iter().find(|entry| entry.kind == EntryKind::Forward);
    let names = outputs.into_iter().flat_map(|entry| &entry.outputs).map(|(name, _)| name.clone());
    let layers = names.filter(|name| name == "hidden.embed" || name.starts_with("hidden.layer."));
    let mut layers: Vec<String> = layers.collect();
    layers
        .sort_by_key(|name| name.rsplit('.').next().and_then(|index| index.parse::<usize>().ok()).map_or(0, |i| i + 1));
    layers
}
