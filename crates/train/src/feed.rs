//! From the options to batches: data sets, tokenizer, packing, the split for validation.
//!
//! Knows names of options; rows, templates and packing are the data crate's.

mod check;

use std::path::PathBuf;
use std::sync::Arc;

use data::show::ShownRow;
use data::{
    AutoColumns, ConversationColumns, DatasetKind, DatasetSpec, DialogueOptions, DocumentSet, Extent,
    InstructionColumns, Keeping, Layout, Loader, LoaderSpec, Padding, Position, PrepareOptions, Prepared, RowCache,
    Share, Summary, SystemPrompt, Tokenizer, Truncation,
};
use program::{Arch, Documents, Machine, Variant};

use crate::checkpoint::DataDigest;
use crate::config::{self, Config, Dataset, DatasetType, Side, SystemPromptType};
use crate::conversation::dialogue_options;
use crate::engine::{bucket_of, count_documents};
use crate::error::{Result, TrainError};
use crate::plan::Plan;
use crate::source::ModelSource;

/// Micro-batches that are made ahead of the loop.
pub const PREFETCH: usize = 4;

/// Threads that prepare data when the user leaves it open, at most.
const MAX_WORKERS: usize = 8;

/// Batches that are looked at to learn how many documents one holds.
const COUNTED_BATCHES: usize = 64;

/// Row lengths of unpacked batches: these parts of the longest, so that few shapes are compiled.
const LENGTH_PARTS: [f64; 3] = [0.25, 0.5, 1.0];

/// Unpacked rows have a multiple of so many tokens.
const LENGTH_UNIT: usize = 16;

/// The data of a run.
pub struct Feed {
    pub train: Loader,
    pub train_extent: Extent,
    documents: DocumentSet,
    spec: LoaderSpec,
    validation: Option<(DocumentSet, LoaderSpec)>,
    pub summary: Summary,
    /// What the user should know, a sentence each.
    pub notes: Vec<String>,
    /// Every row is one document and padding behind it.
    pub one_per_row: bool,
}

impl Feed {
    /// Reads, encodes and packs everything. `sequence_len` is the length of packed rows.
    pub fn new(config: &Config, source: &ModelSource, sequence_len: usize) -> Result<Feed> {
        let datasets = config.data.datasets.as_deref().unwrap_or_default();
        let validation = config.data.validation_datasets.as_deref().unwrap_or_default();
        let needs_text = |of: &Dataset| of.r#type != DatasetType::Tokens;
        let tokenizer = match datasets.iter().chain(validation).any(needs_text) {
            true => Some(Arc::new(Tokenizer::from_folder(&source.folder).map_err(TrainError::Data)?)),
            false => None,
        };
        let workers = workers(config);
        let (dialogue, note) = dialogue_options(config, source, tokenizer.as_deref())?;
        let options = prepare_options(config, source, sequence_len, workers, dialogue)?;
        let mut notes: Vec<String> = note.into_iter().collect();
        let cache = row_cache(config, &mut notes);
        let tell = |text: &str| eprintln!("surogate: {text}");
        let prepare = |list: &[Dataset], option: &str| -> Result<Prepared> {
            let place = |i: usize| format!("{option}[{i}]");
            let specs = list.iter().enumerate().map(|(i, of)| spec(config, of, &place(i)));
            let specs = specs.collect::<Result<Vec<_>>>()?;
            let keeping = cache.as_ref().map(|cache| Keeping { cache, tell: &tell });
            data::prepare_cached(&specs, tokenizer.as_ref(), &options, keeping).map_err(TrainError::Data)
        };
        let Prepared { corpus, mut summary, notes: of_rows } = prepare(datasets, "datasets")?;
        notes.extend(of_rows);
        let (train, held_out) = if validation.is_empty() {
            let (train, held_out) =
                data::order::split(corpus.len(), config.data.validation_split_ratio, config.data.train_seed);
            let part = |members: Vec<u32>| DocumentSet { corpus: corpus.clone(), members: members.into() };
            (part(train), part(held_out))
        } else {
            let other = prepare(validation, "validation_datasets")?;
            summary.datasets.extend(other.summary.datasets);
            notes.extend(other.notes);
            (DocumentSet::all(corpus), DocumentSet::all(other.corpus))
        };
        let layout = layout(config, &[&train, &held_out], sequence_len);
        let batch_size = config.training.per_device_train_batch_size as usize;
        let row = row_length(&layout, sequence_len, batch_size);
        let longest = bucket_of(train.longest().max(held_out.longest()), row);
        let pad_id = tokenizer.map_or(0, |t| t.pad_id() as i32);
        let train_spec = LoaderSpec {
            batch_size,
            share: Share::WHOLE,
            seq_len: row,
            layout,
            padding: match config.template.padding_side {
                Side::Right => Padding::End,
                Side::Left => Padding::Beginning,
            },
            shuffle: config.data.shuffle,
            seed: config.data.train_seed,
            epochs: Some(u64::from(config.run.num_epochs)),
            pad_id,
            longest_padding: longest,
            prefetch: if workers == 0 { 0 } else { PREFETCH },
        };
        let train_extent = data::extent(&train, &train_spec).map_err(TrainError::Data)?;
        let one_per_row = matches!(train_spec.layout, Layout::Padded(_)) && train_spec.padding == Padding::End;
        let validation_spec = LoaderSpec { seed: config.data.eval_seed, epochs: Some(1), ..train_spec.clone() };
        // A fixed number of steps goes on through the data for as long as it takes.
        let epochs = config.training.fixed_steps().map_or(train_spec.epochs, |_| None);
        let train_spec = LoaderSpec { epochs, ..train_spec };
        let documents = train.clone();
        let spec = train_spec.clone();
        let train = Loader::new(train, train_spec, Position::default()).map_err(TrainError::Data)?;
        let validation = (!held_out.is_empty()).then_some((held_out, validation_spec));
        Ok(Feed { train, train_extent, documents, spec, validation, summary, notes, one_per_row })
    }

    /// The shapes of the batches, as far as they are known before the first. On a GPU the plan
    /// depends on how many documents a batch holds: the first batches are counted, with room above.
    pub fn variants(&self, machine: &Machine) -> Result<Vec<Variant>> {
        let batch = self.spec.batch_size;
        // Padding in front of a document, or a document behind another, are told apart by their starts.
        let several = |batch: usize, seq_len: usize, most: usize| {
            let count = if machine.arch == Arch::Cpu { batch * seq_len } else { most.next_power_of_two() };
            let count = count.min(batch * seq_len);
            Variant { batch, seq_len, documents: Documents::Packed { count, longest: seq_len } }
        };
        match &self.spec.layout {
            Layout::Padded(lengths) if self.one_per_row => {
                let variant = |seq_len: &usize| Variant { batch, seq_len: *seq_len, documents: Documents::Rows };
                return Ok(lengths.iter().map(variant).collect());
            }
            Layout::Padded(lengths) => return Ok(lengths.iter().map(|&n| several(batch, n, 2 * batch)).collect()),
            Layout::Joined(lengths) => return Ok(lengths.iter().map(|&n| several(1, n, batch + 1)).collect()),
            Layout::Packed => {}
        }
        let seq_len = self.spec.seq_len;
        let most = batch * seq_len;
        let (count, longest) = match machine.arch {
            Arch::Cpu => (most, seq_len),
            // Padding is no longer than the longest document either.
            _ => (self.count_documents()?.min(most), self.spec.longest_padding),
        };
        Ok(vec![Variant { batch, seq_len, documents: Documents::Packed { count, longest } }])
    }

    /// Documents of a packed batch, by the first batches of the data.
    fn count_documents(&self) -> Result<usize> {
        let spec = LoaderSpec { prefetch: 0, epochs: Some(1), ..self.spec.clone() };
        let loader = Loader::new(self.documents.clone(), spec, Position::default()).map_err(TrainError::Data)?;
        let batches =
            loader.take(COUNTED_BATCHES).chain(self.validation()?.into_iter().flatten().take(COUNTED_BATCHES));
        let most = batches.map(|batch| count_documents(&batch)).max().unwrap_or(1);
        Ok((most + most / 4).next_power_of_two())
    }

    /// The first rows that training takes, with their texts where the model's folder has a tokenizer.
    fn first_rows(&self, source: &ModelSource, count: usize) -> Result<Vec<ShownRow>> {
        let has_tokenizer = source.folder.join("tokenizer.json").is_file();
        let tokenizer = has_tokenizer.then(|| Tokenizer::from_folder(&source.folder)).transpose();
        let tokenizer = tokenizer.map_err(TrainError::Data)?;
        let spec = LoaderSpec { prefetch: 0, epochs: Some(1), ..self.spec.clone() };
        let loader = Loader::new(self.documents.clone(), spec, Position::default()).map_err(TrainError::Data)?;
        let rows = loader.flat_map(|batch| data::show::rows(&batch, tokenizer.as_ref(), self.spec.pad_id));
        Ok(rows.filter(|row| !row.documents.is_empty()).take(count).collect())
    }

    /// The next batch begins at a place in the training data.
    pub fn seek(&mut self, position: Position) -> Result<()> {
        self.train = Loader::new(self.documents.clone(), self.spec.clone(), position).map_err(TrainError::Data)?;
        Ok(())
    }

    /// The table of the data check: what became of the rows, and how they fill the batches.
    pub fn check_table(&self) -> String {
        let held_out = self.validation.as_ref().map_or(0, |(documents, _)| documents.len());
        let Extent { rows, micro_batches, fill } = self.train_extent;
        let how = match &self.spec.layout {
            Layout::Packed => "packed",
            Layout::Padded(_) => "padded",
            Layout::Joined(_) => "joined",
        };
        format!(
            "{}{} documents to train on, {held_out} for evaluation; {rows} rows of up to {} tokens in {micro_batches} \
             micro-batches, {how}, {:.1} % full\n",
            self.summary,
            self.documents.len(),
            self.spec.seq_len,
            100.0 * fill
        )
    }

    /// What identifies the training data.
    pub fn digest(&self) -> DataDigest {
        DataDigest { documents: self.documents.len(), digest: self.documents.digest() }
    }

    /// What identifies the documents that are held out; none without them.
    pub fn validation_digest(&self) -> Option<DataDigest> {
        let (documents, _) = self.validation.as_ref()?;
        Some(DataDigest { documents: documents.len(), digest: documents.digest() })
    }

    /// Every batch of the validation data; `None` where there is none.
    pub fn validation(&self) -> Result<Option<Loader>> {
        let Some((documents, spec)) = &self.validation else { return Ok(None) };
        let loader = Loader::new(documents.clone(), spec.clone(), Position::default());
        loader.map(Some).map_err(TrainError::Data)
    }

    /// Passes over the data after so many steps: rows against those of a mean epoch.
    pub fn epochs(&self, config: &Config, steps: u64) -> f64 {
        let of = &config.training;
        let rows = u64::from(of.per_device_train_batch_size) * u64::from(of.gradient_accumulation_steps) * steps;
        (rows * u64::from(config.run.num_epochs)) as f64 / self.train_extent.rows as f64
    }

    /// Optimizer steps of the run.
    pub fn total_steps(&self, config: &Config) -> u64 {
        let accumulation = config.training.gradient_accumulation_steps as usize;
        config.training.fixed_steps().unwrap_or_else(|| self.train_extent.steps(accumulation))
    }
}

/// Threads that prepare data; 0: the loop itself.
pub fn workers(config: &Config) -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, |n| n.get()).min(MAX_WORKERS);
    config.data.dataloader_num_workers.value().map_or_else(cores, |n| *n as usize)
}

/// Names the folder of encoded rows where the options do not.
const CACHE_VARIABLE: &str = "SUROGATE_DATA_CACHE";

/// The word that keeps no rows.
const NO_CACHE: &str = "off";

/// Where encoded rows are kept; a note where there is no such place although none was refused.
fn row_cache(config: &Config, notes: &mut Vec<String>) -> Option<RowCache> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let written = config.data.data_cache.value().map(PathBuf::from);
    let folder = written.or_else(|| variable(CACHE_VARIABLE)).or_else(|| {
        let own = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")))?;
        Some(own.join("surogate").join("rows"))
    });
    let Some(folder) = folder else {
        notes.push("encoded rows are kept in memory: neither HOME nor XDG_CACHE_HOME says where to".to_owned());
        return None;
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
    })
}

/// The columns of an instruction set. Their names are there unless the type is left open.
fn instruction_columns(of: &Dataset) -> InstructionColumns {
    InstructionColumns {
        instruction: of.instruction_field.clone().unwrap_or_default(),
        output: of.output_field.clone().unwrap_or_default(),
        input: of.input_field.clone(),
        system: match of.system_prompt_type {
            None => SystemPrompt::None,
            Some(SystemPromptType::Field) => SystemPrompt::Field(of.system_prompt_field.clone().unwrap_or_default()),
            Some(SystemPromptType::Fixed) => SystemPrompt::Fixed(of.system_prompt.clone().unwrap_or_default()),
        },
        prompt_format: of.prompt_format.clone(),
        prompt_format_no_input: of.prompt_format_no_input.clone(),
    }
}

fn conversation_columns(of: &Dataset) -> ConversationColumns {
    ConversationColumns {
        messages: of.messages_field.clone(),
        system: of.system_field.clone(),
        tools: of.tools_field.clone(),
        properties: of.message_property_mappings.clone().unwrap_or_default(),
    }
}

/// What the user says of a set whose type is left open. A column's default name says nothing.
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
    }
}

/// A data set of the options as the data crate takes it; `place` is where it stands there.
fn spec(config: &Config, of: &Dataset, place: &str) -> Result<DatasetSpec> {
    let kind = match of.r#type {
        DatasetType::Tokens => DatasetKind::Tokens,
        DatasetType::Text => DatasetKind::Text { field: of.text_field.clone() },
        DatasetType::Instruction => DatasetKind::Instruction(instruction_columns(of)),
        DatasetType::Conversation => DatasetKind::Conversation(conversation_columns(of)),
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
        ..DatasetSpec::new(&of.path, kind)
    })
}

fn layout(config: &Config, sets: &[&DocumentSet], sequence_len: usize) -> Layout {
    if config.data.sample_packing {
        return Layout::Packed;
    }
    let lengths = sets.iter().flat_map(|set| set.members.iter().map(|i| set.corpus.length(*i as usize)));
    let longest = lengths.max().unwrap_or(1).next_multiple_of(LENGTH_UNIT).min(sequence_len);
    let part = |share: f64| ((longest as f64 * share) as usize).next_multiple_of(LENGTH_UNIT).min(longest);
    let mut lengths: Vec<usize> = LENGTH_PARTS.into_iter().map(part).collect();
    lengths.dedup();
    if !config.template.padding_free {
        return Layout::Padded(lengths);
    }
    let rows = config.training.per_device_train_batch_size as usize;
    Layout::Joined(lengths.into_iter().map(|length| length * rows).collect())
}

/// Tokens of the longest document that a row takes.
fn row_length(layout: &Layout, sequence_len: usize, rows: usize) -> usize {
    let last = |lengths: &[usize]| *lengths.last().expect("there is a longest row");
    match layout {
        Layout::Packed => sequence_len,
        Layout::Padded(lengths) => last(lengths),
        Layout::Joined(lengths) => last(lengths) / rows,
    }
}

/// What became of the data of a run.
#[derive(Clone, Debug)]
pub struct CheckedData {
    /// The notes and the table of the data check.
    pub table: String,
    /// The first rows that training takes.
    pub rows: Vec<ShownRow>,
}

/// Prepares the data of a run without training. `rows`: how many rows are wanted to be looked at.
pub fn check_data(config: &Config, source: &ModelSource, rows: usize) -> Result<CheckedData> {
    let problems = config.check_datasets();
    if !problems.is_empty() {
        return Err(TrainError::Config(problems));
    }
    let plan = Plan::new(config, source)?;
    let feed = Feed::new(config, source, plan.sequence_len)?;
    let notes: String = feed.notes.iter().map(|note| format!("Note: {note}\n")).collect();
    let rows = if rows == 0 { Vec::new() } else { feed.first_rows(source, rows)? };
    Ok(CheckedData { table: notes + &feed.check_table(), rows })
}

/// The names that a pattern of a data set's path means.
pub fn matching_names(pattern: &str, names: Vec<String>) -> Vec<String> {
    let test = data::rows::files::glob(pattern);
    names.into_iter().filter(|name| test.is_match(name)).collect()
}

/// The files of a data set among the names of a folder, before any is fetched; else the problem and what helps.
pub fn choose_files(
    names: &[String],
    card: Option<&str>,
    subset: Option<&str>,
    split: &str,
) -> std::result::Result<Vec<String>, (String, String)> {
    let chosen = data::rows::files::choose(names, card, subset, split);
    chosen.map(|chosen| chosen.names).map_err(|no| (no.problem, no.hint))
}
