//! Options of several machines (nodes).

use options::{Reader, options};

use super::{Config, Strategy};
use crate::nodes;

options! {
    /// Training on several machines, or in several processes of one.
    pub struct MultiNode: "Several machines" {
        /// The nodes of the run: processes that train together, usually one on each machine.
        distributed: Distributed = {}, resumable;
    }
}

options! {
    /// The nodes of the run: processes that train together, usually one on each machine.
    pub struct Distributed: "Nodes" {
        /// Ray cluster that starts the nodes: `auto` is the one that this machine belongs to, `local` a new one on this
        /// machine, `ray://host:port` that of a head node. Ray is used if this option is set, or if there are several
        /// nodes and nothing says which of them this process is.
        ray_address: String = "auto", resumable;
        /// Number of nodes.
        num_nodes: u32 = 1, min = 1, max = 1024, resumable;
        /// GPUs, or ranks on the CPU, of each node. 0 uses the value of `gpus`.
        gpus_per_node: u32 = 0, resumable;
        /// Number of this node, from 0. Null reads it from the environment: `RANK` of torchrun, `SLURM_PROCID`, or
        /// `JOB_COMPLETION_INDEX` of a Kubernetes Job.
        node_rank: Option<u32> = null, resumable;
        /// `host:port` at which node 0 listens and the others find it. Null reads it from the environment:
        /// `MASTER_ADDR` and `MASTER_PORT`, or the first host of a SLURM job.
        rendezvous: Option<String> = null, resumable;
        /// Seconds that nodes wait for each other: at the start, and in every exchange.
        timeout: u32 = 600, min = 1, resumable;
        /// Maximum number of times that a run continues from its last checkpoint after a node was lost. Ray starts the
        /// nodes again; with other launchers, and by hand, you start the lost node again while the others wait for it.
        max_restarts: u32 = 0, max = 1000000, resumable;
        /// Ray only: the fewest nodes with which a run continues if lost ones do not come back. Null waits for all.
        /// Fewer nodes accumulate more micro-batches, so that a step keeps its number of rows; a number of nodes that
        /// does not divide it is not used.
        min_nodes: Option<u32> = null, min = 1, resumable;
        /// Ray only: the most nodes of the run. Machines that join the cluster while it goes are used from its next
        /// checkpoint on; the run starts with `num_nodes`. Null is `num_nodes`: the run grows again after it went on with
        /// fewer. More nodes accumulate fewer micro-batches, as with `min_nodes`.
        max_nodes: Option<u32> = null, min = 1, max = 1024, resumable;
        /// Folder in which each node keeps its tokenized data, in `node-0`, `node-1` and so on. Null uses `surogate-` and
        /// `run_name`, or the model's name, in the system's folder for temporary files (`/tmp`), unless `data_cache` is set.
        worker_output_dir: Option<String> = null, path, resumable;
    }
}

impl Distributed {
    /// The number of nodes that the run has at most.
    pub fn most_nodes(&self) -> u32 {
        self.max_nodes.unwrap_or(self.num_nodes).max(self.num_nodes)
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
    if let Some(name) = nodes::launched_by(of, reader.is_written("distributed.ray_address")) {
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
mod tests {
    use crate::config::{Config, Task};

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
