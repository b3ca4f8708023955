//! The option tables as JSON Schema, as reference page, and as rows for `--help`.

use serde_json::{Value, json};

use super::{SECTIONS, Task, names, runs};

/// The JSON Schema of a configuration file.
pub fn schema() -> Value {
    let mut schema = options::object_schema(SECTIONS);
    let properties = schema["properties"].as_object_mut().expect("the schema of an object has properties");
    let model = json!({ "type": "string", "description": "Second spelling of `model`." });
    properties.insert("model_name".into(), model);
    let dataset = json!({ "type": "string", "description": "One dataset of type `auto`, instead of `datasets`." });
    properties.insert("dataset".into(), dataset);
    let options: serde_json::Map<String, Value> =
        properties.keys().map(|name| (name.clone(), json!({ "$ref": format!("#/properties/{name}") }))).collect();
    let of_runs = json!({
        "type": "array",
        "minItems": 1,
        "description": "Several runs, one after the other: what each changes of the options of the file.",
        "items": { "type": "object", "properties": options, "required": ["run_name"], "additionalProperties": false },
    });
    properties.insert(runs::RUNS.into(), of_runs);
    assert_eq!(names::SECOND_NAMES.len(), 2, "every second spelling is in the schema");
    // `model` and `model_name` are two spellings of a required option.
    let required = std::mem::take(&mut schema["required"]);
    let others: Vec<&Value> = required.as_array().into_iter().flatten().filter(|name| *name != "model").collect();
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Surogate run",
        "type": "object",
        "properties": schema["properties"],
        "required": others,
        "oneOf": [{ "required": ["model"] }, { "required": ["model_name"] }],
        "additionalProperties": false,
    })
}

/// The reference page, in Markdown.
pub fn reference_page() -> String {
    let introduction = "\
A run is one YAML file: `surogate sft run.yaml`. All options are at the top level, except those of `distributed` and of the
items of `datasets`. Command-line options override the file: `--set option=value`, `--set distributed.num_nodes=2`,
`option=value`, or `--option value` (with dashes for underscores); `--option` and `--no-option` stand for true and false.

In paths `~` is your own folder; variables such as `$HOME` are refused. A list of one item can be written as the item alone.

Unknown or duplicate options, wrong types, values out of range and contradictions are errors. They are reported all at once
with line and column, and the exit code is 2. An option marked *not available yet* is checked, but only its default is
accepted.

The list `runs` makes several runs of one file, one after the other: each item has a `run_name` and the options that it changes,
and writes to a folder of this name in `output_dir` unless it names another ([fine-tuning](fine-tuning.md#several-runs-of-one-file)).

`auto` leaves the choice to Surogate; the choice and its reason are written to `resolved.yaml`. ↻ marks options that may
change when a run is resumed. This page is generated from the option tables by `cargo xtask generate`.";
    let mut page = options::reference_page("Options", introduction, SECTIONS);
    for (option, value) in Task::Pt.defaults() {
        page.push_str(&format!("\n`surogate pt` differs from `surogate sft` in one default: `{option}: {value}`.\n"));
    }
    page
}

/// The rows from which a command line builds its `--help`: a JSON array, see [`options::help_rows`].
pub fn help_rows() -> Value {
    options::help_rows(SECTIONS)
}
