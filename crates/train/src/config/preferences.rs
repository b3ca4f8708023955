//! Options of losses of preferences. Names, values and defaults are those of TRL 1.16 where it has the thing.

use options::{Key, Node, OptionValue, Reader, Section, Table, Tree, choices, options};
use serde_json::{Map, Value, json};

use super::{CAUSAL_LM, Config, Task};

options! {
    /// Losses of `task: dpo`. docs/preferences.md has the formulas.
    pub struct Preferences: "Preferences" {
        /// The losses, one or a list of which the weighted sum is taken.
        loss_type: Vec<PreferenceLoss> = ["sigmoid"];
        /// Weights of the losses of `loss_type`, in its order. Null: 1 each.
        loss_weights: Option<Vec<f64>> = null;
        /// Strength of the constraint to the reference: larger values stay nearer to it.
        beta: f64 = 0.1, above = 0;
        /// Probability that a pair is labelled the wrong way round. With `sigmoid` this is conservative DPO, where TRL
        /// ignores it.
        label_smoothing: f64 = 0.0, min = 0, below = 1;
        /// The divergence from the reference.
        f_divergence_type: Divergence = "reverse_kl";
        /// The coefficient of `f_divergence_type: alpha_divergence`.
        f_alpha_divergence_coef: f64 = 0.5, above = 0;
        /// Weight of the tokens of an answer beyond the length of the shorter answer of its pair. Null: 1.
        ld_alpha: Option<f64> = null, min = 0, max = 1;
        /// Temperature of `loss_type: discopop`.
        discopop_tau: f64 = 0.05, above = 0;
        /// Weigh each pair by how likely the model finds it (WPO).
        use_weighting: bool = false;
        /// Take all log-probabilities of the reference as 0: no reference is computed.
        reference_free: bool = false;
        /// Folder of the model that is the reference, of the same architecture. Null: the weights that training starts from,
        /// for adapters the model without them.
        reference: Option<String> = null, path;
    }
}

choices! {
    /// A loss of a pair of a chosen and a rejected answer.
    pub enum PreferenceLoss {
        /// The logistic loss of DPO on the difference of the log-ratios.
        Sigmoid = "sigmoid",
        /// The hinge loss of SLiC with a margin of 1.
        Hinge = "hinge",
        /// IPO with means over the tokens, as TRL has it.
        Ipo = "ipo",
        /// IPO with sums over the tokens, as in the paper.
        IpoPaper = "ipo_paper",
        /// Robust DPO, for labels that are wrong with the probability `label_smoothing`.
        Robust = "robust",
        /// Conservative DPO: `sigmoid` under the name of its paper.
        Cdpo = "cdpo",
        /// EXO: reverse KL divergence to the smoothed label.
        ExoPair = "exo_pair",
        /// NCA: the likelihood of the chosen answer does not fall.
        NcaPair = "nca_pair",
        /// BCO on pairs without a shift, as TRL has it.
        BcoPair = "bco_pair",
        /// BCO on pairs, shifted by the mean reward of the micro-batch.
        BcoPairPaper = "bco_pair_paper",
        /// The squared loss of SPPO with hard labels, 1 and 0.
        SppoHard = "sppo_hard",
        /// AOT: quantiles of the margins over the micro-batch.
        Aot = "aot",
        /// AOT with the quantiles of each side of the pairs.
        AotUnpaired = "aot_unpaired",
        /// APO-zero: chosen answers become likelier.
        ApoZero = "apo_zero",
        /// APO-down: chosen answers become less likely, rejected ones more so.
        ApoDown = "apo_down",
        /// DiscoPOP: a mixture of the logistic and the exponential loss.
        Discopop = "discopop",
        /// DPO with means over the tokens (Tülu 3).
        SigmoidNorm = "sigmoid_norm",
        /// Cross entropy of the chosen answers, a mean over all their tokens in the micro-batch.
        Sft = "sft",
        /// Cross entropy of the chosen answers, a mean of the means of answers (RPO).
        NllPaper = "nll_paper",
    }
}

choices! {
    /// A divergence of the policy from the reference.
    pub enum Divergence {
        /// Reverse KL divergence, as in DPO: the plain log-ratio.
        ReverseKl = "reverse_kl",
        /// Forward KL divergence: minus the inverse of the ratio.
        ForwardKl = "forward_kl",
        /// Jensen-Shannon divergence between policy and reference.
        Js = "js_divergence",
        /// Alpha divergence with the coefficient `f_alpha_divergence_coef`.
        Alpha = "alpha_divergence",
    }
}

/// The task that the file names, else that of the command; its defaults hold from here on.
pub(super) fn task_of(entries: &[(Key, Node)], command: Task, reader: &mut Reader) -> Task {
    let written = entries.iter().find(|(key, _)| key.name == "task");
    let word = written.and_then(|(_, node)| match &node.tree {
        Tree::Scalar { text, .. } => Task::parse(text),
        _ => None,
    });
    let Some(task) = word else { return command };
    if command != Task::Sft && command != task {
        let message = format!("`task: {task}`, but the command is `surogate {command}`");
        let span = written.and_then(|(_, node)| node.span);
        reader.report_at(span, "task", message, Some(format!("run `surogate {task}`, or remove `task`")));
    }
    reader.set_defaults(task.defaults());
    task
}

/// Losses that `label_smoothing` changes.
const SMOOTHED: &[PreferenceLoss] = {
    use PreferenceLoss as L;
    &[L::Sigmoid, L::Robust, L::Cdpo, L::ExoPair, L::Aot, L::AotUnpaired]
};

/// Contradictions between the options of preferences, and what no task of them takes.
pub(super) fn check_preferences(config: &Config, reader: &mut Reader) {
    let of = &config.preferences;
    let mut report = |path: &str, message: String, hint: &str| {
        if !reader.is_faulty(path) {
            reader.report(path, message, Some(hint.into()));
        }
    };
    if config.task != Task::Dpo {
        let changed = of.values().into_iter().zip(Preferences::placeholder().values());
        for (row, _) in
            Section::of::<Preferences>().rows.iter().zip(changed).filter(|(_, (value, default))| value != default)
        {
            let message = format!("`{}` has no effect on `task: {}`", row.name, config.task);
            report(row.name, message, "set `task: dpo`, or remove it");
        }
        return;
    }
    if of.loss_type.is_empty() {
        report("loss_type", "`loss_type` is empty".into(), "name a loss, such as `sigmoid`");
    }
    if let Some(weights) = &of.loss_weights
        && weights.len() != of.loss_type.len()
    {
        let message =
            format!("`loss_weights` has {} numbers, `loss_type` {} losses", weights.len(), of.loss_type.len());
        report("loss_weights", message, "give a weight for each loss");
    }
    let has = |loss: PreferenceLoss| of.loss_type.contains(&loss);
    if of.label_smoothing > 0.0 && !of.loss_type.iter().any(|loss| SMOOTHED.contains(loss)) {
        let message = format!("`label_smoothing` has no effect on `loss_type: {}`", of.loss_type[0]);
        report(
            "label_smoothing",
            message,
            "remove `label_smoothing`, or take `sigmoid`, `robust`, `exo_pair` or `aot`",
        );
    }
    if of.label_smoothing >= 0.5 {
        let message = format!("`label_smoothing: {}` says that most pairs are the wrong way round", of.label_smoothing);
        report("label_smoothing", message, "take a number below 0.5, or exchange `chosen_field` and `rejected_field`");
    }
    if has(PreferenceLoss::ExoPair) && of.label_smoothing == 0.0 {
        let message = "`loss_type: exo_pair` takes the logarithm of `label_smoothing`, which is 0".to_owned();
        report("label_smoothing", message, "set `label_smoothing: 0.01`");
    }
    if of.discopop_tau != 0.05 && !has(PreferenceLoss::Discopop) {
        let message = "`discopop_tau` has no effect without `loss_type: discopop`".to_owned();
        report("discopop_tau", message, "remove `discopop_tau`");
    }
    if of.f_alpha_divergence_coef != 0.5 && of.f_divergence_type != Divergence::Alpha {
        let message =
            "`f_alpha_divergence_coef` has no effect without `f_divergence_type: alpha_divergence`".to_owned();
        report("f_alpha_divergence_coef", message, "remove it, or set `f_divergence_type: alpha_divergence`");
    }
    if of.reference_free && of.reference.is_some() {
        let message = "`reference_free: true` computes no reference, and `reference` names one".to_owned();
        report("reference", message, "remove one of them");
    }
    let unavailable = [
        ("pipeline_parallel_size", config.stages() > 1, "pipeline stages"),
        ("sequence_parallel_size", config.sequence() > 1, "sequence parallelism"),
        ("distributed.num_nodes", config.nodes() > 1, "several nodes"),
        ("sample_prompts", !config.logging.sample_prompts.is_empty() && !of.reference_free, "sample prompts"),
    ];
    for (path, _, what) in unavailable.into_iter().filter(|(_, on, _)| *on) {
        let message = format!("`{path}`: {what} are not available yet with `task: dpo`");
        report(path, message, "remove it");
    }
}

/// Losses that compare the pairs of a micro-batch with each other.
const OF_MICRO_BATCHES: &[PreferenceLoss] = {
    use PreferenceLoss as L;
    &[L::Aot, L::AotUnpaired, L::BcoPairPaper, L::Sft]
};

impl Config {
    /// Returns what a user of a task of preferences should know, a sentence each.
    pub(crate) fn notes_on_preferences(&self) -> Vec<String> {
        if self.task != Task::Dpo {
            return Vec::new();
        }
        let task = format!("`task: {}` trains on pairs of answers", self.task);
        let loss = self.preferences.loss_type.iter().find(|loss| OF_MICRO_BATCHES.contains(loss));
        let window = loss.filter(|_| self.data.sample_packing).map(|loss| {
            format!(
                "`loss_type: {loss}` compares the pairs of a micro-batch, and packed rows hold various numbers of pairs; \
                 `sample_packing: false` makes it `per_device_train_batch_size` pairs"
            )
        });
        [task].into_iter().chain(window).collect()
    }

    /// The losses that the model's graph is recorded with, by name, each with its settings.
    pub fn recorded_tasks(&self) -> Value {
        let of = &self.preferences;
        let mut tasks = Map::from_iter([(CAUSAL_LM.to_owned(), json!({}))]);
        if self.task == Task::Dpo {
            let ones = vec![1.0; of.loss_type.len()];
            let settings = json!({
                "losses": of.loss_type.write(),
                "loss_weights": of.loss_weights.as_ref().unwrap_or(&ones),
                "beta": of.beta,
                "label_smoothing": of.label_smoothing,
                "divergence": of.f_divergence_type.name(),
                "alpha": of.f_alpha_divergence_coef,
                "ld_alpha": of.ld_alpha,
                "discopop_tau": of.discopop_tau,
                "weighted": of.use_weighting,
                "reference_free": of.reference_free,
            });
            tasks.insert(self.task.loss().to_owned(), settings);
        }
        Value::Object(tasks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_over_a_micro_batch_are_named_where_rows_are_packed() {
        let notes = |task: &str, options: &str| {
            let text = format!("model: m\ntask: {task}\ndatasets:\n  - {{path: d.jsonl, type: auto}}\n{options}");
            Config::load(&text, "run.yaml", Task::Sft, &[]).unwrap().notes_on_preferences().join("\n")
        };
        assert_eq!(notes("sft", ""), "");
        assert_eq!(notes("dpo", ""), "`task: dpo` trains on pairs of answers");
        assert!(
            notes("dpo", "loss_type: [sigmoid, aot]").contains("`loss_type: aot` compares the pairs of a micro-batch")
        );
        assert!(!notes("dpo", "loss_type: aot\nsample_packing: false").contains("compares"));
    }
}
