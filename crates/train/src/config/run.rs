//! Options of the run as a whole: name, length in epochs, folders, checkpoints.

use options::{Fault, Kind, Node, OptionValue, Reader, Setting, Tree, options};
use serde_json::{Value, json};

use super::Task;
use super::cadence::{Epochs, Strategy};

options! {
    /// Name, length, folders and checkpoints of the run.
    pub struct Run: "Run" {
        /// Kind of training. Null takes that of the command.
        task: Option<Task> = null;
        /// Name of the run in logs and file names. `auto` derives it from the model and the time.
        run_name: Setting<String> = auto, resumable;
        /// Set options that you left out to the values that the plan finds best for this machine, and print each choice
        /// with its reason: `recipe`, `sample_packing`, with adapters `qlora_bnb`, fewer rows in a step if the data would make
        /// fewer than 20 steps, and if the run does not fit otherwise, `sequence_parallel_size`. A resumed run keeps its
        /// first choices.
        apply_recommended_values: bool = false;
        /// Passes over the training data; the last may be a part of one, such as 0.5 or 1.25. `max_steps` takes
        /// precedence.
        num_epochs: Epochs = 3, above = 0, max = 1_000_000, resumable;
        /// Folder for everything that the run writes: resolved options, log, checkpoints, result. With `s3://bucket/path` or
        /// `gs://bucket/path` the run writes to a folder of the user's cache and uploads everything from there during the
        /// training.
        output_dir: String = "output", path, resumable;
        /// Folder for checkpoints, used by one run at a time. `auto` is `output_dir`.
        checkpoint_dir: Setting<String> = auto, path, resumable;
        /// Resume from the last checkpoint of the run in `output_dir` (`true`; without a checkpoint the run starts at
        /// step 0 and says so), or from the checkpoint at a path. Options without ↻ must be unchanged; batch size ×
        /// accumulation may be split differently.
        resume_from_checkpoint: Resume = false, path, resumable;
        /// Times of checkpoints: every `save_steps`, after every pass over the data, or not before the end. The last
        /// step and an interruption are always saved.
        save_strategy: Strategy = "steps", resumable;
        /// Steps between checkpoints, for `save_strategy: steps`.
        save_steps: u64 = 50, min = 1, resumable;
        /// Number of checkpoints to keep. Older ones of this run are deleted.
        save_total_limit: u64 = 5, min = 1, resumable;
        /// Seconds that a signal leaves for the current step and its checkpoint, such as the grace period of a queue. A run
        /// that has not ended by then ends without that checkpoint, with the exit code of the signal; the newest complete one
        /// stays. A note says so when a step and a checkpoint take longer. Null waits for the checkpoint.
        save_grace_seconds: Option<u64> = null, min = 1, resumable;
        /// Write the result from the weights with the lowest evaluation loss (`task: grpo`: the highest reward) instead of the
        /// last ones. Every evaluation that is the best so far is saved as a checkpoint, which is kept in addition to the
        /// newest ones.
        load_best_model_at_end: bool = false, resumable;
        /// Upload the result to this repository of the Hub, `owner/name`, when the run has finished; it is created if
        /// it does not exist. With `merge_adapter`, the merged model is uploaded.
        push_to_hub: Option<String> = null, resumable;
        /// Create the repository of `push_to_hub` as a private one. An existing repository keeps its visibility.
        hub_private_repo: bool = true, resumable;
    }
}

/// The point at which a run begins.
#[derive(Clone, Debug, PartialEq)]
pub enum Resume {
    /// At step 0.
    No,
    /// At the newest checkpoint of this run.
    Newest,
    /// At the checkpoint in this folder.
    From(String),
}

impl OptionValue for Resume {
    const KIND: Kind = Kind::Either(&[Kind::Bool, Kind::Text]);

    fn read(node: &Node, reader: &mut Reader) -> Result<Self, Fault> {
        match (&node.tree, bool::read(node, reader)) {
            (_, Ok(true)) => Ok(Resume::Newest),
            (_, Ok(false)) => Ok(Resume::No),
            (Tree::Scalar { text, .. }, Err(_)) if !text.is_empty() => Ok(Resume::From(text.clone())),
            _ => Err(Fault::MISMATCH),
        }
    }

    fn write(&self) -> Value {
        match self {
            Resume::No => json!(false),
            Resume::Newest => json!(true),
            Resume::From(path) => json!(path),
        }
    }

    fn placeholder() -> Self {
        Resume::No
    }
}
