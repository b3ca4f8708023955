//! The model that a run starts from: its folder, its Hugging Face configuration, and its graph as
//! the Python DSL recorded it. Knows no keys of the configuration.

use std::path::{Path, PathBuf};

use data::boxes::{BoxForm, Units};
use data::image::{Limits, PixelLimits, Pixels, Processor};
use data::patches::{Form, Picture};
use data::pictures::ImageReader;
use data::safetensors::{Stack, Weights};
use data::{Batch, IGNORE};
use graph::{AdapterForm, Dim, Element, ImageForm, Model, ParameterSpec, ValueType};
use options::Setting;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tensor::DType;

use crate::config::{Config, Task};
use crate::error::{Result, TrainError};
use crate::files::digest;
use crate::model::hf_config::{self, HfConfig};
use crate::model::{quantized_checkpoint, rope_scaling};

/// The configuration that a model is built from, as the options change it.
pub fn model_config(config: &Config, fields: &Value) -> Result<Value> {
    let changed = with_head(config, rope_scaling::apply(config, fields)?);
    Ok(match config.model.router_aux_loss_coef {
        Setting::Auto => changed,
        Setting::Value(coefficient) => HfConfig(changed).with_router_loss(coefficient).0,
    })
}

/// The configuration with the head that the task trains.
fn with_head(config: &Config, fields: Value) -> Value {
    match config.task {
        Task::Reward => HfConfig(fields).as_reward_model().0,
        _ => fields,
    }
}

/// The head of a reward model, which is drawn where the files have none.
pub const SCORE: &str = "score.weight";

/// A model as data: its configuration, its graph and its files.
#[derive(Clone, Debug)]
pub struct ModelSource {
    /// Local folder with `config.json` and, unless the weights are drawn, safetensors files.
    pub folder: PathBuf,
    pub config: HfConfig,
    pub model: Model,
    /// Bounds of images in place of those of the folder's processor.
    pub pixels: PixelLimits,
}

/// Tensors in files that have, one after another, matrices which are parameters: what adapters know as parameters of three
/// axes.
pub(crate) fn stacks(adapters: &AdapterForm) -> Vec<Stack<'_>> {
    adapters.stacks.iter().map(|stack| Stack { name: &stack.name, parts: &stack.parts }).collect()
}

/// The configuration of a model's folder. Where the files hold a head that differs from the embedding, the model has a head
/// of its own whatever the fields say, as in transformers.
pub fn config_of(folder: &Path) -> Result<HfConfig> {
    let config = HfConfig::read(folder)?;
    Ok(if has_own_head(folder)? { config.untied() } else { config })
}

/// True if the files hold a head besides the embedding, with other numbers, and the fields do not say so.
pub fn has_own_head(folder: &Path) -> Result<bool> {
    // What cannot be read is an error where the fields are wanted.
    let Ok(config) = HfConfig::read(folder) else { return Ok(false) };
    if config.is_untied() || !quantized_checkpoint::has_weights(folder) {
        return Ok(false);
    }
    // What cannot be read is an error where the weights are wanted.
    let Ok(files) = quantized_checkpoint::weights(folder) else { return Ok(false) };
    let named = |endings: &[&str]| {
        let ends = |name: &&str| endings.iter().any(|end| name == end || name.ends_with(&format!(".{end}")));
        let found = files.names().into_iter().find(ends).map(str::to_owned);
        found.map(|name| files.get(&name).map_err(TrainError::model_file)).transpose()
    };
    let (head, table) = (named(&["lm_head.weight"])?, named(&["embed_tokens.weight", "wte.weight"])?);
    match (head, table) {
        (Some(head), Some(table)) if head.shape == table.shape => {
            Ok(!head.has_bytes_of(&table).map_err(TrainError::unreadable)?)
        }
        _ => Ok(false),
    }
}

/// Returns the reader of images by the processor of a folder; `form` is `images` of the model's graph as JSON.
pub fn image_reader(folder: &Path, form: &str) -> Result<ImageReader> {
    let form: ImageForm = serde_json::from_str(form).map_err(|error| TrainError::Usage(error.to_string()))?;
    reader_of(folder, form)
}

fn reader_of(folder: &Path, form: ImageForm) -> Result<ImageReader> {
    let processor = Processor::read(folder).map_err(TrainError::Data)?.ok_or_else(|| {
        let folder = folder.display();
        TrainError::Usage(format!("{folder}: there is no `preprocessor_config.json`, which says how images are read"))
    })?;
    if processor.frames() != form.frames {
        let (folder, found, wanted) = (folder.display(), processor.frames(), form.frames);
        return Err(TrainError::Usage(format!(
            "{folder}: patches have {wanted} frames by `config.json`, and {found} by the processor of \
             `preprocessor_config.json`: their `temporal_patch_size` must be equal"
        )));
    }
    let units = if form.boxes_in_pixels { Units::Pixels } else { Units::Thousandths };
    let boxes = BoxForm { units, marked: form.boxes_marked };
    Ok(ImageReader { form: read_as(form), processor, limits: Limits::default(), boxes, rooms: Vec::new() })
}

/// The reading of images as the data know it.
fn read_as(form: ImageForm) -> Form {
    let ImageForm { token, width, side, window, table, stretched, breaks, pad, .. } = form;
    Form { token, width, side, window, table, stretched, breaks, pad }
}

/// Rejects a model that reads what no batch brings.
fn check_inputs(model: &Model) -> Result<()> {
    let described = |of: &data::inputs::Input| {
        let axis = |axis: &&str| axis.parse().map_or_else(|_| Dim::Symbol((*axis).to_owned()), Dim::Fixed);
        let axes = of.axes.iter().map(axis).collect::<Vec<_>>();
        ValueType::new(Element::Fixed(of.dtype()), if axes.is_empty() { vec![Dim::Fixed(1)] } else { axes })
    };
    // An extent `N` of the description is the model's to say.
    let fits = |known: &Dim, asked: &Dim| match (known, asked) {
        (Dim::Symbol(open), Dim::Fixed(_)) => open == "N",
        (Dim::Symbol(open), Dim::Symbol(_)) if open == "P/N" => asked.axis() == Some(graph::Axis::Patches),
        _ => known == asked,
    };
    for input in &model.inputs {
        let asked = ValueType::new(input.dtype, input.shape.clone());
        let known = data::inputs::input(&input.name).map(described);
        let agrees = known.as_ref().is_some_and(|known| {
            let axes = known.shape.len() == asked.shape.len();
            known.dtype == asked.dtype && axes && known.shape.iter().zip(&asked.shape).all(|(a, b)| fits(a, b))
        });
        if !agrees {
            let expected = match known {
                Some(known) => format!("it is {known}"),
                None => format!("there are {}", data::inputs::INPUTS.map(|of| of.name).join(", ")),
            };
            let text = format!("the model reads `{}` as {asked} from a batch; {expected}", input.name);
            return Err(TrainError::Usage(text));
        }
    }
    Ok(())
}

impl ModelSource {
    /// Reads `config.json` of a folder; `ir` is the model's graph as JSON.
    pub fn open(folder: &Path, ir: &str) -> Result<ModelSource> {
        let config = config_of(folder)?;
        let model = graph::from_json(ir).map_err(|e| TrainError::Usage(e.to_string()))?;
        check_inputs(&model)?;
        Ok(ModelSource { folder: folder.to_owned(), config, model, pixels: PixelLimits::default() })
    }

    /// The digest of `config.json` as it is in the folder.
    pub fn config_digest(&self) -> Result<String> {
        let path = self.folder.join(hf_config::FILE);
        digest::of_file(&path).map_err(|e| TrainError::io("read", &path, e))
    }

    /// The digests of the model's files; `weights`: those of the weights, too.
    pub fn digest(&self, weights: bool) -> Result<ModelDigest> {
        let failed = |e| TrainError::io("read", &self.folder, e);
        let config = self.config_digest()?;
        let of_weights = || -> std::io::Result<String> {
            let files = digest::of_files(&self.folder, |name| name.ends_with(".safetensors"))?;
            let text: String = files.iter().map(|(name, bytes, digest)| format!("{name} {bytes} {digest}\n")).collect();
            Ok(digest::of_bytes(text.as_bytes()))
        };
        let weights = weights.then(of_weights).transpose().map_err(failed)?;
        Ok(ModelDigest { config, weights })
    }

    /// The same model, whose weights that write into the residual stream are drawn as zeros. An error where the
    /// architecture marks none.
    pub fn with_projections_at_zero(&self) -> Result<ModelSource> {
        let mut source = self.clone();
        if source.model.zero_residual_projections() == 0 {
            let name = &self.model.architecture;
            let text = format!("`init_projections_to_zero: true`, but {name} marks no weight as such a projection");
            return Err(TrainError::Usage(text));
        }
        Ok(source)
    }

    /// The same model with what the options change in its configuration; its graph was built from that.
    pub fn configured(self, config: &Config) -> Result<ModelSource> {
        let fields = with_head(config, rope_scaling::apply(config, &self.config.0)?);
        Ok(ModelSource { config: HfConfig(fields), ..self })
    }

    /// Rows of the embedding table.
    pub fn vocab_size(&self) -> Result<usize> {
        self.config.vocab_size().or_else(|| self.model.columns_of("logits")).ok_or_else(|| {
            TrainError::Usage(format!("{}: there is no `vocab_size`", self.folder.join(hf_config::FILE).display()))
        })
    }

    /// The model's weights in a folder, under the names of its parameters.
    pub fn weights(&self, folder: &Path) -> Result<Weights> {
        Ok(self.tensors(folder)?.filtered(|name| !self.model.files.carries(name)))
    }

    /// The tensors of a folder that belong to parts which are not computed, under such names too: results take them
    /// over.
    pub fn carried(&self, folder: &Path) -> Result<Weights> {
        let form = &self.model.files;
        if form.carried.is_empty() { Ok(Weights::none()) } else { self.own(folder) }
            .map(|own| own.filtered(|name| form.carries(name)))
    }

    /// All tensors of a model's folder, none where its weights were drawn.
    pub fn own(&self, folder: &Path) -> Result<Weights> {
        if quantized_checkpoint::has_weights(folder) { self.tensors(folder) } else { Ok(Weights::none()) }
    }

    fn tensors(&self, folder: &Path) -> Result<Weights> {
        let form = &self.model.files;
        let files = quantized_checkpoint::weights(folder)?.without(&form.computed).renamed(&form.renamed);
        let files = match &form.base_prefix {
            Some(prefix) => files.prefixed(prefix),
            None => files,
        };
        let files = files.unstacked(&stacks(&self.model.adapters)).map_err(TrainError::model_file)?;
        let files = files.reshaped(|name| self.reshaped(name).map(|of| of.shape.as_slice()));
        Ok(files.swapped(|name| self.swapped(name).map(|of| of.shape.as_slice())))
    }

    /// Returns the reader of images; an error where the model reads none, or its folder has no processor.
    pub fn image_reader(&self) -> Result<ImageReader> {
        let Some(form) = self.model.images else {
            return Err(TrainError::Usage(format!("{} reads no images", self.model.architecture)));
        };
        let reader = reader_of(&self.folder, form)?;
        let processor = reader.processor.bounded(self.pixels).map_err(TrainError::Usage)?;
        Ok(ImageReader { processor, ..reader })
    }

    /// The reading of images, where the model computes them.
    pub(crate) fn image_form(&self) -> Option<Form> {
        self.model.images.map(read_as)
    }

    /// The views of images, in their order.
    pub fn pictures(&self, images: &[Pixels]) -> Result<Vec<Picture>> {
        if images.is_empty() {
            return Ok(Vec::new());
        }
        let reader = self.image_reader()?;
        let mut pictures = Vec::new();
        for (number, image) in images.iter().enumerate() {
            let views = reader.pictures(image.clone());
            pictures.extend(views.map_err(|problem| TrainError::Usage(format!("image {}: {problem}", number + 1)))?);
        }
        Ok(pictures)
    }

    /// The parameter of this name, where files may hold its matrices with exchanged axes.
    fn swapped(&self, name: &str) -> Option<&ParameterSpec> {
        let may_be = self.model.adapters.may_be_swapped(name);
        self.model.weights().find(|of| may_be && of.is_named(name))
    }

    /// The parameter of this name, where it has another shape in files.
    fn reshaped(&self, name: &str) -> Option<&ParameterSpec> {
        self.model.weights().find(|of| of.stored.is_some() && of.is_named(name))
    }

    /// The shape of a parameter in files, where that is another than the model's.
    pub fn stored_shape(&self, name: &str) -> Option<&[usize]> {
        self.reshaped(name)?.stored.as_deref()
    }

    /// Lays out the images of a batch, in the order of their tokens, where the model computes images. Errors: images for a
    /// model without, and what [`Form::lay_out`] refuses.
    pub fn with_images(&self, batch: Batch, pictures: &[Picture]) -> Result<Batch> {
        let Some(form) = self.image_form() else {
            let text = format!("{} reads no images", self.model.architecture);
            return if pictures.is_empty() { Ok(batch) } else { Err(TrainError::Usage(text)) };
        };
        let patches = form.lay_out(&batch, pictures).map_err(TrainError::Data)?;
        Ok(Batch { patches, ..batch })
    }

    /// The name of a parameter in results: that of the model's own files, or that of published files if there are none.
    pub fn file_name(&self, own: &Weights, name: &str) -> String {
        if self.model.files.renamed.is_empty() {
            return name.to_owned();
        }
        if let Some(there) = own.name_in_file(name) {
            return there.to_owned();
        }
        let mut others = self.model.files.renamed.iter().filter(|[from, to]| from != to);
        let published = |[from, to]: &[String; 2]| Some(format!("{from}{}", name.strip_prefix(to.as_str())?));
        others.find_map(published).unwrap_or_else(|| name.to_owned())
    }

    /// Rejects tokens, targets and positions that an embedding table has no row for.
    pub fn check_ids(&self, batches: &[Batch]) -> Result<()> {
        let vocabulary = self.vocab_size()?;
        if let Some(limit) = self.model.max_positions {
            let positions = batches.iter().flat_map(|batch| &batch.position_ids);
            if let Some(position) = positions.copied().find(|p| *p < 0 || *p as usize >= limit) {
                let message = format!("position {position} is outside of the model's {limit} positions");
                return Err(TrainError::Usage(message));
            }
        }
        let ids = batches.iter().flat_map(|batch| batch.input_ids.iter().chain(&batch.targets));
        match ids.copied().find(|id| *id != IGNORE && (*id < 0 || *id as usize >= vocabulary)) {
            Some(id) => Err(TrainError::Usage(format!("token id {id} is outside of the vocabulary of {vocabulary}"))),
            None => Ok(()),
        }
    }

    /// Positions that the model was made for.
    pub fn max_positions(&self) -> Option<usize> {
        self.model.max_positions.or_else(|| self.config.max_positions())
    }

    /// The longest row that the model allows, stretched positions included.
    pub fn position_limit(&self) -> Option<usize> {
        self.model.max_positions.or_else(|| self.config.stretched_positions())
    }

    pub fn model_type(&self) -> &str {
        self.config.model_type()
    }

    /// The element type that the model was saved in, as its configuration says.
    pub fn dtype(&self) -> Option<DType> {
        self.config.dtype()
    }
}

/// Digests of the model that a run started from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelDigest {
    /// Digest of `config.json`.
    pub config: String,
    /// Digest of the weights' files; None when the weights were drawn.
    pub weights: Option<String>,
}

#[cfg(test)]
impl ModelSource {
    /// Two layers of Qwen3-0.6B's shape, without weights, and the folder that has their configuration.
    pub(crate) fn of_two_layers() -> (tempfile::TempDir, ModelSource) {
        let folder = tempfile::tempdir().unwrap();
        let fields = serde_json::json!({
            "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 2,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
            "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
        });
        std::fs::write(folder.path().join("config.json"), fields.to_string()).unwrap();
        let source = ModelSource::open(folder.path(), include_str!("../../tests/ir/qwen3.json")).unwrap();
        (folder, source)
    }
}
