//! Generation for some prompts, step by step: a step reads a part of a prompt, or adds a token to every running
//! sequence. Sequences begin in their order as rows, with their slots, and pages become free. Knows no device.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use data::Tokenizer;
use data::sequence_images::SequenceImages;
use data::show::ShownImage;
use program::Variant;
use rayon::prelude::*;

use super::capacity::{Capacity, Need};
use super::defaults::Defaults;
use super::generator::Generator;
use super::images::PromptImages;
use super::pages::{Pages, Place};
use super::prompt::PromptEncoder;
use super::reader::{Following, Reader, Row, Wanted, of_images};
use super::request::{Prompt, Request};
use super::sampling::{draw_after, next_of_changed};
use super::settings::{GenerationOptions, Settings};
use super::text::Text;
use crate::engine::Engine;
use crate::error::{Result, TrainError};
use crate::model::source::ModelSource;

/// Tokens of a text that is continued from which the text of its continuation follows.
const CONTEXT: usize = 4;

/// Sequences whose texts go on in one task.
const AT_A_TIME: usize = 32;

/// The reason why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A token that ends answers.
    EndToken,
    /// A text that ends answers.
    Stop,
    /// The number of tokens that was requested.
    Length,
    /// The longest sequence that the model allows.
    Context,
    /// The prompt cannot be answered.
    Refused,
}

impl Finish {
    pub const fn name(self) -> &'static str {
        match self {
            Finish::EndToken => "end",
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::Context => "context",
            Finish::Refused => "error",
        }
    }
}

/// The addition of one step to an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// The number of the prompt.
    pub prompt: usize,
    /// Text that is settled now; empty without a tokenizer.
    pub text: String,
    pub finish: Option<Finish>,
}

/// One sequence: a prompt and its answer.
#[derive(Clone)]
pub(super) struct Sequence {
    /// The prompt, then the answer.
    pub ids: Vec<i32>,
    pub prompt: usize,
    /// The images of the prompt.
    pub images: Option<SequenceImages>,
    /// Tokens that the cache holds.
    pub read: usize,
    /// A sequence whose first pages it has too, and the tokens in them.
    pub shared: Option<(usize, usize)>,
    /// Tokens at most, and why no more.
    most: usize,
    ending: Finish,
    pub pages: Vec<u32>,
    /// Its rank and its slot there while it runs.
    pub rank: usize,
    pub slot: u32,
    /// The slot of its adapter among those that are on the device together; 0 for none.
    pub adapter: u32,
    text: Text,
    tokenizer: Option<Arc<Tokenizer>>,
    settings: Arc<Settings>,
    /// Log-probabilities of the answer's tokens, where they are kept.
    logps: Vec<f32>,
    /// The reason why it is not answered, with a text.
    refused: Option<(Finish, String)>,
}

/// Prompts as token ids, before there is room for their answers.
#[derive(Clone)]
pub(crate) struct Asked {
    sequences: Vec<Sequence>,
    settings: Arc<Settings>,
    /// The longest sequence whose tokens are rotated as those of short ones.
    turning: Option<usize>,
}

impl Asked {
    /// Encodes prompts, and checks them against what the model takes. `goes_on`: one that cannot be answered ends at once
    /// with the reason, else it is the error of all. `folder`: where relative paths of images begin.
    pub fn new(
        source: &ModelSource,
        (encoder, defaults): (&PromptEncoder, &Defaults),
        requests: Vec<Result<Request>>,
        options: &GenerationOptions,
        (goes_on, folder): (bool, &Path),
    ) -> Result<Asked> {
        let settings = Arc::new(Settings::of(options, defaults, encoder.end_tokens(defaults))?);
        let tokenizer = encoder.tokenizer().cloned();
        if tokenizer.is_none() && !options.stop.iter().all(String::is_empty) {
            return Err(TrainError::Usage(
                "stop: the model has no tokenizer.json, so stop texts cannot be found".into(),
            ));
        }
        let images = PromptImages::of(source, tokenizer.as_deref(), &requests, options, folder.to_owned())?;
        let count = requests.len();
        let mut sequences = Vec::with_capacity(count);
        for (index, request) in requests.into_iter().enumerate() {
            sequences.push(
                match request.and_then(|of| Sequence::of(source, (encoder, images.as_ref()), &of, &settings)) {
                    Ok(sequence) => sequence,
                    Err(TrainError::Usage(text)) if goes_on => Sequence::refused(&settings, Finish::Refused, text),
                    Err(TrainError::Usage(text)) if count > 1 => {
                        return Err(TrainError::Usage(format!("prompt {} of {count}: {text}", index + 1)));
                    }
                    Err(error) => return Err(error),
                },
            );
            if let (false, Some((_, text))) = (goes_on, &sequences[index].refused) {
                let place = if count > 1 { format!("prompt {} of {count}: ", index + 1) } else { String::new() };
                return Err(TrainError::Usage(format!("{place}{text}")));
            }
        }
        sequences.iter_mut().for_each(|sequence| sequence.tokenizer.clone_from(&tokenizer));
        Ok(Asked { sequences, settings, turning: source.config.turning() })
    }

    /// The same for the adapter in a slot.
    fn of_adapter(mut self, slot: u32) -> Asked {
        self.sequences.iter_mut().for_each(|sequence| sequence.adapter = slot);
        self
    }

    /// The tokens that each sequence needs.
    pub fn needs(&self) -> Vec<Need> {
        self.answered().map(|index| self.sequences[index].need()).collect()
    }

    /// The same with the files of images in memory, so that it does not matter what becomes of them. Errors: a file that has
    /// changed.
    pub fn in_memory(mut self) -> Result<Asked> {
        for sequence in &mut self.sequences {
            let held = sequence.images.take().map(SequenceImages::in_memory).transpose();
            sequence.images = held.map_err(TrainError::Data)?;
        }
        Ok(self)
    }

    /// The images of each prompt.
    pub fn images(&self) -> impl Iterator<Item = Vec<ShownImage>> {
        self.sequences.iter().map(|of| of.images.as_ref().map(SequenceImages::shown).unwrap_or_default())
    }

    /// The shapes in which the images of the prompts are read. Errors: a file that has changed.
    pub fn image_shapes(&self, capacity: &Capacity) -> Result<Vec<Variant>> {
        let mut shapes = Vec::new();
        for sequence in &self.sequences {
            let mut of = sequence.clone();
            while sequence.images.is_some() && of.left() > 0 {
                let row = of.next_row(capacity, false)?;
                let (read, shape) = (row.ids.len(), row.images.as_ref().map(of_images));
                shapes.extend(shape.filter(|shape| !shapes.contains(shape)));
                of.read += read;
            }
        }
        Ok(shapes)
    }

    /// The prompts that are answered already.
    fn answered(&self) -> impl Iterator<Item = usize> {
        (0..self.sequences.len()).filter(|index| self.sequences[*index].refused.is_none())
    }

    /// The ranks that sample sequences of their own: one where all do the same.
    fn ranks(&self, engine: &Engine) -> usize {
        let has_images = self.sequences.iter().any(|sequence| sequence.images.is_some());
        let cluster = engine.program().cluster;
        if has_images || cluster.nodes > 1 || cluster.sequence > 1 { 1 } else { cluster.ranks }
    }

    /// Sequences of a rank at a time, at most.
    pub fn batch_size(&self, engine: Option<&Engine>) -> usize {
        self.settings.batch_size.div_ceil(engine.map_or(1, |engine| self.ranks(engine)))
    }

    /// The generation, with room for it.
    pub fn begin(self, reader: &Reader<'_>, number: u64) -> Generation {
        let ranks = self.ranks(reader.engine);
        let rows = self.settings.batch_size.div_ceil(ranks);
        let rows = if reader.runs_alone() { 1 } else { reader.capacity.rows.min(rows) };
        let cache = reader.capacity.cache;
        let place = || Place {
            pages: Pages::new(cache.pages),
            slots: (0..cache.sequences as u32).rev().collect(),
            running: Vec::new(),
        };
        Generation {
            waiting: self.answered().collect(),
            refused: (0..self.sequences.len()).filter(|index| self.sequences[*index].refused.is_some()).collect(),
            sequences: self.sequences,
            places: (0..ranks).map(|_| place()).collect(),
            rows,
            number,
            shares: self.turning.is_none() && !reader.has_slots(),
            turning: self.turning,
        }
    }
}

/// Refuses ids that the model does not know.
fn check_ids(ids: &[i32], vocabulary: usize) -> Result<()> {
    match ids.iter().find(|id| **id < 0 || **id as usize >= vocabulary) {
        Some(id) => Err(TrainError::Usage(format!("token id {id} is outside of the vocabulary of {vocabulary}"))),
        None => Ok(()),
    }
}

/// The state of generating answers to some prompts.
pub struct Generation {
    pub(super) sequences: Vec<Sequence>,
    pub(super) waiting: VecDeque<usize>,
    /// The prompts that are not answered, until a step says so.
    refused: Vec<usize>,
    /// The places of each rank that samples.
    pub(super) places: Vec<Place>,
    /// Sequences of a rank at a time, at most.
    pub(super) rows: usize,
    number: u64,
    /// Sequences that begin alike may have the same pages.
    pub(super) shares: bool,
    /// The longest sequence whose tokens are rotated as those of short ones.
    turning: Option<usize>,
}

impl Generation {
    /// Encodes the prompts and makes room for them. An earlier generation of the same generator is over by it.
    pub fn start(generator: &mut Generator, prompts: &[Prompt], options: &GenerationOptions) -> Result<Generation> {
        let requests = prompts.iter().map(|prompt| Ok(prompt.clone().into())).collect();
        Generation::begin(generator, requests, options, (false, Path::new(".")))
    }

    /// The same for prompts with options of their own. `goes_on`: one that cannot be read or answered does not end the
    /// others; [`Generation::refusal`] says why. `folder`: where relative paths of images begin.
    pub fn begin(
        generator: &mut Generator,
        requests: Vec<Result<Request>>,
        options: &GenerationOptions,
        place: (bool, &Path),
    ) -> Result<Generation> {
        Generation::begin_with_room(generator, requests, options, place, (None, 0))
    }

    /// The same with room for prompts that are added later: `room` is the tokens of a sequence, the answer included, of which
    /// `batch_size` run at a time. `adapter`: the slot of that of the prompts, where several are on the device; 0 for none.
    pub fn begin_with_room(
        generator: &mut Generator,
        requests: Vec<Result<Request>>,
        options: &GenerationOptions,
        place: (bool, &Path),
        (room, adapter): (Option<usize>, u32),
    ) -> Result<Generation> {
        let of = generator.texts_of(adapter)?;
        let asked = Asked::new(generator.source(), of, requests, options, place)?.of_adapter(adapter);
        generator.started += 1;
        let mut needs = asked.needs();
        if let Some(room) = room {
            let tokens = generator.longest().map_or(room, |longest| room.min(longest)).max(1);
            let later = options.batch_size as usize - needs.len().min(options.batch_size as usize);
            needs.extend(std::iter::repeat_n(Need { prompt: tokens, tokens }, later));
        }
        if needs.is_empty() {
            // One token, so that there is something that reads.
            generator.make_room(&[Need { prompt: 1, tokens: 1 }], 1)?;
        } else {
            generator.make_room(&needs, asked.batch_size(generator.engine()))?;
        }
        let number = generator.started;
        Ok(asked.begin(&generator.reader(), number))
    }

    /// Adds prompts to those that are being answered, with options of their own but `batch_size`. Returns the number of the
    /// first; none where the caches have no room for one of them, even alone. `adapter` as for
    /// [`Generation::begin_with_room`].
    pub fn add(
        &mut self,
        generator: &mut Generator,
        requests: Vec<Result<Request>>,
        options: &GenerationOptions,
        place: (bool, &Path),
        adapter: u32,
    ) -> Result<Option<usize>> {
        self.check_is_current(generator)?;
        let of = generator.texts_of(adapter)?;
        let asked = Asked::new(generator.source(), of, requests, options, place)?.of_adapter(adapter);
        let cache = generator.reader().capacity.cache;
        let most = cache.pages.min(cache.pages_per_sequence);
        let has_images = asked.sequences.iter().any(|sequence| sequence.images.is_some());
        if asked.needs().iter().any(|need| need.pages() > most) || has_images && self.places.len() > 1 {
            return Ok(None);
        }
        let first = self.sequences.len();
        for (index, sequence) in (first..).zip(asked.sequences) {
            match sequence.refused {
                Some(_) => self.refused.push(index),
                None => self.waiting.push_back(index),
            }
            self.sequences.push(sequence);
        }
        Ok(Some(first))
    }

    /// Ends an answer, if it has not, and forgets its tokens.
    pub fn forget(&mut self, prompt: usize) {
        self.waiting.retain(|index| *index != prompt);
        self.refused.retain(|index| *index != prompt);
        if self.places.iter().any(|place| place.running.contains(&prompt)) {
            self.retire(prompt);
        }
        let sequence = &mut self.sequences[prompt];
        (sequence.ids, sequence.logps, sequence.images) = (Vec::new(), Vec::new(), None);
        (sequence.prompt, sequence.text) = (0, Text::new(&[], &[]));
    }

    /// The reason why a prompt is not answered, or None.
    pub fn refusal(&self, prompt: usize) -> Option<&str> {
        self.sequences[prompt].refused.as_ref().map(|(_, text)| text.as_str())
    }

    pub fn is_done(&self) -> bool {
        self.waiting.is_empty() && self.refused.is_empty() && self.places.iter().all(|of| of.running.is_empty())
    }

    /// The ids of an answer so far, the token that ended it included.
    pub fn answer(&self, prompt: usize) -> &[i32] {
        let sequence = &self.sequences[prompt];
        &sequence.ids[sequence.prompt..]
    }

    /// Log-probabilities of the tokens of an answer so far; none unless its request keeps them.
    pub fn logps(&self, prompt: usize) -> &[f32] {
        &self.sequences[prompt].logps
    }

    /// The number of tokens of a prompt.
    pub fn prompt_tokens(&self, prompt: usize) -> usize {
        self.sequences[prompt].prompt
    }

    /// One step. Nothing happens when all is done.
    pub fn step(&mut self, generator: &mut Generator) -> Result<Vec<Piece>> {
        self.check_is_current(generator)?;
        self.advance(&mut generator.reader())
    }

    fn check_is_current(&self, generator: &Generator) -> Result<()> {
        if generator.started != self.number {
            let text = "another generation or batch was run on this model: this one is over";
            return Err(TrainError::Usage(text.into()));
        }
        Ok(())
    }

    /// One step of a generation that nothing else comes between.
    pub(crate) fn advance(&mut self, reader: &mut Reader<'_>) -> Result<Vec<Piece>> {
        if !self.refused.is_empty() {
            let of = |index: usize| self.sequences[index].refused.as_ref().map(|(finish, _)| *finish);
            let refused = std::mem::take(&mut self.refused).into_iter();
            return Ok(refused.map(|prompt| Piece { prompt, text: String::new(), finish: of(prompt) }).collect());
        }
        self.admit();
        let turn = self.next_turn();
        let asked: Vec<usize> = turn.rows.concat();
        if asked.is_empty() {
            return Ok(Vec::new());
        }
        let sequences = &self.sequences;
        let row = |index: &usize| sequences[*index].next_row(reader.capacity, turn.single);
        let of_rank = |of: &Vec<usize>| of.iter().map(row).collect::<Result<Vec<_>>>();
        let rows = turn.rows.iter().map(of_rank).collect::<Result<Vec<_>>>()?;
        let whole = asked.iter().map(|index| sequences[*index].ids.len()).max().unwrap_or(0);
        let read: Vec<usize> = rows.iter().flatten().map(|row| row.ids.len()).collect();
        let place = |rank: usize| (0..turn.rows[rank].len()).map(move |row| (rank, row));
        let places = (0..turn.rows.len()).flat_map(place);
        let ended: Vec<((usize, usize), usize)> = (places.zip(asked.iter().copied()).zip(&read))
            .filter(|((_, index), read)| sequences[*index].left() == **read)
            .map(|(of, _)| of)
            .collect();
        let any = |of: fn(&Settings) -> bool| ended.iter().any(|(_, index)| of(&sequences[*index].settings));
        let wanted = Wanted { logps: any(|of| of.keeps_logps), logits: any(Settings::changes_logits) };
        let following = reader.read(&rows, whole, (!ended.is_empty()).then_some(wanted))?;
        for (index, read) in asked.iter().zip(read) {
            self.sequences[*index].read += read;
        }
        let Some(mut following) = following else { return Ok(Vec::new()) };
        let batch = following.batch;
        let ended: Vec<(usize, usize)> =
            ended.into_iter().map(|((rank, row), index)| (rank * batch + row, index)).collect();
        self.draw_changed(&ended, &mut following);
        for (place, index) in &ended {
            let Sequence { settings, logps, .. } = &mut self.sequences[*index];
            logps.extend(following.logps.get(*place).filter(|_| settings.keeps_logps));
        }
        let tokens =
            self.take(&ended.into_iter().map(|(place, index)| (index, following.ids[place])).collect::<Vec<_>>());
        following.logits.into_iter().for_each(|logits| reader.engine.give_back(logits));
        tokens
    }

    /// Draws the next tokens of sequences whose logits are changed before, in place of those of the device. `ended`: rows with
    /// their sequences.
    fn draw_changed(&self, ended: &[(usize, usize)], following: &mut Following) {
        let changed = ended.par_iter().filter(|(_, index)| self.sequences[*index].settings.changes_logits());
        let of = &*following;
        let draw = |(place, index): &(usize, usize)| {
            let Sequence { ids, prompt, most, settings, .. } = &self.sequences[*index];
            (*place, next_of_changed(&of.logits_of(*place), (ids, *prompt), *most, settings))
        };
        for (place, (id, logp)) in changed.map(draw).collect::<Vec<_>>() {
            following.ids[place] = id;
            if let Some(of) = following.logps.get_mut(place) {
                *of = logp;
            }
        }
    }

    /// Takes the next tokens of sequences.
    fn take(&mut self, tokens: &[(usize, u32)]) -> Result<Vec<Piece>> {
        let mut next = vec![None; self.sequences.len()];
        tokens.iter().for_each(|(index, id)| next[*index] = Some(*id));
        let turning = self.turning;
        let push = |(sequence, id): (&mut Sequence, Option<u32>)| id.map(|id| sequence.push(id, turning));
        // Texts of many tokens take as long as a step of a small model.
        let added = self.sequences.par_iter_mut().zip(next).with_min_len(AT_A_TIME).map(push);
        let mut added: Vec<_> = added.collect();
        let piece = |(prompt, _): &(usize, u32)| {
            let (text, finish) = added[*prompt].take().expect("every token was added")?;
            if finish.is_some() {
                self.retire(*prompt);
            }
            Ok(Piece { prompt: *prompt, text, finish })
        };
        tokens.iter().map(piece).collect()
    }
}

impl Sequence {
    /// A prompt before its answer. Errors: a prompt that is none, or that the model does not know.
    fn of(
        source: &ModelSource,
        (encoder, images): (&PromptEncoder, Option<&PromptImages>),
        of: &Request,
        settings: &Arc<Settings>,
    ) -> Result<Sequence> {
        if let (Prompt::Messages(messages), None) = (&of.prompt, &source.model.images) {
            messages.check_without_images(&source.model.architecture)?;
        }
        let (ids, images) = encoder.encode_with_images(&of.prompt, images)?;
        check_ids(&ids, source.vocab_size()?)?;
        let is_own = of.max_new_tokens.is_some() || of.temperature.is_some() || of.seed.is_some() || of.keeps_logps;
        let settings = if is_own { Arc::new(settings.with(of)) } else { settings.clone() };
        let sequence = Sequence::new(ids, &settings, source.position_limit())?;
        let mut sequence = Sequence { images, ..sequence };
        if of.continues_text {
            let end = &sequence.ids[sequence.prompt.saturating_sub(CONTEXT)..];
            sequence.text = Text::new(&settings.stop, end);
        }
        Ok(sequence)
    }

    fn new(ids: Vec<i32>, settings: &Arc<Settings>, longest: Option<usize>) -> Result<Sequence> {
        let prompt = ids.len();
        if prompt == 0 {
            return Err(TrainError::Usage("the prompt has no tokens, expected one or more".into()));
        }
        if let Some(longest) = longest.filter(|longest| prompt >= *longest) {
            let text = format!(
                "the prompt has {prompt} tokens, and the model allows sequences of {longest}, the answer included"
            );
            return Ok(Sequence { ids, prompt, ..Sequence::refused(settings, Finish::Context, text) });
        }
        if let Some(whole) = settings.max_length.filter(|whole| prompt >= *whole) {
            let text = format!(
                "the prompt has {prompt} tokens, and `max_length` of the model's generation_config.json is {whole}, the answer \
                 included (give `max_new_tokens`)"
            );
            return Ok(Sequence { ids, prompt, ..Sequence::refused(settings, Finish::Context, text) });
        }
        let whole = settings.max_length.unwrap_or(usize::MAX);
        let asked = (prompt + settings.max_new_tokens).min(whole);
        let (most, ending) = match longest {
            Some(longest) if asked > longest => (longest, Finish::Context),
            _ => (asked, Finish::Length),
        };
        Ok(Sequence { ids, prompt, most, ending, refused: None, ..Sequence::refused(settings, ending, String::new()) })
    }

    /// One that is not answered.
    fn refused(settings: &Arc<Settings>, finish: Finish, why: String) -> Sequence {
        Sequence {
            ids: Vec::new(),
            prompt: 0,
            images: None,
            read: 0,
            shared: None,
            most: 0,
            ending: finish,
            pages: Vec::new(),
            rank: 0,
            slot: 0,
            adapter: 0,
            text: Text::new(&settings.stop, &[]),
            tokenizer: None,
            settings: settings.clone(),
            logps: Vec::new(),
            refused: Some((finish, why)),
        }
    }

    pub fn need(&self) -> Need {
        Need { prompt: self.prompt, tokens: self.most }
    }

    /// Takes the next token. Gives the text that is settled by it, and why the answer ends with it if it does.
    fn push(&mut self, id: u32, turning: Option<usize>) -> Result<(String, Option<Finish>)> {
        let tokenizer = self.tokenizer.as_deref();
        self.ids.push(id as i32);
        if turning == Some(self.ids.len() - 1) {
            // All its tokens are rotated in another way from here on.
            self.read = 0;
        }
        let ended = self.settings.end_tokens.contains(&id);
        let (mut text, stopped) = match tokenizer {
            Some(tokenizer) if !ended => self.text.push(id, tokenizer)?,
            _ => (String::new(), false),
        };
        let finish = match () {
            () if ended => Some(Finish::EndToken),
            () if stopped => Some(Finish::Stop),
            () if self.ids.len() >= self.most => Some(self.ending),
            () => None,
        };
        if let (Some(tokenizer), Some(_), false) = (tokenizer, finish, stopped) {
            text.push_str(&self.text.finish(tokenizer)?);
        }
        Ok((text, finish))
    }

    /// Tokens that are not in the cache yet.
    pub fn left(&self) -> usize {
        self.ids.len() - self.read
    }

    /// The tokens that are read next: a single one, or at most a chunk of them unless an image is longer. Errors: an image that
    /// has changed.
    fn next_row(&self, capacity: &Capacity, single: bool) -> Result<Row<'_>> {
        let mut end = self.ids.len().min(self.read + if single { 1 } else { capacity.most_at_once() });
        let (mut axes, mut images) = (None, None);
        if let Some(of) = &self.images {
            end = of.end_of_part(self.read, end);
            let part = self.read..end;
            axes = Some(of.axes(part.clone()));
            images = of.lay_out(&self.ids, part, capacity.row(end - self.read)).map_err(TrainError::Data)?;
        }
        let ids = &self.ids[self.read..end];
        let draw = draw_after(self.ids.len(), &self.settings);
        let (slot, adapter) = (self.slot, self.adapter);
        Ok(Row { ids, position: self.read, pages: &self.pages, slot, adapter, axes, images, draw })
    }
}
