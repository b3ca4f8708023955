//! Exact sampling: the log-probabilities of the sampler are those of training. Says where that is so, and rejects the option
//! where it is not. Operations do it: those of a CPU sum in an order that follows from the sequence alone.

use options::Setting;
use program::{Arch, Machine};

use crate::config::{Config, Recipe, Task};
use crate::error::{Result, TrainError};

/// Returns the reason why the sampler of a run gives other log-probabilities than training; `None` where it gives the same.
fn reason(config: &Config, on_cpu: bool) -> Option<(String, &'static str)> {
    if !on_cpu {
        let why = "on GPUs the kernels that sample round otherwise than those of training";
        return Some((why.to_owned(), "remove it: `sampling/sampling_logp_difference` shows the distance"));
    }
    let dropout = config.lora.lora_dropout.value().copied().filter(|dropout| config.lora.lora && *dropout > 0.0);
    if let Some(dropout) = dropout {
        let why = format!("`lora_dropout: {dropout}` is on in training and off in sampling");
        return Some((why, "set `lora_dropout: 0`"));
    }
    let recipe = config.precision.recipe;
    (recipe != Recipe::Bf16).then(|| {
        let why = format!("with `recipe: {recipe}` the scales of a tensor follow from all of its tokens");
        (why, "set `recipe: bf16`")
    })
}

/// Returns the value of `exact_sampling: auto`, and the reason for it.
pub(crate) fn choice(config: &Config, on_cpu: bool) -> (bool, String) {
    if config.task != Task::Grpo {
        return (false, "the task does not sample".to_owned());
    }
    match reason(config, on_cpu) {
        Some((why, _)) => (false, why),
        None => (true, "it takes no time on a CPU".to_owned()),
    }
}

/// Checks `exact_sampling`. Returns what a user should know of it, a sentence; none for tasks that do not sample.
///
/// Errors: `exact_sampling: true` where sampler and training differ.
pub(crate) fn note(config: &Config, machine: &Machine) -> Result<Option<String>> {
    if config.task != Task::Grpo {
        return Ok(None);
    }
    let option = config.reinforcement.exact_sampling;
    match (reason(config, machine.arch == Arch::Cpu), option) {
        (Some((why, hint)), Setting::Value(true)) => {
            let message = format!("`exact_sampling: true` is not available here: {why}");
            Err(TrainError::Config(vec![config.mistake("exact_sampling", message, Some(hint.to_owned()))]))
        }
        (Some((why, _)), _) => Ok(Some(format!("sampling is not exact: {why}"))),
        (None, Setting::Value(false)) => Ok(Some(
            "`exact_sampling: false` has no effect: sampling on a CPU is exact without further time".to_owned(),
        )),
        (None, _) => {
            Ok(Some("exact sampling: the log-probabilities of sampler and training have the same bits".to_owned()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_told_or_is_an_error() {
        let config = |text: String| {
            let found = Config::load(&text, "run.yaml", Task::Sft, &[]);
            found.unwrap_or_else(|problems| panic!("{}", options::render_problems(&problems)))
        };
        let said = |more: &str, machine: &Machine| {
            let text = format!("model: m\ntask: grpo\nrewards: [{{function: length, tokens: 9}}]\n{more}");
            note(&config(text), machine).map_err(|error| error.to_string())
        };
        let (gpu, cpu) = (Machine::named("h200").expect("a known machine"), Machine::cpu(1 << 30, 2));
        assert!(said("", &cpu).unwrap().unwrap().starts_with("exact sampling:"));
        assert!(said("exact_sampling: false\n", &cpu).unwrap().unwrap().contains("has no effect"));
        assert!(said("", &gpu).unwrap().unwrap().contains("on GPUs"));
        assert!(said("exact_sampling: true\n", &gpu).unwrap_err().contains("is not available here: on GPUs"));
        let dropout = said("exact_sampling: true\nlora_dropout: 0.1\n", &cpu).unwrap_err();
        assert!(dropout.contains("`lora_dropout: 0.1`") && dropout.contains("set `lora_dropout: 0`"), "{dropout}");
        assert!(said("recipe: fp8_hybrid\n", &cpu).unwrap().unwrap().contains("`recipe: fp8_hybrid`"));
        assert_eq!(note(&config("model: m\n".to_owned()), &gpu).unwrap(), None);
    }
}
