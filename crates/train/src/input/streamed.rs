//! The training sets of a run as a stream: their files here or elsewhere, and the first documents.
//!
//! Knows option names; windows and their order belong to the data crate, fetching to `remote_shards.rs`.

use std::path::PathBuf;
use std::sync::Arc;

use data::{
    DataError, DatasetSpec, DocumentSet, EncodedCorpus, LocalShards, OpenShards, PrepareOptions, Shards, Stop, Stream,
    StreamFile, StreamOptions, StreamSet, Tokenizer,
};

use crate::config::{Config, Remote};
use crate::error::{Result, TrainError};
use crate::input::remote_shards::{RemoteShards, Source};
use crate::words::size;

/// Reads and encodes the first rows. `specs` are the training sets in the order of the options. Errors: those of reading
/// them, and files that are too large for `streaming_disk_limit`.
pub(crate) fn begin(
    config: &Config,
    specs: Vec<DatasetSpec>,
    tokenizer: Option<&Arc<Tokenizer>>,
    options: &PrepareOptions,
    stop: Stop<'_>,
) -> Result<(EncodedCorpus, Arc<Stream>)> {
    let mut sets = Vec::new();
    let mut sources = Vec::new();
    for (index, spec) in specs.into_iter().enumerate() {
        let files = config.remote.as_ref().and_then(|remote| remote.files.get(&format!("datasets[{index}]")));
        let set = match files {
            Some(files) => StreamSet { spec, files: files.clone(), left_out: Vec::new() },
            None => StreamSet::here(spec).map_err(TrainError::data)?,
        };
        sources.push(match files {
            Some(files) => Source::Elsewhere(files.clone()),
            None => Source::Here(set.files.iter().map(|file| PathBuf::from(&file.name)).collect()),
        });
        sets.push(set);
    }
    let order = StreamOptions {
        shuffle: config.data.shuffle,
        seed: config.data.train_seed,
        buffer: config.data.shuffle_buffer_size as usize,
        shares: config.data.interleave_probs.clone().unwrap_or_default(),
    };
    let notify = Arc::new(|text: &str| eprintln!("surogate: {}", options::visible(text)));
    let open = opener(config, sources)?;
    let begun = Stream::begin(&sets, (tokenizer, options), order, open, notify, stop);
    let (stream, DocumentSet { corpus, .. }, summary) = begun.map_err(TrainError::data)?;
    let mut notes = Vec::new();
    if config.data.validation_datasets.is_none() {
        notes.push(
            "nothing of a stream is held out for evaluation: `validation_datasets` names documents for it".into(),
        );
    }
    Ok((EncodedCorpus { corpus, summary, notes }, stream))
}

/// Opens the shards: files here, or a process that fetches those elsewhere.
fn opener(config: &Config, sources: Vec<Source>) -> Result<OpenShards> {
    let Some(Remote { python, .. }) = &config.remote else {
        let here = sources.into_iter().map(|of| match of {
            Source::Here(files) => files,
            Source::Elsewhere(_) => unreachable!("files elsewhere are of `remote`"),
        });
        let shards = LocalShards { files: here.collect() };
        return Ok(Arc::new(move || Ok(Box::new(shards.clone()) as Box<dyn Shards>)));
    };
    let limit = config.data.streaming_disk_limit.0;
    check_limit(config, &sources, limit)?;
    let python = python.clone();
    Ok(Arc::new(move || -> std::result::Result<Box<dyn Shards>, DataError> {
        Ok(Box::new(RemoteShards::start(&python, sources.clone(), limit)?))
    }))
}

/// Errors: the limit does not hold one file of each set at once.
fn check_limit(config: &Config, sources: &[Source], limit: u64) -> Result<()> {
    let largest = sources.iter().filter_map(|source| match source {
        Source::Elsewhere(files) => files.iter().max_by_key(|file| file.bytes),
        Source::Here(_) => None,
    });
    let largest: Vec<&StreamFile> = largest.collect();
    let needed: u64 = largest.iter().map(|file| file.bytes).sum();
    if needed <= limit {
        return Ok(());
    }
    let name = largest.iter().max_by_key(|file| file.bytes).map_or("", |file| file.name.as_str());
    let message = format!(
        "`streaming_disk_limit` is {}, but the largest file of each dataset takes {} together, {name} most",
        size(limit as usize),
        size(needed as usize)
    );
    let hint = format!("set it to {needed} or more: files are fetched whole");
    Err(TrainError::Config(vec![config.mistake("streaming_disk_limit", message, Some(hint))]))
}
