//! Every option of a run: the union of the option tables.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use ::data::StreamFile;
use options::{Fields, Problem, Row, Section, Table, Written};

use super::{
    ChatTemplate, Data, Distillation, GradientCompression, Hardware, Logging, Lora, Memory, Model, MultiNode, Offload,
    Optimizer, Precision, Preferences, Qlora, Reason, Reasons, Recompute, Reinforcement, Run, Sharding, Task, Training,
};
use crate::error::TrainError;

/// A model that an option names, where it is available locally.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchedModel {
    pub folder: PathBuf,
    /// The graph of its architecture with its tasks, as JSON.
    pub ir: Arc<str>,
}

/// Files of streamed datasets that are fetched while a run trains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remote {
    /// The interpreter of the process that fetches them.
    pub python: PathBuf,
    /// The files by the place of the set, such as `datasets[0]`.
    pub files: BTreeMap<String, Vec<StreamFile>>,
}

/// Declares the configuration as the union of tables: a field for each, and the list of them.
macro_rules! union_of_tables {
    ($( $(#[doc = $doc:literal])+ $field:ident: $table:ty; )+) => {
        /// Every option of a run. Loaded by [`Config::load`] and not changed afterwards.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Config {
            /// The task: its data, its loss and a few defaults.
            pub task: Task,
            $( $(#[doc = $doc])+ pub $field: $table, )+
            /// Files of datasets whose path is a name, by the place of the set, such as `datasets[0]`.
            pub fetched: BTreeMap<String, Vec<PathBuf>>,
            /// Files elsewhere of datasets that are streamed.
            pub remote: Option<Remote>,
            /// The local folder of the teacher with its recorded graph, once it was fetched.
            pub fetched_teacher: Option<FetchedModel>,
            /// Values that `apply_recommended_values` chose for options that were left out, with reasons; None before
            /// that.
            pub recommended: Option<Reasons>,
            /// Tokens of a row that the checkpoint recorded with which the run resumes, where they are left open.
            pub kept_sequence_len: Option<usize>,
            /// Rows of a micro-step that the plan chose, or that the checkpoint recorded; None before that.
            pub micro_batch: Option<Reason>,
            pub(super) written: Written,
        }

        /// Every table, in the order of the reference page.
        pub const SECTIONS: &[Section] = &[$( Section::of::<$table>() ),+];

        impl Config {
            pub(super) fn read(task: Task, fields: &mut Fields) -> Config {
                $( let $field = <$table as Table>::read_fields(fields); )+
                Config {
                    task, $($field,)+ fetched: BTreeMap::new(), remote: None, fetched_teacher: None, recommended: None, kept_sequence_len: None,
                    micro_batch: None,
                    written: Written::default(),
                }
            }

            /// The values of each table, in the order of [`SECTIONS`] and their rows.
            pub(super) fn values(&self) -> Vec<Vec<serde_json::Value>> {
                vec![$( self.$field.values() ),+]
            }
        }
    };
}

union_of_tables! {
    /// The run as a whole.
    run: Run;
    /// Options of the model.
    model: Model;
    /// Options of the training loop.
    training: Training;
    /// The optimizer and its schedule.
    optimizer: Optimizer;
    /// Options of the data.
    data: Data;
    /// Options of the chat template.
    template: ChatTemplate;
    /// Losses that compare answers, and their reference.
    preferences: Preferences;
    /// Rewards, samples and losses of sampled answers.
    reinforcement: Reinforcement;
    /// The teacher of distillation and the loss.
    distillation: Distillation;
    /// Options of the adapters.
    lora: Lora;
    /// Options of quantized weights under adapters.
    qlora: Qlora;
    /// Options of number formats.
    precision: Precision;
    /// Options of the devices.
    hardware: Hardware;
    /// Options of recomputed activations.
    recompute: Recompute;
    /// Options of tensors in host memory.
    offload: Offload;
    /// Large tensors cut into parts.
    memory: Memory;
    /// Options of several GPUs.
    sharding: Sharding;
    /// Options of several machines.
    multi_node: MultiNode;
    /// Options of logs and reports.
    logging: Logging;
}

/// The rows of every table.
pub fn rows() -> impl Iterator<Item = &'static Row> + Clone {
    SECTIONS.iter().flat_map(|section| section.rows)
}

impl Config {
    /// Devices that train together, of all nodes.
    pub fn ranks(&self) -> usize {
        self.local_ranks() * self.nodes()
    }

    /// Devices of this node that have rows of their own: all layers, or those of a pipeline.
    pub fn local_ranks(&self) -> usize {
        (self.devices() / self.stages()).max(1)
    }

    /// Devices that have some layers each.
    pub fn stages(&self) -> usize {
        self.sharding.pipeline_parallel_size as usize
    }

    /// Number of devices of this node.
    pub fn devices(&self) -> usize {
        match self.multi_node.distributed.gpus_per_node {
            0 => self.hardware.gpus.max(1) as usize,
            of_node => of_node as usize,
        }
    }

    /// Devices in a row that have the parts of one micro-batch.
    pub fn sequence(&self) -> usize {
        self.template.sequence_parallel_size as usize
    }

    /// Micro-batches that are worked on at once.
    pub fn replicas(&self) -> usize {
        self.ranks() / self.sequence()
    }

    /// Number of processes that train together.
    pub fn nodes(&self) -> usize {
        self.multi_node.distributed.num_nodes as usize
    }

    /// The same on one node: what is for others alone is left out.
    pub(crate) fn of_one_node(&self) -> Config {
        let mut config = self.clone();
        if config.sharding.gradient_compression.is_between_nodes() {
            config.sharding.gradient_compression = GradientCompression::None;
        }
        config
    }

    /// True if the user gave the option a value. Parts are spelled `distributed.num_nodes`, `datasets[0].path`.
    pub fn is_written(&self, path: &str) -> bool {
        self.written.contains(path)
    }

    /// The same configuration with the local files of datasets whose path is a name, by their places.
    pub fn with_fetched(&self, files: BTreeMap<String, Vec<PathBuf>>) -> Config {
        Config { fetched: files, ..self.clone() }
    }

    /// The same configuration with the files elsewhere of datasets that are streamed.
    pub fn with_remote(&self, remote: Remote) -> Config {
        Config { remote: Some(remote), ..self.clone() }
    }

    /// The model whose distributions are learned: with `quantize_aware` the model itself where none is given.
    pub fn teacher(&self) -> Option<&str> {
        let own = self.task == Task::Distil && self.precision.quantize_aware.is_some();
        self.distillation.teacher.as_deref().or_else(|| own.then_some(self.model.model.as_str()))
    }

    /// The same configuration with the local folder of the teacher and its graph as JSON.
    pub fn with_fetched_teacher(&self, folder: PathBuf, ir: &str) -> Config {
        Config { fetched_teacher: Some(FetchedModel { folder, ir: ir.into() }), ..self.clone() }
    }

    /// The error with the places of options in the user's text, where a later stage knew only their names.
    pub(crate) fn located(&self, error: TrainError) -> TrainError {
        let place = |of: Problem| match of.place.location {
            None => self.mistake(&of.place.path, of.message, of.hint),
            Some(_) => of,
        };
        match error {
            TrainError::Config(problems) => TrainError::Config(problems.into_iter().map(place).collect()),
            other => other,
        }
    }

    /// A problem at an option that a later stage found, pointing at the user's line if there is one.
    pub fn mistake(&self, path: &str, message: impl Into<String>, hint: Option<String>) -> Problem {
        self.written.mistake(path, message, hint)
    }
}
