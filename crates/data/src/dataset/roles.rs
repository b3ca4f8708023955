//! Names of roles in messages of other tools.
//!
//! Knows names; no messages.

use serde_json::Value;

/// Roles with the names that other tools have for them; every other name is the template's business.
pub(super) const ROLES: [(&str, &[&str]); 4] = [
    ("system", &["system", "system_prompt"]),
    ("user", &["user", "human", "prompter"]),
    ("assistant", &["assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "ai"]),
    (
        "tool",
        &[
            "tool",
            "observation",
            "function",
            "function_response",
            "function_result",
            "tool_response",
            "tool_responses",
            "tool_result",
            "tool_results",
            "ipython",
        ],
    ),
];

/// Roles of messages whose content is a call.
const CALLERS: [&str; 5] = ["function_call", "function_calls", "tool_call", "tool_calls", "tool_use"];

/// A name in small letters, with its words apart by `_`: `functionCall` and `Function-Call` are `function_call`.
pub(super) fn plain_name(name: &str) -> String {
    let mut plain = String::with_capacity(name.len() + 2);
    let mut was_small = false;
    for sign in name.trim().chars() {
        if sign.is_ascii_uppercase() && was_small {
            plain.push('_');
        }
        was_small = sign.is_ascii_lowercase();
        plain.push(if matches!(sign, '-' | ' ') { '_' } else { sign.to_ascii_lowercase() });
    }
    plain
}

/// Names of a question and its answer in an object that holds both.
pub(super) const PAIRS: [(&str, &str); 4] =
    [("human", "assistant"), ("user", "assistant"), ("human", "gpt"), ("user", "gpt")];

/// True for an object that holds a question and its answer.
pub(super) fn is_pair(value: &Value) -> bool {
    let is_text = |name: &str| value.get(name).is_some_and(Value::is_string);
    value.get("role").is_none() && PAIRS.iter().any(|(question, answer)| is_text(question) && is_text(answer))
}

/// True for the name of a role whose content is a call.
pub(super) fn is_caller(role: &str) -> bool {
    CALLERS.contains(&plain_name(role).as_str())
}

/// True for the name of a role whose content is the result of a tool or a call.
pub(super) fn stands_for_result(role: &str) -> bool {
    is_caller(role) || is_name_of("tool", role)
}

/// True for a name that other tools have for one of our roles, and for that itself.
pub(super) fn is_name_of(ours: &str, role: &str) -> bool {
    let (lower, plain) = (role.to_ascii_lowercase(), plain_name(role));
    let is_among = |names: &[&str]| names.contains(&lower.as_str()) || names.contains(&plain.as_str());
    ROLES.iter().any(|(of, names)| *of == ours && is_among(names))
}
