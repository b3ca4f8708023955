//! All renderings of one row, within one budget: to find its messages, a row may be rendered several times for each.
//!
//! Counted, not timed, so that a row ends the same way on every machine. Knows no spans.

use std::cell::Cell;

use serde_json::{Map, Value};

use crate::error::{RowError, RowReason};
use crate::template::{ChatTemplate, Conversation, Rendered};

/// Bytes that all renderings of a row may make, some seconds of work.
const MOST: u64 = 10_000_000_000;

/// Bytes that may be written in the time that a message takes besides its text.
const MESSAGE: u64 = 1000;

/// Renders the conversations of one row.
pub(crate) struct RowRendering<'a> {
    template: &'a ChatTemplate,
    tools: Option<&'a Value>,
    variables: Option<&'a Map<String, Value>>,
    left: Cell<u64>,
}

impl<'a> RowRendering<'a> {
    pub(crate) fn new(template: &'a ChatTemplate, tools: Option<&'a Value>) -> Self {
        RowRendering { template, tools, variables: None, left: Cell::new(MOST) }
    }

    /// The same with variables that the template sees for this row.
    pub(crate) fn with(self, variables: Option<&'a Map<String, Value>>) -> Self {
        RowRendering { variables, ..self }
    }

    /// The row's own variables.
    pub(crate) fn variables(&self) -> Option<&'a Map<String, Value>> {
        self.variables
    }

    pub(crate) fn template(&self) -> &'a ChatTemplate {
        self.template
    }

    /// The function definitions that the template sees.
    pub(crate) fn tools(&self) -> Option<&'a Value> {
        self.tools
    }

    /// Errors: the template rejects the messages, or the row has used up its budget.
    pub(crate) fn render(&self, messages: &[Map<String, Value>]) -> Result<Rendered, RowError> {
        self.render_opening(messages, false)
    }

    /// The same; `opens`: with the assistant's turn opened at the end.
    pub(crate) fn render_opening(&self, messages: &[Map<String, Value>], opens: bool) -> Result<Rendered, RowError> {
        let left = self.left.get();
        if left == 0 {
            let problem = format!(
                "the template writes its {} messages depending on one another, and to render them for each one takes \
                 too long; split the conversation",
                messages.len()
            );
            return Err(RowError::new(RowReason::Template, problem));
        }
        let rendered =
            self.template.render_with(Conversation { messages, tools: self.tools }, opens, self.variables)?;
        let taken = rendered.text.len() as u64 + MESSAGE * messages.len() as u64;
        self.left.set(left.saturating_sub(taken));
        Ok(rendered)
    }
}
