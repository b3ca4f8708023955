//! Dataset types: what the columns of a row mean, one file each.
//!
//! Adding a type is one file here, one variant of [`DatasetKind`] and one line in [`encoder`]. Knows no file formats
//! and no packing.

mod calls;
mod columns;
mod conversation;
mod detect;
mod instruction;
mod json_text;
mod message;
pub(crate) mod padding;
mod part_kinds;
mod part_texts;
mod results;
mod roles;
mod text;
mod tokens;
mod unused;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::dialogue::{DialogueEncoder, DialogueOptions};
use crate::document::{Document, Truncation};
use crate::error::{DataError, RowError};
use crate::image_folders::ImageFolders;
use crate::preference::{
    PairRows, PreferenceColumns, PreferenceCounts, PreferenceOptions, UnpairedColumns, UnpairedRows,
};
use crate::remarks::Remarks;
use crate::rows::RowLimit;
use crate::summary::Expected;
use crate::tokenizer::Tokenizer;

pub use calls::tools;
pub(crate) use columns::{Open, fits, open, optional, optional_text, required, unread, wrong};
pub use conversation::ConversationColumns;
pub(crate) use conversation::IMAGES;
pub use detect::{AutoColumns, SYSTEM};
pub(crate) use detect::{Columns, MESSAGES, Refused, SAMPLE, TOOLS, detect, is_talk};
pub(crate) use instruction::history;
pub use instruction::{InstructionColumns, SystemPrompt};
pub(crate) use json_text::{as_list, is_broken, opened};
pub(crate) use message::messages_with;
pub use message::{messages, messages_in};
pub(crate) use part_texts::PartTexts;
pub(crate) use unused::{absent, filled, late, unused};

/// One dataset: where it is, what its rows mean, how many of them are used.
#[derive(Clone, Debug)]
pub struct DatasetSpec {
    /// A local file, directory or pattern; what the set is called in messages.
    pub path: PathBuf,
    /// The files themselves, where the path is a name that was resolved elsewhere.
    pub files: Option<Vec<PathBuf>>,
    /// Part of a directory that holds several sets.
    pub subset: Option<String>,
    /// The split of a directory that is read.
    pub split: String,
    pub kind: DatasetKind,
    /// Only the first rows, if set.
    pub samples: Option<usize>,
    /// The part of these rows that is read here.
    pub shard: RowShard,
    /// Memory limit of a single row.
    pub row_limit: RowLimit,
}

/// Rows number, number + of, number + 2·of, … of a set: what one of several nodes reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShard {
    /// From 0.
    pub number: usize,
    pub of: usize,
}

impl RowShard {
    /// The shard that holds every row.
    pub const ALL: RowShard = RowShard { number: 0, of: 1 };
}

impl DatasetSpec {
    /// All rows of the split for training.
    pub fn new(path: impl Into<PathBuf>, kind: DatasetKind) -> Self {
        let split = crate::rows::files::TRAIN.to_owned();
        DatasetSpec {
            path: path.into(),
            files: None,
            subset: None,
            split,
            kind,
            samples: None,
            shard: RowShard::ALL,
            row_limit: RowLimit::default(),
        }
    }
}

/// The meaning of a row.
#[derive(Clone, Debug)]
pub enum DatasetKind {
    /// `input_ids` and optionally `labels`, `position_ids`, `weights`.
    Tokens,
    /// Plain text in one column; everything is trained, EOS is appended.
    Text {
        field: String,
    },
    Instruction(InstructionColumns),
    Conversation(ConversationColumns),
    /// Two answers, of which one is better.
    Preference(PreferenceColumns),
    /// An answer, and whether it is good.
    Unpaired(UnpairedColumns),
    /// Recognised by the columns of its rows.
    Auto(Box<AutoColumns>),
}

/// The source of the text of a set's documents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Writing {
    /// There is none: rows are token ids.
    #[default]
    Tokens,
    /// A column, whose text is used unchanged.
    Column,
    /// A prompt format of the dataset's options.
    Format,
    /// The chat template of the model or the run.
    Template,
}

impl DatasetKind {
    /// Returns the source of the text of this type; of a type that is left open, nothing is known.
    pub(crate) fn writing(&self) -> Writing {
        match self {
            DatasetKind::Tokens | DatasetKind::Auto(_) => Writing::Tokens,
            DatasetKind::Text { .. } => Writing::Column,
            DatasetKind::Instruction(columns) if columns.prompt_format.is_some() => Writing::Format,
            DatasetKind::Instruction(_) | DatasetKind::Conversation(_) => Writing::Template,
            // Messages by the template, texts as they stand: rows decide.
            DatasetKind::Preference(_) | DatasetKind::Unpaired(_) => Writing::Template,
        }
    }

    /// True if the type is left open, and no option names the column with the text.
    pub(crate) fn is_guess(&self) -> bool {
        matches!(self, DatasetKind::Auto(hints) if hints.text.is_empty())
    }

    /// Returns the column under which the content of a `.txt` file is read.
    pub(crate) fn text_field(&self) -> &str {
        match self {
            DatasetKind::Text { field } => field,
            DatasetKind::Auto(hints) if !hints.text.is_empty() => &hints.text,
            _ => "text",
        }
    }

    /// Returns the truncation of over-long documents of this type: text is split, never deleted.
    pub(crate) fn truncation(&self, chosen: Truncation) -> Truncation {
        if matches!(self, DatasetKind::Text { .. }) { Truncation::Split } else { chosen }
    }
}

/// The kind of file that a row is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowForm {
    /// Nulls mean what they say.
    Text,
    /// Every struct has the fields of all others of its column, as nulls.
    Columnar,
}

/// Limits of the documents of a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Tokens of a document, or of a side of a pair.
    pub max_length: usize,
    pub truncation: Truncation,
}

/// Facts of a row that the data check counts.
#[derive(Debug, Default)]
pub(crate) struct Noticed {
    /// Tokens before truncation, where it comes so far, and whether they are more than are taken.
    pub length: Option<(usize, bool)>,
    pub remarks: Remarks,
    pub counts: PreferenceCounts,
}

/// Turns the columns of one row into what is kept of it.
pub(crate) trait RowDocuments: Send + Sync {
    /// Errors: the row cannot be encoded, or nothing of it is within the limits.
    fn documents(
        &self,
        row: &Map<String, Value>,
        form: RowForm,
        limits: &Limits,
        noticed: &mut Noticed,
    ) -> Result<Vec<Document>, RowError>;

    /// The tokens and marks that its documents should hold.
    fn expected(&self) -> Expected;

    /// Values that its templates have read from the clock so far, by format.
    fn clock_readings(&self) -> BTreeMap<String, String>;
}

/// One document of text a row, truncated as the run says.
struct Text<E>(E);

impl<E: EncodeRow> RowDocuments for Text<E> {
    fn documents(
        &self,
        row: &Map<String, Value>,
        form: RowForm,
        limits: &Limits,
        noticed: &mut Noticed,
    ) -> Result<Vec<Document>, RowError> {
        let document = self.0.encode(row, form, &mut noticed.remarks)?;
        noticed.length = Some((document.len(), document.len() > limits.max_length));
        document.truncate(limits.max_length, limits.truncation)
    }

    fn expected(&self) -> Expected {
        self.0.expected()
    }

    fn clock_readings(&self) -> BTreeMap<String, String> {
        self.0.clock_readings()
    }
}

/// Turns the columns of one row into a document.
pub(crate) trait EncodeRow: Send + Sync {
    /// Adds to `remarks` what of the row does not reach the document.
    fn encode(&self, row: &Map<String, Value>, form: RowForm, remarks: &mut Remarks) -> Result<Document, RowError>;

    /// The tokens and marks that its documents should hold: nothing in particular.
    fn expected(&self) -> Expected {
        Expected::default()
    }

    /// Values that its templates have read from the clock so far, by format: none.
    fn clock_readings(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }
}

/// The encoder of a dataset; relative paths of its images begin in one of the `folders`. `tokenizer` may be absent for
/// [`DatasetKind::Tokens`] only.
pub(crate) fn encoder(
    spec: &DatasetSpec,
    tokenizer: Option<&Arc<Tokenizer>>,
    dialogue: &DialogueOptions,
    preference: &PreferenceOptions,
    folders: Arc<ImageFolders>,
) -> Result<Box<dyn RowDocuments>, DataError> {
    let needed = || {
        tokenizer.cloned().ok_or_else(|| {
            DataError::invalid(spec.path.display(), "this dataset needs a tokenizer")
                .hint("give a model folder with tokenizer.json, or a dataset of type tokens")
        })
    };
    Ok(match &spec.kind {
        DatasetKind::Tokens => Box::new(Text(tokens::TokenRows)),
        DatasetKind::Text { field } => Box::new(Text(text::TextRows::new(needed()?, field.clone()))),
        DatasetKind::Instruction(columns) => {
            let tokenizer = needed()?;
            let form = match &columns.prompt_format {
                Some(format) => instruction::Form::Format(format.clone(), columns.prompt_format_no_input.clone()),
                None => instruction::Form::Chat(Box::new(DialogueEncoder::new(tokenizer.clone(), dialogue)?)),
            };
            Box::new(Text(instruction::InstructionRows::new(tokenizer, columns.clone(), form)))
        }
        DatasetKind::Auto(_) => panic!("the type of a set is recognised before its rows are encoded"),
        DatasetKind::Conversation(columns) => {
            let encoder = DialogueEncoder::new(needed()?, dialogue)?;
            Box::new(Text(conversation::ConversationRows::new(encoder, columns.clone(), folders)))
        }
        DatasetKind::Preference(columns) => {
            Box::new(PairRows::new((needed()?, folders), dialogue, columns.clone(), preference)?)
        }
        DatasetKind::Unpaired(columns) => {
            Box::new(UnpairedRows::new((needed()?, folders), dialogue, columns.clone(), preference)?)
        }
    })
}
