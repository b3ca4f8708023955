//! A model in evaluation mode, for `surogate.load` and `Trainer.model`.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use numpy::PyArrayDyn;
use options::Setting;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensor::DType;
use train::config::Device as DeviceKind;
use train::{Device, DeviceRequest, ModelSource, TrainError};

use crate::arrays::{self, Floats, Integers};
use crate::errors::train_error;
use crate::generate::Generation;
use crate::images::{Image, pixels};
use crate::score::{Pair, Scoring};
use crate::trainer::Trainer;

type Array<'py> = Bound<'py, PyArrayDyn<f32>>;

/// A model with its weights on a device.
#[pyclass(frozen, module = "surogate._native")]
pub struct Model(Of);

/// A model of its own.
struct Loaded {
    model: Mutex<train::Model>,
    /// Made when text is first requested.
    generator: Mutex<Option<train::Generator>>,
}

/// The owner of the weights.
enum Of {
    Loaded(Box<Loaded>),
    /// The weights of a model in training.
    Trained(Py<Trainer>),
}

pub fn device_setting(name: &str) -> PyResult<Setting<DeviceKind>> {
    match name {
        "auto" => Ok(Setting::Auto),
        "cpu" => Ok(Setting::Value(DeviceKind::Cpu)),
        "cuda" => Ok(Setting::Value(DeviceKind::Cuda)),
        "rocm" => Ok(Setting::Value(DeviceKind::Rocm)),
        other => {
            Err(PyValueError::new_err(format!("device: {other:?} is not known, expected auto, cuda, rocm or cpu")))
        }
    }
}

fn element_type(name: &str) -> PyResult<Setting<DType>> {
    match name.parse() {
        _ if name == "auto" => Ok(Setting::Auto),
        Ok(dtype @ (DType::F32 | DType::BF16)) => Ok(Setting::Value(dtype)),
        _ => {
            let text = format!("dtype: {name:?} is not supported, expected float32, bfloat16 or auto");
            Err(PyValueError::new_err(text))
        }
    }
}

impl Model {
    /// The model that a trainer trains.
    pub fn in_training(trainer: Py<Trainer>) -> Model {
        Model(Of::Trained(trainer))
    }

    /// Calls the engine without the interpreter's lock. A panic in an earlier call has left nothing
    /// half done that a later one would read.
    pub fn with<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut train::Model) -> train::Result<T> + Send,
    ) -> PyResult<T> {
        let (model, generator) = match &self.0 {
            Of::Loaded(loaded) => (&loaded.model, &loaded.generator),
            Of::Trained(trainer) => return trainer.get().with(py, |trainer| trainer.with_model(call)),
        };
        let result = py.detach(|| {
            let mut generator = generator.lock().unwrap_or_else(PoisonError::into_inner);
            let mut model = model.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(generator) = &mut *generator {
                model.take_back(generator)?;
            }
            drop(generator);
            call(&mut model)
        });
        result.map_err(|error| train_error(py, error))
    }

    /// The same with what generates text.
    pub fn with_generator<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut train::Generator) -> train::Result<T> + Send,
    ) -> PyResult<T> {
        let (model, generator) = match &self.0 {
            Of::Loaded(loaded) => (&loaded.model, &loaded.generator),
            Of::Trained(trainer) => return trainer.get().with(py, |trainer| trainer.with_generator(call)),
        };
        let result = py.detach(|| {
            let mut generator = generator.lock().unwrap_or_else(PoisonError::into_inner);
            let mut model = model.lock().unwrap_or_else(PoisonError::into_inner);
            let generator = match &mut *generator {
                Some(known) => known,
                none => none.insert(model.generator()?),
            };
            model.lend(generator)?;
            drop(model);
            call(generator)
        });
        result.map_err(|error| train_error(py, error))
    }
}

#[pymethods]
impl Model {
    /// Begins to answer prompts, a list as JSON, with options as in YAML. `goes_on`: one that cannot be answered does not end
    /// the others. `folder`: where relative paths of images begin. `room`: tokens of a sequence for which there is room when
    /// prompts are added later. `adapter`: the slot of the adapter that answers, where several are on the device; 0 for none.
    #[pyo3(signature = (prompts, options, goes_on = false, folder = None, room = None, adapter = 0))]
    #[allow(clippy::too_many_arguments)] // those of the Python method
    fn start(
        slf: &Bound<'_, Self>,
        py: Python<'_>,
        prompts: &str,
        options: Vec<(String, String)>,
        goes_on: bool,
        folder: Option<PathBuf>,
        room: Option<usize>,
        adapter: u32,
    ) -> PyResult<Generation> {
        let folder = folder.unwrap_or_else(|| PathBuf::from("."));
        Generation::start(py, slf, prompts, &options, (goes_on, &folder), (room, adapter))
    }

    /// The reason why an adapter cannot be on the device with others; None where it can.
    fn obstacle(&self, py: Python<'_>, folder: PathBuf) -> PyResult<Option<String>> {
        self.with_generator(py, |generator| generator.obstacle(&folder))
    }

    /// Makes slots for adapters that are on the device together, each with room for the largest of these.
    fn share(&self, py: Python<'_>, folders: Vec<PathBuf>, slots: usize) -> PyResult<()> {
        if let Of::Trained(_) = &self.0 {
            let text = "a model in training has no room for adapters: save it, and call `surogate.load` on the result";
            return Err(train_error(py, TrainError::Usage(text.into())));
        }
        self.with_generator(py, |generator| generator.share(&folders, slots))
    }

    /// Puts an adapter into a slot, from 1 on. Returns the reason why it does not fit there; None where it does.
    fn place(&self, py: Python<'_>, slot: u32, folder: PathBuf) -> PyResult<Option<String>> {
        self.with_generator(py, |generator| generator.place(slot, &folder))
    }

    /// Frees the memory of the device; the next call reads the weights again. Nothing where a trainer has them.
    fn unload(&self, py: Python<'_>) {
        let Of::Loaded(loaded) = &self.0 else { return };
        py.detach(|| {
            if let Some(generator) = &mut *loaded.generator.lock().unwrap_or_else(PoisonError::into_inner) {
                generator.unload();
            }
            loaded.model.lock().unwrap_or_else(PoisonError::into_inner).unload();
        });
    }

    /// Returns the fields of the model's `generation_config.json` that would change its texts and are not applied.
    fn unused_defaults(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.with_generator(py, |generator| Ok(generator.unused_defaults()))
    }

    /// Returns a sentence on how far the weights were moved when they were loaded, if any was. Before that: none.
    fn rounded(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.with_generator(py, |generator| Ok(generator.rounded()))
    }

    /// Begins to score pairs of a beginning and its continuation.
    #[pyo3(signature = (pairs, batch_tokens = None))]
    fn score(
        slf: &Bound<'_, Self>,
        py: Python<'_>,
        pairs: Vec<Pair>,
        batch_tokens: Option<usize>,
    ) -> PyResult<Scoring> {
        Scoring::start(py, slf, pairs, batch_tokens)
    }

    /// The longest sequence that the model allows.
    fn longest(&self, py: Python<'_>) -> PyResult<Option<usize>> {
        self.with(py, |model| Ok(model.longest()))
    }

    /// Opens the device and the folders. `ir` is the model's graph as JSON, `adapter` a folder in
    /// PEFT's form.
    #[staticmethod]
    fn load(
        py: Python<'_>,
        folder: PathBuf,
        ir: &str,
        adapter: Option<PathBuf>,
        device: &str,
        dtype: &str,
        site_packages: Vec<PathBuf>,
    ) -> PyResult<Self> {
        let (dtype, device) = (element_type(dtype)?, device_setting(device)?);
        let request = DeviceRequest { device, site_packages, ..DeviceRequest::default() };
        let loaded = py.detach(|| {
            let device = Arc::new(Device::open(&request)?);
            let source = Arc::new(ModelSource::open(&folder, ir)?);
            train::Model::load(device, source, adapter.as_deref(), dtype)
        });
        loaded
            .map(|model| Model(Of::Loaded(Box::new(Loaded { model: Mutex::new(model), generator: Mutex::new(None) }))))
            .map_err(|error| train_error(py, error))
    }

    /// Describes the model: architecture, size, device.
    fn summary(&self, py: Python<'_>) -> PyResult<String> {
        match &self.0 {
            Of::Loaded(_) => self.with(py, |model| Ok(model.summary())),
            Of::Trained(trainer) => trainer.get().summary(py),
        }
    }

    /// Names of the tensors that gradients are given for.
    fn parameter_names(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.with(py, train::Model::parameter_names)
    }

    /// (logits, hidden states); the list is empty when it is not requested. `lengths`: tokens of each row, where padding
    /// follows, of which all results are 0.
    #[pyo3(signature = (input_ids, position_ids, hidden, lengths, images = None))]
    fn forward<'py>(
        &self,
        py: Python<'py>,
        input_ids: Integers<'py>,
        position_ids: Option<Integers<'py>>,
        hidden: bool,
        lengths: Option<Vec<usize>>,
        images: Option<Vec<Image<'py>>>,
    ) -> PyResult<(Array<'py>, Vec<Array<'py>>)> {
        let batch = arrays::batches(&(input_ids.clone(), input_ids, position_ids, None, lengths.clone()))?.remove(0);
        let images = pixels(&images.unwrap_or_default())?;
        let mut result = self.with(py, |model| model.forward(&model.with_images(batch, &images)?, hidden))?;
        for tensor in std::iter::once(&mut result.logits).chain(&mut result.hidden) {
            arrays::clear_padding(tensor, lengths.as_deref());
        }
        let states = result.hidden.iter().map(|state| arrays::to_numpy(py, state)).collect::<PyResult<_>>()?;
        Ok((arrays::to_numpy(py, &result.logits)?, states))
    }

    /// Log-probabilities of the labels, [B, T].
    fn logps<'py>(
        &self,
        py: Python<'py>,
        input_ids: Integers<'py>,
        labels: Integers<'py>,
        position_ids: Option<Integers<'py>>,
        lengths: Option<Vec<usize>>,
    ) -> PyResult<Array<'py>> {
        let batch = arrays::batches(&(input_ids, labels, position_ids, None, lengths))?.remove(0);
        arrays::to_numpy(py, &self.with(py, |model| model.logps(&batch))?)
    }

    /// (loss, loss of each token, gradients by name).
    #[pyo3(signature = (input_ids, labels, position_ids, weights, lengths, images = None))]
    #[allow(clippy::too_many_arguments)] // those of the Python method
    fn loss_and_gradients<'py>(
        &self,
        py: Python<'py>,
        input_ids: Integers<'py>,
        labels: Integers<'py>,
        position_ids: Option<Integers<'py>>,
        weights: Option<Floats<'py>>,
        lengths: Option<Vec<usize>>,
        images: Option<Vec<Image<'py>>>,
    ) -> PyResult<(f32, Array<'py>, Bound<'py, PyDict>)> {
        let batch = arrays::batches(&(input_ids, labels, position_ids, weights, lengths))?.remove(0);
        let images = pixels(&images.unwrap_or_default())?;
        let result = self.with(py, |model| model.loss_and_gradients(&model.with_images(batch, &images)?))?;
        let gradients = PyDict::new(py);
        for (name, gradient) in &result.gradients {
            gradients.set_item(name, arrays::to_numpy(py, gradient)?)?;
        }
        Ok((result.loss, arrays::to_numpy(py, &result.token_loss)?, gradients))
    }
}
