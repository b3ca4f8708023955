//! `type: auto`: detects the type of a dataset from the names and values of its columns.
//!
//! A pure function of a few rows. It describes what it found, and rejects rather than guesses.

use serde_json::{Map, Value};

use super::{ConversationColumns, DatasetKind, InstructionColumns, SystemPrompt};
use crate::rows::json::kind;

/// Rows that are examined.
pub(crate) const SAMPLE: usize = 64;

/// What the user says of the columns although the type is left open. Empty names are open.
#[derive(Clone, Debug, Default)]
pub struct AutoColumns {
    /// The column with a text.
    pub text: String,
    pub instruction: InstructionColumns,
    pub conversation: ConversationColumns,
}

/// Columns that hold messages, by their usual names.
const MESSAGES: [&str; 7] = ["messages", "conversations", "conversation", "dialogue", "dialog", "chat", "turns"];

/// A task and the names under which its answer is found.
const PAIRS: [(&str, &[&str]); 6] = [
    ("instruction", &["output", "response", "answer", "completion"]),
    ("prompt", &["completion", "response", "output", "answer"]),
    ("question", &["answer", "response", "output"]),
    ("query", &["response", "answer", "output"]),
    ("problem", &["solution", "answer"]),
    ("input", &["output"]),
];

/// What was recognised.
#[derive(Clone, Debug)]
pub(crate) struct Detected {
    pub kind: DatasetKind,
    /// For the user, such as `conversation (ShareGPT form) in `conversations``.
    pub words: String,
}

/// A problem and what helps.
pub(crate) type Refused = (String, String);

struct Columns<'a> {
    rows: &'a [&'a Map<String, Value>],
}

impl<'a> Columns<'a> {
    /// The values of a column that are not null.
    fn values(&self, name: &str) -> impl Iterator<Item = &'a Value> {
        self.rows.iter().filter_map(|row| row.get(name)).filter(|value| !value.is_null())
    }

    /// Whether a column is there and each of its values is of the wanted kind.
    fn all(&self, name: &str, is: impl Fn(&Value) -> bool) -> bool {
        self.values(name).next().is_some() && self.values(name).all(is)
    }

    fn is_text(&self, name: &str) -> bool {
        self.all(name, Value::is_string)
    }

    fn names(&self) -> Vec<&'a str> {
        let mut names: Vec<&str> = Vec::new();
        for name in self.rows.iter().flat_map(|row| row.keys()) {
            if !names.contains(&name.as_str()) {
                names.push(name);
            }
        }
        names
    }

    fn first_of(&self, names: &[&'static str], is: impl Fn(&str) -> bool) -> Option<&'static str> {
        names.iter().copied().find(|name| is(name))
    }
}

/// Recognises the type of a set by some of its rows.
pub(crate) fn detect(rows: &[&Map<String, Value>], hints: &AutoColumns) -> Result<Detected, Refused> {
    let columns = Columns { rows };
    let is_given =
        !hints.conversation.messages.is_empty() || !hints.instruction.instruction.is_empty() || !hints.text.is_empty();
    if !is_given && let Some(refused) = preference(&columns) {
        return Err(refused);
    }
    let found = conversation(&columns, &hints.conversation)
        .or_else(|| instruction(&columns, &hints.instruction))
        .or_else(|| tokens(&columns))
        .or_else(|| text(&columns, hints));
    found.ok_or_else(|| {
        let shown = columns.names().into_iter().map(|name| {
            let value = columns.values(name).next().unwrap_or(&Value::Null);
            format!("`{name}` ({})", kind(value))
        });
        let problem = format!("the type cannot be detected from the columns {}", shown.collect::<Vec<_>>().join(", "));
        (problem, "set `type` and the names of its columns".to_owned())
    })
}

/// Rows that hold a good and a bad answer to the same question, or an answer with a verdict.
fn preference(columns: &Columns<'_>) -> Option<Refused> {
    let has = |name: &str| columns.values(name).next().is_some();
    let pair = [("chosen", "rejected"), ("chosen_response", "rejected_response"), ("response_j", "response_k")]
        .into_iter()
        .find(|(good, bad)| has(good) && has(bad));
    let hint = "preferences are not trained on; to train on one of the answers, set `type` and name its column";
    if let Some((good, bad)) = pair {
        return Some((format!("these are preference pairs: columns `{good}` and `{bad}`"), hint.to_owned()));
    }
    let verdict = has("prompt") && has("completion") && columns.all("label", Value::is_boolean);
    verdict.then(|| ("these are answers with a verdict: column `label`".to_owned(), hint.to_owned()))
}

fn conversation(columns: &Columns<'_>, hints: &ConversationColumns) -> Option<Detected> {
    let theirs = |ours: &str| hints.properties.get(ours).map_or(ours.to_owned(), Clone::clone);
    let (role, content) = (theirs("role"), theirs("content"));
    let has = |name: &str, keys: &[&str]| {
        columns.all(name, |value| {
            let is_message = |m: &Value| keys.iter().all(|key| m.get(*key).is_some());
            value.as_array().is_some_and(|list| list.iter().all(is_message))
        }) && columns.values(name).any(|value| value.as_array().is_some_and(|list| !list.is_empty()))
    };
    let form_of = |name: &str| -> Option<&'static str> {
        if has(name, &["from", "value"]) {
            return Some("ShareGPT form");
        }
        has(name, &[&role]).then_some(if role == "role" && content == "content" { "OpenAI form" } else { "own names" })
    };
    let given = (!hints.messages.is_empty()).then_some(hints.messages.as_str());
    let usual = || columns.first_of(&MESSAGES, |name| form_of(name).is_some());
    let any = || columns.names().into_iter().find(|name| form_of(name).is_some());
    let name = given.or_else(usual).or_else(any)?;
    let form = form_of(name)?;
    let opens_with_system = columns.values(name).any(|list| {
        let first = &list[0];
        [&first[role.as_str()], &first["from"]].into_iter().any(|role| role == "system")
    });
    let system = ["system", "system_prompt"].into_iter().find(|name| columns.is_text(name) && !opens_with_system);
    let list_or_text = |value: &Value| value.is_array() || value.is_string();
    let tools = ["tools", "functions"].into_iter().find(|name| columns.all(name, list_or_text));
    let found = ConversationColumns {
        messages: name.to_owned(),
        system: hints.system.clone().or(system.map(str::to_owned)),
        tools: hints.tools.clone().or(tools.map(str::to_owned)),
        properties: hints.properties.clone(),
    };
    let mut words = format!("conversation ({form}) in `{name}`");
    let further = [("system prompt", &found.system), ("tools", &found.tools)];
    further.into_iter().for_each(|(what, column)| {
        if let Some(column) = column {
            words += &format!(", {what} in `{column}`");
        }
    });
    Some(Detected { kind: DatasetKind::Conversation(found), words })
}

fn instruction(columns: &Columns<'_>, hints: &InstructionColumns) -> Option<Detected> {
    let given = (!hints.instruction.is_empty() && !hints.output.is_empty())
        .then(|| (hints.instruction.clone(), hints.output.clone()));
    let usual = || {
        PAIRS.into_iter().find_map(|(task, answers)| {
            let answer = columns.first_of(answers, |name| columns.is_text(name))?;
            columns.is_text(task).then(|| (task.to_owned(), answer.to_owned()))
        })
    };
    let (task, answer) = given.or_else(usual)?;
    let is_other = |name: &&str| *name != task && *name != answer;
    let input = ["input", "context"].into_iter().filter(is_other).find(|name| columns.is_text(name));
    let system = ["system", "system_prompt"].into_iter().find(|name| columns.is_text(name));
    let found = InstructionColumns {
        instruction: task.clone(),
        output: answer.clone(),
        input: hints.input.clone().or(input.filter(|_| task == "instruction").map(str::to_owned)),
        system: match (&hints.system, system) {
            (SystemPrompt::None, Some(name)) => SystemPrompt::Field(name.to_owned()),
            (given, _) => given.clone(),
        },
        ..hints.clone()
    };
    let form = match task.as_str() {
        "instruction" => "Alpaca form",
        "prompt" => "prompt/completion form",
        _ => "question and answer",
    };
    let mut words = format!("instruction ({form}): `{task}` and `{answer}`");
    if let Some(input) = &found.input {
        words += &format!(", input in `{input}`");
    }
    if let SystemPrompt::Field(name) = &found.system {
        words += &format!(", system prompt in `{name}`");
    }
    Some(Detected { kind: DatasetKind::Instruction(found), words })
}

fn tokens(columns: &Columns<'_>) -> Option<Detected> {
    let is_ids = |value: &Value| value.as_array().is_some_and(|list| list.iter().all(Value::is_number));
    let words = "token ids in `input_ids`".to_owned();
    columns.all("input_ids", is_ids).then_some(Detected { kind: DatasetKind::Tokens, words })
}

fn text(columns: &Columns<'_>, hints: &AutoColumns) -> Option<Detected> {
    let given = (!hints.text.is_empty()).then_some(hints.text.as_str());
    let usual = || columns.first_of(&["text", "content", "document"], |name| columns.is_text(name));
    let only = || match columns.names()[..] {
        [only] => columns.is_text(only).then_some(only),
        _ => None,
    };
    let field = given.or_else(usual).or_else(only)?.to_owned();
    let words = format!("text in `{field}`");
    Some(Detected { kind: DatasetKind::Text { field }, words })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn found(row: Value) -> Result<Detected, Refused> {
        let Value::Object(row) = row else { panic!("a row is an object") };
        detect(&[&row], &AutoColumns::default())
    }

    #[test]
    fn the_usual_forms_are_distinguished() {
        let message = json!([{"role": "user", "content": "hi"}]);
        for (row, words) in [
            (json!({"id": 1, "messages": message}), "conversation (OpenAI form) in `messages`"),
            (
                json!({"conversations": [{"from": "human", "value": "hi"}], "system": "s", "tools": "[]"}),
                "conversation (ShareGPT form) in `conversations`, system prompt in `system`, tools in `tools`",
            ),
            (json!({"talk": message, "n": 1}), "conversation (OpenAI form) in `talk`"),
            (
                json!({"instruction": "a", "input": "", "output": "b"}),
                "instruction (Alpaca form): `instruction` and `output`, input in `input`",
            ),
            (
                json!({"prompt": "a", "completion": "b"}),
                "instruction (prompt/completion form): `prompt` and `completion`",
            ),
            (json!({"question": "a", "answer": "b"}), "instruction (question and answer): `question` and `answer`"),
            (json!({"input_ids": [1, 2], "labels": [1, 2]}), "token ids in `input_ids`"),
            (json!({"url": "u", "text": "t"}), "text in `text`"),
            (json!({"sql": "t"}), "text in `sql`"),
        ] {
            assert_eq!(found(row).unwrap().words, words);
        }
    }

    #[test]
    fn preferences_are_recognised_and_refused() {
        let pairs = found(json!({"conversations": [], "chosen": {}, "rejected": {}})).unwrap_err();
        assert!(pairs.0.contains("preference pairs") && pairs.1.contains("not trained on"), "{pairs:?}");
        let verdict = found(json!({"prompt": "a", "completion": "b", "label": true})).unwrap_err();
        assert!(verdict.0.contains("verdict"), "{verdict:?}");
    }

    #[test]
    fn what_cannot_be_detected_is_reported_with_the_columns() {
        let (problem, hint) = found(json!({"a": "x", "b": 1})).unwrap_err();
        assert_eq!(problem, "the type cannot be detected from the columns `a` (a string), `b` (a number)");
        assert!(hint.contains("set `type`"));
    }

    #[test]
    fn what_the_user_names_wins() {
        let row = json!({"messages": [{"role": "user", "content": "hi"}], "essay": "t"});
        let Value::Object(row) = row else { unreachable!() };
        let hints = AutoColumns {
            conversation: ConversationColumns { messages: "messages".into(), ..Default::default() },
            ..Default::default()
        };
        assert!(detect(&[&row], &hints).unwrap().words.contains("in `messages`"));
    }
}
