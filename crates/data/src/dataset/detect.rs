//! `type: auto`: detects the type of a dataset from the names and values of its columns.
//!
//! A pure function of a few rows. It describes what it found, and rejects rather than guesses.

use serde_json::{Map, Value};

use super::json_text::{as_list, opened};
use super::{ConversationColumns, DatasetKind, InstructionColumns, SystemPrompt};
use crate::preference::{Found, PreferenceColumns, Purpose, UnpairedColumns, found_pair, found_unpaired};
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
    pub preference: PreferenceColumns,
    pub unpaired: UnpairedColumns,
}

/// Columns that hold messages, by their usual names.
pub(crate) const MESSAGES: [&str; 8] =
    ["messages", "conversations", "conversation", "dialogue", "dialog", "chat", "turns", "contents"];

/// Columns of a system prompt.
pub(crate) const SYSTEM: [&str; 4] = ["system", "system_prompt", "systemInstruction", "system_instruction"];

/// The column of a prompt, and those of its completion.
const PROMPT: &str = "prompt";
const COMPLETIONS: &[&str] = &["completion", "response", "output", "answer"];

/// The column of the turns before a task.
const HISTORY: &str = "history";

/// A task and the names under which its answer is found.
const PAIRS: [(&str, &[&str]); 6] = [
    ("instruction", &["output", "response", "answer", "completion"]),
    (PROMPT, COMPLETIONS),
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

/// Some rows by their columns.
pub(crate) struct Columns<'a> {
    pub(crate) rows: &'a [&'a Map<String, Value>],
}

impl<'a> Columns<'a> {
    /// The values of a column that are not null.
    pub(crate) fn values(&self, name: &str) -> impl Iterator<Item = &'a Value> {
        self.rows.iter().filter_map(|row| row.get(name)).filter(|value| !value.is_null())
    }

    /// Whether a column is there and each of its values is of the wanted kind.
    pub(crate) fn all(&self, name: &str, is: impl Fn(&Value) -> bool) -> bool {
        self.values(name).next().is_some() && self.values(name).all(is)
    }

    pub(crate) fn is_text(&self, name: &str) -> bool {
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

    pub(crate) fn first_of(&self, names: &[&'static str], is: impl Fn(&str) -> bool) -> Option<&'static str> {
        names.iter().copied().find(|name| is(name))
    }
}

/// Recognises the type of a set by some of its rows.
pub(crate) fn detect(rows: &[&Map<String, Value>], hints: &AutoColumns, purpose: Purpose) -> Result<Detected, Refused> {
    let columns = Columns { rows };
    let is_given =
        !hints.conversation.messages.is_empty() || !hints.instruction.instruction.is_empty() || !hints.text.is_empty();
    if !is_given {
        if let Some(found) = preference(rows, hints, purpose) {
            return found;
        }
        if let Some(refused) = steps(&columns).or_else(|| no_json(&columns)) {
            return Err(refused);
        }
    }
    if let Some(found) = conversation(&columns, &hints.conversation)
        .or_else(|| instruction(&columns, &hints.instruction))
        .or_else(|| tokens(&columns))
    {
        return Ok(found);
    }
    if !is_given && let Some(refused) = prompt_only(&columns) {
        return Err(refused);
    }
    text(&columns, hints).ok_or_else(|| {
        let shown = columns.names().into_iter().map(|name| {
            let value = columns.values(name).next().unwrap_or(&Value::Null);
            format!("`{name}` ({})", kind(value))
        });
        let problem = format!("the type cannot be detected from the columns {}", shown.collect::<Vec<_>>().join(", "));
        (problem, "set `type` and the names of its columns".to_owned())
    })
}

/// Rows that hold a good and a bad answer to the same question, or answers with a verdict.
fn preference(
    rows: &[&Map<String, Value>],
    hints: &AutoColumns,
    purpose: Purpose,
) -> Option<Result<Detected, Refused>> {
    if let Some(pair) = found_pair(rows, &hints.preference) {
        let of = |found: Found<PreferenceColumns>| Detected {
            kind: DatasetKind::Preference(found.columns),
            words: found.words,
        };
        return Some(pair.map(of));
    }
    let found = found_unpaired(rows, &hints.unpaired, purpose == Purpose::Answers)?;
    Some(Ok(Detected { kind: DatasetKind::Unpaired(found.columns), words: found.words }))
}

/// Rows that hold a verdict on each step of an answer.
fn steps(columns: &Columns<'_>) -> Option<Refused> {
    let has = |name: &str| columns.values(name).next().is_some();
    let hint = "steps are not trained on; to train on the answers, set `type` and name their column";
    let steps = has("completions") && columns.all("labels", Value::is_array) && !has("input_ids");
    steps.then(|| {
        ("these are steps with a verdict each: columns `completions` and `labels`".to_owned(), hint.to_owned())
    })
}

/// Messages as a text in the notation of a programming language.
fn no_json(columns: &Columns<'_>) -> Option<Refused> {
    let is_broken = |value: &Value| {
        let text = value.as_str().map_or("", str::trim_start);
        let names_roles = ["role", "from"].iter().any(|key| {
            let quoted = |mark: char| text.contains(&format!("{mark}{key}{mark}:"));
            quoted('\'') || quoted('"')
        });
        text.starts_with(['[', '{']) && names_roles && as_list(value).is_none()
    };
    let name = columns.names().into_iter().find(|name| columns.all(name, is_broken))?;
    let hint = "write the column as JSON: `json.dumps` in Python does it";
    Some((format!("column `{name}` holds messages as a text that is not valid JSON"), hint.to_owned()))
}

/// Prompts without answers: what a model is asked, not what it should say.
fn prompt_only(columns: &Columns<'_>) -> Option<Refused> {
    let is_messages = columns.all(PROMPT, |value| is_dialogue(value, &["role"]) || is_dialogue(value, &["from"]));
    let has_text = ["text", "content", "document"].iter().any(|name| columns.is_text(name));
    let is_prompt = is_messages || (columns.is_text(PROMPT) && !has_text);
    let hint =
        "prompts alone are not trained on; name the column of the answers: `type: instruction` with `output_field`";
    is_prompt.then(|| (format!("these are prompts without answers: column `{PROMPT}`"), hint.to_owned()))
}

/// Returns true for a list of messages with the given keys, in any of the forms in which lists stand in rows.
fn is_dialogue(value: &Value, keys: &[&str]) -> bool {
    let is_message = |message: &Value| {
        let message = opened(message);
        keys.iter().all(|key| message.get(*key).is_some())
    };
    as_list(value).is_some_and(|list| list.iter().all(is_message))
}

/// The form of the messages of a column.
fn form_of(columns: &Columns<'_>, name: &str, hints: &ConversationColumns) -> Option<String> {
    let theirs = |ours: &str| hints.properties.get(ours).map_or(ours.to_owned(), Clone::clone);
    let (role, content) = (theirs("role"), theirs("content"));
    let is_there = columns.values(name).any(|value| as_list(value).is_some_and(|list| !list.is_empty()));
    let has = |keys: &[&str]| is_there && columns.all(name, |value| is_dialogue(value, keys));
    let form = if has(&["from", "value"]) || has(&["from", "content"]) {
        "ShareGPT form"
    } else if has(&[&role, "parts"]) {
        "Google form"
    } else if has(&[&role]) {
        if role == "role" && content == "content" { "OpenAI form" } else { "own names" }
    } else if has(&["human", "assistant"]) {
        "pairs of `human` and `assistant`"
    } else {
        return None;
    };
    let as_text = if columns.is_text(name) { ", as JSON text" } else { "" };
    Some(format!("{form}{as_text}"))
}

/// Returns true if the first message of a value of a column, or with `at_end` the last, has one of the roles `names`.
fn speaks(columns: &Columns<'_>, name: &str, role: &str, names: &[&str], at_end: bool) -> bool {
    columns.values(name).filter_map(as_list).any(|list| {
        let message = if at_end { list.last() } else { list.first() };
        let message = message.map(opened);
        let of = |key: &str| message.as_ref().and_then(|message| message.get(key)).and_then(Value::as_str);
        [of(role), of("from")].into_iter().flatten().any(|role| names.contains(&role))
    })
}

fn conversation(columns: &Columns<'_>, hints: &ConversationColumns) -> Option<Detected> {
    let role = hints.properties.get("role").map_or("role", String::as_str);
    let form_of = |name: &str| form_of(columns, name, hints);
    let given = (!hints.messages.is_empty()).then_some(hints.messages.as_str());
    let usual = || columns.first_of(&MESSAGES, |name| form_of(name).is_some());
    let mut completion = None;
    let mut with_completion = |name: &str| {
        // Either may be a plain text, but not both: that is an instruction.
        let is_part = |name: &str| form_of(name).is_some() || columns.is_text(name);
        completion = columns.first_of(COMPLETIONS, |of| is_part(of) && (form_of(of).or(form_of(name))).is_some());
        (is_part(name) && completion.is_some()).then_some(PROMPT)
    };
    let any = || {
        let answers = |name: &str| speaks(columns, name, role, &["assistant", "gpt", "model"], true);
        let is_talk = |name: &&str| *name != HISTORY && form_of(name).is_some() && (*name != PROMPT || answers(name));
        columns.names().into_iter().find(is_talk)
    };
    let name = match given {
        Some(PROMPT) => with_completion(PROMPT).or(given)?,
        Some(given) => given,
        None => usual().or_else(|| with_completion(PROMPT)).or_else(any)?,
    };
    let form = form_of(name).or_else(|| completion.and_then(form_of))?;
    let opens_with_system = speaks(columns, name, role, &["system", "developer"], false);
    let is_prompt = |value: &Value| value.is_string() || value.is_object();
    let system = SYSTEM.into_iter().find(|name| columns.all(name, is_prompt) && !opens_with_system);
    let is_tools = |value: &Value| value.is_array() || value.is_string() || value.is_object();
    let tools = ["tools", "functions"].into_iter().find(|name| columns.all(name, is_tools));
    let found = ConversationColumns {
        messages: name.to_owned(),
        completion: completion.map(str::to_owned),
        system: hints.system.clone().or(system.map(str::to_owned)),
        tools: hints.tools.clone().or(tools.map(str::to_owned)),
        properties: hints.properties.clone(),
    };
    let mut words = match &found.completion {
        Some(completion) => format!("prompt and completion ({form}) in `{name}` and `{completion}`"),
        None => format!("conversation ({form}) in `{name}`"),
    };
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
    let system = SYSTEM.into_iter().find(|name| columns.is_text(name));
    // A prompt format has no place for earlier turns.
    let is_history = |value: &Value| *value == "" || as_list(value).is_some();
    let history = (hints.prompt_format.is_none() && columns.all(HISTORY, is_history)).then(|| HISTORY.to_owned());
    let found = InstructionColumns {
        instruction: task.clone(),
        output: answer.clone(),
        input: hints.input.clone().or(input.filter(|_| task == "instruction").map(str::to_owned)),
        history,
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
    if let Some(history) = &found.history {
        words += &format!(", earlier turns in `{history}`");
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
        detect(&[&row], &AutoColumns::default(), Purpose::Documents)
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
            (
                json!({"prompt": message, "completion": message, "tools": "[]"}),
                "prompt and completion (OpenAI form) in `prompt` and `completion`, tools in `tools`",
            ),
            (
                json!({"prompt": "q", "completion": message}),
                "prompt and completion (OpenAI form) in `prompt` and `completion`",
            ),
            (json!({"prompt": message, "answer": "a"}), "prompt and completion (OpenAI form) in `prompt` and `answer`"),
            (json!({"messages": message.to_string()}), "conversation (OpenAI form, as JSON text) in `messages`"),
            (json!({"text": message.to_string()}), "conversation (OpenAI form, as JSON text) in `text`"),
            (json!({"messages": [message[0].to_string()]}), "conversation (OpenAI form) in `messages`"),
            (json!({"chat": {"role": ["user"], "content": ["hi"]}}), "conversation (OpenAI form) in `chat`"),
            (
                json!({"contents": [{"role": "user", "parts": [{"text": "hi"}]}], "systemInstruction": {"parts": []}}),
                "conversation (Google form) in `contents`, system prompt in `systemInstruction`",
            ),
            (
                json!({"instruction": "a", "input": "", "output": "b", "history": [["c", "d"]]}),
                "instruction (Alpaca form): `instruction` and `output`, input in `input`, earlier turns in `history`",
            ),
            (json!({"input_ids": [1, 2], "labels": [1, 2]}), "token ids in `input_ids`"),
            (json!({"url": "u", "text": "t"}), "text in `text`"),
            (json!({"sql": "t"}), "text in `sql`"),
        ] {
            assert_eq!(found(row).unwrap().words, words);
        }
    }

    #[test]
    fn steps_with_verdicts_are_recognised_and_refused() {
        let steps = found(json!({"prompt": "a", "completions": ["b", "c"], "labels": [true, false]})).unwrap_err();
        assert!(steps.0.contains("`completions` and `labels`"), "{steps:?}");
    }

    #[test]
    fn prompts_without_answers_are_refused_by_name() {
        let message = json!([{"role": "user", "content": "hi"}]);
        for row in [
            json!({"prompt": "a b"}),
            json!({"prompt": message}),
            json!({"prompt": message.to_string()}),
            json!({"prompt": message, "tools": [{"name": "f"}]}),
            json!({"prompt": "a", "ground_truth": "b"}),
        ] {
            let refused = found(row.clone()).unwrap_err();
            assert!(refused.0.contains("prompts without answers: column `prompt`"), "{row}: {refused:?}");
        }
        let answered = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]);
        assert_eq!(found(json!({"prompt": answered})).unwrap().words, "conversation (OpenAI form) in `prompt`");
        assert_eq!(found(json!({"prompt": "a", "text": "a b"})).unwrap().words, "text in `text`");
    }

    #[test]
    fn messages_in_another_notation_than_json_are_refused_by_name() {
        for text in ["[{'role': 'user', 'content': 'hi'}]", "[{\"role\": \"user\", \"content\": \"hi\""] {
            let refused = found(json!({"messages": text, "id": 1})).unwrap_err();
            assert!(
                refused.0.contains("column `messages` holds messages as a text that is not valid JSON"),
                "{refused:?}"
            );
        }
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
        assert!(detect(&[&row], &hints, Purpose::Documents).unwrap().words.contains("in `messages`"));
    }
}
