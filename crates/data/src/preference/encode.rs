//! Rows of preferences to sides of ids and labels.
//!
//! Knows neither columns nor batches.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::columns::{PreferenceColumns, UnpairedColumns};
use super::cut::{Side, cut_pair, pair, shared};
use super::reading::{Asked, RowReader, Said};
use super::text::{is_transcript, said};
use super::{PreferenceOptions, Purpose, Split, Unpaired};
use crate::dataset::{IMAGES, Limits, Noticed, RowDocuments, RowForm};
use crate::dialogue::{Answered, DialogueEncoder, DialogueOptions, label};
use crate::document::Document;
use crate::document::IGNORE;
use crate::error::{DataError, RowError, RowReason};
use crate::image_folders::ImageFolders;
use crate::image_source::ImageRef;
use crate::remarks::Remarks;
use crate::spans::TrainedSpan;
use crate::summary::Expected;
use crate::tokenizer::Tokenizer;
use crate::weights::LossRule;

/// Encodes prompts with their answers.
struct Answers {
    tokenizer: Arc<Tokenizer>,
    /// The reason why conversations cannot be written, if there is one.
    dialogue: Result<Box<DialogueEncoder>, DataError>,
    is_chat: bool,
    options: PreferenceOptions,
    /// Folders in which relative paths of images begin.
    folders: Arc<ImageFolders>,
}

/// The images of a prompt: their texts, and what is kept of them.
type Images = (Vec<String>, Vec<ImageRef>);

/// One side with both ways to tell prompt and answer apart.
struct Encoded {
    /// Its labels follow from the spans of the answer.
    document: Document,
    /// Tokens that the prompt alone has in common with it.
    prefix: usize,
}

impl Answers {
    fn new(
        (tokenizer, folders): (Arc<Tokenizer>, Arc<ImageFolders>),
        dialogue: &DialogueOptions,
        is_chat: bool,
        options: &PreferenceOptions,
    ) -> Result<Self, DataError> {
        if matches!(dialogue.loss, LossRule::Everything) {
            let problem = "`loss_scale: all` trains prompts too, which a preference compares answers to";
            return Err(DataError::invalid("loss_scale", problem).hint("remove `loss_scale`"));
        }
        if options.split == Split::CommonPrefix && !matches!(dialogue.loss, LossRule::Answers) {
            let problem = "`preference_split: trl` trains everything after the prompt alike";
            return Err(DataError::invalid("loss_scale", problem).hint("remove one of both"));
        }
        let encoder = DialogueEncoder::new(tokenizer.clone(), dialogue).map(Box::new);
        let dialogue = if is_chat { Ok(encoder?) } else { encoder };
        Ok(Answers { tokenizer, dialogue, is_chat, options: options.clone(), folders })
    }

    /// Reads the images of a row's prompt, none where the model reads none. Errors: an image that is not there or cannot be
    /// read, one in an answer, and one for a prompt that no template writes.
    fn images(&self, row: &Map<String, Value>, asked: &mut Asked) -> Result<Images, RowError> {
        let Ok(Some(of)) = self.dialogue.as_ref().map(|dialogue| dialogue.images()) else {
            return Ok((Vec::new(), Vec::new()));
        };
        let found = IMAGES.iter().find_map(|name| row.get(*name).filter(|value| !value.is_null()));
        let column = found.map(|found| match found {
            Value::Array(list) => list.as_slice(),
            one => std::slice::from_ref(one),
        });
        let has_image =
            |answer: &Said| matches!(answer, Said::Turns(turns) if turns.iter().any(|of| !of.images.is_empty()));
        let wrong = |problem: &str| Err(RowError::new(RowReason::WrongType, problem));
        if asked.answers.iter().any(has_image) {
            return wrong("an answer has an image: images are read in prompts alone");
        }
        match &mut asked.prompt {
            Said::Turns(prompt) => of.read(of.place(prompt, column, &self.folders)?),
            Said::Text(_) if column.is_some_and(|list| !list.is_empty()) => {
                wrong("the row has images, and its prompt is a plain text: give messages")
            }
            Said::Text(_) => Ok((Vec::new(), Vec::new())),
        }
    }

    /// The sides of a row, a prompt with each of its answers, and whether a split by common tokens trains others.
    fn encode(
        &self,
        row: &Map<String, Value>,
        mut asked: Asked,
        remarks: &mut Remarks,
    ) -> Result<(Vec<Side>, bool), RowError> {
        let images = self.images(row, &mut asked)?;
        let mut sides = Vec::new();
        let mut of_row = Remarks::default();
        for answer in &asked.answers {
            let mut own = Remarks::default();
            sides.push(match (&asked.prompt, answer) {
                (Said::Text(prompt), Said::Text(answer)) => self.text(prompt, answer)?,
                _ => self.turns(&asked, answer, &images, &mut own)?,
            });
            // Both sides show the same prompt.
            of_row.widen(&own);
        }
        remarks.extend(&of_row);
        let together = match self.options.purpose {
            Purpose::Answers => None,
            _ => sides.iter().map(|side| side.prefix).min(),
        };
        let by_prefix = |side: &Encoded| together.unwrap_or(side.prefix);
        let mut is_other = false;
        let side = |side: Encoded| {
            let prefix = by_prefix(&side);
            let mut document = side.document;
            let first = document.labels.iter().position(|label| *label != IGNORE).unwrap_or(prefix);
            let is_trained = |(t, label): (usize, &i32)| (*label != IGNORE) == (t >= prefix);
            is_other |= !document.labels.iter().enumerate().all(is_trained);
            match self.options.split {
                Split::Spans => Side { document, prompt: prefix.min(first) },
                Split::CommonPrefix => {
                    for t in 0..document.len() {
                        let is_answer = t >= prefix;
                        document.labels[t] = if is_answer { document.ids[t] } else { IGNORE };
                        document.weights[t] = f32::from(u8::from(is_answer));
                    }
                    Side { document, prompt: prefix }
                }
            }
        };
        let sides: Vec<Side> = sides.into_iter().map(side).collect();
        Ok((sides, is_other && self.options.split == Split::Spans))
    }

    /// Plain text: what the model writes ends with its EOS.
    fn text(&self, prompt: &str, answer: &str) -> Result<Encoded, RowError> {
        let mut text = format!("{prompt}{answer}");
        if let Some(eos) = self.tokenizer.eos()
            && !text.ends_with(&eos.text)
        {
            text.push_str(&eos.text);
        }
        let begin = prompt.len();
        let ranges = if is_transcript(prompt) { said(answer) } else { std::iter::once(0..answer.len()).collect() };
        let span = |range: Range<usize>| {
            // EOS ends what is said last.
            let end = if range.end == answer.len() { text.len() } else { begin + range.end };
            TrainedSpan { range: begin + range.start..end, weight: 1.0 }
        };
        let spans: Vec<TrainedSpan> = ranges.into_iter().map(span).collect();
        let alone = self.tokenizer.encode_document(prompt)?.ids;
        let document = label(self.tokenizer.encode_document(&text)?, &spans);
        let images = self.dialogue.as_ref().ok().and_then(|dialogue| dialogue.images());
        if images.is_some_and(|of| document.ids.iter().any(|id| of.is_of_image(*id))) {
            return Err(RowError::new(RowReason::Template, "a text has a token that stands for images, and no image"));
        }
        let prefix = common_prefix(&alone, &document.ids);
        Ok(Encoded { document, prefix })
    }

    fn turns(
        &self,
        asked: &Asked,
        answer: &Said,
        (texts, images): &Images,
        remarks: &mut Remarks,
    ) -> Result<Encoded, RowError> {
        let (Said::Turns(prompt), Said::Turns(answer)) = (&asked.prompt, answer) else {
            panic!("a row is all text or all turns");
        };
        let dialogue = self.dialogue.as_ref().map_err(|error| RowError::new(RowReason::Template, error))?;
        let turns = Answered {
            prompt,
            answer,
            tools: asked.tools.as_ref(),
            variables: asked.variables.as_ref(),
            needs_spans: self.options.split == Split::Spans,
            images: (texts, images),
        };
        let (document, alone) = dialogue.encode_answer(&turns, remarks)?;
        let prefix = common_prefix(&alone, &document.ids);
        Ok(Encoded { document, prefix })
    }

    fn expected(&self) -> Expected {
        let bos = self.tokenizer.bos().map(|bos| bos.id as i32);
        match &self.dialogue {
            Ok(encoder) if self.is_chat => encoder.expected(),
            _ => Expected { ends: None, bos },
        }
    }

    fn clock_readings(&self) -> BTreeMap<String, String> {
        self.dialogue.as_ref().map(|encoder| encoder.clock_readings()).unwrap_or_default()
    }

    /// A side as a document with its verdict.
    fn unpaired(
        &self,
        mut side: Side,
        desirable: bool,
        limits: &Limits,
        noticed: &mut Noticed,
    ) -> Result<Document, RowError> {
        noticed.counts.cut += usize::from(side.cut(limits.max_length, self.options.cut)?);
        side.check()?;
        noticed.counts.answer(desirable);
        Ok(Unpaired { document: side.document, prompt: side.prompt, desirable }.into_document())
    }
}

/// Elements that both begin with.
fn common_prefix(alone: &[u32], ids: &[i32]) -> usize {
    alone.iter().zip(ids).take_while(|(a, b)| **a as i32 == **b).count()
}

/// `type: preference`: two answers to a prompt, of which one is better.
pub(crate) struct PairRows {
    answers: Answers,
    columns: PreferenceColumns,
}

impl PairRows {
    pub(crate) fn new(
        source: (Arc<Tokenizer>, Arc<ImageFolders>),
        dialogue: &DialogueOptions,
        columns: PreferenceColumns,
        options: &PreferenceOptions,
    ) -> Result<Self, DataError> {
        let answers = Answers::new(source, dialogue, columns.question.is_chat, options)?;
        Ok(PairRows { answers, columns })
    }
}

impl RowDocuments for PairRows {
    fn documents(
        &self,
        row: &Map<String, Value>,
        form: RowForm,
        limits: &Limits,
        noticed: &mut Noticed,
    ) -> Result<Vec<Document>, RowError> {
        let options = &self.answers.options;
        let mut reader = RowReader { row, form, split: options.split, remarks: &mut noticed.remarks };
        let (asked, margin) = reader.pair(&self.columns, &mut noticed.counts)?;
        let (sides, is_other) = self.answers.encode(row, asked, &mut noticed.remarks)?;
        let sides: [Side; 2] = sides.try_into().map_err(|_| RowError::new(RowReason::MissingField, "one answer"))?;
        noticed.counts.other_split += usize::from(is_other);
        if options.purpose == Purpose::Answers {
            let longest = sides.iter().map(|side| side.document.len()).max().unwrap_or(0);
            noticed.length = Some((longest, longest > limits.max_length));
            let [chosen, rejected] = sides;
            let chosen = self.answers.unpaired(chosen, true, limits, noticed)?;
            return Ok(vec![chosen, self.answers.unpaired(rejected, false, limits, noticed)?]);
        }
        let mut sides = sides;
        let lengths = sides.each_ref().map(|side| side.document.len());
        let together = lengths.iter().sum::<usize>() - shared(&sides, options);
        let is_over = lengths.iter().any(|length| *length > limits.max_length)
            || options.pair_length > 0 && together > options.pair_length;
        noticed.length = Some((together, is_over));
        noticed.counts.cut += cut_pair(&mut sides, limits.max_length, options)?;
        sides.iter().try_for_each(Side::check)?;
        let shared = shared(&sides, options);
        noticed.counts.pair(&sides, shared);
        Ok(vec![pair(sides, margin).into_document(shared)])
    }

    fn expected(&self) -> Expected {
        self.answers.expected()
    }

    fn clock_readings(&self) -> BTreeMap<String, String> {
        self.answers.clock_readings()
    }
}

/// `type: unpaired`: an answer to a prompt, and whether it is good.
pub(crate) struct UnpairedRows {
    answers: Answers,
    columns: UnpairedColumns,
}

impl UnpairedRows {
    pub(crate) fn new(
        source: (Arc<Tokenizer>, Arc<ImageFolders>),
        dialogue: &DialogueOptions,
        columns: UnpairedColumns,
        options: &PreferenceOptions,
    ) -> Result<Self, DataError> {
        let answers = Answers::new(source, dialogue, columns.question.is_chat, options)?;
        Ok(UnpairedRows { answers, columns })
    }
}

impl RowDocuments for UnpairedRows {
    fn documents(
        &self,
        row: &Map<String, Value>,
        form: RowForm,
        limits: &Limits,
        noticed: &mut Noticed,
    ) -> Result<Vec<Document>, RowError> {
        let split = self.answers.options.split;
        let mut reader = RowReader { row, form, split, remarks: &mut noticed.remarks };
        let (asked, desirable) = reader.unpaired(&self.columns)?;
        let (mut sides, is_other) = self.answers.encode(row, asked, &mut noticed.remarks)?;
        let side = sides.pop().ok_or_else(|| RowError::new(RowReason::MissingField, "no answer"))?;
        noticed.counts.other_split += usize::from(is_other);
        noticed.length = Some((side.document.len(), side.document.len() > limits.max_length));
        Ok(vec![self.answers.unpaired(side, desirable, limits, noticed)?])
    }

    fn expected(&self) -> Expected {
        self.answers.expected()
    }

    fn clock_readings(&self) -> BTreeMap<String, String> {
        self.answers.clock_readings()
    }
}
