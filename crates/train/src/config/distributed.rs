//! Options of several machines.

use options::options;

options! {
    /// Training on several machines in a Ray cluster.
    pub struct MultiNode: "Several machines" {
        /// The cluster and how much of it to use.
        distributed: Distributed = {};
    }
}

options! {
    /// The cluster and how much of it to use.
    pub struct Distributed: "Cluster" {
        /// Ray cluster: `auto` joins the one running on this machine, `local` starts one, `ray://host:port` connects to
        /// a head node.
        ray_address: String = "auto", pending, resumable;
        /// Number of machines.
        num_nodes: u32 = 1, min = 1, pending, resumable;
        /// GPUs per machine. 0 uses the value of `gpus`.
        gpus_per_node: u32 = 0, pending, resumable;
        /// Folder for the data that each machine tokenizes. Null is a temporary folder named after the run.
        worker_output_dir: Option<String> = null, pending, resumable;
    }
}
