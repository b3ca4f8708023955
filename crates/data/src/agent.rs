//! Tools and tool calls as plain messages, for templates that do not support them.
//!
//! Knows agent formats; no template and no tokens.

use serde_json::{Map, Value, json};

use crate::spans::Message;
use crate::template::json_dumps;

/// The notation of tools and tool calls in the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentForm {
    /// JSON between `<tool_call>` tags, with the prompt of the Hermes models.
    Hermes,
    /// `Action:`, `Action Input:` and `Observation:` lines.
    React,
}

impl AgentForm {
    /// Names of all agent forms.
    pub const NAMES: [&'static str; 2] = ["hermes", "react"];

    /// The form of that name.
    pub fn named(name: &str) -> Option<AgentForm> {
        match name {
            "hermes" => Some(AgentForm::Hermes),
            "react" => Some(AgentForm::React),
            _ => None,
        }
    }

    /// The same conversation in system, user and assistant messages without tools. Weights stay with their messages; results
    /// that follow one another are one message, for many templates want turns to alternate.
    pub fn write(self, messages: &[Message], tools: Option<&Value>) -> Vec<Message> {
        let mut written: Vec<Message> = Vec::with_capacity(messages.len() + 1);
        if let Some(tools) = tools {
            let instructions = self.instructions(tools);
            match messages.first().filter(|first| first.role() == "system") {
                Some(system) => {
                    let mut system = system.clone();
                    let text = format!("{}\n\n{instructions}", self.content(&system.fields));
                    system.fields.insert("content".to_owned(), json!(text));
                    written.push(system);
                }
                None => written.push(Message::new("system", &instructions)),
            }
        }
        let rest = if written.is_empty() || messages.first().is_none_or(|m| m.role() != "system") { 0 } else { 1 };
        let mut after_result = false;
        for message in &messages[rest..] {
            let is_result = message.role() == "tool";
            let follows = std::mem::replace(&mut after_result, is_result) && is_result;
            let mut message = message.clone();
            let calls = message.fields.shift_remove("tool_calls");
            if let Some(Value::Array(calls)) = calls {
                let text = self.content(&message.fields);
                let lines: Vec<String> = calls.iter().map(|call| self.call(call)).collect();
                let gap = if text.is_empty() { "" } else { "\n" };
                message.fields.insert("content".to_owned(), json!(format!("{text}{gap}{}", lines.join("\n"))));
            }
            if is_result {
                let text = self.result(&self.content(&message.fields));
                match written.last_mut().filter(|last| follows && last.weight == message.weight) {
                    Some(last) => {
                        last.fields
                            .insert("content".to_owned(), json!(format!("{}\n{text}", self.content(&last.fields))));
                        last.images.append(&mut message.images);
                        continue;
                    }
                    None => message.fields = Message::new("user", &text).fields,
                }
            }
            written.push(message);
        }
        written
    }

    fn instructions(self, tools: &Value) -> String {
        let tools: Vec<&Value> = tools.as_array().map(|list| list.iter().collect()).unwrap_or_default();
        let function = |tool: &Value| tool.get("function").unwrap_or(tool).clone();
        match self {
            AgentForm::Hermes => {
                let typed = |tool: &Value| json_dumps(&json!({"type": "function", "function": function(tool)}));
                let lines: Vec<String> = tools.into_iter().map(typed).collect();
                HERMES.replace("{tools}", &lines.join("\n"))
            }
            AgentForm::React => {
                let lines: Vec<String> = tools.into_iter().map(|tool| function(tool).to_string()).collect();
                format!(
                    "Tools that you may use, one JSON signature a line:\n{}\nA tool is used by two lines, after which its \
                     result is given as an observation:\nAction: the name of the tool\nAction Input: its arguments as \
                     JSON",
                    lines.join("\n")
                )
            }
        }
    }

    fn call(self, call: &Value) -> String {
        let function = call.get("function").unwrap_or(call);
        let name = function.get("name").and_then(Value::as_str).unwrap_or_default();
        let arguments = match function.get("arguments") {
            // A JSON value, as the call around it is.
            Some(other) if self == AgentForm::Hermes => json_dumps(other),
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
            None => "{}".to_owned(),
        };
        match self {
            AgentForm::Hermes => {
                format!("<tool_call>\n{{\"name\": {}, \"arguments\": {arguments}}}\n</tool_call>", json!(name))
            }
            AgentForm::React => format!("Action: {name}\nAction Input: {arguments}"),
        }
    }

    fn result(self, text: &str) -> String {
        match self {
            AgentForm::Hermes => format!("<tool_response>\n{text}\n</tool_response>"),
            AgentForm::React => format!("Observation: {text}"),
        }
    }

    fn content(self, fields: &Map<String, Value>) -> String {
        match fields.get("content") {
            Some(Value::String(text)) => text.clone(),
            None | Some(Value::Null) => String::new(),
            Some(other) if self == AgentForm::Hermes => json_dumps(other),
            Some(other) => other.to_string(),
        }
    }
}

/// The system prompt of the Hermes models, word for word: they and the servers that read their calls know no other.
const HERMES: &str = "You are a function calling AI model. You are provided with function signatures within \
    <tools></tools> XML tags. You may call one or more functions to assist with the user query. Don't make assumptions \
    about what values to plug into functions. Here are the available tools: <tools> {tools} </tools> Use the following \
    pydantic model json schema for each tool call you will make: {\"properties\": {\"name\": {\"title\": \"Name\", \
    \"type\": \"string\"}, \"arguments\": {\"title\": \"Arguments\", \"type\": \"object\"}}, \"required\": [\"name\", \
    \"arguments\"], \"title\": \"FunctionCall\", \"type\": \"object\"}\nFor each function call return a json object with \
    function name and arguments within <tool_call></tool_call> XML tags as follows:\n<tool_call>\n{\"name\": \
    <function-name>, \"arguments\": <args-dict>}\n</tool_call>";

#[cfg(test)]
mod tests {
    use super::*;

    fn content(fields: &Map<String, Value>) -> String {
        AgentForm::React.content(fields)
    }

    #[test]
    fn calls_and_results_become_text() {
        let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
        let mut call = Message::new("assistant", "");
        call.fields.insert("tool_calls".into(), json!([{"function": {"name": "f", "arguments": {"x": 1}}}]));
        call.weight = Some(0.5);
        let talk = [Message::new("user", "q"), call, Message::new("tool", "7"), Message::new("assistant", "a")];
        let written = AgentForm::Hermes.write(&talk, Some(&tools));
        let shown: Vec<(&str, String)> = written.iter().map(|m| (m.role(), content(&m.fields))).collect();
        assert_eq!(shown[0].0, "system");
        let prompt = &shown[0].1;
        let tool =
            "<tools> {\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": {}}} </tools> Use the";
        assert!(prompt.starts_with("You are a function calling AI model.") && prompt.contains(tool), "{prompt}");
        assert!(prompt.ends_with("<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-dict>}\n</tool_call>"));
        assert_eq!(shown[2].1, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>");
        assert_eq!((shown[3].0, shown[3].1.as_str()), ("user", "<tool_response>\n7\n</tool_response>"));
        assert_eq!((written.len(), written[2].weight), (5, Some(0.5)));
        assert!(!written[2].fields.contains_key("tool_calls"));
        let system = [Message::new("system", "S"), talk[0].clone()];
        let written = AgentForm::React.write(&system, Some(&tools));
        assert!(written.len() == 2 && content(&written[0].fields).starts_with("S\n\nTools that"));
    }

    #[test]
    fn results_in_a_row_are_one_message() {
        let mut call = Message::new("assistant", "Look:");
        let of = |arguments: Value| json!({"function": {"name": "é", "arguments": arguments}});
        call.fields.insert("tool_calls".into(), json!([of(json!({})), of(json!("London"))]));
        let mut value = Message::new("tool", "");
        value.fields.insert("content".into(), json!({"t": 18}));
        let mut apart = Message::new("tool", "c");
        apart.weight = Some(1.0);
        let talk = [Message::new("user", "q"), call, Message::new("tool", "a"), value, apart];
        let written = AgentForm::Hermes.write(&talk, None);
        let shown: Vec<(&str, String)> = written.iter().map(|m| (m.role(), content(&m.fields))).collect();
        let calls = "Look:\n<tool_call>\n{\"name\": \"é\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n\
            {\"name\": \"é\", \"arguments\": \"London\"}\n</tool_call>";
        assert_eq!(shown[1], ("assistant", calls.to_owned()));
        let results = "<tool_response>\na\n</tool_response>\n<tool_response>\n{\"t\": 18}\n</tool_response>";
        assert_eq!(shown[2], ("user", results.to_owned()));
        assert_eq!(shown[3], ("user", "<tool_response>\nc\n</tool_response>".to_owned()), "of another weight");
        let written = AgentForm::React.write(&talk, None);
        assert_eq!(content(&written[2].fields), "Observation: a\nObservation: {\"t\":18}");
        assert_eq!((written.len(), written[3].weight), (4, Some(1.0)));
    }
}
