//! The configuration of a run: the union of the option tables, loaded once, with all problems at once.
//!
//! Knows names, types, defaults and contradictions of options. Deliberately unknown here: models, devices, data; what
//! depends on them is checked where they are known, with the places that [`Config::mistake`] remembers.

mod cadence;
mod checks;
mod criterion;
mod data;
mod distillation;
mod distributed;
mod dtype;
mod foreign;
mod hardware;
mod inert;
mod local;
mod logging;
mod lora;
mod machine;
mod memory;
mod model;
mod names;
mod offload;
mod optimizer;
mod pipeline;
mod precision;
mod preferences;
mod prompts;
mod quantize_aware;
mod rates;
mod recommended;
mod recompute;
mod reference;
mod reinforcement;
mod resolved;
mod rows;
mod run;
mod runs;
mod sharding;
mod template;
#[cfg(test)]
mod tests;
mod training;

pub use cadence::{Epochs, Strategy};
pub use criterion::Criterion;
pub use data::{Data, Dataset, DatasetType, PreferenceSplit, Stopping, SystemPromptType};
pub use distillation::Distillation;
pub use distributed::{Distributed, MultiNode};
pub use dtype::{Dtype, MatmulDtype};
pub use foreign::{hint_for as foreign_hint, name_for as foreign_name};
pub use hardware::{Device, Hardware};
pub use inert::{notes as inert_notes, notes_on_template};
pub use local::Look;
pub use logging::{LogFormat, Logging, Reporter};
pub use lora::{Lora, Qlora};
pub use machine::MachineFacts;
pub use memory::Memory;
pub use model::{Init, Model, RopeMethod, RopeScaling};
pub use offload::Offload;
pub use optimizer::{Optimizer, OptimizerKind, Schedule};
pub use options::{Problem, Setting, render_problems};
pub use precision::{Fp4Backend, Precision, QuantizeAware, Recipe};
pub use preferences::{Divergence, PreferenceLoss, Preferences};
pub use recompute::Recompute;
pub use reference::{help_rows, reference_page, schema};
pub use reinforcement::{Aggregation, Correction, Level, Reinforcement, RewardFunction, ScaleRewards};
pub use resolved::{Reason, Reasons};
pub use run::{Resume, Run};
pub use sharding::{GradientCompression, ShardScope, Sharding};
pub use template::{ChatTemplate, Clock, LossScale, NormBbox, Side, Truncation, TruncationMode, is_template_file};
pub use training::Training;

use std::collections::BTreeMap;

use ::data::Purpose;
use std::path::PathBuf;
use std::sync::Arc;

use options::{Fields, Node, Reader, Row, Section, Table, Tree, Written, choices};

/// Exit code of a program that was given a wrong configuration or wrong arguments.
pub const EXIT_CONFIG: u8 = 2;

choices! {
    /// Kind of training, which decides a few defaults.
    pub enum Task {
        /// Supervised fine-tuning.
        Sft = "sft",
        /// Pre-training.
        Pt = "pt",
        /// Direct preference optimization, on pairs of answers.
        Dpo = "dpo",
        /// Kahneman-Tversky optimization, on answers with a verdict each.
        Kto = "kto",
        /// Odds ratio preference optimization, on pairs of answers, without a reference.
        Orpo = "orpo",
        /// Contrastive preference optimization and SimPO, on pairs of answers, without a reference.
        Cpo = "cpo",
        /// A reward model: a score for each answer, on pairs of answers.
        Reward = "reward",
        /// Group relative policy optimization, on answers that the model samples to prompts.
        Grpo = "grpo",
        /// Distillation: the distributions of tokens of another model, the teacher.
        Distil = "distil" | "distill",
    }
}

impl Task {
    /// Defaults that differ from the tables': (option, value as in YAML).
    pub const fn defaults(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Task::Sft => &[],
            Task::Pt => &[("lora", "false")],
            Task::Dpo | Task::Orpo | Task::Cpo => &[("learning_rate", "1e-6")],
            Task::Kto => &[("learning_rate", "1e-6"), ("loss_type", "kto")],
            Task::Reward => &[("learning_rate", "1e-4")],
            Task::Grpo => {
                // Samples are drawn without dropout: with it the loss would see other probabilities.
                &[
                    ("learning_rate", "1e-6"),
                    ("loss_type", "dapo"),
                    ("beta", "0"),
                    ("validation_split_ratio", "0"),
                    ("lora_dropout", "0"),
                    ("sample_packing", "false"),
                ]
            }
            Task::Distil => &[("learning_rate", "1e-6"), ("beta", "1")],
        }
    }

    /// The purpose for which the task reads rows.
    pub const fn purpose(self) -> Purpose {
        match self {
            Task::Sft | Task::Pt | Task::Distil => Purpose::Documents,
            Task::Dpo | Task::Orpo | Task::Cpo => Purpose::Pairs,
            Task::Kto => Purpose::Answers,
            Task::Reward => Purpose::Scores,
            Task::Grpo => Purpose::Prompts,
        }
    }

    /// The file of `python/surogate/tasks/` that has its loss.
    pub(crate) const fn loss(self) -> &'static str {
        match self {
            Task::Sft | Task::Pt => CAUSAL_LM,
            Task::Dpo | Task::Kto | Task::Orpo | Task::Cpo | Task::Reward | Task::Grpo | Task::Distil => self.name(),
        }
    }
}

/// The loss of a language model, next to which others are built: it gives the log-probabilities of targets.
pub(crate) const CAUSAL_LM: &str = "causal_lm";

/// A model that an option names, where it is available locally.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchedModel {
    pub folder: PathBuf,
    /// The graph of its architecture with its tasks, as JSON.
    pub ir: Arc<str>,
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
            /// The local folder of the teacher with its recorded graph, once it was fetched.
            pub fetched_teacher: Option<FetchedModel>,
            /// Values that `apply_recommended_values` chose for options that were left out, with reasons; None before
            /// that.
            pub recommended: Option<Reasons>,
            /// Tokens of a row that the checkpoint recorded with which the run resumes, where they are left open.
            pub kept_sequence_len: Option<usize>,
            /// Rows of a micro-step that the plan chose, or that the checkpoint recorded; None before that.
            pub micro_batch: Option<Reason>,
            written: Written,
        }

        /// Every table, in the order of the reference page.
        pub const SECTIONS: &[Section] = &[$( Section::of::<$table>() ),+];

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

    /// The options with `gpus: 0` as the number of GPUs that are visible. Errors: what does not go with several.
    pub fn with_visible_gpus(&self, visible: usize) -> Result<Config, Vec<Problem>> {
        let gpus = if self.hardware.gpus == 0 { visible.max(1) as u32 } else { self.hardware.gpus };
        self.with_gpus(gpus)
    }

    /// The options with as many GPUs as `--machine` names, if it names several and the options leave that open. Errors:
    /// the options name others, or what does not go with several.
    pub fn with_planned_gpus(&self, named: usize, machine: &str) -> Result<Config, Vec<Problem>> {
        let gpus = self.hardware.gpus;
        if named == 1 || gpus as usize == named {
            return self.with_gpus(gpus);
        }
        if self.is_written("gpus") && gpus > 0 {
            let message = format!("`gpus: {gpus}`, but `--machine {machine}` has {named}");
            let hint = "remove `gpus`, or name as many in `--machine`".to_owned();
            return Err(vec![self.mistake("gpus", message, Some(hint))]);
        }
        self.with_gpus(u32::try_from(named).unwrap_or(u32::MAX))
    }

    /// The same on one node: what is for others alone is left out.
    pub(crate) fn of_one_node(&self) -> Config {
        let mut config = self.clone();
        if config.sharding.gradient_compression.is_between_nodes() {
            config.sharding.gradient_compression = GradientCompression::None;
        }
        config
    }

    pub(crate) fn with_gpus(&self, gpus: u32) -> Result<Config, Vec<Problem>> {
        let mut config = self.clone();
        config.hardware.gpus = gpus;
        let refused = checks::refused_with_ranks(&config).into_iter();
        let mut problems: Vec<Problem> =
            refused.map(|(path, message, hint)| config.mistake(path, message, Some(hint))).collect();
        let wrong = config.divide_rows();
        problems.extend(wrong.map(|(path, message, hint)| config.mistake(path, message, Some(hint))));
        if problems.is_empty() { Ok(config) } else { Err(problems) }
    }

            fn read(task: Task, fields: &mut Fields) -> Config {
                $( let $field = <$table as Table>::read_fields(fields); )+
                Config {
                    task, $($field,)+ fetched: BTreeMap::new(), fetched_teacher: None, recommended: None, kept_sequence_len: None,
                    micro_batch: None,
                    written: Written::default(),
                }
            }

            /// The values of each table, in the order of [`SECTIONS`] and their rows.
            fn values(&self) -> Vec<Vec<serde_json::Value>> {
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
    /// Loads a YAML text. `source_name` is before line and column in messages; `overrides` are pairs from the
    /// command line (`--set key=value`, `--key value`) and win over the text, the last over the first.
    ///
    /// # Errors
    /// Every problem of the text and of the overrides, in the order in which they were found.
    pub fn load(
        text: &str,
        source_name: &str,
        task: Task,
        overrides: &[(String, String)],
    ) -> Result<Config, Vec<Problem>> {
        Config::load_looking(text, source_name, task, overrides, Look::Nowhere)
    }

    /// Loads as [`Config::load`], and reports problems of the local files that the options name.
    ///
    /// # Errors
    /// Those of [`Config::load`], and what is not there.
    pub fn load_looking(
        text: &str,
        source_name: &str,
        task: Task,
        overrides: &[(String, String)],
        look: Look,
    ) -> Result<Config, Vec<Problem>> {
        Config::load_run(text, source_name, task, overrides, look, None)
    }

    /// Loads as [`Config::load_looking`], one run of a text that lists several.
    ///
    /// # Errors
    /// Those of [`Config::load_looking`], and a name that no run has.
    pub fn load_run(
        text: &str,
        source_name: &str,
        task: Task,
        overrides: &[(String, String)],
        look: Look,
        run: Option<&str>,
    ) -> Result<Config, Vec<Problem>> {
        let mut reader = Reader::new(task.defaults());
        match reader.read_yaml(source_name, text) {
            Some(root) => Config::from_tree(reader, root, task, overrides, look, run),
            None => Err(reader.finish().1),
        }
    }

    /// The names of the runs that a text lists; none where it is one run.
    ///
    /// # Errors
    /// What is wrong with the text as YAML, and with the list.
    pub fn run_names(text: &str, source_name: &str) -> Result<Vec<String>, Vec<Problem>> {
        let mut reader = Reader::new(&[]);
        let names =
            reader.read_yaml(source_name, text).map_or_else(Vec::new, |root| runs::names_of(&mut reader, &root));
        let problems = reader.finish().1;
        if problems.is_empty() { Ok(names) } else { Err(problems) }
    }

    /// Loads options that are given as a JSON object (a Python dict); problems have no line then.
    ///
    /// # Errors
    /// Every problem of the options and of the overrides. A text that is not JSON is one.
    pub fn load_json(text: &str, task: Task, overrides: &[(String, String)]) -> Result<Config, Vec<Problem>> {
        Config::load_json_looking(text, task, overrides, Look::Nowhere)
    }

    /// Loads as [`Config::load_json`], and reports problems of the local files that the options name.
    ///
    /// # Errors
    /// Those of [`Config::load_json`], and what is not there.
    pub fn load_json_looking(
        text: &str,
        task: Task,
        overrides: &[(String, String)],
        look: Look,
    ) -> Result<Config, Vec<Problem>> {
        let mut reader = Reader::new(task.defaults());
        match serde_json::from_str(text) {
            Ok(value) => Config::from_tree(reader, Node::from_json(&value), task, overrides, look, None),
            Err(error) => {
                reader.report_at(None, "", format!("the options are not JSON: {error}"), None);
                Err(reader.finish().1)
            }
        }
    }

    fn from_tree(
        mut reader: Reader,
        mut root: Node,
        task: Task,
        overrides: &[(String, String)],
        look: Look,
        run: Option<&str>,
    ) -> Result<Config, Vec<Problem>> {
        if let Tree::Null = root.tree {
            root.tree = Tree::Map(Vec::new());
        }
        if !matches!(root.tree, Tree::Map(_)) {
            let message =
                format!("a configuration is a list of `option: value` lines, but this is {}", root.describe());
            reader.report_at(root.span, "", message, None);
            return Err(reader.finish().1);
        }
        names::use_first_names(&mut reader, &mut root);
        // The folder that is said for several runs is that in which each has its own.
        let of_all = |key: &str| run.is_some() && key.replace('-', "_") == "output_dir";
        let (before, after): (Vec<_>, Vec<_>) = overrides.iter().partition(|(key, _)| of_all(key));
        for (key, value) in before {
            names::override_option(&mut reader, &mut root, key, value);
        }
        runs::choose(&mut reader, &mut root, run);
        for (key, value) in after {
            names::override_option(&mut reader, &mut root, key, value);
        }
        let Tree::Map(entries) = &root.tree else { unreachable!("overrides change entries of the root, not the root") };
        let task = preferences::task_of(entries, task, &mut reader);
        let mut fields = Fields::new(&mut reader, entries, root.span);
        let mut config = Config::read(task, &mut fields);
        let second = names::SECOND_NAMES.iter().map(|(second, _)| *second);
        fields.refuse_unknown(rows().map(|row| row.name).chain(second), foreign::hint);
        foreign::explain_datasets(&root, &mut reader);
        checks::check_options(&config, &mut reader);
        local::check(&config, &mut reader, look);
        let (written, problems) = reader.finish();
        if !problems.is_empty() {
            return Err(problems);
        }
        config.written = written;
        Ok(config)
    }

    /// True if the user gave the option a value. Parts are spelled `distributed.num_nodes`, `datasets[0].path`.
    pub fn is_written(&self, path: &str) -> bool {
        self.written.contains(path)
    }

    /// The same configuration with the local files of datasets whose path is a name, by their places.
    pub fn with_fetched(&self, files: BTreeMap<String, Vec<PathBuf>>) -> Config {
        Config { fetched: files, ..self.clone() }
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

    /// A problem at an option that a later stage found, pointing at the user's line if there is one.
    pub fn mistake(&self, path: &str, message: impl Into<String>, hint: Option<String>) -> Problem {
        self.written.mistake(path, message, hint)
    }
}
