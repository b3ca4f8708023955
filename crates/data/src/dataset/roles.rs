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
            "tool_response",
            "tool_result",
            "tool_results",
            "ipython",
        ],
    ),
];

/// Roles of messages whose content is a call.
pub(super) const CALLERS: [&str; 3] = ["function_call", "tool_call", "tool_calls"];

/// Names of a question and its answer in an object that holds both.
pub(super) const PAIRS: [(&str, &str); 4] =
    [("human", "assistant"), ("user", "assistant"), ("human", "gpt"), ("user", "gpt")];

/// True for an object that holds a question and its answer.
pub(super) fn is_pair(value: &Value) -> bool {
    let is_text = |name: &str| value.get(name).is_some_and(Value::is_string);
    value.get("role").is_none() && PAIRS.iter().any(|(question, answer)| is_text(question) && is_text(answer))
}

/// True for the name of a role whose content is the result of a tool or a call.
pub(super) fn stands_for_result(role: &str) -> bool {
    CALLERS.contains(&role) || is_name_of("tool", role)
}

/// True for a name that other tools have for one of our roles, and for that itself.
pub(super) fn is_name_of(ours: &str, role: &str) -> bool {
    let lower = role.to_ascii_lowercase();
    ROLES.iter().any(|(of, names)| *of == ours && names.contains(&lower.as_str()))
}
