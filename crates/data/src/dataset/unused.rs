//! Columns of a set that look like data and are not read.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::{DatasetKind, SystemPrompt};

/// Largest number of columns that are named.
const MOST: usize = 16;

/// The columns of some rows that hold lists, objects or texts of several words, and that the type does not read.
pub(crate) fn unused(rows: &[&Map<String, Value>], kind: &DatasetKind) -> Vec<String> {
    let used = used(kind);
    let mut found: Vec<String> = Vec::new();
    for (name, value) in rows.iter().flat_map(|row| row.iter()) {
        let is_new = found.len() < MOST && !found.contains(name);
        let is_data = || DATA.contains(&name.as_str()) && !value.is_null() && *value != "";
        if is_new && !used.contains(&name.as_str()) && (looks_like_data(value) || is_data()) {
            found.push(name.clone());
        }
    }
    found.sort();
    found
}

/// The names of the columns that some rows fill.
pub(crate) fn filled(rows: &[&Map<String, Value>]) -> HashSet<String> {
    rows.iter().flat_map(|row| row.iter()).filter(|(_, value)| !value.is_null()).map(|(name, _)| name.clone()).collect()
}

/// Adds the columns of a row that look like data, that the type does not read and that no earlier row fills: `known` has those.
pub(crate) fn late(row: &Map<String, Value>, kind: &DatasetKind, known: &mut HashSet<String>, found: &mut Vec<String>) {
    for (name, value) in row {
        let is_new = found.len() < MOST && !known.contains(name) && looks_like_data(value);
        if is_new && known.insert(name.clone()) && !used(kind).contains(&name.as_str()) {
            found.push(name.clone());
        }
    }
}

/// Columns whose values are data however short they are.
const DATA: [&str; 13] = [
    "answer",
    "response",
    "output",
    "completion",
    "solution",
    "reasoning",
    "reasoning_content",
    "thinking",
    "label",
    "target",
    "weight",
    "sample_weight",
    "image",
];

/// Numbers, flags and single words say something of a row, such as its number or its source. Words of several scripts are
/// not separated by spaces.
fn looks_like_data(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
        Value::String(text) => {
            text.trim().contains(char::is_whitespace) || text.chars().any(|c| !c.is_ascii() && c.is_alphabetic())
        }
        Value::Array(list) => !list.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
    }
}

/// The columns that the type reads where they are there, and that none of some rows has.
pub(crate) fn absent(rows: &[&Map<String, Value>], kind: &DatasetKind) -> Vec<String> {
    let optional = match kind {
        DatasetKind::Tokens | DatasetKind::Text { .. } => Vec::new(),
        DatasetKind::Instruction(of) => vec![of.input.as_ref()],
        DatasetKind::Conversation(of) => vec![of.system.as_ref(), of.tools.as_ref()],
        DatasetKind::Preference(of) => {
            vec![of.question.system.as_ref(), of.question.tools.as_ref(), of.margin.as_ref()]
        }
        DatasetKind::Unpaired(of) => vec![of.question.system.as_ref(), of.question.tools.as_ref()],
        DatasetKind::Auto(_) => panic!("the type of a set is recognised before its columns are compared"),
    };
    let is_absent = |name: &&String| !rows.is_empty() && rows.iter().all(|row| !row.contains_key(*name));
    optional.into_iter().flatten().filter(is_absent).cloned().collect()
}

fn used(kind: &DatasetKind) -> Vec<&str> {
    let (always, maybe) = match kind {
        DatasetKind::Tokens => (vec!["input_ids", "labels", "position_ids", "weights"], vec![]),
        DatasetKind::Text { field } => (vec![field.as_str()], vec![]),
        DatasetKind::Instruction(of) => {
            let system = match &of.system {
                SystemPrompt::Field(name) => Some(name),
                SystemPrompt::None | SystemPrompt::Fixed(_) => None,
            };
            let own = [of.instruction.as_str(), &of.output].into_iter().chain(of.open.iter().copied()).collect();
            (own, vec![of.input.as_ref(), of.history.as_ref(), system])
        }
        DatasetKind::Conversation(of) => {
            let own = [of.messages.as_str()].into_iter().chain(of.open.iter().copied()).collect();
            (own, vec![of.completion.as_ref(), of.system.as_ref(), of.tools.as_ref()])
        }
        DatasetKind::Preference(of) => return of.names(),
        DatasetKind::Unpaired(of) => return of.names(),
        DatasetKind::Auto(_) => panic!("the type of a set is recognised before its columns are compared"),
    };
    always.into_iter().chain(maybe.into_iter().flatten().map(String::as_str)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{ConversationColumns, InstructionColumns};
    use super::*;
    use serde_json::json;

    #[test]
    fn data_that_is_not_read_is_named() {
        let row = json!({"messages": [{"role": "user"}], "tools": [{"name": "f"}], "id": 7, "source": "web", "ok": true,
            "history": [["a", "b"]], "images": [], "image": "a.png", "note": "two words", "answer": "yes", "备注": "没有空格"});
        let Value::Object(row) = row else { unreachable!() };
        let of = |tools: Option<&str>| {
            let messages = "messages".to_owned();
            let tools = tools.map(str::to_owned);
            DatasetKind::Conversation(ConversationColumns { messages, tools, ..ConversationColumns::default() })
        };
        assert_eq!(unused(&[&row], &of(Some("tools"))), ["answer", "history", "image", "note", "备注"]);
        assert_eq!(unused(&[&row, &row], &of(None)), ["answer", "history", "image", "note", "tools", "备注"]);
        let columns = InstructionColumns {
            instruction: "note".into(),
            output: "note".into(),
            history: Some("history".into()),
            ..InstructionColumns::default()
        };
        assert_eq!(
            unused(&[&row], &DatasetKind::Instruction(columns)),
            ["answer", "image", "messages", "tools", "备注"]
        );
    }

    #[test]
    fn columns_that_no_row_has_are_named() {
        let Value::Object(row) = json!({"messages": [], "tools": null}) else { unreachable!() };
        let of = |tools: &str| {
            let (system, tools) = (Some("persona".to_owned()), Some(tools.to_owned()));
            DatasetKind::Conversation(ConversationColumns { system, tools, ..ConversationColumns::default() })
        };
        assert_eq!(absent(&[&row], &of("tools")), ["persona"]);
        assert_eq!(absent(&[&row], &of("tolls")), ["persona", "tolls"]);
        assert!(absent(&[], &of("tolls")).is_empty());
    }
}
