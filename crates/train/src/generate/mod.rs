//! Text from a trained model: prompts in, tokens and text out, several sequences at a time.
//!
//! [`Generator`] has the model on a device, compiled to go on where its sequences were; a [`Generation`] is what is done for
//! some prompts, step by step, so that a caller shows text as it comes and stops when it likes. Which sequence runs when is
//! `generation.rs`'s, which page of the cache it has `pages.rs`'s, which token follows `sampling.rs`'s, what text it is
//! `text.rs`'s. Knows no terminal.

mod capacity;
mod defaults;
mod generation;
mod generator;
mod pages;
mod prompt;
mod samples;
mod sampling;
mod settings;
mod text;

pub(crate) use defaults::Defaults;
pub use generation::{Finish, Generation, Piece};
pub use generator::Generator;
pub use prompt::{Prompt, PromptEncoder};
pub(crate) use samples::{Sample, Samples};
pub use settings::{GenerationOptions, section};
