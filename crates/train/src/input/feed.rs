//! From encoded documents to batches: row layout, shapes, data order.
//!
//! Knows option names; packing is in the data crate, reading and encoding in `encoded.rs`.

mod check;

use std::sync::Arc;

use data::pictures::ImageReader;
use data::show::ShownRow;
use data::{
    Batch, DatasetSummary, DocumentSet, Extent, IGNORE, Layout, Loader, LoaderSpec, Mark, Padding, Placed, Position,
    Share, Stop, Summary, Tokenizer,
};
use program::{Documents, OfPatch, Variant};

use crate::config::{Config, Side};
use crate::error::{Result, TrainError};
use crate::input::data_digest::DataDigest;
use crate::input::encoded::{Encoded, workers};
use crate::input::few_steps::Steps;
use crate::input::first_batches::{COUNTED_BATCHES, first_batches};
use crate::input::image_shapes::{ImageShapes, images_of};
use crate::input::logit_shapes;
use crate::model::source::ModelSource;
use crate::words::count;

/// The note on a batch with more patches than those that were counted for the plan.
const MORE_PATCHES: &str = "a batch has more patches of images than those that were counted: a program of its own was compiled for it, which is in no plan";

/// Micro-batches that are made ahead of the loop.
pub const PREFETCH: usize = 4;

/// Packed rows are filled up with documents of at most this number of tokens: attention over them costs little.
const LONGEST_PADDING: usize = 128;

/// Row lengths of unpacked batches: these parts of the longest, so that few shapes are compiled.
const LENGTH_PARTS: [f64; 3] = [0.25, 0.5, 1.0];

/// The length of unpacked rows is a multiple of this number of tokens.
const LENGTH_UNIT: usize = 16;

/// Images of shown rows that are drawn, at most: each adds some ten thousand bytes to the page.
const DRAWN: usize = 64;

/// The data of a run.
pub struct Feed {
    pub train: Loader,
    pub train_extent: Extent,
    /// Rows of a whole pass over the data.
    rows_in_epoch: u64,
    /// Number of passes over the data.
    epochs: f64,
    documents: DocumentSet,
    spec: LoaderSpec,
    validation: Option<(DocumentSet, LoaderSpec)>,
    pub encoded: Encoded,
    /// Every row is one document and padding after it.
    pub one_per_row: bool,
    /// The shapes of batches with images.
    shapes: ImageShapes,
}

/// The note on evaluations of few documents or prompts that decide which weights are the result, or when the run ends.
pub(crate) fn note_on_judges(config: &Config, held_out: usize, what: &str) -> Option<String> {
    const FEW: usize = 30;
    let decides = [
        ("load_best_model_at_end", config.run.load_best_model_at_end),
        ("early_stopping_patience", config.training.early_stopping_patience.is_some()),
    ];
    let (option, _) = decides.into_iter().find(|(_, on)| *on && held_out < FEW)?;
    let criterion = config.task.criterion().name();
    Some(format!(
        "`{option}` goes by the {criterion} of {}, which says little: hold out more with `validation_split_ratio` or \
         name `validation_datasets`",
        count(held_out as u64, what),
    ))
}

impl Feed {
    /// Lays documents out in rows and batches. The options may differ from those that they were read with, as long as
    /// no document is longer than a row. `sequence_len` is the length of packed rows; `trained_logits`: logits may be
    /// computed for tokens with a target alone.
    pub fn new(
        config: &Config,
        encoded: Encoded,
        (sequence_len, trained_logits): (usize, bool),
        stop: Stop<'_>,
    ) -> Result<Feed> {
        let Encoded { train, held_out, pad_id, images, .. } = encoded.clone();
        let workers = workers(config);
        let stream = encoded.stream.clone();
        let longest = match stream {
            Some(_) => sequence_len,
            None => train.longest().max(held_out.longest()).max(1),
        };
        let layout = layout(config, longest, sequence_len);
        let batch_size = config.micro_rows() as usize;
        let row = row_length(&layout, sequence_len, batch_size);
        let train_spec = LoaderSpec {
            batch_size,
            share: Share::among(config.replicas()),
            seq_len: row,
            layout,
            padding: match config.template.padding_side {
                Side::Right => Padding::End,
                Side::Left => Padding::Beginning,
            },
            shuffle: config.data.shuffle,
            seed: config.data.train_seed,
            epochs: Some(config.run.num_epochs.begun()),
            pad_id,
            longest_padding: LONGEST_PADDING,
            prefetch: if workers == 0 { 0 } else { PREFETCH },
            logits: Vec::new(),
            images: None,
        };
        let train_extent = data::extent_unless(&train, &train_spec, stop).map_err(TrainError::data)?;
        let rows_in_epoch = train_extent.by_epoch.first().copied().unwrap_or(train_extent.rows);
        let train_extent = train_extent.with_part_of_last(config.run.num_epochs.of_last());
        let one_per_row = matches!(train_spec.layout, Layout::Padded(_)) && train_spec.padding == Padding::End;
        let validation_spec = LoaderSpec { seed: config.data.eval_seed, epochs: Some(1), ..train_spec.clone() };
        // A fixed number of steps goes on through the data for as long as it takes.
        let epochs = config.training.fixed_steps().map_or(train_spec.epochs, |_| None);
        let train_spec = LoaderSpec { epochs, ..train_spec };
        let documents = train.clone();
        let form = images.as_ref().map(|reader| &reader.form);
        let shapes = form.map(|form| ImageShapes::of(form, &documents, &train_spec)).transpose()?.unwrap_or_default();
        let images = images.map(|reader| Arc::new(ImageReader { rooms: shapes.rooms.clone(), ..reader }));
        let first = [(&documents, stream.as_ref(), &train_spec), (&held_out, None, &validation_spec)];
        let logits = match trained_logits {
            true => logit_shapes::of(first, train_spec.batch_size * train_spec.seq_len)?,
            false => Vec::new(),
        };
        let train_spec = LoaderSpec { images: images.clone(), logits: logits.clone(), ..train_spec };
        let validation_spec = LoaderSpec { images, logits, ..validation_spec };
        let spec = train_spec.clone();
        let train = match &stream {
            Some(stream) => Loader::streamed(stream, train_spec, Position::default()),
            None => Loader::new(train, train_spec, Position::default()).map_err(TrainError::Data)?,
        };
        let validation = (!held_out.is_empty()).then_some((held_out, validation_spec));
        let epochs = config.run.num_epochs.0;
        Ok(Feed {
            train,
            train_extent,
            rows_in_epoch,
            epochs,
            documents,
            spec,
            validation,
            encoded,
            one_per_row,
            shapes,
        })
    }

    /// The shapes of the batches, as far as they are known before the first.
    pub fn variants(&self) -> Vec<Variant> {
        let batch = self.spec.batch_size;
        // Padding before a document, or a document after another, are distinguished by their starts.
        let (batch, lengths, documents) = match &self.spec.layout {
            Layout::Padded(lengths) if self.one_per_row => (batch, &lengths[..], Documents::Rows),
            Layout::Padded(lengths) => (batch, &lengths[..], Documents::Packed),
            Layout::Joined(lengths) => (1, &lengths[..], Documents::Packed),
            Layout::Packed if self.documents_fill_rows() => (batch, &[self.spec.seq_len][..], Documents::Rows),
            Layout::Packed => (batch, &[self.spec.seq_len][..], Documents::Packed),
        };
        let of_text = lengths.iter().map(|seq_len| (*seq_len, 0));
        let extents = if self.spec.images.is_some() { self.shapes.extents.clone() } else { of_text.collect() };
        let variant =
            |(seq_len, patches)| Variant { batch, seq_len, documents, patches, logits: self.logits_of(seq_len) };
        extents.into_iter().map(variant).collect()
    }

    /// Tokens whose logits are computed in a micro-batch of rows of a length; 0: all.
    pub(crate) fn logits_of(&self, seq_len: usize) -> usize {
        self.spec.logits.iter().find(|of| of.0 == seq_len).map_or(0, |of| of.1)
    }

    /// The note on a batch with a shape that is in no plan, where one of these has.
    pub(crate) fn note_on_overflow(&self, batches: &[Batch]) -> Option<&'static str> {
        let planned = self.variants();
        let mut own = batches.iter().filter(|batch| batch.remote.is_none());
        own.find_map(|batch| {
            let patches = batch.patches.count();
            let has_patches = || planned.iter().any(|of| (of.seq_len, of.patches) == (batch.seq_len, patches));
            match batch.logits == 0 && self.logits_of(batch.seq_len) > 0 {
                true => Some(logit_shapes::OVERFLOW),
                false => (patches > 0 && !has_patches()).then_some(MORE_PATCHES),
            }
        })
    }

    /// The note on logits that are not computed.
    pub(crate) fn note_on_logits(&self) -> Option<String> {
        let rows = if matches!(self.spec.layout, Layout::Joined(_)) { 1 } else { self.spec.batch_size };
        logit_shapes::note(&self.spec.logits, rows)
    }

    /// Rows of a whole pass over the data.
    pub(crate) fn rows_in_epoch(&self) -> u64 {
        self.rows_in_epoch
    }

    /// Documents that are trained on, those that are repeated as often as they are.
    pub(crate) fn documents(&self) -> usize {
        self.documents.len()
    }

    /// The note on a run of few steps.
    pub(crate) fn note_on_steps(&self, config: &Config) -> Option<String> {
        Steps::of(config, self.rows_in_epoch(), self.documents() as u64)?.note(self.total_steps(config))
    }

    /// The note on evaluations of few documents that decide which weights are the result, or when the run ends.
    pub(crate) fn note_on_judges(&self, config: &Config) -> Option<String> {
        let (documents, _) = self.validation.as_ref()?;
        note_on_judges(config, documents.len(), "document")
    }

    /// True if every document is as long as a row: then packing leaves each alone, and kernels for full rows take them.
    fn documents_fill_rows(&self) -> bool {
        let set = &self.documents;
        // A stream knows its first documents alone.
        self.encoded.stream.is_none()
            && set.members.iter().all(|index| set.corpus.length(*index as usize) == self.spec.seq_len)
    }

    /// The first batches that training takes, with images as they are in the rows; of a stream as far as it is known before the first step.
    fn first_batches(&self) -> Result<Loader> {
        first_batches(&self.documents, self.encoded.stream.as_ref(), &self.spec)
    }

    /// Counts of the rows; of a stream those of the rows that were read so far.
    pub(crate) fn summary(&self) -> Summary {
        self.encoded.stream.as_ref().map_or_else(|| self.encoded.summary.clone(), |stream| stream.counted())
    }

    /// The shapes of the first batches, their tokens, and what attention sees in them.
    pub(crate) fn first_shapes(&self) -> Result<FirstShapes> {
        let ranks = self.spec.share.here.max(1);
        let batches = self.first_batches()?.take(COUNTED_BATCHES.next_multiple_of(ranks));
        let batches = batches.collect::<std::result::Result<Vec<Batch>, _>>().map_err(TrainError::Data)?;
        let (mut extents, mut pairs, mut tokens, mut seen, mut looked_at) = (Vec::new(), 0, 0, 0.0, 0u32);
        for round in batches.chunks(ranks) {
            let mut most = 0;
            for batch in round {
                tokens += tokens_of(batch);
                if batch.remote.is_none() {
                    (seen, looked_at) = (seen + seen_share(batch), looked_at + 1);
                }
                let images = self.spec.images.as_ref().map_or(Vec::new(), |reader| images_of(&reader.form, batch));
                pairs += images.iter().map(|image| image * image).sum::<usize>();
                most = most.max(images.iter().sum());
            }
            let room = self.spec.images.as_ref().map_or(0, |reader| reader.room(most));
            extents.extend(vec![(round[0].seq_len, room, round[0].logits); round.len()]);
        }
        let count = extents.len().max(1) as f64;
        let seen = seen / f64::from(looked_at.max(1));
        let patches = extents.iter().map(|(_, patches, _)| patches).sum::<usize>().max(1) as f64;
        let patches = self.spec.images.as_ref().map(|reader| {
            let image = (pairs as f64 / patches).max(1.0);
            OfPatch { image, window: (reader.form.patches_of_window() as f64).min(image) }
        });
        Ok(FirstShapes { extents, tokens: tokens as f64 / count, seen, patches })
    }

    /// Batches of one pass over the data that are held out.
    pub(crate) fn validation_batches(&self) -> Result<u64> {
        let Some((documents, spec)) = &self.validation else { return Ok(0) };
        Ok(data::extent(documents, spec).map_err(TrainError::Data)?.micro_batches)
    }

    /// The first rows that training takes, with their texts where the model's folder has a tokenizer.
    pub(crate) fn first_rows(&self, source: &ModelSource, count: usize) -> Result<Vec<ShownRow>> {
        let has_tokenizer = source.folder.join("tokenizer.json").is_file();
        let tokenizer = has_tokenizer.then(|| Tokenizer::from_folder(&source.folder)).transpose();
        let tokenizer = tokenizer.map_err(TrainError::Data)?;
        let loader = self.first_batches()?;
        let mut rows = Vec::new();
        for batch in loader {
            let batch = batch.map_err(TrainError::Data)?;
            let shown = data::show::rows(&batch, tokenizer.as_ref(), self.spec.pad_id, self.spec.images.as_deref());
            let shown = shown.map_err(TrainError::Data)?;
            rows.extend(shown.into_iter().filter(|row| !row.documents.is_empty()));
            if rows.len() >= count {
                break;
            }
        }
        rows.truncate(count);
        data::show::draw(&mut rows, DRAWN).map_err(TrainError::Data)?;
        Ok(rows)
    }

    /// The next batch begins at a place in the training data.
    pub fn seek(&mut self, position: Position) -> Result<()> {
        self.train = match &self.encoded.stream {
            Some(stream) => Loader::streamed(stream, self.spec.clone(), position),
            None => Loader::new(self.documents.clone(), self.spec.clone(), position).map_err(TrainError::Data)?,
        };
        Ok(())
    }

    /// The table of the data check: what became of the rows, and how they fill the batches.
    pub fn check_table(&self, config: &Config) -> String {
        let held_out = self.validation.as_ref().map_or(0, |(documents, _)| documents.len());
        let Extent { rows, micro_batches, fill, .. } = &self.train_extent;
        let splits = config.data.validation_datasets.is_none() && !config.is_written("validation_split_ratio");
        let by = if splits && held_out > 0 { " (`validation_split_ratio`)" } else { "" };
        let of_run = match config.training.fixed_steps() {
            Some(steps) if self.encoded.stream.is_some() => count(steps, "step"),
            Some(steps) => format!("{} in {:.2} epochs", count(steps, "step"), self.epochs(config, steps)),
            None => {
                let epochs = if self.epochs == 1.0 { "1 epoch".to_owned() } else { format!("{} epochs", self.epochs) };
                let (rows, micro_batches) = (count(*rows, "row"), count(*micro_batches, "micro-batch"));
                format!("{rows} in {micro_batches} in {epochs}")
            }
        };
        let how = match &self.spec.layout {
            Layout::Packed => "packed",
            Layout::Padded(_) => "padded",
            Layout::Joined(_) => "joined",
        };
        let warnings = self.encoded.summary.datasets.iter().filter_map(DatasetSummary::warning);
        let warnings: String = warnings.map(|text| format!("Warning: {text}\n")).collect();
        if let Some(stream) = &self.encoded.stream {
            return format!(
                "{}streamed from {}: the table is of the first rows, which become {} in {} of up to {} tokens, {how}, {:.1} % \
                 full; {} for evaluation; {of_run}\n{warnings}",
                self.encoded.summary,
                count(stream.files() as u64, "file"),
                count(self.documents.len() as u64, "document"),
                count(self.rows_in_epoch, "row"),
                self.spec.seq_len,
                100.0 * fill,
                count(held_out as u64, "document"),
            );
        }
        format!(
            "{}{} to train on, {held_out} for evaluation{by}; {} of up to {} tokens in an epoch, {how}, {:.1} % full; \
             {of_run}\n{warnings}",
            self.encoded.summary,
            count(self.documents.len() as u64, "document"),
            count(self.rows_in_epoch, "row"),
            self.spec.seq_len,
            100.0 * fill,
        )
    }

    /// The identity of the training data.
    pub fn digest(&self) -> DataDigest {
        match &self.encoded.stream {
            Some(stream) => DataDigest::of_stream(stream, self.documents.len()),
            None => DataDigest::of(&self.documents),
        }
    }

    /// The identity of the documents that are held out; None without them.
    pub fn validation_digest(&self) -> Option<DataDigest> {
        let (documents, _) = self.validation.as_ref()?;
        Some(DataDigest::of(documents))
    }

    /// The documents and their layout in rows, as text.
    pub(crate) fn layout(&self) -> String {
        let LoaderSpec { batch_size, seq_len, layout, padding, longest_padding, .. } = &self.spec;
        let documents = (self.digest(), self.validation_digest());
        format!("{documents:?}, {batch_size} rows of {seq_len}, {layout:?}, {padding:?}, {longest_padding}")
    }

    /// Every batch of the validation data; `None` where there is none.
    pub fn validation(&self) -> Result<Option<Loader>> {
        let Some((documents, spec)) = &self.validation else { return Ok(None) };
        let loader = Loader::new(documents.clone(), spec.clone(), Position::default());
        loader.map(Some).map_err(TrainError::Data)
    }

    /// Every batch of one pass over the training data in their order, then of the validation data.
    pub(crate) fn once(&self) -> Result<Vec<Loader>> {
        let sets = [Some((&self.documents, &self.spec)), self.validation.as_ref().map(|(of, spec)| (of, spec))];
        let spec = |of: &LoaderSpec| LoaderSpec { epochs: Some(1), shuffle: false, ..of.clone() };
        let loader = |(of, own): (&DocumentSet, &LoaderSpec)| Loader::new(of.clone(), spec(own), Position::default());
        sets.into_iter().flatten().map(|set| loader(set).map_err(TrainError::Data)).collect()
    }

    /// Returns the seconds that batches were waited for since the last call.
    pub fn take_waited(&mut self) -> f64 {
        self.train.take_waited().as_secs_f64()
    }

    /// The micro-batches of the next step, for each of `replicas` one after another: `accumulation` rounds of them, fewer where the
    /// epoch ends, so that no step has a row twice; none after the last epoch.
    pub(crate) fn next_step(&mut self, accumulation: usize, replicas: usize) -> Result<Vec<Batch>> {
        let mut batches = Vec::with_capacity(accumulation * replicas);
        for _ in 0..accumulation {
            for batch in self.train.by_ref().take(replicas) {
                batches.push(batch.map_err(TrainError::Data)?);
            }
            if self.train.ends_epoch() {
                break;
            }
        }
        Ok(batches)
    }

    /// Waits for the batches of a step where they are streamed, whose files may take any time to come. False: `stop` said so, and
    /// the step was not begun.
    pub(crate) fn wait_for_step(&mut self, batches: usize, stop: &mut dyn FnMut() -> bool) -> bool {
        self.encoded.stream.is_none() || self.train.wait_for(batches, stop)
    }

    /// Passes over the data after `steps` steps: whole ones, and of the one that is begun the share of its steps.
    pub fn epochs(&self, config: &Config, steps: u64) -> f64 {
        if let Some(stream) = &self.encoded.stream {
            // By the place in the files: what a number of steps comes to depends on rows that are not read yet.
            let position = self.train.position();
            return position.stream.map_or(0.0, |place| stream.passes(&place));
        }
        let accumulation = config.micro_steps() as usize;
        let of_epochs: Vec<u64> = self.train_extent.steps_by_epoch(accumulation).collect();
        let (mut left, mut passes) = (steps, 0.0);
        for (number, of_epoch) in of_epochs.iter().enumerate() {
            let share = if number + 1 == of_epochs.len() { config.run.num_epochs.of_last() } else { 1.0 };
            passes += share * left.min(*of_epoch) as f64 / (*of_epoch).max(1) as f64;
            left = left.saturating_sub(*of_epoch);
        }
        // A fixed number of steps may go further than `num_epochs`: as many to an epoch as in the mean of those.
        passes + left as f64 * self.epochs / of_epochs.iter().sum::<u64>().max(1) as f64
    }

    /// The steps that end a pass over the data, of a run of `total` steps; the last may be the run's last.
    pub(crate) fn epoch_ends(&self, config: &Config, total: u64) -> Result<Vec<u64>> {
        let accumulation = config.micro_steps() as usize;
        let first = self.train_extent.steps_by_epoch(accumulation).next().unwrap_or(1).max(1);
        // Every epoch is packed by itself, so some may have fewer rows than the first.
        let epochs = total.div_ceil(first);
        let spec = LoaderSpec { epochs: Some(epochs + epochs / 8 + 1), ..self.spec.clone() };
        let extent = data::extent(&self.documents, &spec).map_err(TrainError::Data)?;
        let ends = extent.steps_by_epoch(accumulation).scan(0, |end, steps| {
            *end += steps;
            Some(*end)
        });
        Ok(ends.take_while(|end| *end <= total).collect())
    }

    /// Returns the optimizer steps of a run that continues at `position` after `done` steps; `None` if the total does not
    /// depend on the position. After a change of the number of parts, the rest of an epoch is packed into other rows.
    pub(crate) fn total_from(&self, config: &Config, position: &Position, done: u64) -> Result<Option<u64>> {
        let is_in_parts = self.documents.corpus.parts() > 1 || position.parts() > 1 || !position.before.is_empty();
        let passes = config.run.num_epochs;
        if !is_in_parts || config.training.fixed_steps().is_some() || passes.of_last() < 1.0 {
            return Ok(None);
        }
        let spec = LoaderSpec { epochs: Some(passes.begun()), ..self.spec.clone() };
        let left = data::remaining(&self.documents, &spec, position.clone()).map_err(TrainError::Data)?;
        let accumulation = config.micro_steps().into();
        Ok(Some(done + left.iter().map(|rounds: &u64| rounds.div_ceil(accumulation)).sum::<u64>()))
    }

    /// Optimizer steps of the run.
    pub fn total_steps(&self, config: &Config) -> u64 {
        let accumulation = config.micro_steps() as usize;
        config.training.fixed_steps().unwrap_or_else(|| self.train_extent.steps(accumulation))
    }
}

/// The layout of rows for documents of at most `longest` tokens.
fn layout(config: &Config, longest: usize, sequence_len: usize) -> Layout {
    if config.data.sample_packing {
        return Layout::Packed;
    }
    let longest = longest.next_multiple_of(LENGTH_UNIT).min(sequence_len);
    let part = |share: f64| ((longest as f64 * share) as usize).next_multiple_of(LENGTH_UNIT).min(longest);
    let mut lengths: Vec<usize> = LENGTH_PARTS.into_iter().map(part).collect();
    lengths.dedup();
    if !config.template.padding_free {
        return Layout::Padded(lengths);
    }
    let rows = config.micro_rows() as usize;
    Layout::Joined(lengths.into_iter().map(|length| length * rows).collect())
}

/// The shapes of the first batches.
pub(crate) struct FirstShapes {
    /// Tokens of a row, patches of images, padding included, and tokens whose logits are computed, by batches.
    pub extents: Vec<(usize, usize, usize)>,
    /// Tokens of documents in a batch, in the mean.
    pub tokens: f64,
    /// Share of a row's pairs of tokens that lie in one document, in the mean.
    pub seen: f64,
    /// Patches that one sees, in the mean; none without images.
    pub patches: Option<OfPatch>,
}

/// Returns the pairs of a token of the rejected side and one of the chosen side, where both share a prompt.
fn hidden(of: &Placed) -> usize {
    match of.mark {
        Mark::Pair { chosen, shared, .. } if shared > 0 => (chosen - shared) * (of.tokens - chosen),
        _ => 0,
    }
}

/// Returns the share of pairs of a token and one up to it in its row that lie in one document.
fn seen_share(batch: &Batch) -> f64 {
    let places = batch.document_start.iter().enumerate().map(|(index, start)| (index % batch.seq_len, *start));
    let seen: f64 = places.map(|(at, start)| (at + 1) as f64 - f64::from(start)).sum();
    let seen = seen - batch.marks.iter().map(|of| hidden(of) as f64).sum::<f64>();
    seen / (batch.batch as f64 * batch.seq_len as f64 * (batch.seq_len + 1) as f64 / 2.0)
}

/// Rows of a batch and their length where the documents are as long as they may be.
pub(crate) fn fixed_lengths(config: &Config, sequence_len: usize) -> (usize, usize) {
    let rows = config.micro_rows() as usize;
    match config.template.padding_free && !config.data.sample_packing {
        true => (1, rows * sequence_len.next_multiple_of(LENGTH_UNIT).min(sequence_len)),
        false => (rows, sequence_len),
    }
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

/// The result of preparing the data of a run.
#[derive(Clone, Debug)]
pub struct CheckedData {
    /// The notes and the table of the data check.
    pub table: String,
    /// The first rows that training takes.
    pub rows: Vec<ShownRow>,
    /// The same counts for programs, with the optimizer steps of the run, `steps`.
    pub counts: serde_json::Value,
}

/// The names that a pattern of a dataset's path means.
pub fn matching_names(pattern: &str, names: Vec<String>) -> Vec<String> {
    let test = data::rows::files::glob(pattern);
    names.into_iter().filter(|name| test.is_match(name)).collect()
}

/// The files of a dataset among the names of a folder, before any is fetched; else the problem and what helps.
pub fn choose_files(
    names: &[String],
    card: Option<&str>,
    subset: Option<&str>,
    split: &str,
) -> std::result::Result<Vec<String>, (String, String)> {
    let chosen = data::rows::files::choose(names, card, subset, split);
    chosen.map(|chosen| chosen.names).map_err(|no| (no.problem, no.hint))
}

/// Tokens of documents in which something is trained: padding does not count. Of a batch of another node those of all
/// documents.
pub(crate) fn tokens_of(batch: &Batch) -> u64 {
    if let Some(tokens) = batch.remote {
        return tokens as u64;
    }
    let rows = batch.document_start.chunks(batch.seq_len).zip(batch.targets.chunks(batch.seq_len));
    let in_row = |(starts, targets): (&[i32], &[i32])| -> u64 {
        let mut sum = 0;
        let mut begin = 0;
        for document in starts.chunk_by(|a, b| a == b) {
            let end = begin + document.len();
            if targets[begin..end].iter().any(|target| *target != IGNORE) {
                sum += document.len() as u64;
            }
            begin = end;
        }
        sum
    };
    rows.map(in_row).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_does_not_count_as_tokens() {
        let labels = [1, 1, 1, -100, -100, -100, -100, -100];
        let batch = Batch::from_labels(1, 8, vec![1; 8], &labels, Some(vec![0, 1, 2, 0, 1, 2, 3, 4]), None).unwrap();
        assert_eq!(tokens_of(&batch), 3);
    }
}
