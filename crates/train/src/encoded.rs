//! The data of a run as encoded documents: datasets, tokenizer, validation split, and the row length where it follows
//! from the documents.
//!
//! Knows option names; rows and templates belong to the data crate, packing and batches to `feed.rs`.

use std::path::PathBuf;
use std::sync::Arc;

use data::image_texts::ImageTexts;
use data::pictures::ImageReader;
use data::{
    AutoColumns, ConversationColumns, Cut, DatasetKind, DatasetSpec, DatasetSummary, DialogueOptions, DocumentSet,
    EncodedCorpus, InstructionColumns, Keeping, PreferenceColumns, PreferenceOptions, PrepareOptions, Purpose,
    Question, RowCache, RowLimit, Split, Stop, Summary, SystemPrompt, Tokenizer, Truncation, UnpairedColumns, Writing,
};
use net::Nodes;
use options::cache::folder_of_user;

use crate::config::{self, Config, Dataset, DatasetType, SystemPromptType};
use crate::conversation::dialogue_options;
use crate::data_shard::DataShard;
use crate::error::{Result, TrainError};
use crate::images;
use crate::mixture;
use crate::nodes;
use crate::plan::Plan;
use crate::row_length;
use crate::shared_prompts;
use crate::source::ModelSource;

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
}

impl Encoded {
    /// Reads and encodes everything, with rows as long as the plan says; where it leaves that open, it follows from the
    /// documents. Of several `nodes` each reads its own rows, and all do it at once.
    pub fn read(
        config: &Config,
        source: &ModelSource,
        plan: &Plan,
        nodes: Option<&Nodes>,
        stop: Stop<'_>,
    ) -> Result<Encoded> {
        let most = plan.sequence_len;
        let data_shard = nodes.map(|nodes| DataShard::new(nodes, nodes::of_a_host(config)));
        let is_shared = plan.compile.branches.is_some();
        let within = |tokens: usize| Encoded::within(config, source, (tokens, is_shared), data_shard.as_ref(), stop);
        let encoded = within(most)?;
        if !plan.length_is_open {
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
        let prepare = |specs: &[DatasetSpec]| -> Result<EncodedCorpus> {
            let keeping = cache.as_ref().map(|cache| Keeping { cache, notify: &notify });
            data::prepare_cached(specs, tokenizer.as_ref(), &options, keeping, stop).map_err(TrainError::data)
        };
        let encoded = match data_shard {
            None => prepare(&of_training)?,
            Some(data_shard) => {
                let own = |spec: &DatasetSpec| DatasetSpec { shard: data_shard.shard(), ..spec.clone() };
                data_shard.join(prepare(&of_training.iter().map(own).collect::<Vec<_>>())?)?
            }
        };
        let EncodedCorpus { corpus, mut summary, notes: of_rows } = encoded;
        notes.extend(of_rows);
        let counts: Vec<usize> = summary.datasets.iter().map(|of| of.documents).collect();
        let (train, held_out) = if validation.is_empty() {
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
        notes
            .extend(summary.datasets.iter().filter_map(DatasetSummary::warning).map(|text| format!("Warning: {text}")));
        notes.extend(summary.datasets.iter().filter_map(DatasetSummary::length_bias));
        notes.extend(shared_prompts::note(&summary));
        summary.datasets.iter().try_for_each(|of| of.check_lengths()).map_err(TrainError::data)?;
        let train = mixture::mixed(config, train, datasets, &counts, &mut notes);
        let pad_id = tokenizer.map_or(0, |t| t.pad_id() as i32);
        Ok(Encoded { train, held_out, summary, notes, sequence_len, because: None, pad_id, template, images })
    }
}

/// Threads that prepare data; 0: the loop itself.
pub fn workers(config: &Config) -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, |n| n.get()).min(MAX_WORKERS);
    config.data.dataloader_num_workers.value().map_or_else(cores, |n| *n as usize)
}

/// Names the folder of encoded rows where the options do not.
pub(crate) const CACHE_VARIABLE: &str = "SUROGATE_DATA_CACHE";

/// The word that keeps no rows.
const NO_CACHE: &str = "off";

/// The cache of encoded rows; a note if there is no folder for it although none was refused.
pub(crate) fn row_cache(config: &Config, notes: &mut Vec<String>) -> Option<RowCache> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let written = match nodes::own_folder(config) {
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

/// The columns of what a preference asks.
fn question(of: &Dataset) -> Question {
    Question {
        prompt: of.prompt_field.clone(),
        system: of.system_field.clone(),
        tools: of.tools_field.clone(),
        properties: of.message_property_mappings.clone().unwrap_or_default(),
        ..Question::default()
    }
}

fn preference_columns(of: &Dataset) -> PreferenceColumns {
    PreferenceColumns {
        question: question(of),
        chosen: of.chosen_field.clone(),
        rejected: of.rejected_field.clone().unwrap_or_default(),
        margin: of.margin_field.clone(),
        scores: None,
    }
}

fn unpaired_columns(of: &Dataset) -> UnpairedColumns {
    UnpairedColumns {
        question: question(of),
        completion: of.completion_field.clone(),
        label: of.label_field.clone().unwrap_or_default(),
    }
}

/// The columns of an instruction set. Their names are there unless the type is left open.
fn instruction_columns(of: &Dataset) -> InstructionColumns {
    InstructionColumns {
        instruction: of.instruction_field.clone().unwrap_or_default(),
        output: of.output_field.clone().unwrap_or_default(),
        input: of.input_field.clone(),
        history: None,
        system: match of.system_prompt_type {
            None => SystemPrompt::None,
            Some(SystemPromptType::Field) => SystemPrompt::Field(of.system_prompt_field.clone().unwrap_or_default()),
            Some(SystemPromptType::Fixed) => SystemPrompt::Fixed(of.system_prompt.clone().unwrap_or_default()),
        },
        prompt_format: of.prompt_format.clone(),
        prompt_format_no_input: of.prompt_format_no_input.clone(),
        open: Vec::new(),
    }
}

fn conversation_columns(of: &Dataset) -> ConversationColumns {
    ConversationColumns {
        messages: of.messages_field.clone(),
        completion: None,
        system: of.system_field.clone(),
        tools: of.tools_field.clone(),
        properties: of.message_property_mappings.clone().unwrap_or_default(),
        open: Vec::new(),
    }
}

/// The user's options on the columns of a set whose type is left open. A column's default name says nothing.
fn auto_columns(config: &Config, of: &Dataset, place: &str) -> AutoColumns {
    let named = |option: &str, name: &str| {
        if config.is_written(&format!("{place}.{option}")) { name.to_owned() } else { String::new() }
    };
    AutoColumns {
        text: named("text_field", &of.text_field),
        instruction: instruction_columns(of),
        conversation: ConversationColumns {
            messages: named("messages_field", &of.messages_field),
            ..conversation_columns(of)
        },
        preference: preference_columns(of),
        unpaired: unpaired_columns(of),
    }
}

/// A dataset of the options as the data crate takes it; `place` is where it stands there.
pub(crate) fn spec(config: &Config, of: &Dataset, place: &str) -> Result<DatasetSpec> {
    let kind = match of.r#type {
        DatasetType::Tokens => DatasetKind::Tokens,
        DatasetType::Text => DatasetKind::Text { field: of.text_field.clone() },
        DatasetType::Instruction => DatasetKind::Instruction(instruction_columns(of)),
        DatasetType::Conversation => DatasetKind::Conversation(conversation_columns(of)),
        DatasetType::Preference => DatasetKind::Preference(preference_columns(of)),
        DatasetType::Unpaired => DatasetKind::Unpaired(unpaired_columns(of)),
        DatasetType::Auto => DatasetKind::Auto(Box::new(auto_columns(config, of, place))),
    };
    let templated = match &kind {
        DatasetKind::Conversation(_) => true,
        DatasetKind::Instruction(columns) => columns.prompt_format.is_none(),
        _ => false,
    };
    if templated && !config.template.use_chat_template {
        let message = format!("`use_chat_template: false`, but {} is written with the chat template", of.path);
        let hint = "remove `use_chat_template`, or give an instruction set a `prompt_format`".to_owned();
        return Err(TrainError::Config(vec![config.mistake("use_chat_template", message, Some(hint))]));
    }
    Ok(DatasetSpec {
        files: config.fetched.get(place).cloned(),
        subset: of.subset.clone(),
        split: of.split.clone(),
        samples: of.samples.map(|n| n as usize),
        row_limit: RowLimit(of.max_row_size.0),
        ..DatasetSpec::new(&of.path, kind)
    })
}
