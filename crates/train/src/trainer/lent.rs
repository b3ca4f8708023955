//! The weights of a trainer while they are lent to a model in evaluation mode.

use compiler::CompileOptions;

use crate::engine::Compiled;
use crate::error::Result;
use crate::inference::generate::Generator;
use crate::inference::model::Model;

/// A model over the weights in training.
pub(crate) struct Live {
    /// Compile options of both programs, without their entries.
    pub(super) options: CompileOptions,
    pub(super) model: Model,
    /// Made when text is first requested.
    pub(super) generator: Option<Generator>,
    /// The entries of the trainer's engine, while it is lent.
    pub(super) training: Option<Compiled>,
}

impl Live {
    /// Gives the model what generates text has. Nothing is compared: there are no other weights than these.
    pub(super) fn gather(&mut self) -> Result<()> {
        match self.generator.as_mut().and_then(Generator::release) {
            Some(engine) => self.model.take(engine),
            None => Ok(()),
        }
    }
}
