//! From files to batches: safetensors, datasets, tokenizers, chat templates, label spans, packing, loading.
//!
//! ```text
//! files ──rows──▶ JSON objects ──dataset──▶ documents ──prepare──▶ corpus ──loader──▶ batches
//!                                  │ tokenizer, dialogue (template + spans)   │ cache     │ order, packing
//! ```
//!
//! Invariant: this crate knows no graph, no device and no run config; it is reported what to do by small structs of its
//! own.

pub mod agent;
pub mod batch;
pub mod boxes;
pub mod cache;
pub mod corpus;
pub mod dataset;
pub mod dialogue;
pub mod document;
mod encoded_text;
mod error;
mod fast_encoder;
#[cfg(test)]
mod figures;
mod file_stamp;
mod gather;
pub mod gguf;
mod guard;
pub mod image;
pub mod image_folders;
mod image_parts;
pub mod image_source;
pub mod image_texts;
pub mod in_making;
pub mod inputs;
mod json_values;
pub mod loader;
mod loader_spec;
mod new_file;
pub mod order;
pub mod packing;
mod pairs;
mod part_file;
mod patched_view;
pub mod patches;
pub mod pictures;
mod pipeline;
pub mod preference;
pub mod prepare;
mod prepare_options;
pub mod quantised;
pub mod remarks;
mod round_images;
mod row_encoding;
mod row_order;
mod row_rendering;
pub mod rows;
pub mod safetensors;
mod segment;
pub mod sequence_images;
pub mod show;
mod shown;
pub mod small_file;
pub mod spans;
mod spread;
pub mod stream;
pub mod summary;
pub mod template;
pub mod tokenizer;
pub mod weights;
mod word_file;

pub use agent::AgentForm;
pub use batch::{Batch, Patches, Placed, Taught};
pub use cache::{RecordWriter, Records, RowCache};
pub use corpus::{Corpus, DocumentSet};
pub use dataset::{
    AutoColumns, ConversationColumns, DatasetKind, DatasetSpec, InstructionColumns, RowShard, SystemPrompt, Writing,
};
pub use dialogue::{DialogueEncoder, DialogueOptions, shows_tools};
pub use document::{Document, IGNORE, Mark, Truncation};
pub use error::{DataError, RowError, RowReason, Stop};
pub use loader::{Extent, Loader, extent, extent_unless, remaining};
pub use loader_spec::{Layout, LoaderSpec, Padding, Share};
pub use pairs::mismatched;
pub use preference::{
    Cut, Preference, PreferenceColumns, PreferenceOptions, Purpose, Question, Split, Unpaired, UnpairedColumns,
};
pub use prepare::{EncodedCorpus, Keeping, dataset_images, origin, prepare, prepare_cached};
pub use prepare_options::PrepareOptions;
pub use row_order::{Place, Position};
pub use rows::RowLimit;
pub use spans::Message;
pub use spread::{Held, join};
pub use stream::{LocalShards, OpenShards, ShardId, Shards, Stream, StreamFile, StreamOptions, StreamPlace, StreamSet};
pub use summary::{DatasetSummary, LengthAdvice, Summary};
pub use tokenizer::Tokenizer;
pub use weights::LossRule;
