//! Checks of a model and an adapter before the data are read: tensors of the files against the parameters of the graph,
//! and the names of the linears that get an adapter. Reads names and shapes only.

use data::safetensors::Weights;
use graph::Parameter;

use crate::config::{Config, Init, Problem, Task};
use crate::error::{Result, TrainError};
use crate::model::source::{ModelSource, SCORE};
use crate::plan::Plan;

/// Problems that are listed, at most.
const MOST: usize = 20;

/// Every problem at once, at the options that they concern.
pub fn check(config: &Config, source: &ModelSource, plan: &Plan) -> Result<()> {
    let mut problems = Vec::new();
    let parameters = match compiler::parameters(&source.model, &plan.compile) {
        Ok(parameters) => parameters,
        Err(compiler::CompileError::Options(message)) if config.lora.adapter.is_none() => {
            let hint = "`[all-linear]` takes every linear but the head".to_owned();
            problems.push(config.mistake("lora_target_modules", message, Some(hint)));
            let bare = compiler::CompileOptions { adapter: None, ..plan.compile.clone() };
            compiler::parameters(&source.model, &bare)?
        }
        Err(error @ compiler::CompileError::Option { .. }) => return Err(config.located(TrainError::from(error))),
        Err(compiler::CompileError::Saved(message)) if config.lora.adapter.is_none() => {
            problems.push(config.mistake("modules_to_save", message, None));
            let bare = compiler::CompileOptions { adapter: None, ..plan.compile.clone() };
            compiler::parameters(&source.model, &bare)?
        }
        Err(error) => return Err(error.into()),
    };
    if config.model.init == Init::Pretrained {
        let files = source.weights(&source.folder)?;
        problems.extend(unfit(config, source, &parameters, &files)?);
    }
    if problems.is_empty() { Ok(()) } else { Err(TrainError::Config(problems)) }
}

/// The tensors that a model's files lack or have in another shape. Superfluous tensors are found when the weights are
/// loaded: that takes their contents.
fn unfit(config: &Config, source: &ModelSource, of: &[Parameter], files: &Weights) -> Result<Option<Problem>> {
    let mut lines = Vec::new();
    for parameter in of.iter().filter(|parameter| !parameter.adapter) {
        let name = &parameter.name;
        if !files.contains(name) {
            if config.task == Task::Reward && name == SCORE {
                continue;
            }
            lines.push(format!("`{name}` is missing"));
            continue;
        }
        let view = files.get(name).map_err(TrainError::model_file)?;
        if view.shape != parameter.shape.as_slice() {
            lines.push(format!("`{name}` has shape {:?}, the model needs {:?}", view.shape, parameter.shape));
        } else if !view.dtype.is_float() {
            lines.push(format!("`{name}` holds {}, expected floating point", view.dtype));
        }
    }
    if lines.is_empty() {
        return Ok(None);
    }
    let more = lines.len().saturating_sub(MOST);
    lines.truncate(MOST);
    let rest = if more > 0 { format!("\n  … and {more} more") } else { String::new() };
    let place = source.folder.display();
    let message = format!("{place}: the weights do not fit the model:\n  {}{rest}", lines.join("\n  "));
    Ok(Some(config.mistake("model", message, None)))
}
