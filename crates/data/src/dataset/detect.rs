//! `type: auto`: detects the type of a dataset from the names and values of its columns.
//!
//! A pure function of a few rows. It describes what it found, and rejects rather than guesses.

use serde_json::{Map, Value};

use super::columns::{fits, open};
use super::json_text::{as_list, is_broken, opened};
use super::roles::PAIRS as TURNS;
use super::{ConversationColumns, DatasetKind, InstructionColumns, SystemPrompt};
use crate::json_values::kind;
use crate::json_values::parsed;
use crate::preference::{Found, PreferenceColumns, Purpose, UnpairedColumns, found_pair, found_unpaired};

/// Number of rows of a set that are examined.
pub(crate) const SAMPLE: usize = 64;

/// Names of columns that the user gave although the type is left open. Empty names are open.
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
pub const SYSTEM: [&str; 4] = ["system", "system_prompt", "systemInstruction", "system_instruction"];

/// The usual columns of the definitions of functions.
pub(crate) const TOOLS: [&str; 2] = ["tools", "functions"];

/// Columns of the input of an instruction.
pub(super) const INPUTS: [&str; 2] = ["input", "context"];

/// The column of a prompt, and those of its completion.
const PROMPT: &str = "prompt";
const COMPLETIONS: &[&str] = &["completion", "response", "output", "answer"];

/// The column of the turns before a task.
pub(super) const HISTORY: &str = "history";

/// A task and the names under which its answer is found.
const PAIRS: [(&str, &[&str]); 6] = [
    ("instruction", &["output", "response", "answer", "completion"]),
    (PROMPT, COMPLETIONS),
    ("question", &["answer", "response", "output"]),
    ("query", &["response", "answer", "output"]),
    ("problem", &["solution", "answer"]),
    ("input", &["output"]),
];

/// The type that was recognized, in words for the data check.
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

    /// Returns true if a column is there and each of its values is of the wanted kind.
    pub(crate) fn all(&self, name: &str, is: impl Fn(&Value) -> bool) -> bool {
        self.values(name).next().is_some() && self.values(name).all(is)
    }

    /// Returns true if more than half of the values of a column are of the wanted kind: the rows of others are refused one by
    /// one, as they are read.
    pub(crate) fn mostly(&self, name: &str, is: impl Fn(&Value) -> bool) -> bool {
        let (are, count) = self.values(name).fold((0, 0), |(are, all), value| (are + usize::from(is(value)), all + 1));
        2 * are > count
    }

    pub(crate) fn is_mostly_text(&self, name: &str) -> bool {
        self.mostly(name, Value::is_string)
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

/// The types that options of a dataset belong to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Owner {
    Text,
    Instruction,
    Conversation,
}

impl AutoColumns {
    /// The type that the given options belong to, and one of them.
    fn owner(&self) -> Option<(Owner, &'static str)> {
        let (task, talk) = (&self.instruction, &self.conversation);
        let options = [
            (!self.text.is_empty(), Owner::Text, "text_field"),
            (!talk.messages.is_empty(), Owner::Conversation, "messages_field"),
            (!talk.properties.is_empty(), Owner::Conversation, "message_property_mappings"),
            (talk.system.is_some(), Owner::Conversation, "system_field"),
            (talk.tools.is_some(), Owner::Conversation, "tools_field"),
            (!task.instruction.is_empty(), Owner::Instruction, "instruction_field"),
            (!task.output.is_empty(), Owner::Instruction, "output_field"),
            (task.input.is_some(), Owner::Instruction, "input_field"),
            (task.prompt_format.is_some(), Owner::Instruction, "prompt_format"),
            (task.system != SystemPrompt::None, Owner::Instruction, "system_prompt_type"),
        ];
        options.into_iter().find(|(is_given, ..)| *is_given).map(|(_, owner, option)| (owner, option))
    }

    /// True if a column with the trained text is named.
    fn names_column(&self) -> bool {
        !self.conversation.messages.is_empty() || !self.instruction.output.is_empty() || !self.text.is_empty()
    }
}

/// Recognises the type of a set by some of its rows. Options that belong to one type decide for it.
pub(crate) fn detect(rows: &[&Map<String, Value>], hints: &AutoColumns, purpose: Purpose) -> Result<Detected, Refused> {
    let columns = Columns { rows };
    if !hints.names_column() {
        if let Some(found) = preference(rows, hints, purpose) {
            return found;
        }
        if let Some(refused) = steps(&columns).or_else(|| no_json(&columns)) {
            return Err(refused);
        }
    }
    let found = match hints.owner() {
        Some((Owner::Text, _)) => text(&columns, hints),
        Some((Owner::Conversation, _)) => conversation(&columns, &hints.conversation),
        Some((Owner::Instruction, _)) => instruction(&columns, &hints.instruction),
        None => conversation(&columns, &hints.conversation)
            .or_else(|| instruction(&columns, &hints.instruction))
            .or_else(|| tokens(&columns)),
    };
    if let Some(found) = found {
        return Ok(found);
    }
    let shown = columns.names().into_iter().map(|name| {
        let mut kinds: Vec<&str> = Vec::new();
        columns.values(name).map(kind).for_each(|of| {
            if !kinds.contains(&of) {
                kinds.push(of)
            }
        });
        let kinds = if kinds.is_empty() { "null".to_owned() } else { kinds.join(" or ") };
        format!("`{name}` ({kinds})")
    });
    let shown = shown.collect::<Vec<_>>().join(", ");
    if let Some((owner, option)) = hints.owner() {
        let what = match owner {
            Owner::Text => "the text that it names",
            Owner::Instruction => "a task and its answer",
            Owner::Conversation => "messages",
        };
        let problem = format!("`{option}` is given, but {what} cannot be found in the columns {shown}");
        return Err((problem, format!("correct or remove `{option}`, or set `type` and the names of its columns")));
    }
    if let Some(refused) = prompt_only(&columns) {
        return Err(refused);
    }
    if let Some(DatasetKind::Text { field }) = text(&columns, hints).map(|found| found.kind)
        && hints.text.is_empty()
        && let Some(row) = rows.iter().position(|row| row.get(&field).is_some_and(is_talk))
        && (MESSAGES.contains(&field.as_str())
            || FEW * columns.values(&field).filter(|of| is_talk(of)).count() > rows.len())
    {
        let problem =
            format!("column `{field}` holds messages in some rows (such as row {}), and text in others", row + 1);
        let hint = format!(
            "write them alike, or set `type: text` with `text_field: {field}` to train on the source of the messages"
        );
        return Err((problem, hint));
    }
    if let Some(DatasetKind::Text { field }) = text(&columns, hints).map(|found| found.kind)
        && columns.all(&field, |value| value.as_str().is_some_and(is_json))
    {
        let problem = format!("column `{field}` holds JSON, whose source would be trained as text");
        let hint = format!(
            "write its fields as columns, or set `type: text` with `text_field: {field}` to train on the source"
        );
        return Err((problem, hint));
    }
    text(&columns, hints).ok_or_else(|| {
        let problem = format!("the type cannot be detected from the columns {shown}");
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

/// True for a text that is the source of JSON, or of lines of it.
fn is_json(text: &str) -> bool {
    let mut lines = text.lines().filter(|line| !line.trim().is_empty()).take(SAMPLE).peekable();
    parsed(text).is_some() || (lines.peek().is_some() && lines.all(|line| parsed(line).is_some()))
}

/// A set is one of texts if at most one text of this number holds messages, as the source of a program may.
const FEW: usize = 10;

/// True for messages as a text of JSON, well formed or not.
pub(crate) fn is_talk(value: &Value) -> bool {
    let is_list = as_list(value).is_some_and(|list| !list.is_empty());
    is_broken(value)
        || (is_list && [["role", "content"], ["from", "value"]].iter().any(|keys| is_dialogue(value, keys)))
}

/// Messages as a text in the notation of a programming language.
fn no_json(columns: &Columns<'_>) -> Option<Refused> {
    let name = columns.names().into_iter().find(|name| columns.all(name, is_broken))?;
    let hint = "write the column as JSON: `json.dumps` in Python does it";
    Some((format!("column `{name}` holds messages as a text that is not valid JSON"), hint.to_owned()))
}

/// Prompts without answers: what a model is asked, not what it should say.
fn prompt_only(columns: &Columns<'_>) -> Option<Refused> {
    let is_messages = columns.all(PROMPT, |value| is_dialogue(value, &["role"]) || is_dialogue(value, &["from"]));
    let has_text = ["text", "content", "document"].iter().any(|name| columns.is_mostly_text(name));
    let is_prompt = is_messages || (columns.is_mostly_text(PROMPT) && !has_text);
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
    let has = |keys: &[&str]| is_there && columns.mostly(name, |value| is_dialogue(value, keys));
    let form = if has(&["from", "value"]) || has(&["from", "content"]) {
        "ShareGPT form"
    } else if has(&[&role, "parts"]) {
        "Google form"
    } else if has(&[&role]) {
        if role == "role" && content == "content" { "OpenAI form" } else { "own names" }
    } else if let Some((asks, answers)) = TURNS.iter().find(|(asks, answers)| has(&[asks, answers])) {
        &format!("pairs of `{asks}` and `{answers}`")
    } else {
        return None;
    };
    let as_text = if columns.is_mostly_text(name) { ", as JSON text" } else { "" };
    Some(format!("{form}{as_text}"))
}

/// Returns true if the last message of a value of a column has one of the roles `names`.
fn ends_with(columns: &Columns<'_>, name: &str, role: &str, names: &[&str]) -> bool {
    columns.values(name).filter_map(as_list).any(|list| {
        let message = list.last().map(opened);
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
    let mut with_completion = |task: &'static str, names: &[&'static str]| {
        // Either may be a plain text, but not both: that is an instruction.
        let is_part = |name: &str| form_of(name).is_some() || columns.is_mostly_text(name);
        let answers = |of: &str| is_part(of) && (form_of(of).or(form_of(task))).is_some();
        completion = is_part(task).then(|| columns.first_of(names, answers)).flatten();
        completion.map(|_| task)
    };
    let answers = |name: &str| ends_with(columns, name, role, &["assistant", "gpt", "model"]);
    let any = || {
        let is_talk = |name: &&str| *name != HISTORY && form_of(name).is_some() && (*name != PROMPT || answers(name));
        columns.names().into_iter().find(is_talk)
    };
    let name = match given {
        Some(PROMPT) => with_completion(PROMPT, COMPLETIONS).or(given)?,
        Some(given) => given,
        None => {
            usual().or_else(|| PAIRS.into_iter().find_map(|(task, names)| with_completion(task, names))).or_else(any)?
        }
    };
    // Messages that end with a question are a prompt, whatever their column is called.
    if given.is_none() && completion.is_none() && !answers(name) {
        let is_answer = |of: &str| of != name && (columns.is_mostly_text(of) || form_of(of).is_some());
        completion = columns.first_of(COMPLETIONS, is_answer);
    }
    let form = form_of(name).or_else(|| completion.and_then(form_of))?;
    let is_prompt = |value: &Value| value.is_string() || value.is_object();
    let system = SYSTEM.into_iter().find(|name| columns.mostly(name, is_prompt));
    let is_tools = |value: &Value| fits(TOOLS[0], value);
    let is_any = |value: &Value| as_list(value).is_none_or(|list| !list.is_empty());
    let tools = TOOLS.into_iter().filter(|name| columns.mostly(name, is_tools));
    let tools = tools.max_by_key(|name| (columns.values(name).any(is_any), *name == "tools"));
    let system = hints.system.clone().or(system.map(str::to_owned));
    let tools = hints.tools.clone().or(tools.map(str::to_owned));
    let optional: [(&'static [&'static str], Option<&str>); 2] =
        [(&SYSTEM, system.as_deref()), (&TOOLS, tools.as_deref())];
    let found = ConversationColumns {
        messages: name.to_owned(),
        completion: completion.map(str::to_owned),
        open: open(columns, &optional, &[name, completion.unwrap_or(name)]),
        system,
        tools,
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
    let given = |name: &str| (!name.is_empty()).then(|| name.to_owned());
    let is_text = |name: &str| columns.is_mostly_text(name);
    let usual = |task: &str, answers: &[&'static str]| {
        let task = given(&hints.instruction).or_else(|| is_text(task).then(|| task.to_owned()))?;
        let answer = given(&hints.output).or_else(|| columns.first_of(answers, is_text).map(str::to_owned))?;
        (task != answer).then_some((task, answer))
    };
    let (task, answer) = PAIRS.into_iter().find_map(|(task, answers)| usual(task, answers))?;
    let is_other = |name: &&str| *name != task && *name != answer;
    // What a prompt format has no place for is not read.
    let has_place = |name: &str| hints.prompt_format.as_ref().is_none_or(|format| format.contains(name));
    let input = INPUTS.into_iter().filter(is_other).find(|name| columns.is_mostly_text(name) && has_place("{input}"));
    let system = SYSTEM.into_iter().find(|name| columns.is_mostly_text(name) && has_place("{system}"));
    // A prompt format has no place for earlier turns.
    let is_history = |value: &Value| *value == "" || as_list(value).is_some();
    let history = (hints.prompt_format.is_none() && columns.mostly(HISTORY, is_history)).then(|| HISTORY.to_owned());
    // A prompt format may have no place for a column.
    let mut optional: Vec<(&'static [&'static str], Option<&str>)> = Vec::new();
    if task == "instruction" && hints.input.is_none() && has_place("{input}") {
        optional.push((&INPUTS, input));
    }
    if hints.system == SystemPrompt::None && has_place("{system}") {
        optional.push((&SYSTEM, system));
    }
    if hints.prompt_format.is_none() {
        optional.push((&[HISTORY], None));
    }
    let found = InstructionColumns {
        instruction: task.clone(),
        output: answer.clone(),
        input: hints.input.clone().or(input.filter(|_| task == "instruction").map(str::to_owned)),
        history,
        system: match (&hints.system, system) {
            (SystemPrompt::None, Some(name)) => SystemPrompt::Field(name.to_owned()),
            (given, _) => given.clone(),
        },
        open: open(columns, &optional, &[&task, &answer]),
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
    let given = Some(hints.text.as_str()).filter(|name| columns.is_mostly_text(name));
    let usual = || columns.first_of(&["text", "content", "document"], |name| columns.is_mostly_text(name));
    let only = || match columns.names()[..] {
        [only] => columns.is_mostly_text(only).then_some(only),
        _ => None,
    };
    let open = || usual().or_else(only);
    let field = if hints.text.is_empty() { open() } else { given }?.to_owned();
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
        let answered = json!([message[0], {"role": "assistant", "content": "a"}]);
        for (row, words) in [
            (json!({"id": 1, "messages": message}), "conversation (OpenAI form) in `messages`"),
            (
                json!({"conversations": [{"from": "human", "value": "hi"}], "system": "s", "tools": "[]"}),
                "conversation (ShareGPT form) in `conversations`, system prompt in `system`, tools in `tools`",
            ),
            (json!({"talk": message, "n": 1}), "conversation (OpenAI form) in `talk`"),
            (
                json!({"question": "q", "answer": [{"role": "assistant", "content": "a"}]}),
                "prompt and completion (OpenAI form) in `question` and `answer`",
            ),
            (json!({"topic": "q", "output": answered}), "conversation (OpenAI form) in `output`"),
            (
                json!({"context": message, "response": "ok"}),
                "prompt and completion (OpenAI form) in `context` and `response`",
            ),
            (
                json!({"messages": message, "tools": [], "functions": [{"name": "f"}]}),
                "conversation (OpenAI form) in `messages`, tools in `functions`",
            ),
            (json!({"chat": [{"user": "a", "gpt": "b"}]}), "conversation (pairs of `user` and `gpt`) in `chat`"),
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
    fn rows_of_another_form_do_not_make_messages_a_text() {
        let message = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]);
        let of = |values: &[Value], name: &str| {
            let rows: Vec<Map<String, Value>> =
                values.iter().map(|value| Map::from_iter([(name.to_owned(), value.clone())])).collect();
            detect(&rows.iter().collect::<Vec<_>>(), &AutoColumns::default(), Purpose::Documents)
        };
        let text = Value::from(message.to_string());
        for other in [json!(""), json!("null"), json!("[{'role': 'user'}]"), json!(text.as_str().unwrap()[..20])] {
            let found = of(&[text.clone(), other.clone(), text.clone()], "messages").unwrap();
            assert_eq!(found.words, "conversation (OpenAI form, as JSON text) in `messages`", "{other}");
            let (problem, _) = of(&[text.clone(), other, json!("b c"), json!("d e")], "text").unwrap_err();
            assert!(problem.contains("holds messages in some rows (such as row 1), and text in others"), "{problem}");
        }
        let holes = of(&[message.clone(), json!([message[0], null]), message.clone()], "messages").unwrap();
        assert_eq!(holes.words, "conversation (OpenAI form) in `messages`");
        assert_eq!(of(&[json!("a b"), json!("[1, 2]")], "text").unwrap().words, "text in `text`");
    }

    #[test]
    fn the_source_of_json_is_no_text_unless_it_is_asked_for() {
        let message = json!([{"role": "user", "content": "hi"}]);
        let (problem, hint) = found(json!({"data": json!({"messages": message}).to_string()})).unwrap_err();
        assert!(problem.contains("column `data` holds JSON") && hint.contains("text_field: data"), "{problem} {hint}");
        let lines = "{\"text\": \"a\"}\n\n{\"text\": \"b\"}\n";
        assert!(found(json!({"text": lines})).unwrap_err().0.contains("column `text` holds JSON"));
        assert!(found(json!({"text": "{\"a\": 1} is JSON"})).is_ok());
        let twice = json!(message.to_string()).to_string();
        assert_eq!(found(json!({"data": twice})).unwrap().words, "conversation (OpenAI form, as JSON text) in `data`");
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
        let hints = AutoColumns { text: "essay".into(), ..Default::default() };
        assert_eq!(detect(&[&row], &hints, Purpose::Documents).unwrap().words, "text in `essay`");
    }

    #[test]
    fn options_of_a_type_decide_for_it_or_are_refused() {
        let row = json!({"messages": [{"role": "user", "content": "hi"}], "text": "t", "q": "a", "answer": "b"});
        let Value::Object(row) = row else { unreachable!() };
        let task = |instruction: &str, output: &str| AutoColumns {
            instruction: InstructionColumns {
                instruction: instruction.into(),
                output: output.into(),
                ..Default::default()
            },
            ..Default::default()
        };
        let words = |hints: &AutoColumns| detect(&[&row], hints, Purpose::Documents).unwrap().words;
        assert_eq!(words(&task("q", "")), "instruction (question and answer): `q` and `answer`");
        assert_eq!(words(&task("q", "text")), "instruction (question and answer): `q` and `text`");
        let format = InstructionColumns { prompt_format: Some("{instruction}".into()), ..Default::default() };
        let tools = ConversationColumns { tools: Some("tools".into()), ..Default::default() };
        for (hints, option) in [
            (AutoColumns { text: "story".into(), ..Default::default() }, "text_field"),
            (task("", "answer"), "output_field"),
            (AutoColumns { instruction: format, ..Default::default() }, "prompt_format"),
        ] {
            let (problem, _) = detect(&[&row], &hints, Purpose::Documents).unwrap_err();
            assert!(problem.starts_with(&format!("`{option}` is given, but ")), "{problem}");
        }
        assert!(words(&AutoColumns { conversation: tools, ..Default::default() }).contains("in `messages`"));
    }
}
