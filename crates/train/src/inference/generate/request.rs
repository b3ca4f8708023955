//! A request to a model: a prompt, and options that differ for it. Read from JSON, as lines of a file have it. Does not
//! know how a prompt becomes tokens.

use std::collections::BTreeMap;

use data::image_texts::shows_image;
use serde_json::{Map, Value};

use crate::error::{Result, TrainError};

/// The constraints that an answer must satisfy.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Token ids of the prompt.
    Ids(Vec<i32>),
    /// A text that is continued.
    Text(String),
    /// Messages, which are answered; the last one is continued where it is the assistant's.
    Messages(Messages),
}

/// A conversation, and what a template sees besides.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Messages {
    /// Objects with `role` and `content`.
    pub messages: Vec<Map<String, Value>>,
    /// Function definitions that the template may show.
    pub tools: Option<Value>,
    /// Variables of the template by name, such as `enable_thinking`.
    pub variables: Map<String, Value>,
    /// Images for the parts and words that stand for one and have none of their own.
    pub images: Option<Vec<Value>>,
}

impl Messages {
    /// The fields of a conversation alone.
    pub fn of(messages: Vec<Map<String, Value>>) -> Messages {
        Messages { messages, ..Messages::default() }
    }

    /// Returns true if it has images, or places for them.
    pub fn has_images(&self) -> bool {
        self.images.is_some() || self.first_image().is_some()
    }

    /// The first message that has an image.
    fn first_image(&self) -> Option<usize> {
        self.messages.iter().position(shows_image)
    }

    /// Rejects images for a model of this name, which reads none.
    pub(super) fn check_without_images(&self, architecture: &str) -> Result<()> {
        let place = match self.first_image() {
            Some(number) => format!("message {}", number + 1),
            None if self.images.is_some() => "`images`".to_owned(),
            None => return Ok(()),
        };
        let text = format!("{place}: an image, and {architecture}, as it is loaded, reads none");
        Err(TrainError::Usage(text))
    }

    /// The same with a mark after the text of the last message, where that is an assistant's and has a text to go on from.
    pub fn marked(&self, mark: &str) -> Option<Messages> {
        let mut marked = self.clone();
        let last = marked.messages.last_mut().filter(|message| message.get("role") == Some(&"assistant".into()))?;
        if last.get("tool_calls").is_some_and(|calls| !calls.is_null() && *calls != Value::Array(Vec::new())) {
            return None;
        }
        let content = last.entry("content").or_insert(Value::Null);
        match content {
            Value::Null => *content = mark.into(),
            Value::String(text) => text.push_str(mark),
            Value::Array(parts) => {
                let text = |part: &mut Value| part.get_mut("text").filter(|text| text.is_string()).map(Value::take);
                let (index, text) = parts.iter_mut().enumerate().rev().find_map(|(i, part)| Some((i, text(part)?)))?;
                parts[index]["text"] = format!("{}{mark}", text.as_str().unwrap_or_default()).into();
            }
            _ => return None,
        }
        Some(marked)
    }
}

impl Prompt {
    /// A text, a list of messages, or a list of ids, as JSON.
    pub fn from_json(value: &Value) -> Result<Prompt> {
        let wrong = || TrainError::Usage(format!("a prompt is a text or a list of messages, not {value}"));
        match value {
            Value::String(text) => Ok(Prompt::Text(text.clone())),
            Value::Array(items) if !items.is_empty() && items.iter().all(Value::is_object) => {
                Ok(Prompt::Messages(Messages::of(read(items)?)))
            }
            Value::Array(items) => {
                let id = |item: &Value| item.as_i64().and_then(|id| i32::try_from(id).ok());
                items.iter().map(id).collect::<Option<Vec<i32>>>().map(Prompt::Ids).ok_or_else(wrong)
            }
            _ => Err(wrong()),
        }
    }
}

/// A prompt with what of the options is its own.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    pub prompt: Prompt,
    pub max_new_tokens: Option<usize>,
    pub temperature: Option<f64>,
    /// The prompt is a text that goes on, also where it is given as ids.
    pub continues_text: bool,
    /// Key of its random numbers.
    pub seed: Option<u64>,
    /// Keep the log-probabilities of the answer's tokens.
    pub keeps_logps: bool,
}

impl From<Prompt> for Request {
    fn from(prompt: Prompt) -> Request {
        let continues_text = matches!(prompt, Prompt::Text(_));
        Request { prompt, max_new_tokens: None, temperature: None, continues_text, seed: None, keeps_logps: false }
    }
}

/// Variables of chat templates that follow from the prompt.
const RESERVED: [&str; 3] = ["messages", "tools", "add_generation_prompt"];

impl Request {
    /// Fields of an object that hold its prompt, in the order in which they are looked for.
    pub const PROMPTS: [&'static str; 4] = ["prompt", "messages", "conversations", "text"];

    /// Fields that are its own besides.
    pub const OWN: [&'static str; 6] =
        ["tools", "chat_template_kwargs", "images", "max_new_tokens", "temperature", "seed"];

    /// A prompt, or an object with one of [`Request::PROMPTS`] and any of [`Request::OWN`]; other fields are left out. A field
    /// that is null is as if it were not there.
    pub fn from_json(value: &Value) -> Result<Request> {
        let Value::Object(fields) = value else { return Ok(Prompt::from_json(value)?.into()) };
        let given = |name: &str| fields.get(name).filter(|value| !value.is_null());
        let wrong = |name: &str, expected: &str| {
            let value = given(name).map(Value::to_string).unwrap_or_default();
            TrainError::Usage(format!("`{name}` is {value}, expected {expected}"))
        };
        let named = Request::PROMPTS.iter().find_map(|name| given(name));
        let expected = || TrainError::Usage(format!("there is none of {}", Request::PROMPTS.join(", ")));
        let named = named.ok_or_else(expected)?;
        // Messages may stand there as a text of JSON, as in rows of data.
        let mut prompt = match data::dataset::messages_in(named) {
            Some(list) => Prompt::from_json(&Value::Array(list))?,
            None => Prompt::from_json(named)?,
        };
        let in_tools = |error: data::RowError| TrainError::Usage(error.to_string());
        let tools = data::dataset::tools("tools", given("tools")).map_err(in_tools)?;
        let variables = given("chat_template_kwargs");
        let as_object = |value: &Value| value.as_object().cloned();
        let variables =
            variables.map(|of| as_object(of).ok_or_else(|| wrong("chat_template_kwargs", "names with values")));
        let variables = variables.transpose()?;
        let is_own = |of: &&String| RESERVED.contains(&of.as_str());
        if let Some(name) = variables.iter().flat_map(|of| of.keys()).find(is_own) {
            let text = format!("`chat_template_kwargs` has `{name}`, which the prompt itself gives");
            return Err(TrainError::Usage(text));
        }
        let images =
            given("images").map(|of| of.as_array().cloned().ok_or_else(|| wrong("images", "a list of images")));
        let images = images.transpose()?;
        match &mut prompt {
            Prompt::Messages(of) => {
                (of.tools, of.variables, of.images) = (tools, variables.unwrap_or_default(), images);
            }
            _ if images.is_some() => {
                let text = "`images` go into the chat template of messages, and the prompt is a text";
                return Err(TrainError::Usage(text.into()));
            }
            _ if tools.is_some() || variables.is_some() => {
                let text = "`tools` and `chat_template_kwargs` go into the chat template of messages, and the prompt is a text";
                return Err(TrainError::Usage(text.into()));
            }
            _ => {}
        }
        let most = given("max_new_tokens").map(|value| {
            let count = value.as_u64().filter(|count| *count >= 1);
            count.map(|n| n as usize).ok_or_else(|| wrong("max_new_tokens", "a whole number from 1"))
        });
        let temperature = given("temperature")
            .map(|value| value.as_f64().filter(|t| *t >= 0.0).ok_or_else(|| wrong("temperature", "a number from 0")));
        let seed = given("seed").map(|value| value.as_u64().ok_or_else(|| wrong("seed", "a whole number from 0")));
        let (max_new_tokens, temperature, seed) = (most.transpose()?, temperature.transpose()?, seed.transpose()?);
        Ok(Request { max_new_tokens, temperature, seed, ..prompt.into() })
    }
}

/// The messages of a conversation as rows of data are read: their names of roles and fields, and texts for parts of text.
pub(crate) fn read(items: &[Value]) -> Result<Vec<Map<String, Value>>> {
    let given = || items.iter().filter_map(Value::as_object).cloned().collect();
    let has_text = |of: &Value| of.get("content").is_some_and(|content| !content.is_null());
    match data::dataset::messages(items, &BTreeMap::new()) {
        // Their images are read with them later.
        Ok(messages) if messages.iter().any(|message| !message.images.is_empty()) => Ok(given()),
        Ok(messages) => Ok(messages.into_iter().map(|message| message.fields).collect()),
        // An empty answer may be begun.
        Err(_) if items.last().is_some_and(|last| !has_text(last)) => Ok(given()),
        Err(error) => Err(TrainError::Usage(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn prompts_are_texts_messages_or_ids() {
        assert_eq!(Prompt::from_json(&json!("a")).unwrap(), Prompt::Text("a".into()));
        assert_eq!(Prompt::from_json(&json!([1, 2])).unwrap(), Prompt::Ids(vec![1, 2]));
        let messages = Prompt::from_json(&json!([{"role": "user", "content": "a"}])).unwrap();
        assert!(matches!(messages, Prompt::Messages(of) if of.messages.len() == 1));
        for wrong in [json!(3), json!(["a"]), json!([1, {"role": "user"}])] {
            let error = Prompt::from_json(&wrong).unwrap_err().to_string();
            assert!(error.contains("a text or a list of messages"), "{error}");
        }
    }

    #[test]
    fn a_row_has_options_of_its_own() {
        let tools = json!([{"type": "function", "function": {"name": "add"}}]);
        let messages = json!([{"role": "user", "content": "a"}]);
        for tools in [tools.clone(), json!(tools.to_string())] {
            let row = json!({"messages": messages, "tools": tools, "chat_template_kwargs": {"x": 1}, "text": null,
                "max_new_tokens": 3, "temperature": 0.5, "id": 7});
            let request = Request::from_json(&row).unwrap();
            let Prompt::Messages(of) = &request.prompt else { panic!("{request:?}") };
            assert_eq!(
                (of.tools.as_ref().unwrap()[0]["type"].as_str(), &of.variables["x"]),
                (Some("function"), &json!(1))
            );
            assert_eq!((request.max_new_tokens, request.temperature), (Some(3), Some(0.5)));
        }
        for (row, said) in [
            (json!({"id": 7}), "there is none of prompt, messages, conversations, text"),
            (json!({"text": "a", "tools": tools}), "the prompt is a text"),
            (json!({"messages": messages, "tools": "none"}), "column `tools` is not valid JSON"),
            (json!({"text": "a", "max_new_tokens": 0}), "`max_new_tokens` is 0, expected a whole number from 1"),
            (json!({"text": "a", "temperature": "hot"}), "`temperature` is \"hot\", expected a number from 0"),
        ] {
            let error = Request::from_json(&row).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn the_last_message_is_continued_where_it_is_the_assistants_text() {
        let marked = |last: Value| {
            let last = last.as_object().unwrap().clone();
            Messages::of(vec![last]).marked("|").map(|of| of.messages[0]["content"].clone())
        };
        assert_eq!(marked(json!({"role": "user", "content": "a"})), None);
        assert_eq!(marked(json!({"role": "assistant", "content": "a"})), Some(json!("a|")));
        assert_eq!(marked(json!({"role": "assistant", "content": null})), Some(json!("|")));
        let parts = json!([{"type": "text", "text": "a"}, {"type": "image"}]);
        let found = marked(json!({"role": "assistant", "content": parts})).unwrap();
        assert_eq!(found, json!([{"type": "text", "text": "a|"}, {"type": "image"}]));
        assert_eq!(marked(json!({"role": "assistant", "content": "a", "tool_calls": [{}]})), None);
        assert_eq!(marked(json!({"role": "assistant", "content": "a", "tool_calls": null})), Some(json!("a|")));
    }
}
