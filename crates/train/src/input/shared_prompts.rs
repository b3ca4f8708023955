//! The decision whether the answers to a prompt follow it in one document, so that it is then computed once (`share_prompts`). Knows no
//! loss.

use compiler::CompileOptions;
use data::{Purpose, Summary};
use options::Setting;
use serde_json::Value;

use crate::config::reason;
use crate::config::{Config, Reasons};
use crate::error::{Result, TrainError};
use crate::model::source::ModelSource;

/// The note on sampled answers.
const SAMPLED: &str = "answers to one prompt follow it in one row, so that it is computed once (`share_prompts: false` gives each \
                       answer a row of its own)";

/// Returns the tokens of the longest document where prompts are shared. Errors: they are to be, and the model cannot.
pub(crate) fn decide(
    config: &Config,
    source: &ModelSource,
    compile: &CompileOptions,
    longest: usize,
    (notes, reasons): (&mut Vec<String>, &mut Reasons),
) -> Result<Option<usize>> {
    let wanted = config.preferences.share_prompts;
    let purpose = config.task.purpose();
    let compares = matches!(purpose, Purpose::Pairs | Purpose::Scores | Purpose::Prompts);
    let mut because = |shares: bool, why: &str| {
        if wanted == Setting::Auto {
            // Other tasks refuse a value.
            let value = if compares { Value::Bool(shares) } else { Value::from("auto") };
            reasons.insert("share_prompts".into(), reason(value, why));
        }
    };
    if !compares || config.data.datasets.is_none() || wanted == Setting::Value(false) {
        because(false, "there are no answers to one prompt");
        return Ok(None);
    }
    let has_noise = compile.training.as_ref().is_some_and(|training| training.embedding_noise != 0.0);
    let obstacle = match has_noise {
        true => Some("`neftune_noise_alpha` weighs its noise by the length of documents".to_owned()),
        false => compiler::branches_obstacle(&source.model, compile, longest)?,
    };
    match (obstacle, wanted) {
        (None, _) => {
            because(true, "the attention is causal and sees whole documents");
            if purpose == Purpose::Prompts {
                notes.push(SAMPLED.to_owned());
            }
            Ok(Some(longest))
        }
        (Some(why), Setting::Auto) => {
            because(false, &why);
            notes.push(format!("prompts are computed for each answer: {why} (`share_prompts`)"));
            Ok(None)
        }
        (Some(why), Setting::Value(_)) => {
            let message = format!("`share_prompts: true`: {why}");
            let hint = "set `share_prompts: auto`".to_owned();
            Err(TrainError::Config(vec![config.mistake("share_prompts", message, Some(hint))]))
        }
    }
}

/// True if some pair of the data shares tokens.
pub(crate) fn has_any(summary: &Summary) -> bool {
    summary.datasets.iter().any(|of| of.preference.shared_tokens > 0)
}

/// Returns a sentence on what is left out by sharing.
pub(crate) fn note(summary: &Summary) -> Option<String> {
    let shared: usize = summary.datasets.iter().map(|of| of.preference.shared_tokens).sum();
    let kept: usize = summary.datasets.iter().map(|of| of.tokens).sum();
    (shared > 0).then(|| {
        let share = 100.0 * shared as f64 / (shared + kept) as f64;
        format!(
            "both answers of a pair follow one prompt, which is computed once: {share:.0} % fewer tokens \
             (`share_prompts: false` computes it for each)"
        )
    })
}
