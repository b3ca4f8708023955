//! Options of several machines.

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
        /// Ray cluster: `auto` joins the one running on this machine, `local` starts one, `ray://host:port` connects to
        /// a head node.
        ray_address: String = "auto", pending, resumable;
        /// Number of nodes. The same command is started once for each. More than one train on CPUs for now.
        num_nodes: u32 = 1, min = 1, max = 1024, resumable;
        /// GPUs, or ranks on the CPU, of each node. 0 uses the value of `gpus`.
        gpus_per_node: u32 = 0, resumable;
        /// Number of this node, from 0. Null takes it from the environment: `RANK` of torchrun, `SLURM_PROCID`, or
        /// `JOB_COMPLETION_INDEX` of a Kubernetes Job.
        node_rank: Option<u32> = null, resumable;
        /// `host:port` at which node 0 listens and the others find it. Null takes it from the environment: `MASTER_ADDR`
        /// and `MASTER_PORT`, or the first host of a SLURM job.
        rendezvous: Option<String> = null, resumable;
        /// Seconds that nodes wait for each other: at the start, and in every exchange.
        timeout: u32 = 600, min = 1, resumable;
        /// Folder in which each node keeps its tokenized data, in `node-0`, `node-1` and so on. Null uses `data_cache`.
        worker_output_dir: Option<String> = null, resumable;
    }
}
