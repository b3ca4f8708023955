//! Generation of text, for `Model.generate` and the command line: steps are the caller's, so that text is shown as it comes
//! and a signal ends it.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use serde_json::Value;
use train::{GenerationOptions, Request, TrainError};

use crate::errors::train_error;
use crate::model::Model;

/// The addition of one step to an answer: number of the prompt, text, and the finish reason once it has ended.
type Piece = (usize, String, Option<&'static str>);

/// Answers to some prompts, while they are made.
#[pyclass(frozen, module = "surogate._native")]
pub struct Generation {
    model: Py<Model>,
    generation: Mutex<train::Generation>,
}

impl Generation {
    /// Begins with prompts as JSON: a list of texts, lists of messages, lists of ids, or objects that have one of these and
    /// options of their own. `goes_on`: one that cannot be answered does not end the others. `folder`: where relative paths of
    /// images begin. `of`: tokens of a sequence that there is room for, and the slot of the prompts' adapter.
    pub fn start(
        py: Python<'_>,
        model: &Bound<'_, Model>,
        prompts: &str,
        options: &[(String, String)],
        place: (bool, &Path),
        of: (Option<usize>, u32),
    ) -> PyResult<Self> {
        let prompts = listed(py, prompts)?;
        let started = model.get().with_generator(py, |generator| {
            let options = GenerationOptions::read(options)?;
            let requests = prompts.iter().map(Request::from_json).collect();
            train::Generation::begin_with_room(generator, requests, &options, place, of)
        })?;
        Ok(Generation { model: model.clone().unbind(), generation: Mutex::new(started) })
    }

    fn with<T>(&self, call: impl FnOnce(&mut train::Generation) -> T) -> T {
        call(&mut self.generation.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[pymethods]
impl Generation {
    /// One step: reads a part of a prompt, or adds a token to every answer that is not done.
    fn step(&self, py: Python<'_>) -> PyResult<Vec<Piece>> {
        let step = |generator: &mut train::Generator| self.with(|generation| generation.step(generator));
        let pieces = self.model.get().with_generator(py, step)?;
        Ok(pieces.into_iter().map(|piece| (piece.prompt, piece.text, piece.finish.map(train::Finish::name))).collect())
    }

    /// Adds prompts, as those that it began with, for the adapter in a slot; 0 for none. Returns the number of the first; none
    /// where the caches have no room.
    #[pyo3(signature = (prompts, options, goes_on, folder, adapter = 0))]
    fn add(
        &self,
        py: Python<'_>,
        prompts: &str,
        options: Vec<(String, String)>,
        goes_on: bool,
        folder: PathBuf,
        adapter: u32,
    ) -> PyResult<Option<usize>> {
        let prompts = listed(py, prompts)?;
        self.model.get().with_generator(py, |generator| {
            let options = GenerationOptions::read(&options)?;
            let requests = prompts.iter().map(Request::from_json).collect();
            self.with(|generation| generation.add(generator, requests, &options, (goes_on, &folder), adapter))
        })
    }

    /// Ends an answer, if it has not, and forgets its tokens.
    fn forget(&self, prompt: usize) {
        self.with(|generation| generation.forget(prompt));
    }

    /// True if every answer has ended.
    #[getter]
    fn done(&self) -> bool {
        self.with(|generation| generation.is_done())
    }

    /// The ids of an answer so far, the token that ended it included.
    fn answer(&self, prompt: usize) -> Vec<i32> {
        self.with(|generation| generation.answer(prompt).to_vec())
    }

    /// The reason that a prompt is rejected, or None.
    fn refusal(&self, prompt: usize) -> Option<String> {
        self.with(|generation| generation.refusal(prompt).map(str::to_owned))
    }

    /// The number of tokens of a prompt.
    fn prompt_tokens(&self, prompt: usize) -> usize {
        self.with(|generation| generation.prompt_tokens(prompt))
    }
}

/// The items of a list as JSON.
fn listed(py: Python<'_>, prompts: &str) -> PyResult<Vec<Value>> {
    serde_json::from_str(prompts)
        .map_err(|e| train_error(py, TrainError::Usage(format!("prompts: expected a list as JSON: {e}"))))
}

/// Fields of a line of prompts that are read: those that hold the prompt, those that are options of its own.
#[pyfunction]
pub fn prompt_fields() -> (Vec<&'static str>, Vec<&'static str>) {
    (Request::PROMPTS.to_vec(), Request::OWN.to_vec())
}

/// The options of generation as JSON: a list of rows, as those of a run.
#[pyfunction]
pub fn generation_help() -> String {
    options::help_rows(&[train::generation_section()]).to_string()
}
