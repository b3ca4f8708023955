//! The columns of preferences: which names hold what, by the names and values of some rows.
//!
//! A pure function of these rows. Knows the spellings of other tools; reads no row.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::reading::{is_number, verdict};
use crate::dataset::{Columns, MESSAGES, Open, Refused, SYSTEM, TOOLS, as_list, fits, open, opened, optional};

/// The columns of what is asked. Open until the rows are seen.
#[derive(Clone, Debug, Default)]
pub struct Question {
    /// A text or messages. `None`: both sides begin with it.
    pub prompt: Option<String>,
    /// Text that follows the prompt's.
    pub input: Option<String>,
    /// Earlier turns: pairs of a question and its answer.
    pub history: Option<String>,
    pub system: Option<String>,
    /// Function definitions: a list, or a string of JSON.
    pub tools: Option<String>,
    /// Texts are turns of a conversation and written with the chat template; else they are plain text.
    pub is_chat: bool,
    /// Our name of a message's property (`role`, `content`, …) to the dataset's name.
    pub properties: BTreeMap<String, String>,
    /// Usual names of columns that are read without being named, in each row that fills them; none where all is text.
    pub open: Open,
}

/// The columns of pairs. Those without a name are found by the rows.
#[derive(Clone, Debug, Default)]
pub struct PreferenceColumns {
    pub question: Question,
    /// `None` once the rows are seen: the last turn of the prompt.
    pub chosen: Option<String>,
    /// Empty until the rows are seen, unless the user names it.
    pub rejected: String,
    /// By how much the chosen answer is better: a number.
    pub margin: Option<String>,
    /// Scores of both sides, which are compared and nothing else.
    pub scores: Option<[String; 2]>,
}

/// The columns of answers with a verdict. Those without a name are found by the rows.
#[derive(Clone, Debug, Default)]
pub struct UnpairedColumns {
    pub question: Question,
    /// `None` once the rows are seen: the last turn of the prompt.
    pub completion: Option<String>,
    /// Empty until the rows are seen, unless the user names it.
    pub label: String,
}

impl Question {
    /// The columns that are read.
    fn names(&self) -> impl Iterator<Item = &str> {
        let own = [&self.prompt, &self.input, &self.history, &self.system, &self.tools];
        own.into_iter().flatten().map(String::as_str).chain(self.open.iter().copied()).chain([VARIABLES])
    }

    /// The names of the columns of a system prompt and of tools in a row: those that were found, else the usual ones.
    pub(super) fn of_row(&self, row: &Map<String, Value>) -> [Option<&str>; 2] {
        [
            optional(row, self.system.as_deref(), &self.open, &SYSTEM),
            optional(row, self.tools.as_deref(), &self.open, &TOOLS),
        ]
    }
}

impl PreferenceColumns {
    pub(crate) fn names(&self) -> Vec<&str> {
        let sides = self.chosen.iter().chain([&self.rejected]).chain(&self.margin);
        let scores = self.scores.iter().flatten();
        self.question.names().chain(sides.chain(scores).map(String::as_str)).collect()
    }
}

impl UnpairedColumns {
    pub(crate) fn names(&self) -> Vec<&str> {
        self.question.names().chain(self.completion.iter().chain([&self.label]).map(String::as_str)).collect()
    }
}

/// The column of variables that the template sees for a row.
pub(super) const VARIABLES: &str = "chat_template_kwargs";

/// Names of the two sides.
const SIDES: [(&str, &str); 6] = [
    ("chosen", "rejected"),
    ("chosen_response", "rejected_response"),
    ("response", "rejected_response"),
    ("chosen_messages", "rejected_messages"),
    ("preferred_output", "non_preferred_output"),
    ("response_j", "response_k"),
];

/// Names of a rejected side whose chosen one is the last turn of the messages.
const REJECTED: [&str; 2] = ["rejected_response", "rejected_messages"];

/// The column of a prompt that is plain text.
const PROMPT: &str = "prompt";
/// Columns of a prompt that is a turn.
const TASKS: [&str; 5] = ["instruction", "question", "query", "problem", "input"];

const COMPLETIONS: [&str; 4] = ["completion", "response", "output", "answer"];
const LABELS: [&str; 5] = ["label", "kto_tag", "desirable", "is_desirable", "is_good"];
/// A label that means nothing else.
const VERDICT: &str = "kto_tag";
const SCORES: [&str; 4] = ["score", "rating", "avg_rating", "reward"];

/// Columns that were found, with words for the user such as `preference pairs in …`.
#[derive(Clone, Debug)]
pub(crate) struct Found<C> {
    pub columns: C,
    pub words: String,
}

/// The columns of pairs, where the rows hold some.
pub(crate) fn found_pair(
    rows: &[&Map<String, Value>],
    hints: &PreferenceColumns,
) -> Option<Result<Found<PreferenceColumns>, Refused>> {
    let columns = Columns { rows };
    let (chosen, rejected) = sides(&columns, hints)?;
    let is_whole = |name: &String| is_whole(&columns, name, &hints.question.properties);
    let whole = chosen.as_ref().is_some_and(is_whole) && is_whole(&rejected);
    let own: Vec<&str> = chosen.iter().chain([&rejected]).map(String::as_str).collect();
    let question = question(&columns, &hints.question, &own, whole);
    let Some(question) = question else {
        return chosen.is_none().then(|| {
            let problem =
                format!("column `{rejected}` has no messages next to it whose last turn is the better answer");
            Err((problem, "set `chosen_field` to the column of the better answers".to_owned()))
        });
    };
    if chosen.is_none() && question.prompt.is_none() {
        return None;
    }
    let margin = hints.margin.clone().or_else(|| columns.mostly("margin", is_number).then(|| "margin".to_owned()));
    let found = PreferenceColumns { question, chosen, rejected, margin, scores: scores(&columns) };
    let words = words(&found);
    Some(Ok(Found { columns: found, words }))
}

fn words(found: &PreferenceColumns) -> String {
    let form = if found.question.is_chat { "conversations" } else { "plain text" };
    let mut words = match &found.chosen {
        Some(chosen) => format!("preference pairs ({form}) in `{chosen}` and `{}`", found.rejected),
        None => format!("preference pairs ({form}) in the last turn and `{}`", found.rejected),
    };
    words += &asked(&found.question, "prompt in what both sides begin with");
    if let Some(margin) = &found.margin {
        words += &format!(", margin in `{margin}`");
    }
    words
}

/// The columns of answers with a verdict, where the rows hold some. `is_wanted`: a `label` next to messages is one.
pub(crate) fn found_unpaired(
    rows: &[&Map<String, Value>],
    hints: &UnpairedColumns,
    is_wanted: bool,
) -> Option<Found<UnpairedColumns>> {
    let columns = Columns { rows };
    let is_label = |name: &str| columns.mostly(name, |value| verdict(value).is_some());
    let named = (!hints.label.is_empty()).then(|| hints.label.clone());
    let label = named.clone().or_else(|| columns.first_of(&LABELS, is_label).map(str::to_owned))?;
    let is_answer =
        |name: &str| columns.is_mostly_text(name) || form(&columns, name, &hints.question.properties).is_some();
    let usual = || columns.first_of(&COMPLETIONS, is_answer).map(str::to_owned);
    let completion = hints.completion.clone().or_else(usual);
    let own: Vec<&str> = completion.iter().map(String::as_str).collect();
    let question = question(&columns, &hints.question, &own, false)?;
    question.prompt.as_ref()?;
    // The last of the messages is the answer, unless a column holds it.
    let talks = question.prompt.as_deref().is_some_and(|name| ends_with_answer(&columns, name));
    let completion = if talks && hints.completion.is_none() { None } else { Some(completion?) };
    // A conversation with a label of another kind is none of these.
    let is_clear = is_wanted || named.is_some() || label == VERDICT;
    let is_plain = question.prompt.as_deref() == Some(PROMPT) && completion.as_deref() == Some(COMPLETIONS[0]);
    let is_usual = is_plain && columns.mostly(&label, Value::is_boolean);
    if !is_clear && !is_usual {
        return None;
    }
    let form = if question.is_chat { "conversations" } else { "plain text" };
    let place = completion.as_ref().map_or("the last turn".to_owned(), |name| format!("`{name}`"));
    let words = format!("answers with a verdict ({form}) in {place}, verdict in `{label}`{}", asked(&question, ""));
    Some(Found { columns: UnpairedColumns { question, completion, label }, words })
}

fn asked(question: &Question, without: &str) -> String {
    let mut words = match &question.prompt {
        Some(prompt) => format!(", prompt in `{prompt}`"),
        None => format!(", {without}"),
    };
    let further = [
        ("input", &question.input),
        ("earlier turns", &question.history),
        ("system prompt", &question.system),
        ("tools", &question.tools),
    ];
    for (what, column) in further {
        if let Some(column) = column {
            words += &format!(", {what} in `{column}`");
        }
    }
    words
}

/// The columns of both sides; without the first, it is the last turn of the messages.
fn sides(columns: &Columns<'_>, hints: &PreferenceColumns) -> Option<(Option<String>, String)> {
    let has = |name: &str| columns.values(name).next().is_some();
    if let (Some(chosen), false) = (&hints.chosen, hints.rejected.is_empty()) {
        return Some((Some(chosen.clone()), hints.rejected.clone()));
    }
    let fits = |(chosen, rejected): &(&str, &str)| {
        let is = |given: Option<&str>, name: &str| given.is_none_or(|given| given == name) && has(name);
        is(hints.chosen.as_deref(), chosen)
            && is(Some(&hints.rejected).filter(|of| !of.is_empty()).map(|s| s.as_str()), rejected)
    };
    if let Some((chosen, rejected)) = SIDES.into_iter().find(fits) {
        return Some((Some(chosen.to_owned()), rejected.to_owned()));
    }
    if let Some(chosen) = &hints.chosen {
        let rejected = SIDES.iter().map(|(_, rejected)| *rejected).find(|name| has(name))?;
        return Some((Some(chosen.clone()), rejected.to_owned()));
    }
    let named = (!hints.rejected.is_empty()).then(|| hints.rejected.clone());
    let rejected = named.or_else(|| REJECTED.into_iter().find(|name| has(name)).map(str::to_owned))?;
    Some((None, rejected))
}

/// The keys of a message's role and content, where a column holds messages.
fn form(columns: &Columns<'_>, name: &str, properties: &BTreeMap<String, String>) -> Option<()> {
    let theirs = |ours: &str| properties.get(ours).map_or(ours.to_owned(), Clone::clone);
    let (role, from) = (theirs("role"), "from".to_owned());
    let is_message = |value: &Value| [&role, &from].iter().any(|key| opened(value).get(key.as_str()).is_some());
    let is_talk = |value: &Value| messages_in(value).is_some_and(|list| list.iter().all(is_message));
    let is_there = columns.values(name).any(|value| messages_in(value).is_some_and(|list| !list.is_empty()));
    (is_there && columns.mostly(name, is_talk)).then_some(())
}

/// The messages of a value: a list of them, or an object that holds one.
pub(super) fn messages_in(value: &Value) -> Option<Vec<Value>> {
    if let Some(inner) = value.get("messages") {
        return as_list(inner).map(|list| list.into_owned());
    }
    as_list(value).map(|list| list.into_owned())
}

fn role_of(message: &Value, properties: &BTreeMap<String, String>) -> String {
    let message = opened(message);
    let key = properties.get("role").map_or("role", String::as_str);
    let role = message.get(key).or_else(|| message.get("from")).and_then(Value::as_str);
    role.unwrap_or_default().to_ascii_lowercase()
}

const ASSISTANTS: [&str; 3] = ["assistant", "gpt", "model"];

/// Returns true if a column holds whole conversations: they begin with what is asked.
fn is_whole(columns: &Columns<'_>, name: &str, properties: &BTreeMap<String, String>) -> bool {
    let begins = |value: &Value| {
        messages_in(value).is_some_and(|list| {
            list.len() > 1 && list.first().is_some_and(|one| !ASSISTANTS.contains(&role_of(one, properties).as_str()))
        })
    };
    form(columns, name, properties).is_some() && columns.values(name).any(begins)
}

fn ends_with_answer(columns: &Columns<'_>, name: &str) -> bool {
    let ends = |value: &Value| {
        let list = messages_in(value).unwrap_or_default();
        list.last().is_some_and(|one| ASSISTANTS.contains(&role_of(one, &BTreeMap::new()).as_str()))
    };
    columns.mostly(name, ends)
}

/// The columns of what is asked, besides `own`; `is_whole`: the sides hold it. `None`: there are none, where the sides do not
/// hold it and are no plain text.
fn question(columns: &Columns<'_>, hints: &Question, own: &[&str], is_whole: bool) -> Option<Question> {
    let form = |name: &str| form(columns, name, &hints.properties);
    let is_other = |name: &&str| !own.contains(name);
    let is_talk = |name: &&str| is_other(name) && form(name).is_some();
    let is_task = |name: &&str| is_other(name) && columns.is_mostly_text(name);
    let usual = || {
        let named = |names: &[&'static str], is: &dyn Fn(&&str) -> bool| names.iter().copied().find(|name| is(name));
        let own = [PROMPT];
        if is_whole {
            return named(&own, &|name| is_talk(name) || is_task(name));
        }
        named(&MESSAGES, &is_talk)
            .or_else(|| named(&[PROMPT, "input"], &is_talk))
            .or_else(|| named(&own, &is_task))
            .or_else(|| named(&TASKS, &is_task))
    };
    let prompt = hints.prompt.clone().or_else(|| usual().map(str::to_owned));
    let is_turn = prompt.as_deref().is_some_and(|name| TASKS.contains(&name));
    let talks =
        prompt.as_deref().is_some_and(|name| form(name).is_some()) || own.iter().any(|name| form(name).is_some());
    let is_free = |name: &&str| is_other(name) && prompt.as_deref() != Some(*name);
    let input = (prompt.as_deref() == Some("instruction"))
        .then(|| ["input"].into_iter().find(|name| is_free(name) && columns.is_mostly_text(name)))
        .flatten();
    let is_history = |value: &Value| *value == "" || as_list(value).is_some();
    let history = (is_turn && columns.mostly("history", is_history)).then(|| "history".to_owned());
    let system = SYSTEM.into_iter().find(|name| is_free(name) && columns.is_mostly_text(name));
    let tools = TOOLS.into_iter().find(|name| columns.mostly(name, |value| fits(name, value)));
    let system = hints.system.clone().or(system.map(str::to_owned));
    let is_chat = talks || is_turn || is_whole || system.is_some() || history.is_some();
    let taken: Vec<&str> = own.iter().copied().chain(prompt.as_deref()).collect();
    let tools = hints.tools.clone().or(tools.map(str::to_owned));
    let optional: [(&'static [&'static str], Option<&str>); 2] =
        [(&SYSTEM, system.as_deref()), (&TOOLS, tools.as_deref())];
    let found = Question {
        is_chat,
        open: if is_chat { open(columns, &optional, &taken) } else { Open::new() },
        prompt,
        input: input.map(str::to_owned),
        history,
        system,
        tools,
        properties: hints.properties.clone(),
    };
    let is_implicit = is_whole || own.len() == 2;
    (found.prompt.is_some() || is_implicit).then_some(found)
}

/// The columns of two scores.
fn scores(columns: &Columns<'_>) -> Option<[String; 2]> {
    let names = SCORES.into_iter().flat_map(|what| {
        let of = |side: &str| [format!("{what}_{side}"), format!("{side}_{what}"), format!("{side}-{what}")];
        of("chosen").into_iter().zip(of("rejected")).map(|(chosen, rejected)| [chosen, rejected]).collect::<Vec<_>>()
    });
    names.into_iter().find(|names| names.iter().all(|name| columns.all(name, Value::is_number)))
}
