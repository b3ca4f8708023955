//! What is generated for some prompts, step by step: a step reads a part of a prompt, or adds a token to every sequence that
//! runs. Sequences begin in their order as rows and pages become free. Knows no device.

use std::collections::VecDeque;
use std::sync::Arc;

use data::Tokenizer;
use rayon::prelude::*;

use super::capacity::{Capacity, Need};
use super::generator::{Following, Generator, Row};
use super::pages::Pages;
use super::prompt::Prompt;
use super::sampling::next_token;
use super::settings::{GenerationOptions, Settings};
use super::text::Text;
use crate::error::{Result, TrainError};

/// Tokens of a text that is continued from which the text of its continuation follows.
const CONTEXT: usize = 4;

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A token that ends answers.
    EndToken,
    /// A text that ends answers.
    Stop,
    /// As many tokens as were asked for.
    Length,
    /// The longest sequence that the model allows.
    Context,
}

impl Finish {
    pub const fn name(self) -> &'static str {
        match self {
            Finish::EndToken => "end",
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::Context => "context",
        }
    }
}

/// What a step added to an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// The number of the prompt.
    pub prompt: usize,
    /// Text that is settled now; empty without a tokenizer.
    pub text: String,
    pub finish: Option<Finish>,
}

/// One sequence.
struct Sequence {
    /// The prompt, then the answer.
    ids: Vec<i32>,
    prompt: usize,
    /// Tokens that the cache holds.
    read: usize,
    /// Tokens at most, and why no more.
    most: usize,
    ending: Finish,
    pages: Vec<u32>,
    text: Text,
}

/// Answers to some prompts.
pub struct Generation {
    sequences: Vec<Sequence>,
    waiting: VecDeque<usize>,
    running: Vec<usize>,
    pages: Pages,
    rows: usize,
    settings: Settings,
    tokenizer: Option<Arc<Tokenizer>>,
    number: u64,
    /// The longest sequence whose tokens are rotated as those of short ones.
    turning: Option<usize>,
}

impl Generation {
    /// Encodes the prompts and makes room for them. An earlier generation of the same generator is over by it.
    pub fn start(generator: &mut Generator, prompts: &[Prompt], options: &GenerationOptions) -> Result<Generation> {
        let encoder = generator.encoder();
        let settings = Settings::of(options, generator.defaults(), encoder.end_tokens(generator.defaults()))?;
        let tokenizer = encoder.tokenizer().cloned();
        if tokenizer.is_none() && !settings.stop.is_empty() {
            return Err(TrainError::Usage(
                "stop: the model has no tokenizer.json, so there is no text to look at".into(),
            ));
        }
        let encoded = prompts.iter().map(|prompt| encoder.encode(prompt)).collect::<Result<Vec<_>>>()?;
        let mut sequences = Vec::new();
        for (index, (prompt, ids)) in prompts.iter().zip(encoded).enumerate() {
            generator.check_ids(&ids)?;
            let mut sequence = Sequence::new(index, ids, &settings, generator.longest())?;
            if matches!(prompt, Prompt::Text(_)) {
                let end = &sequence.ids[sequence.prompt.saturating_sub(CONTEXT)..];
                sequence.text = Text::new(&settings.stop, end);
            }
            sequences.push(sequence);
        }
        let needs: Vec<Need> = sequences.iter().map(Sequence::need).collect();
        generator.started += 1;
        let capacity: Capacity = generator.make_room(&needs, settings.batch_size)?;
        let rows = if generator.runs_alone() { 1 } else { capacity.rows.min(settings.batch_size) };
        Ok(Generation {
            waiting: (0..sequences.len()).collect(),
            sequences,
            running: Vec::new(),
            pages: Pages::new(capacity.cache.pages),
            rows,
            settings,
            tokenizer,
            number: generator.started,
            turning: generator.turning(),
        })
    }

    pub fn is_done(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// The ids of an answer so far, the token that ended it included.
    pub fn answer(&self, prompt: usize) -> &[i32] {
        let sequence = &self.sequences[prompt];
        &sequence.ids[sequence.prompt..]
    }

    /// Tokens of a prompt.
    pub fn prompt_tokens(&self, prompt: usize) -> usize {
        self.sequences[prompt].prompt
    }

    /// One step. Nothing happens when all is done.
    pub fn step(&mut self, generator: &mut Generator) -> Result<Vec<Piece>> {
        if generator.started != self.number {
            return Err(TrainError::Usage("another generation was started on this model: this one is over".into()));
        }
        self.admit();
        let reading = self.running.iter().copied().find(|index| self.sequences[*index].is_behind());
        let asked: Vec<usize> = reading.map_or_else(|| self.running.clone(), |index| vec![index]);
        if asked.is_empty() {
            return Ok(Vec::new());
        }
        let limit = generator.most_at_once();
        let sequences = &self.sequences;
        let rows: Vec<Row<'_>> = asked.iter().map(|index| sequences[*index].next_row(limit)).collect();
        let whole = asked.iter().map(|index| sequences[*index].ids.len()).max().unwrap_or(0);
        let read: Vec<usize> = rows.iter().map(|row| row.ids.len()).collect();
        let following = generator.read(&rows, whole, self.settings.wants_logits())?;
        for (index, read) in asked.iter().zip(read) {
            self.sequences[*index].read += read;
        }
        if asked.iter().any(|index| self.sequences[*index].read < self.sequences[*index].ids.len()) {
            return Ok(Vec::new());
        }
        let next: Vec<u32> = match following {
            Following::Likeliest(ids) => ids,
            Following::Logits { logits, vocabulary } => self.draw(&asked, &logits, vocabulary),
        };
        asked.into_iter().zip(next).map(|(index, id)| self.add(index, id)).collect()
    }

    /// Begins with waiting sequences, in their order, while there is room.
    fn admit(&mut self) {
        while let Some(index) = self.waiting.front().copied().filter(|_| self.running.len() < self.rows) {
            let sequence = &mut self.sequences[index];
            let Some(pages) = self.pages.take(sequence.need().pages()) else { break };
            sequence.pages = pages;
            self.waiting.pop_front();
            self.running.push(index);
        }
    }

    /// The next tokens of sequences from their logits.
    fn draw(&self, asked: &[usize], logits: &[f32], vocabulary: usize) -> Vec<u32> {
        let draw = |(index, logits): (&usize, &[f32])| {
            let ids = &self.sequences[*index].ids;
            next_token(logits, ids, ids.len(), &self.settings)
        };
        asked.par_iter().zip(logits.par_chunks(vocabulary)).map(draw).collect()
    }

    /// Takes the next token of a sequence.
    fn add(&mut self, index: usize, id: u32) -> Result<Piece> {
        let sequence = &mut self.sequences[index];
        sequence.ids.push(id as i32);
        if self.turning == Some(sequence.ids.len() - 1) {
            // All its tokens are rotated in another way from here on.
            sequence.read = 0;
        }
        let ended = self.settings.end_tokens.contains(&id);
        let (mut text, stopped) = match &self.tokenizer {
            Some(tokenizer) if !ended => sequence.text.push(id, tokenizer)?,
            _ => (String::new(), false),
        };
        let finish = match () {
            () if ended => Some(Finish::EndToken),
            () if stopped => Some(Finish::Stop),
            () if sequence.ids.len() >= sequence.most => Some(sequence.ending),
            () => None,
        };
        if finish.is_some() {
            if let (false, Some(tokenizer)) = (stopped, &self.tokenizer) {
                text.push_str(&sequence.text.finish(tokenizer)?);
            }
            self.pages.give_back(std::mem::take(&mut sequence.pages));
            self.running.retain(|running| *running != index);
        }
        Ok(Piece { prompt: index, text, finish })
    }
}

impl Sequence {
    fn new(index: usize, ids: Vec<i32>, settings: &Settings, longest: Option<usize>) -> Result<Sequence> {
        let prompt = ids.len();
        if prompt == 0 {
            return Err(TrainError::Usage(format!("prompt {index} has no tokens, expected one or more")));
        }
        let asked = prompt + settings.max_new_tokens;
        let (most, ending) = match longest {
            Some(longest) if prompt >= longest => {
                return Err(TrainError::Usage(format!(
                    "prompt {index} has {prompt} tokens, and the model allows sequences of {longest}, the answer included"
                )));
            }
            Some(longest) if asked > longest => (longest, Finish::Context),
            _ => (asked, Finish::Length),
        };
        let text = Text::new(&settings.stop, &[]);
        Ok(Sequence { ids, prompt, read: 0, most, ending, pages: Vec::new(), text })
    }

    fn need(&self) -> Need {
        Need { prompt: self.prompt, tokens: self.most }
    }

    /// Whether more than its last token is not in the cache yet.
    fn is_behind(&self) -> bool {
        self.read < self.prompt || self.read + 1 < self.ids.len()
    }

    /// The tokens that are read next, at most so many.
    fn next_row(&self, limit: usize) -> Row<'_> {
        let end = self.ids.len().min(self.read + limit);
        Row { ids: &self.ids[self.read..end], position: self.read, pages: &self.pages }
    }
}
