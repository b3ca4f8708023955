//! Options of several machines.

use options::options;

options! {
    /// Training on several machines that form a Ray cluster.
    pub struct MultiNode: "Several machines" {
        /// The cluster and how much of it to use.
        distributed: Distributed = {};
    }
}

options! {
    /// The cluster and how much of it to use.
    pub struct Distributed: "Cluster" {
        /// Which cluster: `auto` joins the one that runs here, `local` starts one, `ray://host:port` names its head.
        ray_address: String = "auto", pending, resumable;
        /// Machines to train on.
        num_nodes: u32 = 1, min = 1, pending, resumable;
        /// GPUs on each machine. 0 takes the number of `gpus`.
        gpus_per_node: u32 = 0, pending, resumable;
        /// Folder for the tokens that each machine prepares. Null is a temporary folder with the name of the run.
        worker_output_dir: Option<String> = null, pending, resumable;
    }
}
