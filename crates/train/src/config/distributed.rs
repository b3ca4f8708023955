//! Options of several machines (nodes).

use options::options;

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
