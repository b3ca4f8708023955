//! Checks of the options of distillation, and what follows from them.

use options::{OptionValue, Reader, Section, Table};
use serde_json::{Value, json};

use super::distillation::Distillation;
use super::{Config, Task};

/// Contradictions between the options of distillation, and what other tasks do not take.
pub(super) fn check_distillation(config: &Config, reader: &mut Reader) {
    let of = &config.distillation;
    if config.task != Task::Distil {
        let rows = Section::of::<Distillation>().rows.iter();
        for (row, (value, usual)) in rows.zip(of.values().into_iter().zip(Distillation::placeholder().values())) {
            if value != usual && !reader.is_faulty(row.name) {
                let message = format!("`{}` has no effect on `task: {}`", row.name, config.task);
                reader.report(row.name, message, Some("set `task: distil`, or remove it".into()));
            }
        }
        return;
    }
    let mut report = |path: &str, message: String, hint: &str| {
        if !reader.is_faulty(path) {
            reader.report(path, message, Some(hint.into()));
        }
    };
    let beta = config.preferences.beta;
    if beta > 1.0 {
        report("beta", format!("`beta` is {beta}, and `task: distil` takes 0 to 1"), "set `beta: 0.5`");
    }
    if of.loss_top_k > 0 && beta != 0.0 {
        let message = format!("`loss_top_k: {}` gives the forward KL divergence, but `beta` is {beta}", of.loss_top_k);
        report("loss_top_k", message, "set `beta: 0`, or remove `loss_top_k`");
    }
    if of.loss_top_k == 0 && !of.loss_add_tail {
        let message = "`loss_add_tail` has no effect without `loss_top_k`".to_owned();
        report("loss_add_tail", message, "remove it, or set `loss_top_k`");
    }
    if of.lmbda > 0.0 && of.cross_entropy_weight > 0.0 {
        let message = "`cross_entropy_weight` is for the data's tokens, and with `lmbda` the student's own are trained";
        report("cross_entropy_weight", message.to_owned(), "remove one of the two");
    }
    if of.lmbda == 0.0 && of.sampling_temperature != 1.0 {
        let message = "`sampling_temperature` has no effect without `lmbda`".to_owned();
        report("sampling_temperature", message, "set `lmbda: 0.5`, or remove it");
    }
    if of.precompute_teacher && of.loss_top_k == 0 {
        let message =
            "`precompute_teacher` keeps the likeliest tokens of the teacher, and `loss_top_k` is 0".to_owned();
        report("precompute_teacher", message, "set `loss_top_k: 100` with `beta: 0`");
    }
    if of.precompute_teacher && of.lmbda > 0.0 {
        let message =
            "`precompute_teacher` knows the answers of the data, and with `lmbda` the student's own are trained";
        report("precompute_teacher", message.to_owned(), "remove one of the two");
    }
    // Batches of a caller may bring the tokens of a teacher.
    if config.teacher().is_none() && (of.loss_top_k == 0 || config.data.datasets.is_some()) {
        let message = "`task: distil` needs `teacher`".to_owned();
        report("teacher", message, "set `teacher` to the folder of a model, or its name on the Hub");
    }
}

impl Config {
    /// The settings that the loss of distillation is recorded with.
    pub(super) fn distillation_recorded(&self) -> Value {
        let of = &self.distillation;
        json!({
            "beta": self.preferences.beta,
            "temperature": self.reinforcement.temperature,
            "top_k": of.loss_top_k,
            "tail": of.loss_add_tail,
            "cross_entropy_weight": of.cross_entropy_weight,
        })
    }

    /// The tasks that the graph of a teacher is recorded with, by name, each with its settings.
    pub fn recorded_of_teacher(&self) -> Value {
        let of = &self.distillation;
        match of.loss_top_k {
            0 => json!({}),
            count => json!({"teacher": {"count": count, "temperature": self.reinforcement.temperature}}),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(options: &str) -> String {
        let text = format!("model: m\n{options}");
        let found = Config::load(&text, "run.yaml", Task::Sft, &[]);
        let report_of = |of: &options::Problem| format!("{}: {}", of.place.path, of.message);
        found.map_or_else(|problems| problems.iter().map(report_of).collect::<Vec<_>>().join("\n"), |_| String::new())
    }

    #[test]
    fn contradictions_are_reported_with_their_places() {
        assert_eq!(problems("task: distil\nteacher: t\n"), "");
        assert_eq!(problems("task: distil\nteacher: t\nbeta: 0\nloss_top_k: 8\nloss_add_tail: false\n"), "");
        assert_eq!(problems("task: distil\nteacher: t\nlmbda: 0.5\nsampling_temperature: 0.7\ntop_k: 8\n"), "");
        assert_eq!(problems("task: distil\nbeta: 0\nloss_top_k: 8\n"), "");
        assert_eq!(problems("task: distil\nlora: false\nquantize_aware: w4a16\n"), "");
        for (options, said) in [
            ("task: distil\n", "teacher: `task: distil` needs `teacher`"),
            ("teacher: t\n", "teacher: `teacher` has no effect on `task: sft`"),
            ("task: distil\nteacher: t\nbeta: 1.5\n", "beta: `beta` is 1.5, and `task: distil` takes 0 to 1"),
            (
                "task: distil\nteacher: t\nloss_top_k: 8\n",
                "loss_top_k: `loss_top_k: 8` gives the forward KL divergence",
            ),
            ("task: distil\nteacher: t\nloss_add_tail: false\n", "loss_add_tail: `loss_add_tail` has no effect"),
            (
                "task: distil\nteacher: t\nprecompute_teacher: true\n",
                "precompute_teacher: `precompute_teacher` keeps the likeliest tokens",
            ),
            (
                "task: distil\nteacher: t\nbeta: 0\nloss_top_k: 8\nlmbda: 1\nprecompute_teacher: true\n",
                "precompute_teacher: `precompute_teacher` knows the answers of the data",
            ),
            ("task: distil\nteacher: t\nlmbda: 1.5\n", "lmbda: "),
            (
                "task: distil\nteacher: t\nlmbda: 1\ncross_entropy_weight: 1\n",
                "cross_entropy_weight: `cross_entropy_weight` is for the data's tokens",
            ),
            (
                "task: distil\nteacher: t\nsampling_temperature: 2\n",
                "`sampling_temperature` has no effect without `lmbda`",
            ),
            ("task: distil\nteacher: t\ntop_k: 8\n", "top_k: `top_k` has no effect on `task: distil` without `lmbda`"),
            ("task: distil\nteacher: t\nnum_generations: 4\n", "num_generations: `num_generations` has no effect"),
            ("task: sft\ntemperature: 2\n", "temperature: `temperature` has no effect on `task: sft`"),
            ("task: distil\nteacher: t\nloss_type: hinge\n", "loss_type: `loss_type` has no effect on `task: distil`"),
        ] {
            assert!(problems(options).contains(said), "{options}: {}", problems(options));
        }
    }

    #[test]
    fn the_loss_and_the_teacher_are_recorded_with_the_options() {
        let text = "model: m\ntask: distil\nteacher: t\nbeta: 0\nloss_top_k: 8\ntemperature: 2\n";
        let config = Config::load(text, "run.yaml", Task::Sft, &[]).unwrap();
        assert_eq!(config.recorded_of_teacher(), json!({"teacher": {"count": 8, "temperature": 2.0}}));
        assert_eq!(config.recorded_tasks()["distil"]["top_k"], 8);
    }
}
