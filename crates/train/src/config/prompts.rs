//! Contradictions between the options of one dataset: prompt formats that do not show what the options name, and options
//! of two types where the type is left open.

use options::{Reader, Table};

use super::{Config, Dataset, DatasetType, LossScale};

const FORMAT: &str = "prompt_format";
const WITHOUT: &str = "prompt_format_no_input";

/// Reports contradictions of the dataset at `place`, such as `datasets[0]`.
pub(super) fn check(config: &Config, dataset: &Dataset, place: &str, reader: &mut Reader) {
    let at = |name: &str| format!("{place}.{name}");
    if reader.is_faulty(&at("type")) {
        return;
    }
    check_owners(dataset, place, reader);
    if let Some((option, message, hint)) = problem(dataset).filter(|(option, ..)| !reader.is_faulty(&at(option))) {
        reader.report(&at(option), message.replace("@", &format!("{place}.")), Some(hint));
    }
    // Rows that a format writes have an output and nothing else to weigh.
    let is_formatted = writes_prompts(dataset) && dataset.prompt_format.is_some();
    if is_formatted && config.template.loss_scale != LossScale::Default && !reader.is_faulty("loss_scale") {
        let message = format!("`loss_scale` weighs turns of a chat template, but `{place}.{FORMAT}` writes the rows");
        reader.report("loss_scale", message, Some(format!("remove one of `loss_scale` and `{FORMAT}`")));
    }
}

fn writes_prompts(dataset: &Dataset) -> bool {
    [DatasetType::Instruction, DatasetType::Auto].contains(&dataset.r#type)
}

/// Rejects options of different types where the type is left open: one of them would not be read.
fn check_owners(dataset: &Dataset, place: &str, reader: &mut Reader) {
    if dataset.r#type != DatasetType::Auto {
        return;
    }
    let rows = Dataset::ROWS.iter().zip(dataset.values());
    let given: Vec<(&str, &str)> = rows
        .filter(|(row, value)| *value != row.default_json() && !reader.is_faulty(&format!("{place}.{}", row.name)))
        .filter_map(|(row, _)| Some((row.name, row.owner?)))
        .collect();
    let Some((first, owner)) = given.first() else { return };
    if let Some((other, of)) = given.iter().find(|(_, of)| of != owner) {
        let message = format!(
            "`{place}.{first}` belongs to type `{owner}` and `{place}.{other}` to type `{of}`: one of them has no effect"
        );
        let hint = format!("set `type`, and remove `{first}` or `{other}`");
        reader.report(&format!("{place}.{other}"), message, Some(hint));
    }
}

/// The first contradiction between the prompt formats and the columns: option, message with `@` for the place, hint.
fn problem(dataset: &Dataset) -> Option<(&'static str, String, String)> {
    if !writes_prompts(dataset) {
        return None;
    }
    let placeholders = "the placeholders are `{system}`, `{instruction}`, `{input}` and `{output}`";
    let (format, without) = (dataset.prompt_format.as_deref(), dataset.prompt_format_no_input.as_deref());
    let Some(format) = format else {
        let message = format!("`@{WITHOUT}` has no effect without `{FORMAT}`");
        let hint = format!("add `{FORMAT}`, the format of rows with an input, or rename it to that");
        return without.map(|_| (WITHOUT, message, hint));
    };
    let is_typed = dataset.r#type == DatasetType::Instruction;
    let has_input = dataset.input_field.is_some();
    for (option, text) in [(FORMAT, Some(format)), (WITHOUT, without)] {
        if text.is_some_and(|text| !text.contains("{instruction}")) {
            let message = format!("`@{option}` has no `{{instruction}}`: rows would not show their task");
            return Some((option, message, placeholders.to_owned()));
        }
        if dataset.system_prompt_type.is_some() && text.is_some_and(|text| !text.contains("{system}")) {
            let message = format!("`@{option}` has no `{{system}}`: `system_prompt_type` has no effect");
            return Some((option, message, "add `{system}` to it, or remove `system_prompt_type`".to_owned()));
        }
    }
    if has_input && !format.contains("{input}") {
        let message = format!("`@{FORMAT}` has no `{{input}}`: `input_field` has no effect");
        return Some((FORMAT, message, "add `{input}` to it, or remove `input_field`".to_owned()));
    }
    if is_typed && !has_input && without.is_some() {
        let message = format!("without `input_field` no row has an input: `@{FORMAT}` has no effect");
        return Some((FORMAT, message, format!("add `input_field`, or remove `{WITHOUT}`")));
    }
    if is_typed && !has_input && format.contains("{input}") {
        let message = format!("`@{FORMAT}` has `{{input}}`, which is always empty without `input_field`");
        return Some((FORMAT, message, "add `input_field`, or remove `{input}` from it".to_owned()));
    }
    None
}

#[cfg(test)]
mod tests {
    use crate::config::{Config, Task, render_problems};

    fn load(dataset: &str) -> Result<Config, String> {
        let text = format!("model: m\ndatasets:\n  - {{path: d.jsonl, {dataset}}}\n");
        Config::load(&text, "run.yaml", Task::Sft, &[]).map_err(|problems| render_problems(&problems))
    }

    #[test]
    fn a_prompt_format_that_does_not_show_what_options_name_is_refused() {
        let asked = "type: instruction, instruction_field: q, output_field: a";
        for (rest, reported) in [
            ("prompt_format_no_input: '{instruction}'", "`datasets[0].prompt_format_no_input` has no effect without"),
            ("prompt_format: '{question}'", "has no `{instruction}`: rows would not show their task"),
            ("input_field: i, prompt_format: '{instruction}'", "has no `{input}`: `input_field` has no effect"),
            ("prompt_format: '{instruction}{input}'", "`{input}`, which is always empty without `input_field`"),
            (
                "prompt_format: '{instruction}', prompt_format_no_input: '{instruction}'",
                "without `input_field` no row has an input",
            ),
            (
                "system_prompt_type: fixed, system_prompt: s, prompt_format: '{instruction}'",
                "has no `{system}`: `system_prompt_type` has no effect",
            ),
        ] {
            let error = load(&format!("{asked}, {rest}")).unwrap_err();
            assert!(error.contains(reported), "{rest}: {error}");
        }
        load(&format!("{asked}, input_field: i, prompt_format: '{{instruction}}{{input}}'")).unwrap();
        load("type: auto, prompt_format: '{instruction}{input}', prompt_format_no_input: '{instruction}'").unwrap();
    }

    #[test]
    fn options_of_two_types_are_refused_where_the_type_is_open() {
        let error = load("type: auto, text_field: t, tools_field: f").unwrap_err();
        assert!(
            error.contains("`datasets[0].tools_field` to type `conversation or preference or unpaired`: one"),
            "{error}"
        );
        load("type: auto, system_field: s, tools_field: f").unwrap();
        let weighed = "type: auto, prompt_format: '{instruction}'";
        let text = format!("model: m\nloss_scale: all\ndatasets:\n  - {{path: d.jsonl, {weighed}}}\n");
        assert!(Config::load(&text, "run.yaml", Task::Sft, &[]).is_err());
    }
}
