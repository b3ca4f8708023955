//! The launcher of this process, as options and the environment name it: torchrun, SLURM, indexed Jobs of Kubernetes, or none.

use options::Reader;

use super::{Config, Distributed, Strategy};

/// The number of a node, as torchrun, SLURM and indexed Jobs of Kubernetes give it.
pub(crate) const LAUNCHERS: [&str; 3] = ["RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"];

/// A variable of the environment; none where it is empty.
pub(crate) type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

pub(crate) fn of_process(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// True if a Ray cluster is to start the nodes: an address of one is given, or there are several nodes and no launcher
/// gives the number of this one. A number or a rendezvous that is given makes this process one of the nodes.
pub fn starts_on_ray(config: &Config) -> bool {
    is_for_ray(config, &of_process)
}

pub(crate) fn is_for_ray(config: &Config, environment: Environment<'_>) -> bool {
    let of = &config.multi_node.distributed;
    let on_ray = config.is_written("distributed.ray_address");
    launcher(of, on_ray, environment).is_none() && (on_ray || of.most_nodes() > 1)
}

/// Returns the option or variable that makes this process one of the nodes; none if Ray starts them. `on_ray`: the address of
/// a cluster is given.
pub(crate) fn launched_by(of: &Distributed, on_ray: bool) -> Option<&'static str> {
    launcher(of, on_ray, &of_process)
}

pub(crate) fn launcher(of: &Distributed, on_ray: bool, environment: Environment<'_>) -> Option<&'static str> {
    match (&of.node_rank, &of.rendezvous) {
        (Some(_), _) => Some("distributed.node_rank"),
        (None, Some(_)) => Some("distributed.rendezvous"),
        (None, None) => LAUNCHERS.into_iter().find(|name| !on_ray && environment(name).is_some()),
    }
}

/// Checks `max_nodes`: the other numbers of nodes, and all that a run needs to take up further nodes.
pub(super) fn check_max_nodes(config: &Config, reader: &mut Reader) {
    let of = &config.multi_node.distributed;
    let path = "distributed.max_nodes";
    let Some(most) = of.max_nodes.filter(|_| !reader.is_faulty(path)) else { return };
    let numbers = [("num_nodes", Some(of.num_nodes)), ("min_nodes", of.min_nodes)];
    if let Some((name, least)) =
        numbers.into_iter().find_map(|(name, number)| Some((name, number.filter(|number| *number > most)?)))
    {
        let message = format!("`{path}: {most}` is less than `distributed.{name}: {least}`");
        reader.report(path, message, Some(format!("raise it, or remove it for `num_nodes: {}`", of.num_nodes)));
        return;
    }
    if most == of.min_nodes.unwrap_or(of.num_nodes) {
        return;
    }
    if let Some(name) = launched_by(of, reader.is_written("distributed.ray_address")) {
        let message =
            format!("`{path}: {most}` is for nodes that Ray starts, but `{name}` makes this process one of them");
        reader.report(path, message, Some(format!("remove `{path}`, or start the run with Ray and without `{name}`")));
    } else if of.ray_address == "local" {
        let message = format!("`{path}: {most}`, but no machine joins the cluster of `distributed.ray_address: local`");
        reader.report(path, message, Some("set `distributed.ray_address: auto`, or remove it".into()));
    }
    if config.run.save_strategy == Strategy::No && !reader.is_faulty("save_strategy") {
        let message = format!("`{path}: {most}` adds nodes at a checkpoint, but `save_strategy: no` writes none");
        reader.report(path, message, Some("set `save_strategy: steps` and `save_steps`, or remove it".into()));
    }
}

#[cfg(test)]
impl Config {
    /// The options of a run on CPUs with a value of `distributed`, for tests.
    pub(crate) fn of_test_nodes(distributed: &str) -> Config {
        let text = format!("model: m\ndevice: cpu\ndistributed: {distributed}\n");
        let found = Config::load(&text, "run.yaml", super::Task::Sft, &[]);
        found.unwrap_or_else(|problems| panic!("{}", options::render_problems(&problems)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Task;

    #[test]
    fn ray_starts_what_nothing_else_does() {
        let none: &[(&str, &str)] = &[];
        let slurm: &[(&str, &str)] = &[("SLURM_PROCID", "0")];
        for (options, variables, expected) in [
            ("{}", none, false),
            ("{num_nodes: 2}", none, true),
            ("{num_nodes: 2}", slurm, false),
            ("{num_nodes: 2, ray_address: auto}", slurm, true),
            ("{ray_address: local}", none, true),
            ("{max_nodes: 2}", none, true),
            ("{num_nodes: 2, ray_address: auto, node_rank: 1}", none, false),
            ("{num_nodes: 2, rendezvous: 'h:1'}", none, false),
        ] {
            let environment = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|of| of.1.to_owned());
            assert_eq!(is_for_ray(&Config::of_test_nodes(options), &environment), expected, "{options} {variables:?}");
        }
    }

    #[test]
    fn more_nodes_need_their_number_ray_and_checkpoints() {
        for (options, message, hint) in [
            (
                "{num_nodes: 3, max_nodes: 2}",
                "`distributed.max_nodes: 2` is less than `distributed.num_nodes: 3`",
                "raise",
            ),
            (
                "{num_nodes: 2, max_nodes: 3, node_rank: 0}",
                "`distributed.max_nodes: 3` is for nodes that Ray starts, but `distributed.node_rank` makes this process one of them",
                "remove `distributed.max_nodes`",
            ),
            (
                "{max_nodes: 3, rendezvous: 'h:1'}",
                "`distributed.max_nodes: 3` is for nodes that Ray starts, but `distributed.rendezvous` makes this process one of them",
                "remove `distributed.max_nodes`",
            ),
            (
                "{num_nodes: 2, max_nodes: 3, ray_address: local}",
                "`distributed.max_nodes: 3`, but no machine joins the cluster of `distributed.ray_address: local`",
                "set `distributed.ray_address: auto`",
            ),
            (
                "{num_nodes: 2, max_nodes: 3}\nsave_strategy: 'no'",
                "`distributed.max_nodes: 3` adds nodes at a checkpoint, but `save_strategy: no` writes none",
                "set `save_strategy: steps`",
            ),
        ] {
            let text = format!("model: m\ndevice: cpu\ndistributed: {options}\n");
            let problems = Config::load(&text, "run.yaml", Task::Sft, &[]).expect_err(&text);
            assert_eq!(problems.len(), 1, "{text}");
            assert_eq!(problems[0].message, message);
            assert!(problems[0].hint.as_deref().is_some_and(|found| found.starts_with(hint)), "{:?}", problems[0].hint);
        }
        for options in ["{num_nodes: 2, max_nodes: 2, node_rank: 0}", "{max_nodes: 4}", "{num_nodes: 2, min_nodes: 1}"]
        {
            let config =
                Config::load(&format!("model: m\ndevice: cpu\ndistributed: {options}\n"), "run.yaml", Task::Sft, &[]);
            assert!(config.is_ok(), "{options}");
        }
    }
}
