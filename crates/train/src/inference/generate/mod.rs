//! Text from a trained model: prompts in, tokens and text out, several sequences at a time.
//!
//! [`Generator`] has the model on a device, compiled to go on where its sequences were; a [`Generation`] is what is done for
//! some prompts, step by step, so that a caller shows text as it comes and stops when it likes. Which sequence runs when is
//! `schedule.rs`'s, which page of the cache it has `pages.rs`'s, which token follows `sampling.rs`'s, what text it is
//! `text.rs`'s, what becomes of its images `images.rs`'s. Knows no terminal.

mod capacity;
mod defaults;
mod ends;
mod generation;
mod generator;
mod images;
mod masks;
mod pages;
mod prompt;
mod reader;
mod request;
mod samples;
mod sampling;
mod schedule;
mod settings;
mod text;

pub(crate) use capacity::{Capacity, Need, variant};
pub(crate) use defaults::Defaults;
pub use ends::EndTokens;
pub(crate) use ends::{follow as follow_end_tokens, write as write_end_tokens};
pub use generation::{Finish, Generation, Piece};
pub use generator::Generator;
pub use prompt::PromptEncoder;
pub(crate) use reader::LOGITS;
pub(crate) use request::read as read_messages;
pub use request::{Messages, Prompt, Request};
pub(crate) use samples::{Sample, Samples, is_of_conversations};
pub use settings::{GenerationOptions, section};
