//! Tool calls and tool definitions in the form of the OpenAI interface, from the forms that data bring.
//!
//! Knows no columns and no templates.

use serde_json::{Map, Value, json};

use super::columns::wrong;
use super::json_text::{as_list, opened};
use crate::error::{RowError, RowReason};
use crate::json_values::object_of;
use crate::json_values::parsed;

/// Names under which the arguments of a call are found.
const ARGUMENTS: [&str; 6] = ["arguments", "parameters", "args", "input", "kwargs", "tool_input"];

/// Other names of a function's name and of a call's number.
const NAMES: [&str; 2] = ["tool_name", "toolName"];
const IDS: [&str; 3] = ["call_id", "tool_call_id", "toolCallId"];

/// A call or a list of them, each possibly as a text of JSON: `{"name": …, "arguments": …}`, by itself or in `function`.
/// Arguments that are a text of a JSON object become the object; they may be missing.
pub(super) fn calls(place: &str, value: &Value) -> Result<Vec<Value>, RowError> {
    let list = match &*opened(value) {
        Value::Array(list) => list.clone(),
        // A columnar file may write no call as one without anything.
        Value::Object(fields) if fields.values().all(Value::is_null) => Vec::new(),
        one @ Value::Object(_) => vec![one.clone()],
        Value::String(text) if text.trim().is_empty() => Vec::new(),
        Value::String(_) => {
            let problem = format!("`{place}`: the call is a text that is not valid JSON");
            return Err(RowError::new(RowReason::WrongType, problem));
        }
        other => return Err(wrong(place, "a list of calls", other)),
    };
    list.iter().enumerate().map(|(i, one)| call(&format!("{place}[{i}]"), &opened(one))).collect()
}

fn call(place: &str, value: &Value) -> Result<Value, RowError> {
    let expected = "an object with a `name`";
    let mut call = value.as_object().cloned().ok_or_else(|| wrong(place, expected, value))?;
    for (ours, names) in [("name", &NAMES[..]), ("id", &IDS)] {
        let is_free = call.get(ours).is_none_or(Value::is_null);
        if let Some(name) = names.iter().find(|name| is_free && call.get(**name).is_some_and(Value::is_string)) {
            let value = call.shift_remove(*name).unwrap_or_default();
            call.insert(ours.to_owned(), value);
        }
    }
    let nested = call.get("function").filter(|function| !function.is_null()).cloned();
    let place = if nested.is_some() { format!("{place}.function") } else { place.to_owned() };
    let function = match nested.as_ref().map(|nested| opened(nested).into_owned()) {
        Some(Value::Object(function)) => function,
        // A call as `{"function": "name", "arguments": …}`.
        Some(name @ Value::String(_)) => {
            let mut function = parts(&mut call);
            function.insert("name".to_owned(), name);
            function
        }
        Some(other) => return Err(wrong(&place, expected, &other)),
        None => parts(&mut call),
    };
    match function.get("name") {
        None | Some(Value::Null) => {
            return Err(RowError::new(RowReason::MissingField, format!("`{place}` has no `name`")));
        }
        Some(Value::String(name)) if name.trim().is_empty() => {
            return Err(RowError::new(RowReason::MissingField, format!("`{place}.name` is empty")));
        }
        Some(Value::String(_)) => {}
        Some(other) => return Err(wrong(&format!("{place}.name"), "a string", other)),
    }
    let mut whole = Map::new();
    if !call.contains_key("type") {
        whole.insert("type".to_owned(), json!("function"));
    }
    whole.extend(call);
    whole.insert("type".to_owned(), json!("function"));
    let is_given = ARGUMENTS.iter().any(|name| function.get(*name).is_some_and(|value| !value.is_null()));
    let is_filled = |value: &Value| value.as_object().is_some_and(|of| !of.is_empty());
    if let Some((other, _)) =
        function.iter().chain(&whole).find(|(name, of)| !is_given && *name != "function" && is_filled(of))
    {
        let problem = format!("`{place}` has no `arguments`, but an object in `{other}`");
        return Err(RowError::new(RowReason::MissingField, problem));
    }
    let function = with_arguments(function);
    if let Some(text) = function.get(ARGUMENTS[0]).and_then(Value::as_str)
        && text.trim_start().starts_with(['{', '['])
        && parsed(text).is_none()
    {
        let problem = format!("`{place}.{}`: the arguments are a text that is not valid JSON", ARGUMENTS[0]);
        return Err(RowError::new(RowReason::WrongType, problem));
    }
    whole.insert("function".to_owned(), Value::Object(function));
    Ok(Value::Object(whole))
}

/// A function with its arguments under their usual name, as an object where they are a text of one or missing.
fn with_arguments(mut function: Map<String, Value>) -> Map<String, Value> {
    let given = ARGUMENTS.iter().find(|name| function.get(**name).is_some_and(|value| !value.is_null()));
    match given.and_then(|name| Some((*name, function.get(*name)?.clone()))) {
        Some((name, value)) => {
            if name != ARGUMENTS[0] {
                function.shift_remove(name);
            }
            function.insert(ARGUMENTS[0].to_owned(), object_of(&value).unwrap_or(value));
        }
        None => drop(function.insert(ARGUMENTS[0].to_owned(), json!({}))),
    }
    function
}

/// Takes name and arguments out of a call that has no `function`.
fn parts(call: &mut Map<String, Value>) -> Map<String, Value> {
    let names = ["name"].into_iter().chain(ARGUMENTS);
    names.filter_map(|name| Some((name.to_owned(), call.shift_remove(name)?))).collect()
}

/// Function definitions: a list, one definition, or either as a text of JSON, as may be each definition, its function
/// and its parameters. An empty list is none. Bare functions get the wrapping that templates expect.
pub fn tools(place: &str, value: Option<&Value>) -> Result<Option<Value>, RowError> {
    let value = match value {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(None),
        Some(Value::String(text)) => &serde_json::from_str(text)
            .map_err(|e| RowError::new(RowReason::WrongType, format!("column `{place}` is not valid JSON: {e}")))?,
        Some(other) => other,
    };
    let is_group = |value: &Value| GROUPS.iter().any(|name| value.get(*name).is_some());
    let is_one = |value: &Value| {
        is_group(value) || value.get("name").or_else(|| value.get("function")).is_some_and(|of| !of.is_array())
    };
    let list = match value {
        Value::Null => return Ok(None),
        one if one.is_object() && is_one(one) => vec![one.clone()],
        other => as_list(other).ok_or_else(|| wrong(place, "a list of tools", other))?.into_owned(),
    };
    let read = |(i, tool): (usize, &Value)| tools_of(&format!("{place}[{i}]"), tool);
    let tools = list.iter().enumerate().map(read).collect::<Result<Vec<_>, _>>()?.concat();
    Ok((!tools.is_empty()).then_some(Value::Array(tools)))
}

/// The definitions of one element: several, where it is a group of Google's interface.
fn tools_of(place: &str, tool: &Value) -> Result<Vec<Value>, RowError> {
    let tool = opened(tool);
    let group = GROUPS.iter().find_map(|name| as_list(tool.get(*name)?));
    match group {
        Some(group) => group.iter().map(|tool| tool_of(place, tool)).collect(),
        None => Ok(vec![tool_of(place, &tool)?]),
    }
}

/// Names of a group of definitions.
const GROUPS: [&str; 2] = ["functionDeclarations", "function_declarations"];

/// Other names of the schema of a function's parameters.
const SCHEMAS: [&str; 4] = ["input_schema", "inputSchema", "parameters_json_schema", "parametersJsonSchema"];

fn tool_of(place: &str, tool: &Value) -> Result<Value, RowError> {
    let Value::Object(mut tool) = opened(tool).into_owned() else {
        return Err(wrong(place, "the definition of a function", tool));
    };
    if tool.get("function").is_none_or(Value::is_null) && tool.contains_key("name") {
        tool.shift_remove("function");
        tool.shift_remove("type");
        tool = Map::from_iter([("type".to_owned(), json!("function")), ("function".to_owned(), Value::Object(tool))]);
    }
    if let Some(function) = tool.get_mut("function") {
        *function = opened(function).into_owned();
        if let Some(fields) = function.as_object_mut().filter(|fields| !fields.contains_key("parameters"))
            && let Some(schema) = SCHEMAS.iter().find_map(|name| fields.shift_remove(*name))
        {
            fields.insert("parameters".to_owned(), schema);
        }
        if let Some(parameters) = function.get_mut("parameters") {
            *parameters = opened(parameters).into_owned();
        }
    }
    Ok(Value::Object(tool))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_a_call_is_the_same_call() {
        let expected = [json!({"type": "function", "function": {"name": "f", "arguments": {"x": 1}}})];
        let flat = json!({"name": "f", "arguments": {"x": 1}});
        let in_text = json!({"name": "f", "arguments": "{\"x\": 1}"});
        let twice = json!({"name": "f", "arguments": "\"{\\\"x\\\": 1}\""});
        for form in [
            json!([{"type": "function", "function": flat}]),
            json!([{"function": in_text}]),
            json!([{"function": in_text.to_string()}]),
            json!([flat.to_string()]),
            json!([{"function": null, "name": "f", "arguments": {"x": 1}}]),
            json!([{"function": "f", "arguments": {"x": 1}}]),
            json!([{"type": "tool_use", "name": "f", "input": {"x": 1}}]),
            json!([{"name": "f", "parameters": {"x": 1}}]),
            json!([{"name": "f", "kwargs": {"x": 1}}]),
            json!([{"toolName": "f", "args": {"x": 1}}]),
            json!(json!([in_text]).to_string()),
            in_text.clone(),
            twice,
            json!(flat.to_string()),
        ] {
            assert_eq!(calls("c", &form).unwrap(), expected, "{form}");
        }
        let with_id = calls("c", &json!([{"id": "a", "name": "f", "arguments": "London"}])).unwrap();
        let kept = json!({"type": "function", "id": "a", "function": {"name": "f", "arguments": "London"}});
        assert_eq!(with_id, [kept]);
        assert_eq!(
            calls("c", &json!([{"name": "f", "arguments": ""}])).unwrap()[0]["function"]["arguments"],
            json!({})
        );
        for arguments in [json!({"name": "f"}), json!({"name": "f", "arguments": null})] {
            assert_eq!(calls("c", &json!([arguments])).unwrap()[0]["function"]["arguments"], json!({}), "{arguments}");
        }
        for (call, problem) in [
            (json!({"name": "f", "payload": {"x": 1}}), "`c[0]` has no `arguments`, but an object in `payload`"),
            (json!({"name": " ", "arguments": {}}), "`c[0].name` is empty"),
        ] {
            assert!(calls("c", &json!([call])).unwrap_err().detail.contains(problem), "{call}");
        }
        for none in [json!(""), json!([]), json!({}), json!({"name": null, "arguments": null})] {
            assert!(calls("c", &none).unwrap().is_empty(), "{none}");
        }
        for broken in ["{\"x\": 1", "{'x': True}"] {
            let error = calls("c", &json!([{"function": {"name": "f", "arguments": broken}}])).unwrap_err();
            assert!(
                error.detail.contains("`c[0].function.arguments`: the arguments are a text that is not valid"),
                "{error}"
            );
        }
        assert!(calls("c", &json!("f(1)")).unwrap_err().detail.contains("a text that is not valid JSON"));
    }

    #[test]
    fn tools_are_found_in_texts_of_json() {
        let schema = json!({"type": "object", "properties": {}});
        let function = json!({"name": "f", "parameters": schema});
        let expected = json!([{"type": "function", "function": function}]);
        let in_text = json!({"name": "f", "parameters": schema.to_string()});
        for form in [
            expected.clone(),
            json!(expected.to_string()),
            json!([expected[0].to_string()]),
            json!([function]),
            json!([in_text]),
            json!([{"type": "function", "function": in_text.to_string()}]),
            function.clone(),
            json!(function.to_string()),
            json!([{"name": "f", "input_schema": schema}]),
            json!([{"name": "f", "inputSchema": schema.to_string()}]),
            json!([{"functionDeclarations": [function]}]),
            json!({"function_declarations": [function]}),
        ] {
            assert_eq!(tools("tools", Some(&form)).unwrap(), Some(expected.clone()), "{form}");
        }
        for none in [json!(null), json!(""), json!([]), json!("[]"), json!("null")] {
            assert_eq!(tools("tools", Some(&none)).unwrap(), None);
        }
        let error = tools("tools", Some(&json!(["f(x)"]))).unwrap_err();
        assert!(error.detail.contains("`tools[0]`: expected the definition of a function"), "{error}");
        assert!(tools("tools", Some(&json!("f(x)"))).unwrap_err().detail.contains("not valid JSON"));
    }
}
