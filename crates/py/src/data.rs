//! Tokenizer, chat template and data check, for Python. Conversations are passed as JSON text.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use data::image_source::data_uri;
use data::image_texts::ImageTexts;
use data::show::Terminal;
use data::template::{ChatTemplate, Conversation, clock_now};
use data::{AgentForm, DialogueEncoder, DialogueOptions, LossRule};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde_json::{Map, Value};
use train::{ModelSource, TrainError};

use crate::config::Config;
use crate::errors::{DataError, train_error};
use crate::images::{Image, files};
use crate::signals::Signals;

fn data_error(error: impl std::fmt::Display) -> PyErr {
    DataError::new_err(error.to_string())
}

fn json<T: serde::de::DeserializeOwned>(what: &str, text: &str) -> PyResult<T> {
    serde_json::from_str(text).map_err(|e| PyValueError::new_err(format!("{what}: {e}")))
}

/// Prepares the data of a run without training: the table of the data check, and its counts as JSON.
#[pyfunction]
pub fn check_data(py: Python<'_>, config: &Config, folder: PathBuf, ir: &str) -> PyResult<(String, String)> {
    let signals = Signals::default();
    let stop = || signals.raised();
    let checked = py.detach(|| train::check_data(&config.config, &ModelSource::open(&folder, ir)?, 0, &stop));
    signals.outcome(py, checked).map(|checked| (checked.table, checked.counts.to_string()))
}

/// The same with the first rows as they are trained: the table, the rows for a terminal, and a page of HTML. `shown`
/// rows of `tokens` tokens at most go to the terminal, `rows` to the page.
#[pyfunction]
#[pyo3(signature = (config, folder, ir, *, rows, shown, tokens, color, width))]
#[allow(clippy::too_many_arguments)] // keywords of a Python function
pub fn show_data(
    py: Python<'_>,
    config: &Config,
    folder: PathBuf,
    ir: &str,
    rows: usize,
    shown: usize,
    tokens: usize,
    color: bool,
    width: usize,
) -> PyResult<(String, String, String)> {
    let signals = Signals::default();
    let stop = || signals.raised();
    let checked = py.detach(|| train::check_data(&config.config, &ModelSource::open(&folder, ir)?, rows, &stop));
    let checked = signals.outcome(py, checked)?;
    let part = &checked.rows[..shown.min(checked.rows.len())];
    let terminal = data::show::terminal(part, 1, Terminal { color, width, tokens });
    let page = data::show::page("Rows as they are trained", &checked.table, &checked.rows);
    Ok((checked.table, terminal, page))
}

/// A model folder's tokenizer and chat template.
#[pyclass(frozen, module = "surogate._native")]
pub struct Tokenizer {
    tokenizer: Arc<data::Tokenizer>,
}

#[pymethods]
impl Tokenizer {
    #[new]
    fn new(py: Python<'_>, folder: PathBuf) -> PyResult<Self> {
        let opened = py.detach(|| data::Tokenizer::from_folder(&folder));
        let tokenizer = opened.map_err(|error| train_error(py, TrainError::Data(error)))?;
        Ok(Tokenizer { tokenizer: Arc::new(tokenizer) })
    }

    /// The ids of a text; `special` lets the tokenizer add its own.
    fn encode(&self, text: &str, special: bool) -> PyResult<Vec<u32>> {
        self.tokenizer.encoder().encode(text, special).map_err(data_error)
    }

    /// Decodes token ids to text.
    fn decode(&self, ids: Vec<u32>, skip_special: bool) -> PyResult<String> {
        let encoder = self.tokenizer.encoder();
        if let Some(id) = ids.iter().find(|id| encoder.id_to_token(**id).is_none()) {
            let size = encoder.vocab_size();
            return Err(data_error(format!("token id {id} is outside of the tokenizer's {size} tokens")));
        }
        self.tokenizer.encoder().decode(&ids, skip_special).map_err(data_error)
    }

    /// The id of the token before texts, where there is one.
    #[getter]
    fn bos_token_id(&self) -> Option<u32> {
        self.tokenizer.bos().map(|token| token.id)
    }

    /// The id of the token after texts, where there is one.
    #[getter]
    fn eos_token_id(&self) -> Option<u32> {
        self.tokenizer.eos().map(|token| token.id)
    }

    /// The source of the chat template.
    #[getter]
    fn chat_template(&self) -> Option<&str> {
        self.tokenizer.chat_template(false)
    }

    /// The text of a conversation; `variables` are seen by the template.
    fn render(&self, messages: &str, tools: Option<&str>, prompt: bool, variables: &str) -> PyResult<String> {
        let messages: Vec<Map<String, Value>> = json("messages", messages)?;
        let tools: Option<Value> = tools.map(|tools| json("tools", tools)).transpose()?;
        let Some(source) = self.tokenizer.chat_template(tools.is_some()) else {
            return Err(data_error("chat template: the model folder has none"));
        };
        let mut all = self.tokenizer.template_variables().clone();
        all.extend(json::<Map<String, Value>>("variables", variables)?);
        let template = ChatTemplate::new(source, all, clock_now()).map_err(data_error)?;
        let rendered = template.render(Conversation { messages: &messages, tools: tools.as_ref() }, prompt);
        rendered.map(|rendered| rendered.text).map_err(data_error)
    }

    /// Ids, labels and weights of a conversation as the trainer sees them.
    fn labels(&self, messages: &str, tools: Option<&str>, options: &str) -> PyResult<(Vec<i32>, Vec<i32>, Vec<f32>)> {
        let list: Vec<Value> = json("messages", messages)?;
        let messages = data::dataset::messages(&list, &BTreeMap::new()).map_err(data_error)?;
        let tools: Option<Value> = tools.map(|tools| json("tools", tools)).transpose()?;
        let tools = data::dataset::tools("tools", tools.as_ref()).map_err(data_error)?;
        let encoder = DialogueEncoder::new(self.tokenizer.clone(), &dialogue(options)?).map_err(data_error)?;
        let document = encoder.encode(&messages, tools.as_ref()).map_err(data_error)?;
        Ok((document.ids, document.labels, document.weights))
    }

    /// The same of a conversation with images, and the positions of the tokens in three axes where the family has them.
    /// `form` is the reading of images in the model's graph, `images` are files in the order of their places; without, the
    /// messages name them.
    fn labels_with_images(
        &self,
        messages: &str,
        tools: Option<&str>,
        options: &str,
        folder: PathBuf,
        form: &str,
        images: Option<Vec<Image<'_>>>,
    ) -> PyResult<LabelsWithImages> {
        let list: Vec<Value> = json("messages", messages)?;
        let mut messages = data::dataset::messages(&list, &BTreeMap::new()).map_err(data_error)?;
        let tools: Option<Value> = tools.map(|tools| json("tools", tools)).transpose()?;
        let tools = data::dataset::tools("tools", tools.as_ref()).map_err(data_error)?;
        let reader = train::image_reader(&folder, form).map_err(data_error)?;
        let texts = ImageTexts::new(reader.clone(), &self.tokenizer).map_err(data_error)?;
        let files = images.map(|images| files(&images)).transpose()?;
        let given: Option<Vec<Value>> = files.map(|files| files.iter().map(|of| Value::from(data_uri(of))).collect());
        let sources =
            texts.place(&mut messages, given.as_deref(), &vec![PathBuf::from(".")].into()).map_err(data_error)?;
        let options = DialogueOptions { images: Some(Arc::new(texts)), ..dialogue(options)? };
        let encoder = DialogueEncoder::new(self.tokenizer.clone(), &options).map_err(data_error)?;
        let document = encoder.encode_with_images(&messages, sources, tools.as_ref()).map_err(data_error)?;
        let axes = reader.axes(&document).map_err(data_error)?;
        Ok((document.ids, document.labels, document.weights, axes))
    }
}

/// Ids, labels and weights, and three lists of positions where the family has axes.
type LabelsWithImages = (Vec<i32>, Vec<i32>, Vec<f32>, Option<Vec<Vec<i32>>>);

/// The options of the same names in run.yaml.
fn dialogue(options: &str) -> PyResult<DialogueOptions> {
    let options: Map<String, Value> = json("options", options)?;
    let mut dialogue = DialogueOptions::default();
    for (name, value) in options {
        let wrong = || PyValueError::new_err(format!("{name}: {value} is not a value of this option"));
        let text = || value.as_str().map(str::to_owned).ok_or_else(wrong);
        match name.as_str() {
            "system" => dialogue.system = Some(text()?),
            "response_prefix" => dialogue.response_prefix = Some(text()?),
            "clock" => dialogue.clock = Some(text()?),
            "agent_template" => dialogue.agent = Some(AgentForm::named(&text()?).ok_or_else(wrong)?),
            "loss_scale" => {
                dialogue.loss = match &value {
                    Value::Object(weights) => {
                        let number = |(name, weight): (&'_ String, &Value)| Some((name.clone(), weight.as_f64()?));
                        let weights: Vec<(String, f64)> =
                            weights.iter().map(number).collect::<Option<_>>().ok_or_else(wrong)?;
                        let named = weights.iter().map(|(name, weight)| (name.as_str(), *weight));
                        LossRule::by_name(named).map_err(|(name, problem)| {
                            PyValueError::new_err(format!("loss_scale: {name}: {problem}"))
                        })?
                    }
                    _ => match text()?.as_str() {
                        "default" => LossRule::Answers,
                        "last_round" => LossRule::LastRound,
                        "all" => LossRule::Everything,
                        _ => return Err(wrong()),
                    },
                };
            }
            _ => return Err(PyValueError::new_err(format!("there is no option `{name}` here"))),
        }
    }
    Ok(dialogue)
}
