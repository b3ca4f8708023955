//! Conversations to labelled documents: template, spans and tokenizer together.
//!
//! Knows nothing of rows and columns.

use std::sync::Arc;

use jiff::civil::DateTime;
use serde_json::{Map, Value};

use crate::batch::IGNORE;
use crate::document::Document;
use crate::error::{DataError, RowError, RowReason};
use crate::spans::{Markers, Message, TrainedSpan, trained_spans};
use crate::template::{ChatTemplate, Conversation, Rendered, clock_now};
use crate::tokenizer::{Encoded, Tokenizer};

/// How conversations are rendered.
#[derive(Clone, Debug, Default)]
pub struct DialogueOptions {
    /// Jinja text that replaces the model's own template.
    pub template: Option<String>,
    /// System prompt for conversations that bring none.
    pub system: Option<String>,
    /// What `strftime_now` reads, as `2026-11-20` or `2026-11-20T12:00:00`; unset: the moment of loading.
    pub clock: Option<String>,
    /// Further variables that the template sees, such as `enable_thinking`.
    pub variables: Map<String, Value>,
}

/// Names of tokens that end a turn in the common families; the model's own EOS is always one.
const END_OF_TURN: [&str; 13] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<turn|>",
    "</s>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end_of_turn|>",
    "<｜end▁of▁sentence｜>",
];

/// Turns conversations into token ids with labels.
pub struct DialogueEncoder {
    tokenizer: Arc<Tokenizer>,
    template: ChatTemplate,
    /// The model's other template, for conversations with tools.
    tool_template: Option<ChatTemplate>,
    system: Option<String>,
    generation_prompt: String,
    answer_opening: String,
    end_of_turn: Vec<String>,
    special: Vec<String>,
}

impl DialogueEncoder {
    /// Errors: there is no template, it is no Jinja, or the clock is no date.
    pub fn new(tokenizer: Arc<Tokenizer>, options: &DialogueOptions) -> Result<Self, DataError> {
        let clock = match &options.clock {
            None => clock_now(),
            Some(text) => parse_clock(text)?,
        };
        let own = |tools| options.template.as_deref().or(tokenizer.chat_template(tools));
        let Some(source) = own(false).or(own(true)) else {
            return Err(DataError::invalid("chat template", "the model folder has none")
                .hint("set prompt_format for instructions, or take the instruct version of the model"));
        };
        let mut variables = tokenizer.template_variables().clone();
        variables.extend(options.variables.clone());
        let template = ChatTemplate::new(source, variables.clone(), clock)?;
        let tool_template = match own(true) {
            Some(other) if other != source => Some(ChatTemplate::new(other, variables, clock)?),
            _ => None,
        };
        let special: Vec<String> = tokenizer.special_tokens().iter().map(|token| token.text.clone()).collect();
        let generation_prompt = generation_prompt(&template);
        let (answer_opening, answer_tail) = answer_frame(&template);
        let mut encoder = DialogueEncoder {
            tokenizer,
            template,
            tool_template,
            system: options.system.clone(),
            generation_prompt,
            answer_opening,
            end_of_turn: Vec::new(),
            special,
        };
        encoder.end_of_turn = encoder.turn_ends(&answer_tail);
        Ok(encoder)
    }

    /// The known names that this tokenizer has, its EOS, and what the template writes after a last answer.
    fn turn_ends(&self, answer_tail: &str) -> Vec<String> {
        let mut ends: Vec<String> = self.tokenizer.eos().map(|eos| eos.text.clone()).into_iter().collect();
        ends.extend(self.special.iter().filter(|token| END_OF_TURN.contains(&token.as_str())).cloned());
        let written = self.special.iter().filter_map(|token| answer_tail.find(token.as_str()).map(|at| (at, token)));
        ends.extend(written.min().map(|(_, token)| token.clone()));
        ends.sort();
        ends.dedup();
        ends
    }

    /// What opens the assistant's turn.
    pub fn generation_prompt(&self) -> &str {
        &self.generation_prompt
    }

    /// The text of a conversation.
    pub fn render(
        &self,
        messages: &[Map<String, Value>],
        tools: Option<&Value>,
        generation_prompt: bool,
    ) -> Result<Rendered, RowError> {
        let template = self.tool_template.as_ref().filter(|_| tools.is_some()).unwrap_or(&self.template);
        template.render(Conversation { messages, tools }, generation_prompt)
    }

    /// The text of a conversation and what of it is trained.
    pub fn spans(&self, messages: &[Message], tools: Option<&Value>) -> Result<(String, Vec<TrainedSpan>), RowError> {
        let markers = Markers {
            generation_prompt: &self.generation_prompt,
            answer_opening: &self.answer_opening,
            end_of_turn: &self.end_of_turn,
            special: &self.special,
        };
        let render = |messages: &[Map<String, Value>]| self.render(messages, tools, false);
        match &self.system {
            Some(system) if !has_system(messages) => {
                let mut all = vec![Message::new("system", system)];
                all.extend_from_slice(messages);
                trained_spans(&all, &render, markers)
            }
            _ => trained_spans(messages, &render, markers),
        }
    }

    /// The labelled document of a conversation. The template writes BOS itself where the model wants one, so the
    /// tokenizer adds nothing.
    pub fn encode(&self, messages: &[Message], tools: Option<&Value>) -> Result<Document, RowError> {
        if messages.is_empty() {
            return Err(RowError::new(RowReason::Empty, "the conversation has no messages"));
        }
        let (text, spans) = self.spans(messages, tools)?;
        let encoded = self.tokenizer.encoder().encode_with_offsets(&text, false)?;
        Ok(label(encoded, &spans))
    }
}

fn has_system(messages: &[Message]) -> bool {
    messages.first().and_then(|message| message.fields.get("role")).is_some_and(|role| role == "system")
}

fn parse_clock(text: &str) -> Result<DateTime, DataError> {
    let date = || text.parse::<jiff::civil::Date>().map(|date| date.at(0, 0, 0, 0));
    text.parse::<DateTime>().or_else(|_| date()).map_err(|_| {
        DataError::invalid("clock", format!("`{text}` is no date"))
            .hint("write it as 2026-11-20 or 2026-11-20T12:00:00")
    })
}

/// What a template appends to open the assistant's turn; empty where it appends nothing.
fn generation_prompt(template: &ChatTemplate) -> String {
    let probe = [Message::new("user", "x").fields];
    let render = |prompt| template.render(Conversation { messages: &probe, tools: None }, prompt);
    match (render(false), render(true)) {
        (Ok(closed), Ok(open)) => open.text.strip_prefix(&closed.text).unwrap_or_default().to_owned(),
        _ => String::new(),
    }
}

/// What a template writes between a question and its answer, and after a last answer.
fn answer_frame(template: &ChatTemplate) -> (String, String) {
    let (question, answer) = ("Question", "Answer");
    let probe = [Message::new("user", question).fields, Message::new("assistant", answer).fields];
    let rendered = template.render(Conversation { messages: &probe, tools: None }, false);
    let split = rendered.ok().and_then(|rendered| {
        let (before, tail) = rendered.text.rsplit_once(answer)?;
        let (_, opening) = before.rsplit_once(question)?;
        Some((opening.to_owned(), tail.to_owned()))
    });
    split.unwrap_or_default()
}

/// Labels the tokens that hold at least one byte of a span. So a token that joins the prompt's last blank with the
/// answer's first word is trained, as it is with transformers' assistant masks.
pub(crate) fn label(encoded: Encoded, spans: &[TrainedSpan]) -> Document {
    let ids: Vec<i32> = encoded.ids.iter().map(|&id| id as i32).collect();
    let mut labels = vec![IGNORE; ids.len()];
    let mut weights = vec![0.0; ids.len()];
    let mut current = 0;
    for (t, &(begin, end)) in encoded.offsets.iter().enumerate() {
        while current < spans.len() && spans[current].range.end <= begin {
            current += 1;
        }
        match spans.get(current) {
            Some(span) if begin < span.range.end && end > span.range.start && span.weight != 0.0 => {
                labels[t] = ids[t];
                weights[t] = span.weight;
            }
            _ => {}
        }
    }
    Document { ids, labels, weights, positions: None }
}
