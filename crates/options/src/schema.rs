//! Option tables as JSON: the JSON Schema for editors and the rows from which `--help` is built.

use crate::kind::{Kind, Limits};
use crate::row::{Row, join_doc};
use crate::table::Section;
use serde_json::{Map, Value, json};

/// The schema of an object that holds the options of all sections and nothing else.
pub fn object_schema(sections: &[Section]) -> Value {
    rows_schema(sections.iter().flat_map(|section| section.rows))
}

fn rows_schema<'r>(rows: impl Iterator<Item = &'r Row>) -> Value {
    let mut properties = Map::new();
    let mut required = Vec::new();
    for row in rows {
        properties.insert(row.name.to_string(), row_schema(row));
        if row.is_required() {
            required.push(json!(row.name));
        }
    }
    json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false })
}

fn row_schema(row: &Row) -> Value {
    let mut schema = kind_schema(&row.kind, &row.limits);
    let object = schema.as_object_mut().expect("every schema of a kind is an object");
    let note = if row.is_pending { " Not available yet." } else { "" };
    object.insert("description".into(), json!(format!("{}{note}", row.doc_text())));
    if !row.is_required() {
        object.insert("default".into(), row.default_json());
    }
    schema
}

fn kind_schema(kind: &Kind, limits: &Limits) -> Value {
    match kind {
        Kind::Bool => json!({ "type": "boolean" }),
        Kind::Integer { unsigned } => {
            let low = Limits { min: limits.min.or(unsigned.then_some(0)), ..*limits };
            number_schema("integer", &low)
        }
        Kind::Number => number_schema("number", limits),
        Kind::Text => json!({ "type": ["string", "number", "boolean"] }),
        Kind::Form(_) => json!({ "type": "string" }),
        Kind::Bytes => json!({ "type": ["integer", "string"] }),
        Kind::Choice(choices) => {
            let words = choices.iter().flat_map(|choice| std::iter::once(&choice.name).chain(choice.aliases));
            json!({ "enum": words.collect::<Vec<_>>() })
        }
        Kind::List(item) => {
            let (of_item, list) =
                (kind_schema(item, limits), json!({ "type": "array", "items": kind_schema(item, limits) }));
            match item {
                Kind::Table(_) => list,
                _ => json!({ "anyOf": [list, of_item] }),
            }
        }
        Kind::Map(value) => json!({ "type": "object", "additionalProperties": kind_schema(value, limits) }),
        Kind::Object(_) => json!({ "type": "object" }),
        Kind::Table(rows) => rows_schema(rows.iter()),
        Kind::Either(kinds) => {
            json!({ "anyOf": kinds.iter().map(|kind| kind_schema(kind, limits)).collect::<Vec<_>>() })
        }
        Kind::Nullable(inner) => json!({ "anyOf": [kind_schema(inner, limits), { "type": "null" }] }),
        Kind::Auto(inner) => json!({ "anyOf": [kind_schema(inner, limits), { "enum": ["auto", null] }] }),
    }
}

fn number_schema(name: &str, limits: &Limits) -> Value {
    let mut schema = json!({ "type": name });
    if !limits.one_of.is_empty() {
        schema["enum"] = json!(limits.one_of);
    }
    let bounds = [
        ("minimum", limits.min),
        ("maximum", limits.max),
        ("exclusiveMinimum", limits.above),
        ("exclusiveMaximum", limits.below),
    ];
    for (name, bound) in bounds {
        if let Some(bound) = bound {
            schema[name] = json!(bound);
        }
    }
    schema
}

/// Returns one object for each option, in order: `name` (with its group as a prefix), `section`, `type`, `default`,
/// `required`, `help`, `expects`, `choices`, `available`, `resumable`, `of_item`: an option of the items of a list,
/// such as `datasets[].path`, which the command line sets with a number in place of the brackets.
pub fn help_rows(sections: &[Section]) -> Value {
    let mut rows = Vec::new();
    for section in sections {
        for row in section.rows {
            match &row.kind {
                Kind::Table(inner) => {
                    rows.extend(
                        inner.iter().map(|part| help_row(section, &format!("{}.{}", row.name, part.name), part)),
                    );
                }
                kind => {
                    rows.push(help_row(section, row.name, row));
                    rows.extend(kind.rows().iter().map(|part| {
                        let mut of_item = help_row(section, &format!("{}[].{}", row.name, part.name), part);
                        of_item["of_item"] = true.into();
                        of_item
                    }));
                }
            }
        }
    }
    Value::Array(rows)
}

fn help_row(section: &Section, name: &str, row: &Row) -> Value {
    let words = row.kind.choices().iter();
    let choices: Vec<Value> = words
        .map(|choice| {
            let available = !row.pending_words.contains(&choice.name);
            json!({ "name": choice.name, "aliases": choice.aliases, "help": join_doc(choice.doc), "available": available })
        })
        .collect();
    json!({
        "name": name,
        "section": section.title,
        "type": row.kind.short(),
        "default": if row.is_required() { Value::Null } else { row.default_json() },
        "required": row.is_required(),
        "help": row.doc_text(),
        "expects": row.expectation(),
        "choices": choices,
        "available": !row.is_pending,
        "resumable": row.changes_on_resume,
        "of_item": false,
    })
}
