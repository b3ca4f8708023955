//! The options of a run with what is chosen for those that were left open, before it runs: what `resolved.yaml` will
//! say, as far as it does not depend on the time or on the folder of the run.

use program::Machine;
use serde_json::json;

use super::Preview;
use crate::config::{Config, Reasons};
use crate::error::Result;
use crate::input::encoded::Encoded;
use crate::model::source::ModelSource;
use crate::plan::Plan;
use crate::plan::decisions;
use crate::plan::resolved::Known;

/// Every option as YAML, each that is chosen with its reason.
pub fn resolved(config: &Config, source: &ModelSource, machine: &Machine, data: Option<&Encoded>) -> Result<String> {
    let plan = data.into_iter().fold(Plan::new(config, source)?, Plan::with_data);
    let preview = Preview::advised(config, source, machine, data)?;
    let device = machine.arch.device();
    let because = format!("planned for {}", machine.name);
    let known = Known { config, source, plan: &plan, device, because: &because, steps: preview.shapes.steps };
    let mut reasons: Reasons = known.reasons();
    let given = config.to_json();
    for answer in decisions::answers(&preview.program.plan) {
        if given[answer.option] == "auto" {
            let because = answer.because;
            reasons.insert(answer.option.to_owned(), crate::config::Reason { value: answer.value, because });
        }
    }
    for (name, value, because) in [
        ("checkpoint_dir", json!(config.run.output_dir), "`output_dir`"),
        ("run_name", json!("auto"), "the model and the time, when the run begins"),
        ("log_file", json!("auto"), "in `output_dir`, named when the run begins"),
        ("wandb_name", json!("auto"), "`run_name`"),
        ("aim_name", json!("auto"), "`run_name`"),
    ] {
        if given[name] == "auto" {
            reasons.insert(name.to_owned(), crate::config::Reason { value, because: because.to_owned() });
        }
    }
    Ok(config.resolved_yaml(&reasons))
}
