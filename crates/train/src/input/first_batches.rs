//! The batches that are looked at before training, to learn what the data are like.

use std::sync::Arc;

use data::{DocumentSet, Loader, LoaderSpec, Position, Stream};

use crate::error::{Result, TrainError};

/// Number of batches that are looked at.
pub(super) const COUNTED_BATCHES: usize = 64;

/// The first batches, with images as they are in the rows; of a stream as far as it is known before the first step.
pub(super) fn first_batches(
    documents: &DocumentSet,
    stream: Option<&Arc<Stream>>,
    spec: &LoaderSpec,
) -> Result<Loader> {
    let spec = LoaderSpec { prefetch: 0, epochs: Some(1), images: None, ..spec.clone() };
    match stream {
        Some(stream) => Ok(Loader::beginning_of(stream, spec)),
        None => Loader::new(documents.clone(), spec, Position::default()).map_err(TrainError::Data),
    }
}
