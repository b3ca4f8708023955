//! From the options of a dataset to what the data crate reads.

use data::{
    AutoColumns, ConversationColumns, DatasetKind, DatasetSpec, InstructionColumns, PreferenceColumns, Question,
    RowLimit, SystemPrompt, UnpairedColumns,
};

use crate::config::{Config, Dataset, DatasetType, SystemPromptType};
use crate::error::{Result, TrainError};

/// A dataset of the options as the data crate takes it; `place` is where it stands there.
pub(crate) fn spec(config: &Config, of: &Dataset, place: &str) -> Result<DatasetSpec> {
    let kind = match of.r#type {
        DatasetType::Tokens => DatasetKind::Tokens,
        DatasetType::Text => DatasetKind::Text { field: of.text_field.clone() },
        DatasetType::Instruction => DatasetKind::Instruction(instruction_columns(of)),
        DatasetType::Conversation => DatasetKind::Conversation(conversation_columns(of)),
        DatasetType::Preference => DatasetKind::Preference(preference_columns(of)),
        DatasetType::Unpaired => DatasetKind::Unpaired(unpaired_columns(of)),
        DatasetType::Auto => DatasetKind::Auto(Box::new(auto_columns(config, of, place))),
    };
    let templated = match &kind {
        DatasetKind::Conversation(_) => true,
        DatasetKind::Instruction(columns) => columns.prompt_format.is_none(),
        _ => false,
    };
    if templated && !config.template.use_chat_template {
        let message = format!("`use_chat_template: false`, but {} is written with the chat template", of.path);
        let hint = "remove `use_chat_template`, or give an instruction set a `prompt_format`".to_owned();
        return Err(TrainError::Config(vec![config.mistake("use_chat_template", message, Some(hint))]));
    }
    Ok(DatasetSpec {
        files: config.fetched.get(place).cloned(),
        subset: of.subset.clone(),
        split: of.split.clone(),
        samples: of.samples.map(|n| n as usize),
        row_limit: RowLimit(of.max_row_size.0),
        ..DatasetSpec::new(&of.path, kind)
    })
}

/// The columns of an instruction set. Their names are there unless the type is left open.
fn instruction_columns(of: &Dataset) -> InstructionColumns {
    InstructionColumns {
        instruction: of.instruction_field.clone().unwrap_or_default(),
        output: of.output_field.clone().unwrap_or_default(),
        input: of.input_field.clone(),
        history: None,
        system: match of.system_prompt_type {
            None => SystemPrompt::None,
            Some(SystemPromptType::Field) => SystemPrompt::Field(of.system_prompt_field.clone().unwrap_or_default()),
            Some(SystemPromptType::Fixed) => SystemPrompt::Fixed(of.system_prompt.clone().unwrap_or_default()),
        },
        prompt_format: of.prompt_format.clone(),
        prompt_format_no_input: of.prompt_format_no_input.clone(),
        open: Vec::new(),
    }
}

fn conversation_columns(of: &Dataset) -> ConversationColumns {
    ConversationColumns {
        messages: of.messages_field.clone(),
        completion: None,
        system: of.system_field.clone(),
        tools: of.tools_field.clone(),
        properties: of.message_property_mappings.clone().unwrap_or_default(),
        open: Vec::new(),
    }
}

fn preference_columns(of: &Dataset) -> PreferenceColumns {
    PreferenceColumns {
        question: question(of),
        chosen: of.chosen_field.clone(),
        rejected: of.rejected_field.clone().unwrap_or_default(),
        margin: of.margin_field.clone(),
        scores: None,
    }
}

fn unpaired_columns(of: &Dataset) -> UnpairedColumns {
    UnpairedColumns {
        question: question(of),
        completion: of.completion_field.clone(),
        label: of.label_field.clone().unwrap_or_default(),
    }
}

/// The user's options on the columns of a set whose type is left open. A column's default name says nothing.
fn auto_columns(config: &Config, of: &Dataset, place: &str) -> AutoColumns {
    let named = |option: &str, name: &str| {
        if config.is_written(&format!("{place}.{option}")) { name.to_owned() } else { String::new() }
    };
    AutoColumns {
        text: named("text_field", &of.text_field),
        instruction: instruction_columns(of),
        conversation: ConversationColumns {
            messages: named("messages_field", &of.messages_field),
            ..conversation_columns(of)
        },
        preference: preference_columns(of),
        unpaired: unpaired_columns(of),
    }
}

/// The columns of what a preference asks.
fn question(of: &Dataset) -> Question {
    Question {
        prompt: of.prompt_field.clone(),
        system: of.system_field.clone(),
        tools: of.tools_field.clone(),
        properties: of.message_property_mappings.clone().unwrap_or_default(),
        ..Question::default()
    }
}
