//! Models that are not trained: forward passes, scores, generated text.

pub(crate) mod generate;
pub(crate) mod loading;
pub(crate) mod model;
pub(crate) mod score;
pub(crate) mod shared;
