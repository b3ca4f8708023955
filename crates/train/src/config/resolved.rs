//! `resolved.yaml`: every option with the value that the run uses, and for each `auto` the reason.

use options::{Row, hide_userinfo};
use serde_json::{Map, Value};

use super::Reasons;
use super::{Config, SECTIONS};

impl Config {
    /// Every option with its value, as one JSON object; what is left open is `"auto"`.
    pub fn to_json(&self) -> Value {
        let names = SECTIONS.iter().flat_map(|section| section.rows).map(|row| row.name.to_string());
        names.zip(self.values().into_iter().flatten()).collect::<Map<_, _>>().into()
    }

    /// Returns [`Config::to_json`] without passwords in addresses: the form that files keep.
    pub fn recorded_json(&self) -> Value {
        let mut values = self.to_json();
        hide_userinfo(&mut values);
        values
    }

    /// Returns [`Config::recorded_json`] with the choices for what is left open.
    pub fn resolved_json(&self, reasons: &Reasons) -> Value {
        let mut values = self.recorded_json();
        for (name, reason) in reasons {
            values[name.as_str()] = reason.value.clone();
        }
        values
    }

    /// Every option as YAML, by sections, with a remark where the value was given by the user or chosen by a stage.
    ///
    /// # Panics
    /// If a reason is given for an option that is not open: what the user wrote is never replaced.
    pub fn resolved_yaml(&self, reasons: &Reasons) -> String {
        let mut text = format!("# surogate {}: every option of this run.\n", self.task.name());
        for (section, values) in SECTIONS.iter().zip(self.values()) {
            text.push_str(&format!("\n# {}\n", section.title));
            for (row, mut value) in section.rows.iter().zip(values) {
                hide_userinfo(&mut value);
                let reason = reasons.get(row.name);
                if reason.is_some() {
                    assert!(value == "auto", "option `{}` is not open, so nothing may be chosen for it", row.name);
                }
                let recommended = self.recommended.as_ref().and_then(|chosen| chosen.get(row.name));
                let remark = match reason {
                    Some(reason) => format!("  # auto: {}", reason.because.replace('\n', " ")),
                    None if let Some(reason) = recommended => format!("  # recommended: {}", reason.because),
                    None if self.is_written(row.name) => "  # given".into(),
                    None => String::new(),
                };
                let value = reason.map_or(&value, |reason| &reason.value);
                text.push_str(&format!("{}:", row.name));
                push_value(&mut text, row, value, &remark);
            }
        }
        text
    }
}

/// A value after its key: groups and lists of groups as blocks, all else on the line of the key.
fn push_value(text: &mut String, row: &Row, value: &Value, remark: &str) {
    match value {
        Value::Object(fields) if !row.kind.rows().is_empty() => {
            text.push_str(&format!("{remark}\n"));
            push_fields(text, row.kind.rows(), fields, "  ", "  ");
        }
        Value::Array(items) if !items.is_empty() && !row.kind.rows().is_empty() => {
            text.push_str(&format!("{remark}\n"));
            for fields in items.iter().filter_map(Value::as_object) {
                push_fields(text, row.kind.rows(), fields, "  - ", "    ");
            }
        }
        value => text.push_str(&format!(" {}{remark}\n", scalar(value))),
    }
}

/// The options of a group, without those that belong to another `type` of group.
fn push_fields(text: &mut String, rows: &[Row], fields: &Map<String, Value>, first: &str, other: &str) {
    let kind = fields.get("type").and_then(Value::as_str);
    let rows =
        rows.iter().filter(|row| row.owner.is_none() || kind.is_some_and(|kind| row.is_of(kind) || kind == "auto"));
    for (index, row) in rows.enumerate() {
        let indent = if index == 0 { first } else { other };
        text.push_str(&format!("{indent}{}: {}\n", row.name, scalar(&fields[row.name])));
    }
}

/// Words stay bare; what YAML could take for something else is written as JSON, which is YAML.
fn scalar(value: &Value) -> String {
    let Value::String(word) = value else { return value.to_string() };
    let bare = word.starts_with(|c: char| c.is_ascii_alphabetic())
        && word.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '/'))
        && !matches!(word.to_ascii_lowercase().as_str(), "null" | "true" | "false" | "yes" | "no" | "on" | "off");
    if bare { word.clone() } else { value.to_string() }
}
