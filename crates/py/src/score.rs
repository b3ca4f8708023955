//! Likelihoods of continuations, for `Model.score`: steps are the caller's, so that progress is shown and a signal ends it.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use train::ScoreRequest;

use crate::model::Model;

/// A beginning and its continuation, both as texts or both as ids.
#[derive(FromPyObject)]
pub enum Pair {
    Texts(String, String),
    Ids(Vec<i32>, Vec<i32>),
}

/// Answers to some requests, while they are made.
#[pyclass(frozen, module = "surogate._native")]
pub struct Scoring {
    model: Py<Model>,
    scoring: Mutex<train::Scoring>,
}

impl Scoring {
    /// Begins with pairs of a beginning and its continuation.
    pub fn start(
        py: Python<'_>,
        model: &Bound<'_, Model>,
        pairs: Vec<Pair>,
        batch_tokens: Option<usize>,
    ) -> PyResult<Self> {
        let batch_tokens = batch_tokens.unwrap_or(train::BATCH_TOKENS);
        let started = model.get().with(py, |model| {
            let request = |pair| match pair {
                Pair::Texts(beginning, continuation) => model.score_request(&beginning, &continuation),
                Pair::Ids(context, continuation) => Ok(ScoreRequest { context, continuation }),
            };
            let requests = pairs.into_iter().map(request).collect::<train::Result<_>>()?;
            train::Scoring::start(model, requests, batch_tokens)
        })?;
        Ok(Scoring { model: model.clone().unbind(), scoring: Mutex::new(started) })
    }
}

#[pymethods]
impl Scoring {
    /// One batch: (number of the request, log-likelihood, whether it is what the model would say) of some requests.
    fn step(&self, py: Python<'_>) -> PyResult<Vec<(usize, f64, bool)>> {
        let scores = self
            .model
            .get()
            .with(py, |model| self.scoring.lock().unwrap_or_else(PoisonError::into_inner).step(model))?;
        Ok(scores.into_iter().map(|score| (score.request, score.log_likelihood, score.greedy)).collect())
    }

    /// True if every request has an answer.
    #[getter]
    fn done(&self) -> bool {
        self.scoring.lock().unwrap_or_else(PoisonError::into_inner).is_done()
    }
}
