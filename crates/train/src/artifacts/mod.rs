//! Results in standard formats: adapters, merged, extended, quantized and pruned models, GGUF, model cards.

pub(crate) mod card;
pub(crate) mod compress;
pub(crate) mod extend;
pub(crate) mod gguf;
pub(crate) mod merge;
pub(crate) mod prune;
pub(crate) mod recheck;
