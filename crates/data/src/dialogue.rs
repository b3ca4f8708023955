//! Conversations to labeled documents: template, spans and tokenizer combined.
//!
//! Knows nothing of rows and columns.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::civil::DateTime;
use serde_json::{Map, Value};

use crate::agent::AgentForm;
use crate::document::Document;
use crate::document::IGNORE;
use crate::encoded_text::Encoded;
use crate::error::{DataError, RowError, RowReason};
use crate::image_source::{ImageRef, ImageSource};
use crate::image_texts::ImageTexts;
use crate::remarks::Remarks;
use crate::row_rendering::RowRendering;
use crate::shown;
use crate::spans::{Found, Markers, Message, TrainedSpan, system_end, weighted_spans};
use crate::summary::Expected;
use crate::template::{ChatTemplate, Conversation, Rendered, clock_now, read_clock};
use crate::tokenizer::Tokenizer;
use crate::weights::{LossRule, around};

/// Settings for rendering conversations to text.
#[derive(Clone, Debug, Default)]
pub struct DialogueOptions {
    /// Jinja text that replaces the model's own template.
    pub template: Option<String>,
    /// System prompt for conversations that bring none.
    pub system: Option<String>,
    /// The time that `strftime_now` reads, as `2026-11-20` or `2026-11-20T12:00:00`; unset: the moment of loading.
    pub clock: Option<String>,
    /// The turns of a conversation that are trained.
    pub loss: LossRule,
    /// Text between the generation prompt and an answer; not trained.
    pub response_prefix: Option<String>,
    /// The notation of tools and their calls for templates that have no place for them.
    pub agent: Option<AgentForm>,
    /// Find the end of the system prompt, which survives when a document loses its beginning.
    pub keeps_system: bool,
    /// The reason why no conversation may be written, if there is one.
    pub refused: Option<String>,
    /// Further variables that the template sees, such as `enable_thinking`.
    pub variables: Map<String, Value>,
    /// The texts of images, where the model reads them.
    pub images: Option<Arc<ImageTexts>>,
}

impl DialogueOptions {
    fn clock(&self) -> Result<DateTime, DataError> {
        self.clock.as_deref().map_or_else(|| Ok(clock_now()), parse_clock)
    }

    /// Formats the clock; `None` if the clock or the format is invalid.
    pub(crate) fn clock_reading(&self, format: &str) -> Option<String> {
        read_clock(format, self.clock().ok()?).ok()
    }
}

/// Returns true if a template has a place for tools.
pub fn shows_tools(template: &str) -> bool {
    template.contains("tools")
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

/// Roles of a conversation that a message names.
const SHOWN_ROLES: usize = 6;

/// The name of the system's role in later interfaces.
const DEVELOPER: &str = "developer";

/// Turns conversations into token ids with labels.
pub struct DialogueEncoder {
    tokenizer: Arc<Tokenizer>,
    template: ChatTemplate,
    /// The model's other template, for conversations with tools.
    tool_template: Option<ChatTemplate>,
    options: DialogueOptions,
    /// True if the template has a place for tools.
    shows_tools: bool,
    /// It knows the role `developer`, which is another name of the system's.
    knows_developer: bool,
    generation_prompt: String,
    answer_opening: String,
    end_of_turn: Vec<String>,
    special: Vec<String>,
}

impl DialogueEncoder {
    /// Errors: there is no template, it is no Jinja, or the clock is no date.
    pub fn new(tokenizer: Arc<Tokenizer>, options: &DialogueOptions) -> Result<Self, DataError> {
        if let Some(reason) = &options.refused {
            return Err(DataError::invalid("chat template", reason).hint("give the set a prompt_format"));
        }
        let clock = options.clock()?;
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
        let shows_tools = tool_template.is_some() || shows_tools(source);
        let knows_developer = source.contains(DEVELOPER) || own(true).is_some_and(|of| of.contains(DEVELOPER));
        let special: Vec<String> = tokenizer.special_tokens().iter().map(|token| token.text.clone()).collect();
        let generation_prompt = generation_prompt(&template, None);
        let (answer_opening, answer_tail) = answer_frame(&template);
        let mut encoder = DialogueEncoder {
            tokenizer,
            template,
            tool_template,
            options: options.clone(),
            shows_tools,
            knows_developer,
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

    /// The text that opens the assistant's turn.
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
        self.template_for(tools).render(Conversation { messages, tools }, generation_prompt)
    }

    fn template_for(&self, tools: Option<&Value>) -> &ChatTemplate {
        self.tool_template.as_ref().filter(|_| tools.is_some()).unwrap_or(&self.template)
    }

    /// The tokens that end a turn.
    pub fn end_of_turn_ids(&self) -> Vec<i32> {
        let ids = self.end_of_turn.iter().filter_map(|token| self.tokenizer.encoder().token_to_id(token));
        ids.map(|id| id as i32).collect()
    }

    /// The tokens and marks that a conversation's document should hold.
    pub(crate) fn expected(&self) -> Expected {
        let bos = self.tokenizer.bos().map(|bos| bos.id as i32);
        Expected { ends: Some(self.end_of_turn_ids()), bos }
    }

    /// Values that the templates have read from the clock so far, by format.
    pub(crate) fn clock_readings(&self) -> BTreeMap<String, String> {
        let templates = [Some(&self.template), self.tool_template.as_ref()];
        templates.into_iter().flatten().flat_map(ChatTemplate::clock_readings).collect()
    }

    fn markers<'a>(&'a self, generation_prompt: &'a str) -> Markers<'a> {
        Markers {
            generation_prompt,
            answer_opening: &self.answer_opening,
            end_of_turn: &self.end_of_turn,
            special: &self.special,
        }
    }

    /// The messages as they are rendered: with the run's system prompt, and tools in the form that the template has.
    /// `is_strict`: tools that the template cannot show are an error.
    fn written<'a>(
        &self,
        messages: &'a [Message],
        tools: Option<&'a Value>,
        is_strict: bool,
    ) -> Result<(Cow<'a, [Message]>, Option<&'a Value>), RowError> {
        let mut messages = Cow::Borrowed(messages);
        if let Some(number) =
            messages.iter().position(|of| !of.images.is_empty()).filter(|_| self.options.images.is_none())
        {
            let problem = format!("message {} has an image, and only text is trained here", number + 1);
            return Err(RowError::new(RowReason::WrongType, problem));
        }
        if !self.knows_developer && messages.iter().any(|message| message.role() == DEVELOPER) {
            let named = messages.to_mut().iter_mut().filter(|message| message.role() == DEVELOPER);
            named.for_each(|message| drop(message.fields.insert("role".to_owned(), "system".into())));
        }
        if let Some(system) = self.options.system.as_ref().filter(|_| !has_system(&messages)) {
            messages.to_mut().insert(0, Message::new("system", system));
        }
        let has_calls = messages.iter().any(|m| m.fields.contains_key("tool_calls") || m.role() == "tool");
        if self.shows_tools || (tools.is_none() && !has_calls) {
            return Ok((messages, tools));
        }
        match self.options.agent {
            Some(agent) => Ok((Cow::Owned(agent.write(&messages, tools)), None)),
            None if tools.is_some() && is_strict => {
                let problem = "the template has no place for tools; `agent_template` sets their format";
                Err(RowError::new(RowReason::Template, problem))
            }
            None => Ok((messages, tools)),
        }
    }

    /// The text of a conversation and what of it is trained. Spans of weight 0 may be among the trained ones.
    pub fn spans(&self, messages: &[Message], tools: Option<&Value>) -> Result<(String, Vec<TrainedSpan>), RowError> {
        let (messages, tools) = self.written(messages, tools, true)?;
        self.spans_of(&messages, &self.rendering(tools), &mut Remarks::default())
    }

    fn rendering<'a>(&'a self, tools: Option<&'a Value>) -> RowRendering<'a> {
        RowRendering::new(self.template_for(tools), tools)
    }

    fn spans_of(
        &self,
        messages: &[Message],
        rendering: &RowRendering<'_>,
        remarks: &mut Remarks,
    ) -> Result<(String, Vec<TrainedSpan>), RowError> {
        let render = |messages: &[Map<String, Value>]| rendering.render(messages);
        let rule = &self.options.loss;
        let prefix = self.options.response_prefix.as_deref().unwrap_or_default();
        let of_all = rule.weights(messages);
        let is_sought = |(message, weight): (&Message, &f32)| match rule {
            // What the data says nothing of is trained as everything is.
            LossRule::Everything => message.weight.is_some(),
            _ => *weight != 0.0,
        };
        let sought = messages.iter().zip(&of_all);
        let weights: Vec<Option<f32>> = sought
            .map(|(message, weight)| {
                let prefixed = !prefix.is_empty() && message.is_assistant();
                (is_sought((message, weight)) || prefixed).then_some(*weight)
            })
            .collect();
        let by_marks = matches!(rule, LossRule::Answers) && messages.iter().all(|m| m.weight.is_none());
        let own = rendering.variables().map(|of| generation_prompt(rendering.template(), Some(of)));
        let markers = self.markers(own.as_ref().unwrap_or(&self.generation_prompt));
        let found = weighted_spans(messages, &weights, by_marks, &render, markers)?;
        shown::remark(&found, messages, rendering.tools(), &render, remarks);
        let Found { mut text, mut spans, .. } = found;
        if !prefix.is_empty() {
            let answers: Vec<bool> = match by_marks && self.template.has_generation_marks() {
                true => vec![true; spans.len()],
                false => {
                    let found = messages.iter().zip(&weights).filter(|(_, weight)| weight.is_some());
                    found.map(|(message, _)| message.is_assistant()).collect()
                }
            };
            text = insert_prefix(&text, &mut spans, &answers, prefix);
        }
        if matches!(rule, LossRule::Everything) {
            spans = around(&text, spans);
        }
        let spans = rule.refine(&text, spans);
        Ok((text, spans))
    }

    /// Returns true if all of a conversation is trained, prompts too.
    pub(crate) fn trains_everything(&self) -> bool {
        matches!(self.options.loss, LossRule::Everything)
    }

    /// The labelled document of a conversation. The template writes BOS itself where the model wants one, so the
    /// tokenizer adds nothing.
    pub fn encode(&self, messages: &[Message], tools: Option<&Value>) -> Result<Document, RowError> {
        self.encode_remarking(messages, tools, &mut Remarks::default())
    }

    /// The same; what the template does not show is added to `remarks`.
    pub(crate) fn encode_remarking(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        remarks: &mut Remarks,
    ) -> Result<Document, RowError> {
        self.encode_all(messages, Vec::new(), tools, remarks)
    }

    /// The document of a conversation with images, in their order.
    pub fn encode_with_images(
        &self,
        messages: &[Message],
        images: Vec<ImageSource>,
        tools: Option<&Value>,
    ) -> Result<Document, RowError> {
        self.encode_all(messages, images, tools, &mut Remarks::default())
    }

    /// The texts of images, where the model reads them.
    pub(crate) fn images(&self) -> Option<&ImageTexts> {
        self.options.images.as_deref()
    }

    /// The same with the images of the conversation, in their order.
    pub(crate) fn encode_all(
        &self,
        messages: &[Message],
        sources: Vec<ImageSource>,
        tools: Option<&Value>,
        remarks: &mut Remarks,
    ) -> Result<Document, RowError> {
        if messages.is_empty() {
            return Err(RowError::new(RowReason::Empty, "the conversation has no messages"));
        }
        let (messages, tools) = self.written(messages, tools, true)?;
        let rendering = self.rendering(tools);
        let (mut text, mut spans) = self.spans_of(&messages, &rendering, remarks)?;
        let mut images: Vec<ImageRef> = Vec::new();
        if let Some(of) = self.images() {
            let (texts, read) = of.read(sources)?;
            text = of.expand(&text, &mut spans, &texts)?;
            images = read;
        }
        if text.is_empty() {
            let mut roles: Vec<&str> = messages.iter().map(Message::role).collect();
            roles.dedup();
            let named = roles.iter().take(SHOWN_ROLES).map(|role| format!("`{role}`")).collect::<Vec<_>>().join(", ");
            let problem = format!("the chat template shows none of the messages, whose roles are {named}");
            return Err(RowError::new(RowReason::Template, problem));
        }
        let encoded = self.tokenizer.encoder().encode_with_offsets(&text, false)?;
        let mut keep = 0;
        if self.options.keeps_system {
            let render = |messages: &[Map<String, Value>]| rendering.render(messages);
            let end = system_end(&messages, &render, self.markers(&self.generation_prompt))?;
            let begins_with_bos = self.tokenizer.bos().is_some_and(|bos| encoded.ids.first() == Some(&bos.id));
            keep = encoded.offsets.iter().take_while(|offsets| offsets.1 <= end).count();
            keep = keep.max(usize::from(begins_with_bos));
        }
        Ok(self.with_images(Document { keep, ..label(encoded, &spans) }, images))
    }

    /// A document with its images, whose tokens are not trained.
    fn with_images(&self, mut document: Document, images: Vec<ImageRef>) -> Document {
        document.images = images;
        if let Some(of) = self.images().filter(|_| !document.images.is_empty()) {
            for t in (0..document.len()).filter(|t| of.is_of_image(document.ids[*t])) {
                (document.labels[t], document.weights[t]) = (IGNORE, 0.0);
                document.images_end = t + 1;
            }
        }
        document
    }

    /// A prompt with its answer, of which the answer is labelled, and the ids of the prompt alone with the assistant's turn
    /// opened. Without spans nothing is labelled.
    pub(crate) fn encode_answer(
        &self,
        of: &Answered<'_>,
        remarks: &mut Remarks,
    ) -> Result<(Document, Vec<u32>), RowError> {
        let given = of.prompt.iter().map(|message| match message.is_assistant() {
            true => Message { weight: message.weight.or(Some(0.0)), ..message.clone() },
            false => message.clone(),
        });
        let all: Vec<Message> = given.chain(of.answer.iter().cloned()).collect();
        let (messages, tools) = self.written(&all, of.tools, of.needs_spans)?;
        let rendering = self.rendering(tools).with(of.variables);
        let before: Vec<Map<String, Value>> =
            messages[..messages.len() - of.answer.len()].iter().map(|message| message.fields.clone()).collect();
        // A prompt that ends with the assistant's words goes on with them.
        let opens = before.last().is_none_or(|last| last.get("role").is_none_or(|role| role != "assistant"));
        let prefix = self.options.response_prefix.as_deref().unwrap_or_default();
        let mut alone = rendering.render_opening(&before, opens)?.text;
        alone.push_str(if opens { prefix } else { "" });
        let (mut text, mut spans) = if of.needs_spans || !prefix.is_empty() {
            self.spans_of(&messages, &rendering, remarks)?
        } else {
            let plain: Vec<Map<String, Value>> = messages.iter().map(|message| message.fields.clone()).collect();
            let text = rendering.render(&plain)?.text;
            let found = Found { text, spans: Vec::new(), hidden: vec![None; messages.len()] };
            let render = |messages: &[Map<String, Value>]| rendering.render(messages);
            shown::remark(&found, &messages, tools, &render, remarks);
            (found.text, found.spans)
        };
        if let Some(texts) = self.images() {
            text = texts.expand(&text, &mut spans, of.images.0)?;
            alone = texts.expand(&alone, &mut [], of.images.0)?;
        }
        let document = label(self.tokenizer.encoder().encode_with_offsets(&text, false)?, &spans);
        let document = self.with_images(document, of.images.1.to_vec());
        Ok((document, self.tokenizer.encoder().encode(&alone, false)?))
    }
}

/// A prompt with one answer to it.
#[derive(Clone, Copy)]
pub(crate) struct Answered<'a> {
    pub prompt: &'a [Message],
    pub answer: &'a [Message],
    pub tools: Option<&'a Value>,
    /// Further variables of the template, from this row.
    pub variables: Option<&'a Map<String, Value>>,
    /// True if the location of the answer in the rendering is needed; then the template must show each of its messages.
    pub needs_spans: bool,
    /// The texts of the images of the prompt, and the images.
    pub images: (&'a [String], &'a [ImageRef]),
}

/// The text with another before each answer that does not begin with it; it belongs to what the model is given.
fn insert_prefix(text: &str, spans: &mut [TrainedSpan], answers: &[bool], prefix: &str) -> String {
    let mut whole = String::with_capacity(text.len());
    let mut at = 0;
    for (span, is_answer) in spans.iter_mut().zip(answers) {
        whole.push_str(&text[at..span.range.start]);
        at = span.range.start;
        let own = &text[span.range.clone()];
        let mut start = whole.len();
        let mut end = start + own.len();
        if *is_answer {
            if !own.starts_with(prefix) {
                whole.push_str(prefix);
                end += prefix.len();
            }
            start += prefix.len();
        }
        span.range = start..end;
    }
    whole.push_str(&text[at..]);
    whole
}

fn has_system(messages: &[Message]) -> bool {
    messages.first().is_some_and(|message| ["system", DEVELOPER].contains(&message.role()))
}

fn parse_clock(text: &str) -> Result<DateTime, DataError> {
    let date = || text.parse::<jiff::civil::Date>().map(|date| date.at(0, 0, 0, 0));
    text.parse::<DateTime>().or_else(|_| date()).map_err(|_| {
        DataError::invalid("clock", format!("`{text}` is not a date"))
            .hint("write it as 2026-11-20 or 2026-11-20T12:00:00")
    })
}

/// The text that a template appends to open the assistant's turn; may be empty.
fn generation_prompt(template: &ChatTemplate, variables: Option<&Map<String, Value>>) -> String {
    let probe = [Message::new("user", "x").fields];
    let render = |prompt| template.render_with(Conversation { messages: &probe, tools: None }, prompt, variables);
    match (render(false), render(true)) {
        (Ok(closed), Ok(open)) => open.text.strip_prefix(&closed.text).unwrap_or_default().to_owned(),
        _ => String::new(),
    }
}

/// The text that a template writes between a question and its answer, and after a last answer.
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
    Document { ids, labels, weights, ..Document::default() }
}
