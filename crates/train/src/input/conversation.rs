//! From options to chat formatting: which template, with which settings.
//!
//! Knows option names, and checks a named template against the model; the data crate does the rendering.

use data::template::families::{self, Named};
use data::{AgentForm, DialogueOptions, Tokenizer, shows_tools};
use options::Setting;

use crate::config::{self, Config, Truncation, is_template_file};
use crate::error::{Result, TrainError};
use crate::model::source::ModelSource;

/// The rendering options of the run's conversations, and notes on the options that lead to them, a sentence each.
pub fn dialogue_options(
    config: &Config,
    source: &ModelSource,
    tokenizer: Option<&Tokenizer>,
) -> Result<(DialogueOptions, Vec<String>)> {
    let of = &config.template;
    let clock = match &of.clock {
        Setting::Auto => None,
        Setting::Value(clock) => Some(clock.0.clone()),
    };
    let (template, note) = match (&of.template, tokenizer) {
        (Setting::Value(name), Some(tokenizer)) => template(config, name, source, tokenizer)?,
        _ => (None, None),
    };
    let own = tokenizer.and_then(|tokenizer| tokenizer.chat_template(true).or(tokenizer.chat_template(false)));
    let has_tools = template.as_deref().or(own).is_some_and(shows_tools);
    let idle = of.agent_template.as_ref().filter(|_| has_tools).map(|name| {
        format!("`agent_template: {name}` has no effect: the chat template writes tools and their calls itself")
    });
    let refused = (!of.use_chat_template).then(|| "`use_chat_template: false`, but it is written with it".to_owned());
    let options = DialogueOptions {
        template,
        system: of.system.clone(),
        clock,
        loss: config::loss_rule(&of.loss_scale).expect("wrong weights are refused when options are loaded"),
        response_prefix: of.response_prefix.clone(),
        agent: of.agent_template.as_deref().and_then(AgentForm::named),
        keeps_system: of.truncation_strategy == Truncation::Left,
        refused,
        ..DialogueOptions::default()
    };
    Ok((options, note.into_iter().chain(idle).collect()))
}

/// The text that a name or a file stands for; none: the model's own.
fn template(
    config: &Config,
    name: &str,
    source: &ModelSource,
    tokenizer: &Tokenizer,
) -> Result<(Option<String>, Option<String>)> {
    let wrong = |message: String, hint: &str| {
        TrainError::Config(vec![config.mistake("template", message, Some(hint.to_owned()))])
    };
    if is_template_file(name) {
        let text = std::fs::read_to_string(name)
            .map_err(|e| wrong(format!("`template: {name}` cannot be read: {e}"), "give the path of a Jinja file"))?;
        return Ok((Some(text), None));
    }
    let named: &Named = families::named(name).expect("unknown names are refused when options are loaded");
    let model_type = source.model_type();
    if !named.suits(model_type) {
        let message = format!("`template: {name}` is a family, but the model's configuration says `{model_type}`");
        return Err(wrong(message, "remove `template`, or name a format such as `chatml`"));
    }
    if named.is_family() && tokenizer.chat_template(false).is_some() {
        return Ok((None, Some(format!("`template: {name}` is the model's own template"))));
    }
    let Some(text) = named.text else {
        let message = format!("`template: {name}` comes only with models, and this model has none");
        return Err(wrong(message, "take the model's instruct version, or name a format such as `chatml`"));
    };
    if let Some(token) = named.tokens.iter().find(|token| tokenizer.encoder().token_to_id(token).is_none()) {
        let message =
            format!("`template: {name}` writes `{token}`, which the model's tokenizer does not know as a token");
        return Err(wrong(message, "remove `template`, or name a format that the model was made for"));
    }
    Ok((Some(text.to_owned()), Some(format!("`template: {name}` is written in place of the model's own"))))
}
