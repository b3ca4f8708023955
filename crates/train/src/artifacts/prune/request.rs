//! The request for a smaller model, and its result.

use std::path::Path;

use serde_json::Value;

use super::kept::Sizes;
use super::latency::Latency;
use super::scores::Summing;
use crate::artifacts::compress::Compared;
use crate::error::Result;

/// A request to leave out channels, heads, experts and layers.
#[derive(Clone, Debug)]
pub struct PruneRequest<'a> {
    pub sizes: Sizes,
    /// The widest model that answers as fast is written.
    pub latency: Option<Latency>,
    pub summing: Summing,
    /// Layers stay by the loss without them, else by how much they change what they read.
    pub layers_by_loss: bool,
    /// A new file for the scores.
    pub scores: Option<&'a Path>,
}

/// The sizes and losses of a model that [`crate::prune`] wrote.
#[derive(Clone, Debug, PartialEq)]
pub struct Pruned {
    /// Numbers of parameters of the model and of the result.
    pub parameters: (usize, usize),
    /// The limit that was given, with seconds of its request before and now.
    pub latency: Option<(Latency, f64, f64)>,
    /// Sizes by the names of the configuration, before and now.
    pub sizes: Vec<(String, usize, usize)>,
    /// Tokens that activations were measured on.
    pub measured: usize,
    pub compared: Compared,
}

/// Gives the graph of a configuration, as JSON.
pub type Build<'a> = &'a dyn Fn(&Value) -> Result<String>;
