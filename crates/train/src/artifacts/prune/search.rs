//! The search of the widest sizes within a latency.
//!
//! Knows how a configuration follows from sizes; not files.

use tensor::DType;

use super::axes;
use super::axes::Axes;
use super::fields::fields;
use super::kept::{self, Sizes};
use super::request::{Build, PruneRequest};
use super::scores::Scores;
use crate::error::{Result, TrainError};
use crate::model::source::ModelSource;

/// A model whose sizes are searched.
pub struct Work<'a> {
    pub source: &'a ModelSource,
    pub axes: &'a Axes,
    pub dtype: DType,
    pub build: Build<'a>,
}

impl Work<'_> {
    /// Sizes with those that follow from a limit of the latency; without one as they are. Errors: no size is fast enough, or the
    /// model is as it is.
    pub fn fast_enough(&self, sizes: &Sizes, request: &PruneRequest<'_>, scores: &Scores) -> Result<Sizes> {
        let Some(latency) = &request.latency else { return Ok(*sizes) };
        let (mut shortest, mut refused) = (f64::INFINITY, None);
        let mut fits = |sizes: &Sizes| match self.model(sizes, scores).and_then(|of| latency.of(&of, self.dtype)) {
            Ok(seconds) => {
                shortest = shortest.min(seconds);
                Ok(seconds <= latency.limit)
            }
            // The architecture does not take models that are narrower yet.
            Err(error) => {
                refused.get_or_insert(error);
                Ok(false)
            }
        };
        let found = kept::widest("--latency", sizes, self.axes, &self.source.model, &mut fits)?;
        let own = Sizes { hidden: Some(self.axes.hidden_size), ..*sizes };
        let own = Sizes { intermediate: Some(axes::mlp_size(self.axes, &self.source.model)), ..own };
        let wrong = |expected: String| {
            let (limit, machine) = (1e3 * latency.limit, &latency.machine.name);
            TrainError::Usage(format!("--latency {limit}: on {machine} {expected}"))
        };
        match found {
            None if shortest.is_infinite() => Err(refused.expect("a size was tried")),
            None => Err(wrong(format!(
                "the narrowest model that was tried takes {:.3} ms\n  hint: fewer --layers are faster",
                1e3 * shortest
            ))),
            Some(found) if found == own && *sizes == Sizes::default() => {
                let now = 1e3 * latency.of(&self.source.model, self.dtype)?;
                Err(wrong(format!("the model takes {now:.3} ms as it is\n  hint: give a shorter time")))
            }
            Some(found) => kept::check(&found, self.axes).map(|()| found),
        }
    }

    /// The graph of the model in these sizes.
    pub fn model(&self, sizes: &Sizes, scores: &Scores) -> Result<graph::Model> {
        let kept = kept::choose(sizes, self.axes, scores);
        let (fields, _) = fields(self.source, self.dtype, sizes, self.axes, &kept);
        graph::from_json(&(self.build)(&fields)?).map_err(|e| TrainError::Usage(e.to_string()))
    }
}
