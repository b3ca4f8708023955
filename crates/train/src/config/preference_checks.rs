//! Checks of the options of preferences, and what follows from them.

use ::data::Purpose;
use options::{Key, Node, OptionValue, Reader, Section, Table, Tree};
use serde_json::{Map, Value, json};

use super::preferences::{Divergence, Nll, PreferenceLoss, Preferences};
use super::{CAUSAL_LM, Config, Task};

/// The task that the file names, else that of the command; its defaults hold from here on.
pub(super) fn task_of(entries: &[(Key, Node)], command: Task, reader: &mut Reader) -> Task {
    let written = entries.iter().find(|(key, _)| key.name == "task");
    let word = written.and_then(|(_, node)| match &node.tree {
        Tree::Scalar { text, .. } => Task::parse(text),
        _ => None,
    });
    let task = word.unwrap_or(command);
    if command != Task::Sft && command != task {
        let message = format!("`task: {task}`, but the command is `surogate {command}`");
        let span = written.and_then(|(_, node)| node.span);
        reader.report_at(span, "task", message, Some(format!("run `surogate {task}`, or remove `task`")));
    }
    let laid_out =
        ["sample_packing", "padding_free"].iter().any(|name| entries.iter().any(|(key, _)| key.name == *name));
    let mut defaults = task.defaults().to_vec();
    if !laid_out && compares_answers(task, entries) {
        defaults.extend(ONE_BY_ONE);
    }
    reader.set_defaults(&defaults);
    task
}

/// Defaults by which a micro-batch holds `per_device_train_batch_size` documents, in their order.
const ONE_BY_ONE: [(&str, &str); 2] = [("sample_packing", "false"), ("padding_free", "true")];

/// Says whether the loss of an answer depends on others of its micro-batch, as the options are written.
fn compares_answers(task: Task, entries: &[(Key, Node)]) -> bool {
    fn text(node: &Node) -> Option<&str> {
        match &node.tree {
            Tree::Scalar { text, .. } => Some(text.as_str()),
            _ => None,
        }
    }
    let words = |name: &str| -> Vec<&str> {
        match entries.iter().find(|(key, _)| key.name == name).map(|(_, node)| node) {
            Some(Node { tree: Tree::List(items), .. }) => items.iter().filter_map(text).collect(),
            node => node.and_then(text).into_iter().collect(),
        }
    };
    let losses: Vec<PreferenceLoss> = words("loss_type").into_iter().filter_map(PreferenceLoss::parse).collect();
    let cpo_alpha = words("cpo_alpha").first().and_then(|text| text.parse().ok());
    let nll = words("nll").first().and_then(|text| Nll::parse(text)).unwrap_or(Nll::Trl);
    let losses = if losses.is_empty() && task == Task::Kto { vec![PreferenceLoss::Kto] } else { losses };
    reason_to_compare(task, &losses, cpo_alpha, nll).is_some()
}

/// The option by which the loss of an answer depends on others of its micro-batch, if one does.
fn reason_to_compare(task: Task, losses: &[PreferenceLoss], cpo_alpha: Option<f64>, nll: Nll) -> Option<String> {
    use PreferenceLoss as L;
    const COMPARING: &[PreferenceLoss] = &[L::Aot, L::AotUnpaired, L::BcoPairPaper, L::Sft, L::Kto, L::BcoPaper];
    let loss = losses.iter().find(|loss| COMPARING.contains(loss));
    match task {
        Task::Dpo | Task::Kto => loss.map(|loss| format!("loss_type: {loss}")),
        Task::Orpo => (nll == Nll::Trl).then(|| "nll: trl".to_owned()),
        Task::Cpo => {
            let alpha = cpo_alpha_of(losses, cpo_alpha);
            (alpha != 0.0).then(|| format!("cpo_alpha: {alpha}"))
        }
        _ => None,
    }
}

/// Weight of the cross entropy in `cpo`. *Departure* from TRL, where `simpo` has 1 as well.
fn cpo_alpha_of(losses: &[PreferenceLoss], written: Option<f64>) -> f64 {
    let of_means = losses.iter().any(|loss| matches!(loss, PreferenceLoss::Simpo | PreferenceLoss::Alphapo));
    written.unwrap_or(if of_means { 0.0 } else { 1.0 })
}

/// The tasks that read an option of preferences.
fn tasks_of(option: &str) -> &'static [Task] {
    match option {
        "beta" => &[Task::Dpo, Task::Kto, Task::Orpo, Task::Cpo, Task::Grpo, Task::Distil],
        "loss_type" => &[Task::Dpo, Task::Kto, Task::Cpo, Task::Grpo],
        "label_smoothing" => &[Task::Dpo, Task::Cpo],
        "share_prompts" => &[Task::Dpo, Task::Orpo, Task::Cpo, Task::Reward, Task::Grpo],
        "precompute_ref_log_probs" => &[Task::Dpo, Task::Kto],
        "reference" => &[Task::Dpo, Task::Kto, Task::Grpo],
        "desirable_weight" | "undesirable_weight" => &[Task::Kto],
        "cpo_alpha" | "simpo_gamma" | "alpha" => &[Task::Cpo],
        "nll" => &[Task::Orpo],
        "center_rewards_coefficient" => &[Task::Reward],
        _ => &[Task::Dpo],
    }
}

/// Losses that `label_smoothing` changes.
const SMOOTHED: &[PreferenceLoss] = {
    use PreferenceLoss as L;
    &[L::Sigmoid, L::Robust, L::Cdpo, L::ExoPair, L::Aot, L::AotUnpaired]
};

/// Contradictions between the options of preferences, and what no task of them takes.
pub(super) fn check_preferences(config: &Config, reader: &mut Reader) {
    let of = &config.preferences;
    let task = config.task;
    let mut report = |path: &str, message: String, hint: &str| {
        if !reader.is_faulty(path) {
            reader.report(path, message, Some(hint.into()));
        }
    };
    let usual = Preferences::placeholder().values();
    let rows = Section::of::<Preferences>().rows.iter();
    for (row, (value, default)) in rows.zip(of.values().into_iter().zip(usual)) {
        let tasks = tasks_of(row.name);
        let is_task_default = task.defaults().iter().any(|(name, _)| *name == row.name);
        if value != default && !tasks.contains(&task) && !is_task_default {
            let message = format!("`{}` has no effect on `task: {task}`", row.name);
            report(row.name, message, &format!("set `task: {}`, or remove it", tasks[0]));
        }
    }
    if task.purpose() == Purpose::Documents {
        return;
    }
    if tasks_of("beta").contains(&task) {
        check_losses(config, &mut report);
    }
    let has = |loss: PreferenceLoss| of.loss_type.contains(&loss);
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
}

/// Contradictions between the losses and what they are made of.
fn check_losses(config: &Config, report: &mut impl FnMut(&str, String, &str)) {
    let of = &config.preferences;
    let task = config.task;
    if of.beta == 0.0 && task != Task::Grpo {
        report("beta", format!("`beta` is 0, and `task: {task}` needs a number above 0"), "set `beta: 0.1`");
    }
    if of.beta == 0.0 && of.reference.is_some() && task == Task::Grpo {
        report("reference", "`reference` has no effect with `beta: 0`".into(), "set `beta`, or remove `reference`");
    }
    if of.loss_type.is_empty() {
        report("loss_type", "`loss_type` is empty".into(), "name a loss, such as `sigmoid`");
    }
    for loss in of.loss_type.iter().filter(|loss| task != Task::Orpo && !loss.tasks().contains(&task)) {
        let others: Vec<&str> =
            PreferenceLoss::ALL.iter().filter(|loss| loss.tasks().contains(&task)).map(|loss| loss.name()).collect();
        let message = format!("`task: {task}` has no loss `{loss}`; it has {}", others.join(", "));
        report("loss_type", message, &format!("set `task: {}`, or take another loss", loss.tasks()[0]));
    }
    if task != Task::Dpo && of.loss_type.len() > 1 {
        let message = format!("`task: {task}` takes one loss, and `loss_type` lists {}", of.loss_type.len());
        report("loss_type", message, "name one; only `task: dpo` adds up several");
    }
    if let Some(weights) = &of.loss_weights
        && weights.len() != of.loss_type.len()
    {
        let message =
            format!("`loss_weights` has {} numbers, `loss_type` {} losses", weights.len(), of.loss_type.len());
        report("loss_weights", message, "give a weight for each loss");
    }
    let has = |loss: PreferenceLoss| of.loss_type.contains(&loss);
    let is_smoothed =
        |loss: &PreferenceLoss| SMOOTHED.contains(loss) || (task == Task::Cpo && *loss == PreferenceLoss::Hinge);
    if of.label_smoothing > 0.0 && task == Task::Dpo && !of.loss_type.iter().any(is_smoothed)
        || of.label_smoothing > 0.0 && task == Task::Cpo && !has(PreferenceLoss::Sigmoid)
    {
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
    let of_means = has(PreferenceLoss::Simpo) || has(PreferenceLoss::Alphapo);
    for (name, is_set) in [("simpo_gamma", of.simpo_gamma != 0.5), ("alpha", of.alpha != 0.0)] {
        if is_set && !of_means {
            report(
                name,
                format!("`{name}` has no effect without `loss_type: simpo`"),
                "set `loss_type: simpo`, or remove it",
            );
        }
    }
    if has(PreferenceLoss::Alphapo) && of.alpha == 0.0 {
        let message = "`loss_type: alphapo` needs `alpha`; with 0 it is SimPO".to_owned();
        report("alpha", message, "set `alpha`, or `loss_type: simpo`");
    }
    if !config.data.sample_packing && config.training.per_device_train_batch_size < config.least_documents() {
        let message = "`loss_type: kto` compares an answer with those of its micro-batch, which holds one".to_owned();
        report("per_device_train_batch_size", message, "set it to 2 or more, or `loss_type: apo_zero_unpaired`");
    }
}

impl Config {
    /// The fewest documents of a micro-batch that the loss takes.
    pub(crate) fn least_documents(&self) -> u32 {
        if self.preferences.loss_type.contains(&PreferenceLoss::Kto) { 2 } else { 1 }
    }

    /// The option by which the loss compares the rows of a micro-batch, if one does.
    pub(super) fn compared_rows(&self) -> Option<String> {
        let of = &self.preferences;
        reason_to_compare(self.task, &of.loss_type, of.cpo_alpha, of.nll)
    }

    /// Returns what a user of a task of preferences should know, a sentence each.
    pub(crate) fn notes_on_preferences(&self) -> Vec<String> {
        let (of, task) = (&self.preferences, self.task);
        let rows = match task.purpose() {
            Purpose::Documents => return Vec::new(),
            Purpose::Pairs | Purpose::Scores => "pairs of answers",
            Purpose::Answers => "answers with a verdict each",
            Purpose::Prompts => "answers that it samples to prompts",
        };
        let trained = format!("`task: {task}` trains on {rows}");
        let reason = reason_to_compare(task, &of.loss_type, of.cpo_alpha, of.nll);
        let size = self.training.per_device_train_batch_size;
        let window = reason.map(|reason| match (self.data.sample_packing, self.written.contains("sample_packing")) {
            (true, _) => format!(
                "`{reason}` compares the rows of a micro-batch, and packed rows hold various numbers of them; \
                 `sample_packing: false` makes it `per_device_train_batch_size` rows"
            ),
            (false, true) => format!("`{reason}` compares the rows of a micro-batch, {size} each"),
            (false, false) => format!(
                "`{reason}` compares the rows of a micro-batch, so that it holds {size} as they come: rows are not packed; \
                 `per_device_train_batch_size` changes the number"
            ),
        });
        let dropout = self.lora.lora_dropout.value().copied().unwrap_or(0.0);
        let dropout = (task == Task::Grpo && self.lora.lora && dropout > 0.0).then(|| {
            format!(
                "`lora_dropout: {dropout}` is on in training and off in sampling: the loss sees other probabilities than \
                 the sampler, which `sampling/sampling_logp_difference` shows"
            )
        });
        [trained].into_iter().chain(window).chain(dropout).collect()
    }

    /// The losses that the model's graph is recorded with, by name, each with its settings.
    pub fn recorded_tasks(&self) -> Value {
        let of = &self.preferences;
        let mut tasks = Map::from_iter([(CAUSAL_LM.to_owned(), json!({}))]);
        let loss = of.loss_type.first().copied().unwrap_or(PreferenceLoss::Sigmoid);
        let settings = match self.task {
            Task::Sft | Task::Pt => return Value::Object(tasks),
            Task::Dpo => json!({
                "losses": of.loss_type.write(),
                "loss_weights": of.loss_weights.clone().unwrap_or_else(|| vec![1.0; of.loss_type.len()]),
                "beta": of.beta,
                "label_smoothing": of.label_smoothing,
                "divergence": of.f_divergence_type.name(),
                "alpha": of.f_alpha_divergence_coef,
                "ld_alpha": of.ld_alpha,
                "discopop_tau": of.discopop_tau,
                "weighted": of.use_weighting,
                "reference_free": of.reference_free,
            }),
            Task::Kto => json!({
                "loss": loss.name(),
                "beta": of.beta,
                "weights": [of.desirable_weight, of.undesirable_weight],
            }),
            Task::Grpo => self.reinforcement.recorded(loss, of.beta),
            Task::Distil => self.distillation_recorded(),
            Task::Orpo => json!({"beta": of.beta, "nll": of.nll.name()}),
            Task::Reward => json!({"centering": of.center_rewards_coefficient.unwrap_or(0.0)}),
            Task::Cpo => json!({
                "loss": loss.name(),
                "beta": of.beta,
                "label_smoothing": of.label_smoothing,
                "nll_weight": cpo_alpha_of(&of.loss_type, of.cpo_alpha),
                "gamma": of.simpo_gamma,
                "alpha": of.alpha,
            }),
        };
        tasks.insert(self.task.loss().to_owned(), settings);
        if self.scoring() != CAUSAL_LM {
            tasks.insert(self.scoring().to_owned(), json!({"temperature": self.reinforcement.temperature}));
        }
        Value::Object(tasks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(task: &str, options: &str) -> std::result::Result<Config, String> {
        let text = format!("model: m\ntask: {task}\ndatasets:\n  - {{path: d.jsonl, type: auto}}\n{options}");
        let problems = |problems: Vec<options::Problem>| {
            problems.iter().map(|of| of.message.clone()).collect::<Vec<_>>().join("\n")
        };
        Config::load(&text, "run.yaml", Task::Sft, &[]).map_err(problems)
    }

    #[test]
    fn losses_over_a_micro_batch_are_named_and_change_the_default_of_packing() {
        let notes = |task: &str, options: &str| config(task, options).unwrap().notes_on_preferences().join("\n");
        assert_eq!(notes("sft", ""), "");
        assert_eq!(notes("dpo", ""), "`task: dpo` trains on pairs of answers");
        assert!(notes("dpo", "loss_type: [sigmoid, aot]").contains("`loss_type: aot` compares the rows"));
        assert!(notes("kto", "").contains("`loss_type: kto` compares the rows of a micro-batch, so that it holds 2"));
        assert!(notes("cpo", "").contains("`cpo_alpha: 1` compares"));
        assert!(notes("orpo", "sample_packing: true").contains("packed rows hold various numbers"));
        let is_packed = |task: &str, options: &str| config(task, options).unwrap().data.sample_packing;
        for (task, options) in [
            ("dpo", "loss_type: [sigmoid, sft]"),
            ("dpo", "loss_type: bco_pair_paper"),
            ("kto", ""),
            ("kto", "loss_type: bco_paper"),
            ("orpo", ""),
            ("cpo", ""),
            ("cpo", "loss_type: simpo\ncpo_alpha: 0.5"),
        ] {
            let of = config(task, options).unwrap();
            assert!(!of.data.sample_packing && of.template.padding_free, "{task} {options}");
        }
        for (task, options) in [
            ("dpo", "loss_type: [sigmoid, nll_paper]"),
            ("kto", "loss_type: apo_zero_unpaired"),
            ("orpo", "nll: paper"),
            ("cpo", "loss_type: simpo"),
            ("cpo", "cpo_alpha: 0"),
            ("kto", "sample_packing: true"),
        ] {
            assert!(is_packed(task, options), "{task} {options}");
        }
    }

    #[test]
    fn options_of_other_tasks_and_losses_are_refused() {
        for (task, options, named) in [
            ("dpo", "loss_type: kto", "`task: dpo` has no loss `kto`"),
            (
                "kto",
                "loss_type: sigmoid",
                "`task: kto` has no loss `sigmoid`; it has kto, apo_zero_unpaired, bco_paper",
            ),
            ("kto", "per_device_train_batch_size: 1", "which holds one"),
            ("orpo", "loss_type: hinge", "`loss_type` has no effect on `task: orpo`"),
            ("cpo", "loss_type: [hinge, ipo]", "takes one loss"),
            ("cpo", "loss_type: hinge\nlabel_smoothing: 0.1", "`label_smoothing` has no effect"),
            ("cpo", "simpo_gamma: 1", "`simpo_gamma` has no effect without `loss_type: simpo`"),
            ("cpo", "loss_type: alphapo", "needs `alpha`"),
            ("cpo", "reference: m", "`reference` has no effect on `task: cpo`"),
            ("dpo", "desirable_weight: 2", "`desirable_weight` has no effect on `task: dpo`"),
            ("sft", "cpo_alpha: 0.5", "`cpo_alpha` has no effect on `task: sft`"),
        ] {
            let found = config(task, options).unwrap_err();
            assert!(found.contains(named), "{task} {options}: {found}");
        }
        for task in Task::ALL.iter().copied() {
            let needed = if task == Task::Distil { "teacher: t" } else { "" };
            assert!(config(task.name(), needed).is_ok(), "{task}");
        }
    }
}
