//! The padding of columnar files: parquet and arrow give every struct of a column the fields of all others, as nulls.
//!
//! A columnar file says nothing of the difference between a null and a field that is not there, so its nulls are left
//! out. In other files a null means what it says, unless the row shows that it was exported from such a file: a null
//! where none can be. Knows messages and tools before they are read; no files.

use serde_json::{Map, Value};

/// Keywords of a schema whose value may be null, and hold anything.
const FREE: [&str; 5] = ["default", "const", "example", "examples", "enum"];

/// Returns true if a row's messages or tools hold a null that only a columnar file writes: calls of a message that makes
/// none, a schema that is null, or an argument that the called tool does not have.
pub(crate) fn shows(messages: &[Value], tools: Option<&Value>) -> bool {
    let tools = tools.and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let speaks = |message: &Value| {
        let role = message.get("role").or_else(|| message.get("from")).and_then(Value::as_str);
        role.is_some_and(|role| ["user", "system", "tool", "human"].contains(&role))
    };
    messages.iter().any(|message| speaks(message) && message.get("tool_calls").is_some_and(Value::is_null))
        || tools.iter().any(|tool| holds_null(tool, false))
        || messages.iter().flat_map(calls).any(|call| has_foreign_null(call, tools))
}

/// The functions that a message calls.
fn calls(message: &Value) -> impl Iterator<Item = &Value> {
    let calls = message.get("tool_calls").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    calls.iter().chain(message.get("function_call"))
}

/// Returns true if a definition holds a null where none can be. `names`: the keys are names of properties.
fn holds_null(definition: &Value, names: bool) -> bool {
    let Value::Object(fields) = definition else { return false };
    fields.iter().any(|(name, value)| match value {
        _ if !names && FREE.contains(&name.as_str()) => false,
        Value::Null => true,
        Value::Array(list) => list.iter().any(|value| holds_null(value, false)),
        value => holds_null(value, !names && name == "properties"),
    })
}

fn has_foreign_null(call: &Value, tools: &[Value]) -> bool {
    let function = call.get("function").filter(|function| !function.is_null()).unwrap_or(call);
    let Some(Value::Object(arguments)) = function.get("arguments") else { return false };
    let definition = |tool: &&Value| tool["function"].get("name").or(tool.get("name")) == function.get("name");
    let Some(tool) = tools.iter().find(definition) else { return false };
    let schema = tool.get("function").unwrap_or(tool);
    let Some(known) = schema.pointer("/parameters/properties").and_then(Value::as_object) else { return false };
    arguments.iter().any(|(name, value)| value.is_null() && known.get(name).is_none_or(Value::is_null))
}

/// Fields that are there although nothing is in them: a call without arguments, a function without parameters.
const EMPTY: [&str; 7] = ["arguments", "parameters", "properties", "input", "args", "input_schema", "inputSchema"];

/// A value without the nulls of the objects in it, and without objects of nothing else; those of lists stay, for a list has no
/// padding.
pub(crate) fn stripped(value: &Value) -> Value {
    let is_bare = |value: &Value| value.as_object().is_some_and(Map::is_empty);
    match value {
        Value::Object(fields) => {
            let fields = fields.iter().filter(|(_, value)| !value.is_null());
            let fields = fields.map(|(name, value)| (name, value, stripped(value)));
            let is_kept = |(name, value, stripped): &(&String, &Value, Value)| {
                !is_bare(stripped) || is_bare(value) || EMPTY.contains(&name.as_str())
            };
            Value::Object(fields.filter(is_kept).map(|(name, _, stripped)| (name.clone(), stripped)).collect())
        }
        Value::Array(list) => Value::Array(list.iter().map(stripped).collect()),
        other => other.clone(),
    }
}

/// The nulls among the arguments of a message's calls.
pub(crate) fn null_arguments(message: &Value) -> usize {
    let arguments = calls(message).filter_map(|call| {
        let function = call.get("function").filter(|function| !function.is_null()).unwrap_or(call);
        function.get("arguments")?.as_object()
    });
    arguments.map(|arguments| arguments.values().filter(|value| value.is_null()).count()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tool(properties: Value) -> Value {
        json!({"function": {"name": "f", "parameters": {"type": "object", "properties": properties}}})
    }

    fn call(arguments: Value) -> Value {
        json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]})
    }

    #[test]
    fn a_null_where_none_can_be_is_padding() {
        let text = json!({"type": "string"});
        let plain = json!([tool(json!({"city": text, "unit": {"type": ["string", "null"], "default": null}}))]);
        assert!(!shows(&[call(json!({"city": "x", "unit": null}))], Some(&plain)), "a null of its own");
        assert!(shows(&[call(json!({"city": "x", "a": null}))], Some(&plain)), "another tool's argument");
        assert!(shows(&[json!({"role": "user", "content": "x", "tool_calls": null})], None));
        assert!(!shows(&[json!({"role": "assistant", "content": null, "tool_calls": null})], None));
        for padded in [
            tool(json!({"city": text, "a": null})),
            tool(json!({"default": null})),
            tool(json!({"city": {"type": "string", "enum": ["a"], "items": null}})),
            tool(json!({"city": {"anyOf": [{"type": "string", "items": null}]}})),
        ] {
            assert!(shows(&[], Some(&json!([padded]))), "{padded}");
        }
    }

    #[test]
    fn stripping_keeps_what_lists_hold() {
        let value = json!({"a": null, "b": [{"c": null, "d": 1}, null], "e": {"f": {"g": null}}});
        assert_eq!(stripped(&value), json!({"b": [{"d": 1}, null]}));
        let padded = json!({"function": {"name": "f", "arguments": {"a": {"b": null}, "c": null}}, "d": {}});
        assert_eq!(stripped(&padded), json!({"function": {"name": "f", "arguments": {}}, "d": {}}));
        assert_eq!(null_arguments(&call(json!({"a": null, "b": 1, "c": null}))), 2);
    }
}
