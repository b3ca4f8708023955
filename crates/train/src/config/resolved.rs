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
                text.push_str(&format!("{}{}:", self.mark(row.name, None), row.name));
                self.push_value(&mut text, row, value, &remark);
            }
        }
        text
    }

    /// Returns the sign of a comment for an option whose default means something else where it is written: the file is to be
    /// the same run. `kind` is the type of the group that it is in.
    fn mark(&self, path: &str, kind: Option<&str>) -> &'static str {
        let name = path.rsplit('.').next().unwrap_or(path);
        let says_more = match name {
            "ray_address" => true,
            "per_device_train_batch_size" | "gradient_accumulation_steps" => self.training.batch_size.is_some(),
            "gpus" => self.multi_node.distributed.gpus_per_node != 0,
            "text_field" | "messages_field" => kind == Some("auto"),
            _ => false,
        };
        if says_more && !self.is_written(path) { "# " } else { "" }
    }

    /// A value after its key: groups and lists of groups as blocks, all else on the line of the key.
    fn push_value(&self, text: &mut String, row: &Row, value: &Value, remark: &str) {
        match value {
            Value::Object(fields) if !row.kind.rows().is_empty() => {
                text.push_str(&format!("{remark}\n"));
                self.push_fields(text, row.kind.rows(), fields, row.name, ["  ", "  "]);
            }
            Value::Array(items) if !items.is_empty() && !row.kind.rows().is_empty() => {
                text.push_str(&format!("{remark}\n"));
                for (index, fields) in items.iter().filter_map(Value::as_object).enumerate() {
                    self.push_fields(
                        text,
                        row.kind.rows(),
                        fields,
                        &format!("{}[{index}]", row.name),
                        ["  - ", "    "],
                    );
                }
            }
            value => text.push_str(&format!(" {}{remark}\n", scalar(value))),
        }
    }

    /// The options of a group at `place`, without those that belong to another `type` of group; the first and the others after
    /// these indents.
    fn push_fields(
        &self,
        text: &mut String,
        rows: &[Row],
        fields: &Map<String, Value>,
        place: &str,
        indents: [&str; 2],
    ) {
        let kind = fields.get("type").and_then(Value::as_str);
        let is_of = |row: &&Row| row.owner.is_none() || kind.is_some_and(|kind| row.is_of(kind) || kind == "auto");
        let (unsaid, said): (Vec<&Row>, Vec<&Row>) =
            rows.iter().filter(is_of).partition(|row| !self.mark(&format!("{place}.{}", row.name), kind).is_empty());
        // A comment is no first line of a group.
        for (index, row) in said.iter().chain(&unsaid).enumerate() {
            let (indent, mark) = (indents[usize::from(index > 0)], self.mark(&format!("{place}.{}", row.name), kind));
            text.push_str(&format!("{indent}{mark}{}: {}\n", row.name, scalar(&fields[row.name])));
        }
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
