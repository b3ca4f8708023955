//! The data of a run as encoded documents: datasets, tokenizer, validation split, and the row length where it follows
//! from the documents.
//!
//! Knows option names; rows and templates belong to the data crate, packing and batches to `feed.rs`.

use std::path::PathBuf;
use std::sync::Arc;

use data::image_texts::ImageTexts;
use data::pictures::ImageReader;
use data::{
    Cut, DatasetSpec, DatasetSummary, DialogueOptions, DocumentSet, EncodedCorpus, Keeping, PreferenceOptions,
    PrepareOptions, Purpose, RowCache, Split, Stop, Stream, Summary, Tokenizer, Truncation, Writing,
};
use net::Nodes;
use options::cache::folder_of_user;

use crate::config::{self, Config, Dataset, DatasetType};
use crate::error::{Result, TrainError};
use crate::input::conversation::dialogue_options;
use crate::input::data_shard::DataShard;
use crate::input::dataset_spec::spec;
use crate::input::images;
use crate::input::mixture;
use crate::input::node_folder::{CACHE_VARIABLE, own_folder};
use crate::input::row_length::{self, RowLength};
use crate::input::shared_prompts;
use crate::input::streamed;
use crate::model::source::ModelSource;
use crate::nodes::place;

/// Threads that prepare data when the user leaves it open, at most.
const MAX_WORKERS: usize = 8;

/// The documents of a run.
#[derive(Clone)]
pub struct Encoded {
    pub(crate) train: DocumentSet,
    pub(crate) held_out: DocumentSet,
    pub(crate) summary: Summary,
    /// Notes for the user, a sentence each.
    pub(crate) notes: Vec<String>,
    /// Tokens of a row, padding included.
    pub sequence_len: usize,
    /// The reason for the length of rows, if it followed from the documents.
    pub(crate) because: Option<String>,
    pub(crate) pad_id: i32,
    /// The chat template that conversations are written with, where it is not the model's own.
    pub(crate) template: Option<String>,
    /// Makes patches of images, where the model reads them.
    pub(crate) images: Option<ImageReader>,
    /// The sets as a stream, if they are one; `train` are then its first documents.
    pub(crate) stream: Option<Arc<Stream>>,
}

impl Encoded {
    /// Reads and encodes everything, with rows of a length; where that is open, it follows from the documents. True: answers share
    /// their prompts. Of several `nodes` each reads its own rows, and all do it at once.
    pub fn read(
        config: &Config,
        source: &ModelSource,
        (length, share_prompts): (RowLength, bool),
        nodes: Option<&Nodes>,
        stop: Stop<'_>,
    ) -> Result<Encoded> {
        let most = length.tokens;
        let data_shard = nodes.map(|nodes| DataShard::new(nodes, place::of_a_host(config)));
        let within =
            |tokens: usize| Encoded::within(config, source, (tokens, share_prompts), data_shard.as_ref(), stop);
        let encoded = within(most)?;
        if length.is_open && config.data.streaming {
            return Ok(encoded.with_length(row_length::of_stream(most)));
        }
        if !length.is_open {
            return Ok(encoded);
        }
        let length = row_length::of_data(config, &encoded.summary, most);
        match config.kept_sequence_len {
            None => Ok(encoded.with_length(length)),
            // What is longer than the rows that the run began with is cut, or dropped, once more.
            Some(kept) if encoded.longest() > kept => Ok(within(kept)?.with_length(row_length::of_checkpoint(kept))),
            Some(kept) => Ok(encoded.with_length(row_length::of_checkpoint(kept))),
        }
    }

    fn with_length(mut self, length: row_length::OfData) -> Encoded {
        self.notes.insert(0, length.note);
        Encoded { sequence_len: length.tokens, because: Some(length.because), ..self }
    }

    /// Tokens of the longest document.
    pub(crate) fn longest(&self) -> usize {
        self.train.longest().max(self.held_out.longest())
    }

    /// Documents of more tokens than these.
    pub(crate) fn longer_than(&self, tokens: usize) -> usize {
        let sets = [&self.train, &self.held_out];
        sets.iter()
            .flat_map(|set| set.members.iter().map(|i| set.corpus.length(*i as usize)))
            .filter(|n| *n > tokens)
            .count()
    }

    /// Reads and encodes with a limit of a document in tokens; true if pairs share their prompts.
    fn within(
        config: &Config,
        source: &ModelSource,
        (sequence_len, share_prompts): (usize, bool),
        data_shard: Option<&DataShard<'_>>,
        stop: Stop<'_>,
    ) -> Result<Encoded> {
        let datasets = config.data.datasets.as_deref().unwrap_or_default();
        let validation = config.data.validation_datasets.as_deref().unwrap_or_default();
        let needs_text = |of: &Dataset| of.r#type != DatasetType::Tokens;
        let tokenizer = match datasets.iter().chain(validation).any(needs_text) {
            true => Some(Arc::new(Tokenizer::from_folder(&source.folder).map_err(TrainError::Data)?)),
            false => None,
        };
        let (mut dialogue, mut notes) = dialogue_options(config, source, tokenizer.as_deref())?;
        let images = images::of_run(config, source, &mut notes)?;
        if let (Some(reader), Some(tokenizer)) = (&images, &tokenizer) {
            let texts = ImageTexts::new(reader.clone(), tokenizer).map_err(TrainError::Usage)?;
            dialogue.images = Some(Arc::new(texts));
        }
        let template = dialogue.template.clone();
        let mut options = prepare_options(config, source, sequence_len, workers(config), dialogue)?;
        options.preference.share_prompts = share_prompts;
        let cache = row_cache(config, &mut notes);
        let notify = |text: &str| eprintln!("surogate: {}", options::visible(text));
        let specs = |list: &[Dataset], option: &str| -> Result<Vec<DatasetSpec>> {
            let place = |i: usize| format!("{option}[{i}]");
            list.iter().enumerate().map(|(i, of)| spec(config, of, &place(i))).collect()
        };
        let (of_training, of_validation) = (specs(datasets, "datasets")?, specs(validation, "validation_datasets")?);
        if let Some(data_shard) = data_shard {
            let all = [&of_training[..], &of_validation[..]].concat();
            let origin = data::origin(&all, tokenizer.as_ref(), &options, cache.as_ref()).map_err(TrainError::data)?;
            data_shard.compare(origin)?;
        }
        if config.data.streaming && images.is_some() {
            let message = "`streaming` does not go with a model that reads images from the rows";
            let hint = "remove `streaming`: images stay in their files, and only their texts are kept encoded";
            return Err(TrainError::Config(vec![config.mistake("streaming", message, Some(hint.into()))]));
        }
        let prepare = |specs: &[DatasetSpec]| -> Result<EncodedCorpus> {
            let keeping = cache.as_ref().map(|cache| Keeping { cache, notify: &notify });
            data::prepare_cached(specs, tokenizer.as_ref(), &options, keeping, stop).map_err(TrainError::data)
        };
        let (encoded, stream) = match data_shard {
            _ if config.data.streaming => {
                let (encoded, stream) = streamed::begin(config, of_training, tokenizer.as_ref(), &options, stop)?;
                (encoded, Some(stream))
            }
            None => (prepare(&of_training)?, None),
            Some(data_shard) => {
                let own = |spec: &DatasetSpec| DatasetSpec { shard: data_shard.shard(), ..spec.clone() };
                (data_shard.join(prepare(&of_training.iter().map(own).collect::<Vec<_>>())?)?, None)
            }
        };
        let EncodedCorpus { corpus, mut summary, notes: of_rows } = encoded;
        notes.extend(of_rows);
        let counts: Vec<usize> = summary.datasets.iter().map(|of| of.documents).collect();
        let (train, held_out) = if stream.is_some() && validation.is_empty() {
            (DocumentSet::all(corpus.clone()), DocumentSet { corpus, members: Arc::new([]) })
        } else if validation.is_empty() {
            let (train, held_out) =
                data::order::split(corpus.len(), config.data.validation_split_ratio, config.data.train_seed);
            let part = |members: Vec<u32>| DocumentSet { corpus: corpus.clone(), members: members.into() };
            (part(train), part(held_out))
        } else {
            let other = prepare(&of_validation)?;
            summary.datasets.extend(other.summary.datasets);
            notes.extend(other.notes);
            (DocumentSet::all(corpus), DocumentSet::all(other.corpus))
        };
        let writings: Vec<Writing> = summary.datasets.iter().map(|of| of.writing).collect();
        notes.extend(config::notes_on_template(config, &writings));
        notes.extend(summary.datasets.iter().filter_map(DatasetSummary::length_bias));
        notes.extend(shared_prompts::note(&summary));
        summary.datasets.iter().try_for_each(|of| of.check_lengths()).map_err(TrainError::data)?;
        let train = match &stream {
            Some(_) => train,
            None => mixture::mixed(config, train, datasets, &counts, &mut notes),
        };
        let pad_id = tokenizer.map_or(0, |t| t.pad_id() as i32);
        Ok(Encoded { train, held_out, summary, notes, sequence_len, because: None, pad_id, template, images, stream })
    }
}

/// Threads that prepare data; 0: the loop itself.
pub fn workers(config: &Config) -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, |n| n.get()).min(MAX_WORKERS);
    config.data.dataloader_num_workers.value().map_or_else(cores, |n| *n as usize)
}

/// The word that keeps no rows.
const NO_CACHE: &str = "off";

/// The cache of encoded rows; a note if there is no folder for it although none was refused.
pub(crate) fn row_cache(config: &Config, notes: &mut Vec<String>) -> Option<RowCache> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let written = match own_folder(config) {
        Some(Ok(folder)) => Some(folder),
        Some(Err(why)) => {
            notes.push(format!("encoded rows are kept in memory: {why}"));
            return None;
        }
        None => config.data.data_cache.value().map(PathBuf::from),
    };
    let folder = match written.or_else(|| variable(CACHE_VARIABLE)).map_or_else(|| folder_of_user("rows"), Ok) {
        Ok(folder) => folder,
        Err(why) => {
            notes.push(format!("encoded rows are kept in memory: {why}"));
            return None;
        }
    };
    (folder.as_os_str() != NO_CACHE).then(|| RowCache::new(folder))
}

fn prepare_options(
    config: &Config,
    source: &ModelSource,
    sequence_len: usize,
    workers: usize,
    dialogue: DialogueOptions,
) -> Result<PrepareOptions> {
    let template = &config.template;
    Ok(PrepareOptions {
        max_length: template.max_length.map_or(sequence_len, |n| (n as usize).min(sequence_len)),
        truncation: match template.truncation_strategy {
            config::Truncation::Delete => Truncation::Delete,
            config::Truncation::Right => Truncation::Right,
            config::Truncation::Split => Truncation::Split,
            config::Truncation::Left => Truncation::Left,
        },
        vocab_size: source.vocab_size()?,
        positions: source.position_limit(),
        workers,
        dialogue,
        preference: PreferenceOptions {
            purpose: config.task.purpose(),
            split: match config.data.preference_split {
                config::PreferenceSplit::Spans => Split::Spans,
                config::PreferenceSplit::Trl => Split::CommonPrefix,
            },
            cut: match (config.task.purpose(), template.truncation_mode) {
                (Purpose::Scores, _) => Cut::Nothing,
                (_, config::TruncationMode::KeepStart) => Cut::End,
                (_, config::TruncationMode::KeepEnd) => Cut::Beginning,
            },
            pair_length: sequence_len,
            share_prompts: false,
        },
    })
}
