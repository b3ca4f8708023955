//! Options of the run as a whole: name, length in epochs, folders, checkpoints.

use options::{Fault, Kind, Node, OptionValue, Reader, Setting, Tree, options};
use serde_json::{Value, json};

options! {
    /// What the run is called, how long it is, and where its files go.
    pub struct Run: "Run" {
        /// Name of the run in logs and file names. `auto` makes one from the model and the time.
        run_name: Setting<String> = auto, resumable;
        /// Choose for options that are left out what the plan finds best for this machine, and print what was chosen and
        /// why: how the rows of a step are cut into micro-batches (their number stays the same), `recipe`,
        /// `sample_packing`, rows of at most 2048 tokens, and what waits in host memory where nothing fits without. A
        /// resumed run keeps what was chosen when it began.
        apply_recommended_values: bool = false;
        /// Passes over the training data. `max_steps` wins if it is set.
        num_epochs: u32 = 3, min = 1, resumable;
        /// Folder for everything that the run writes: resolved options, log, checkpoints, result.
        output_dir: String = "output", resumable;
        /// Folder for checkpoints, of one run at a time. `auto` is `output_dir`.
        checkpoint_dir: Setting<String> = auto, resumable;
        /// Go on from the checkpoint that the run in `output_dir` wrote last (`true`; without one the run starts at step
        /// 0, and that is said), or from the one at a path. Options without ↻ must be as they were; batch size ×
        /// accumulation may be split anew.
        resume_from_checkpoint: Resume = false, resumable;
        /// Steps from one checkpoint to the next.
        save_steps: u64 = 50, min = 1, resumable;
        /// Checkpoints to keep. Older ones of this run are deleted.
        save_total_limit: u64 = 5, min = 1, resumable;
    }
}

/// Where a run begins.
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
