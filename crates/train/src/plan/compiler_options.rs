//! From options and model to the compiler's options. What the user left open is decided
//! here, each with its reason.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use compiler::{
    AdapterOptions, Blocks, CompileOptions, Compression, OffloadOptions, OptimizerKind, OptimizerOptions, PlanOptions,
    Rates, RecomputeOptions, Scope, Sharding, Training,
};
use options::Setting;
use program::Machine;
use serde_json::json;
use tensor::DType;
use tensor::packed::{Quantisation, Target};

use crate::config::reason;
use crate::config::{self, Config, GradientCompression, MachineFacts, Problem, Reasons, ShardScope, Task};
use crate::error::{Result, TrainError};
use crate::inference::generate::Samples;
use crate::input::encoded::Encoded;
use crate::input::row_length::RowLength;
use crate::input::shared_prompts;
use crate::model::other_parts;
use crate::model::source::{ModelSource, SCORE};
use crate::model::vision;
use crate::plan::exact_sampling;
use crate::plan::formats::{self, dtype_of};
use crate::plan::quantize_aware;
use crate::plan::quantized_model;
use crate::plan::reference::{self, Reference};
use crate::plan::teacher::{self, Teacher};

/// Decisions of a run before anything is compiled.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Without variants: these follow from the data.
    pub compile: CompileOptions,
    /// Tokens of a row; where the length is open, the most that the documents may come to.
    pub sequence_len: usize,
    /// The length of rows follows from the documents, which are not known yet.
    pub length_is_open: bool,
    /// Logits are computed for tokens with a target alone, where batches have many others.
    trained_logits: bool,
    /// Choices for options that were left open.
    pub reasons: Reasons,
    /// Notes for the user, a sentence each.
    pub notes: Vec<String>,
    /// Prompts that are answered at evaluations.
    pub(crate) samples: Option<Arc<Samples>>,
    /// The source of the reference's log-probabilities; None for a task that reads none.
    pub(crate) reference: Option<Reference>,
    /// The model whose distributions are learned, where it is available.
    pub(crate) teacher: Option<Teacher>,
}

impl Plan {
    /// The length of rows as far as it is known, and true if answers share their prompts: what the reading of the data follows.
    pub(crate) fn rows(&self) -> (RowLength, bool) {
        (RowLength { tokens: self.sequence_len, is_open: self.length_is_open }, self.compile.branches.is_some())
    }

    /// Tokens of a row, and true if logits may be computed for tokens with a target alone: what the layout of the data follows.
    pub(crate) fn rows_of_feed(&self) -> (usize, bool) {
        (self.sequence_len, self.trained_logits)
    }

    /// The models whose results training reads besides its own.
    pub(crate) fn others(&self) -> (Option<&Reference>, Option<&Teacher>) {
        (self.reference.as_ref(), self.teacher.as_ref())
    }

    /// Decides. Every contradiction between options and model is in the error.
    pub fn new(config: &Config, source: &ModelSource) -> Result<Plan> {
        let mut problems = Vec::new();
        let mut notes = Vec::new();
        let mut reasons = BTreeMap::new();
        check_family(config, source, &mut problems);
        let length = RowLength::new(config, source, &mut reasons, &mut problems);
        explain_open(config, source.model.images.is_some(), &mut reasons);
        let adapter =
            config.lora.lora.then(|| adapter(config, source, &mut reasons, &mut notes, &mut problems)).transpose()?;
        if !problems.is_empty() {
            return Err(TrainError::Config(problems));
        }
        let dtype = formats::weights(config, source, &mut reasons, &mut notes)?;
        let trained = adapter.as_ref().map_or(dtype, |adapter| adapter.dtype);
        let master = formats::keeps_master(config, dtype, trained, &mut reasons, &mut problems);
        formats::check_gradients(config, dtype, &mut problems);
        vision::check(config, source, &mut problems);
        let stored = quantized_model::decide(config, source, dtype, &mut problems)?;
        notes.extend(stored.note);
        check_quants(config, !stored.packings.is_empty(), &mut problems);
        problems.extend(check_compression(config, dtype));
        notes.extend(formats::note_on_loss_scale(dtype, master));
        notes.extend(formats::note_on_determinism(config));
        notes.extend(config.note_on_split());
        notes.extend(config.notes_on_preferences());
        notes.extend(note_on_score(config, source));
        notes.extend(formats::note_on_attention_dropout(source));
        notes.extend(config::inert_notes(config));
        if !problems.is_empty() {
            return Err(TrainError::Config(problems));
        }
        let samples = Samples::new(config, source)?.map(Arc::new);
        let reference = reference::choose(config, source)?;
        notes.extend(reference::note(config, reference.as_ref()));
        let teacher = teacher::open(config, source, length.tokens)?;
        let entries = reference::entries(config, reference.as_ref());
        let entries = samples.as_ref().map_or(entries.clone(), |samples| samples.with_cache(entries));
        let mut compile = CompileOptions {
            variants: Vec::new(),
            weights: dtype,
            quantised: quantisation(config),
            stored: stored.packings,
            compute: dtype,
            recipe: formats::recipe(config),
            training: Some(Training {
                rates: vision::with_vision(config, source, rates(config)),
                dropout: true,
                embedding_noise: config.training.neftune_noise_alpha.unwrap_or(0.0),
                optimizer: Some(OptimizerOptions { master, ..optimizer(config) }),
            }),
            adapter,
            entries,
            seed: config.data.train_seed,
            plan: PlanOptions { passes: passes(&mut notes)?, ..memory_options(config) },
            sharding: sharding(config),
            branches: None,
            batch_invariant: exact_sampling::is_asked(config),
        };
        compile.branches = shared_prompts::decide(config, source, &compile, length.tokens, (&mut notes, &mut reasons))?;
        notes.extend(quantize_aware::decide(config, source, &mut compile)?);
        notes.extend(formats::note_on_products(config, source, &compile)?);
        notes.extend(formats::note_on_experts(config, source, &compile)?);
        let trained_logits = takes_trained_logits(config) && compiler::takes_trained_logits(&source.model, &compile)?;
        Ok(Plan {
            compile,
            sequence_len: length.tokens,
            length_is_open: length.is_open,
            trained_logits,
            reasons,
            notes,
            samples,
            reference,
            teacher,
        })
    }

    /// The same, with rows as the documents have decided where that was open.
    pub fn with_data(mut self, encoded: &Encoded) -> Plan {
        if let (true, Some(because)) = (self.length_is_open, &encoded.because) {
            self.reasons.insert("sequence_len".into(), reason(encoded.sequence_len, because));
            (self.sequence_len, self.length_is_open) = (encoded.sequence_len, false);
        }
        // Without anything shared, rows have no branches. What a stream brings later is not known.
        let is_shared = || encoded.stream.is_some() || shared_prompts::has_any(&encoded.summary);
        self.compile.branches = self.compile.branches.filter(|_| is_shared());
        self
    }
}

impl Plan {
    /// The note on how the distributions of the teacher reach the loss.
    pub(crate) fn note_on_teacher(&self, config: &Config) -> Option<String> {
        self.teacher.as_ref().map(|teacher| teacher.note(config, self.sequence_len))
    }
}

/// True if the task, and how the batch is divided, leave tokens without a target to themselves.
fn takes_trained_logits(config: &Config) -> bool {
    let task = matches!(config.task, Task::Sft | Task::Dpo | Task::Kto | Task::Cpo);
    let whole = config.nodes() == 1 && config.sequence() == 1 && config.stages() == 1;
    config.training.trained_logits_only && task && whole
}

/// The note on the head of a reward model that its files lack.
fn note_on_score(config: &Config, source: &ModelSource) -> Option<String> {
    let lacks = || source.own(&source.folder).is_ok_and(|files| !files.contains(SCORE));
    (config.task == Task::Reward && config.lora.adapter.is_none() && lacks())
        .then(|| format!("`{SCORE}` is not in the model's files: the head begins with random numbers (`train_seed`)"))
}

/// An error where the options promise what a machine with this number of visible GPUs cannot keep.
pub fn require_machine(config: &Config, machine: &Machine, gpus: usize) -> Result<()> {
    match config.check_machine(&MachineFacts::of(machine, gpus)) {
        problems if problems.is_empty() => Ok(()),
        problems => Err(TrainError::Config(problems)),
    }
}

/// `SUROGATE_PASSES`: how many of the rewrites that may be left out run, for finding the one that breaks a result.
fn passes(notes: &mut Vec<String>) -> Result<Option<usize>> {
    const NAME: &str = "SUROGATE_PASSES";
    let Some(text) = std::env::var_os(NAME) else { return Ok(None) };
    let text = text.to_string_lossy();
    let all = compiler::Pass::OPTIONAL.len();
    let Some(limit) = text.parse().ok().filter(|limit| *limit <= all) else {
        return Err(TrainError::Usage(format!("{NAME} is `{text}`, expected a whole number from 0 to {all}")));
    };
    let skipped: Vec<&str> = compiler::Pass::OPTIONAL[limit..].iter().map(|pass| pass.name()).collect();
    if !skipped.is_empty() {
        notes.push(format!("{NAME}={limit} leaves out {}", skipped.join(", ")));
    }
    Ok(Some(limit))
}

/// The memory options; the compiler decides those that are left open.
fn memory_options(config: &Config) -> PlanOptions {
    let requested = |setting: Setting<bool>| match setting {
        Setting::Value(on) => Some(on),
        Setting::Auto => None,
    };
    let parts = |setting: Setting<u32>| match setting {
        Setting::Value(parts) => Some(parts as usize),
        Setting::Auto => None,
    };
    let one_bit = config.sharding.gradient_compression == GradientCompression::OneBit;
    let of = &config.recompute;
    // What the adapters read can be recomputed only from inside the layer.
    let needs_block = config.lora.lora && requested(of.recompute_lora) == Some(true);
    PlanOptions {
        recompute: RecomputeOptions {
            swiglu: requested(of.recompute_swiglu),
            rmsnorm: requested(of.recompute_rmsnorm),
            ffn: requested(of.recompute_ffn),
            qkv: requested(of.recompute_qkv),
            att: requested(of.recompute_att),
            block: requested(of.recompute_block).or(needs_block.then_some(true)),
            lora: requested(of.recompute_lora),
        },
        head_chunks: parts(config.memory.lmhead_chunks),
        attention_chunks: parts(config.memory.attn_bwd_chunks),
        memory_limit: config.offload.memory_limit.map(|limit| usize::try_from(limit.0).unwrap_or(usize::MAX)),
        reserved: 0,
        micro_steps: config.micro_steps() as usize,
        offload: OffloadOptions {
            residual: requested(config.offload.offload_residual),
            master: requested(config.offload.offload_master),
            // First moments that are compressed are read before the update.
            optimizer: requested(config.offload.offload_optimizer).or(one_bit.then_some(false)),
            // Where each node has all shards, their sums are added up on the device.
            gradients: requested(config.offload.offload_grads).or((config.nodes() > 1).then_some(false)),
            quants: requested(config.offload.offload_quants),
            zero_copy: config.offload.use_zero_copy,
            write_combined: config.offload.use_write_combined,
            slice_bytes: None,
        },
        passes: None,
    }
}

/// Gradients that do not travel are not compressed.
fn check_compression(config: &Config, dtype: DType) -> Option<Problem> {
    let of = config.sharding.gradient_compression;
    if of.is_between_nodes() {
        let written = format!("`gradient_compression: {}`", of.name());
        let (message, hint) = match sharding(config).scope {
            _ if config.nodes() == 1 => (
                format!("{written} needs several nodes: it is for what travels between them"),
                "remove `gradient_compression`, or set it to `bf16`",
            ),
            Scope::World => (
                format!("{written} needs shards of each node: it is for the sums of nodes"),
                "set `shard_scope: node` and several GPUs in each node, or `gradient_compression: bf16`",
            ),
            Scope::Node if dtype == DType::F16 => (
                format!("{written} is not available yet with weights in float16, whose loss scale changes"),
                "set `torch_dtype: bfloat16`, or `gradient_compression: bf16`",
            ),
            Scope::Node if of != GradientCompression::OneBit => return None,
            Scope::Node if config.optimizer.optimizer != config::OptimizerKind::AdamW => (
                format!(
                    "{written} needs the moments of AdamW in float32, not `optimizer: {}`",
                    config.optimizer.optimizer
                ),
                "set `optimizer: adamw`, or `gradient_compression: int8`",
            ),
            Scope::Node if config.offload.offload_optimizer == Setting::Value(true) => (
                format!("{written} reads the optimizer's states twice in an update: they must be on the device"),
                "remove `offload_optimizer`, or set `gradient_compression: int8`",
            ),
            Scope::Node => return None,
        };
        return Some(config.mistake("gradient_compression", message, Some(hint.into())));
    }
    (of != GradientCompression::None && config.ranks() == 1).then(|| {
        let message =
            format!("`gradient_compression: {}` needs several GPUs: on one, gradients do not travel", of.name());
        let hint = "remove `gradient_compression`, or set `gpus` or `distributed.num_nodes` to 2 or more";
        config.mistake("gradient_compression", message, Some(hint.into()))
    })
}

/// The sharding over several ranks.
fn sharding(config: &Config) -> Sharding {
    let of = &config.sharding;
    let open = [of.zero_level.is_auto(), of.shard_gradients.is_auto(), of.shard_weights.is_auto()] == [true; 3];
    let level = |least: u32| matches!(of.zero_level, Setting::Value(level) if level >= least);
    let gradients = level(2) || of.shard_gradients == Setting::Value(true);
    let weights = level(3) || of.shard_weights == Setting::Value(true);
    let (ranks, sequence) = (config.ranks(), config.sequence());
    let compression = match of.gradient_compression {
        GradientCompression::None => Compression::None,
        GradientCompression::BFloat16 => Compression::Bf16,
        GradientCompression::Int8 => Compression::Blocks(Blocks::Int8),
        GradientCompression::TopK => Compression::Blocks(Blocks::TopK),
        GradientCompression::OneBit => Compression::Blocks(Blocks::OneBit),
    };
    let nodes = config.nodes();
    // What is to be sharded needs others who have the rest.
    let alone = config.local_ranks() == 1 && (gradients || weights);
    let (scope, open_scope) = match of.shard_scope {
        Setting::Value(ShardScope::World) => (Scope::World, false),
        Setting::Value(ShardScope::Node) => (Scope::Node, false),
        Setting::Auto if alone || config.offload.offload_grads == Setting::Value(true) => (Scope::World, false),
        // Shards of all nodes have no sums of nodes to compress.
        Setting::Auto => (Scope::Node, !of.gradient_compression.is_between_nodes()),
    };
    let stages = config.stages();
    Sharding {
        ranks,
        nodes,
        scope,
        open_scope,
        sequence,
        gradients,
        weights,
        open,
        compression,
        stages,
        ..Sharding::default()
    }
}

/// Explains open options for which nothing is decided: one device, and properties of the model itself.
fn explain_open(config: &Config, reads_images: bool, reasons: &mut Reasons) {
    let of = &config.sharding;
    let one = match config.stages() {
        1 => "one device has everything",
        _ => "each device has the states of its own layers",
    };
    let sharding = [
        ("zero_level", of.zero_level.is_auto(), json!(1)),
        ("shard_gradients", of.shard_gradients.is_auto(), json!(false)),
        ("shard_weights", of.shard_weights.is_auto(), json!(false)),
    ];
    if of.shard_scope.is_auto() && config.nodes() == 1 {
        reasons.insert("shard_scope".into(), reason(json!("node"), "there is one node"));
    }
    for (name, open, value) in sharding {
        if open && config.ranks() == 1 {
            reasons.insert(name.into(), reason(value, one));
        }
    }
    if of.compression_warmup_steps.is_auto() && of.gradient_compression != GradientCompression::OneBit {
        let because = "only `gradient_compression: onebit` has a warm-up";
        reasons.insert("compression_warmup_steps".into(), reason(json!("auto"), because));
    }
    if config.qlora.qlora_four_over_six.is_auto() {
        let (value, because) = match config.qlora.chooses_four(config.precision.recipe) {
            _ if !config.qlora.qlora_fp4 => (json!("auto"), "only `qlora_fp4` has such blocks"),
            true => (json!(true), "the smaller error of the two"),
            false => (json!(false), "`recipe: nvfp4` rounds weights to 6: nothing is rounded twice"),
        };
        reasons.insert("qlora_four_over_six".into(), reason(value, because));
    }
    if config.lora.lora_dropout.is_auto() && !config.lora.lora {
        reasons.insert("lora_dropout".into(), reason(json!("auto"), "only adapters have it"));
    }
    for (name, open) in [
        ("train_vision", config.lora.train_vision.is_auto()),
        ("train_projector", config.lora.train_projector.is_auto()),
    ] {
        if open {
            let (value, because) = match config.lora.lora {
                _ if !reads_images => (json!("auto"), "the run reads no images"),
                true => (json!(false), "adapters train the text"),
                false => (json!(true), "all weights are trained"),
            };
            reasons.insert(name.into(), reason(value, because));
        }
    }
    if config.model.router_aux_loss_coef.is_auto() {
        let because = "`output_router_logits` and `router_aux_loss_coef` of the model's configuration";
        reasons.insert("router_aux_loss_coef".into(), reason(json!("auto"), because));
    }
}

/// The quantization of the frozen linears. The options name one form at most.
fn quantisation(config: &Config) -> Option<Quantisation> {
    let of = &config.qlora;
    let recipe = config.precision.recipe;
    let fp4 = match recipe {
        // As the recipe quantises weights, so that it finds the same codes.
        config::Recipe::Nvfp4 => Quantisation::Fp4Tiles,
        _ if of.chooses_four(recipe) => Quantisation::Fp4 { target: Target::FourOrSix },
        _ => Quantisation::Fp4 { target: Target::Six },
    };
    let forms = [
        (
            of.qlora_bnb,
            Quantisation::Nf4 { block: of.qlora_bnb_block_size as usize, nested: of.qlora_bnb_double_quant },
        ),
        (of.qlora_fp8, Quantisation::Fp8 { extent: of.qlora_block_size as usize }),
        (of.qlora_fp4, fp4),
    ];
    forms.into_iter().find(|(chosen, _)| *chosen).map(|(_, form)| form)
}

/// Codes of frozen weights are moved where there are some.
fn check_quants(config: &Config, comes_quantised: bool, problems: &mut Vec<Problem>) {
    let moves = config.offload.offload_quants == Setting::Value(true);
    if moves && quantisation(config).is_none() && !comes_quantised {
        let message = "`offload_quants: true`, but no frozen weight is kept in codes".to_owned();
        let hint = "set `qlora_bnb: true`, or remove `offload_quants`".to_owned();
        problems.push(config.mistake("offload_quants", message, Some(hint)));
    }
}

fn check_family(config: &Config, source: &ModelSource, problems: &mut Vec<Problem>) {
    let Setting::Value(requested) = &config.model.model_type else { return };
    let found = source.model_type();
    // A family's name stands for its generations: `qwen` for `qwen3`.
    let generation = found.strip_prefix(requested.to_ascii_lowercase().as_str());
    if generation.is_none_or(|after| after.starts_with(|c: char| c.is_ascii_alphabetic())) {
        let message = format!("`model_type: {requested}`, but the model's configuration says `{found}`");
        problems.push(config.mistake("model_type", message, Some("remove `model_type`".into())));
    }
}

fn optimizer(config: &Config) -> OptimizerOptions {
    let of = &config.optimizer;
    OptimizerOptions {
        kind: match of.optimizer {
            config::OptimizerKind::AdamW => OptimizerKind::AdamW,
            config::OptimizerKind::AdamW8bit => OptimizerKind::AdamW8bit,
            config::OptimizerKind::NorMuon => OptimizerKind::NorMuon {
                momentum: of.normuon_momentum,
                beta2: of.normuon_beta2,
                cautious: of.normuon_cautious_wd,
            },
        },
        beta1: of.adamw_beta1,
        beta2: of.adamw_beta2,
        epsilon: of.adamw_epsilon,
        weight_decay: of.weight_decay,
        max_grad_norm: of.max_grad_norm,
        bias_rate: of.router_bias_update_rate,
        master: false,
    }
}

/// Factors of `learning_rate` where parameters have others, and what stays.
fn rates(config: &Config) -> Rates {
    let of = &config.optimizer;
    let factor = |rate: &f64| rate / of.learning_rate;
    Rates {
        frozen: of.frozen_parameters.clone(),
        factors: of.learning_rates.iter().flatten().map(|(pattern, rate)| (pattern.clone(), factor(rate))).collect(),
        second_matrices: config.lora.loraplus_lr_ratio,
    }
}

/// The adapter of the options, or the one that they continue with: its rank, scale and targets hold.
fn adapter(
    config: &Config,
    source: &ModelSource,
    reasons: &mut Reasons,
    notes: &mut Vec<String>,
    problems: &mut Vec<Problem>,
) -> Result<AdapterOptions> {
    let (of, form) = (&config.lora, &source.model.adapters);
    if of.train_router && form.routers.is_empty() {
        let message = format!("`train_router: true`, but {} has no router", source.model.architecture);
        problems.push(config.mistake("train_router", message, Some("remove `train_router`".into())));
    } else if of.train_router && !form.renamed.is_empty() {
        // PEFT finds a module that is kept as a whole by its own name, and files have another.
        let message = format!("`train_router: true` is not available yet for {}", source.model.architecture);
        let hint = "remove `train_router`: the routers stay as they are";
        problems.push(config.mistake("train_router", message, Some(hint.into())));
    }
    let routers = form.routers.iter().filter(|_| of.train_router).cloned();
    let requested = AdapterOptions {
        rank: of.lora_rank as usize,
        alpha: f64::from(of.lora_alpha),
        rank_stabilised: of.lora_rslora,
        magnitudes: of.lora_dora,
        dropout: of.lora_dropout.value().copied().unwrap_or(DROPOUT),
        dtype: dtype_of(of.lora_dtype),
        targets: of.lora_target_modules.clone(),
        parameters: of.lora_target_parameters.clone(),
        saved: saved_modules(config).chain(routers).chain(vision::saved(config, source)).collect(),
        exceptions: Default::default(),
        slots: None,
        form: form.clone(),
    };
    let Some(folder) = &of.adapter else {
        check_new_rows(config, source, &requested, problems)?;
        let requested = with_open_dropout(config, requested, reasons, notes);
        check_parameters(config, &requested, problems);
        return Ok(requested);
    };
    let found = other_parts::read_options(Path::new(folder), requested.dtype, &source.model)?;
    let sorted = |names: &[String]| {
        let mut names = names.to_vec();
        names.sort_unstable();
        names.join(", ")
    };
    for (path, requested, found) in [
        ("lora_rank", requested.rank.to_string(), found.rank.to_string()),
        ("lora_alpha", requested.alpha.to_string(), found.alpha.to_string()),
        ("lora_target_modules", sorted(&requested.targets), sorted(&found.targets)),
        ("lora_target_parameters", sorted(&requested.parameters), sorted(&found.parameters)),
        ("lora_dora", requested.magnitudes.to_string(), found.magnitudes.to_string()),
        ("lora_rslora", requested.rank_stabilised.to_string(), found.rank_stabilised.to_string()),
        ("modules_to_save", sorted(&requested.saved), sorted(&found.saved)),
    ] {
        if config.is_written(path) && requested != found {
            let message = format!("`{path}` is {requested}, but the adapter in {folder} has {found}");
            problems.push(config.mistake(path, message, Some(format!("remove `{path}`"))));
        }
    }
    vision::check_continued(config, source, &found.saved, problems);
    let dropout = of.lora_dropout.value().copied().unwrap_or(found.dropout);
    if of.lora_dropout.is_auto() {
        reasons.insert("lora_dropout".into(), reason(dropout, "the adapter's configuration"));
    }
    let found = AdapterOptions { dropout, ..found };
    check_parameters(config, &found, problems);
    Ok(found)
}

/// Names of the modules that are trained in full next to an adapter: with those of the options the head of a reward model.
fn saved_modules(config: &Config) -> impl Iterator<Item = String> {
    let named = &config.lora.modules_to_save;
    let head = (config.task == Task::Reward).then(|| "score".to_owned());
    named.iter().cloned().chain(head.filter(|head| !named.contains(head)))
}

/// Dropout of adapters where nothing is said of it.
const DROPOUT: f64 = 0.05;

/// A new adapter with the dropout that its targets allow, where the options leave it open.
fn with_open_dropout(
    config: &Config,
    of: AdapterOptions,
    reasons: &mut Reasons,
    notes: &mut Vec<String>,
) -> AdapterOptions {
    if !config.lora.lora_dropout.is_auto() {
        return of;
    }
    let names = parameters(&of);
    let (dropout, because) = match names.is_empty() {
        true => (DROPOUT, "the usual value".to_owned()),
        false => (0.0, format!("adapters on parameters have none, as in PEFT: {}", names.join(", "))),
    };
    if !names.is_empty() {
        notes.push(format!("`lora_dropout` is 0 instead of {DROPOUT}: {because}"));
    }
    reasons.insert("lora_dropout".into(), reason(dropout, &because));
    AdapterOptions { dropout, ..of }
}

/// Parameters that get adapters, by the ends of their names. Targets that do not go together give none: they are named where
/// the others are that match nothing.
fn parameters(of: &AdapterOptions) -> Vec<String> {
    compiler::converted(of).map(|of| of.parameters).unwrap_or_default()
}

/// New tokens have rows in every table of tokens, and an adapter carries those of the tables that it has as a whole.
fn check_new_rows(
    config: &Config,
    source: &ModelSource,
    of: &AdapterOptions,
    problems: &mut Vec<Problem>,
) -> Result<()> {
    if config.model.new_tokens.is_empty() {
        return Ok(());
    }
    let rows = source.vocab_size()?;
    let all = source.model.parameters.iter().chain(source.model.tasks.iter().flat_map(|task| &task.parameters));
    let tables = all.filter(|table| table.shape.len() == 2 && table.shape[0] == rows && !table.bias);
    for table in tables.filter(|table| of.saves(&table.name).is_none()) {
        let module = table.name.strip_suffix(".weight").unwrap_or(&table.name);
        let module = module.rsplit('.').next().unwrap_or(module);
        let message = format!("with `lora: true` the rows of `new_tokens` in `{module}` are not trained");
        let hint = format!("add `{module}` to `modules_to_save`, or set `lora: false`");
        problems.push(config.mistake("new_tokens", message, Some(hint)));
    }
    Ok(())
}

/// Rejects options that PEFT does not support with adapters on parameters: their product is added to the matrices, so
/// nothing of an input can be dropped, and no output scaled.
fn check_parameters(config: &Config, of: &AdapterOptions, problems: &mut Vec<Problem>) {
    let names = parameters(of).join(", ");
    if names.is_empty() {
        return;
    }
    if of.dropout > 0.0 {
        let message = format!("`lora_dropout` is {}, and adapters on parameters have none: {names}", of.dropout);
        let hint = "remove `lora_dropout`, or name the modules of attention in `lora_target_modules`";
        problems.push(config.mistake("lora_dropout", message, Some(hint.into())));
    }
    if of.magnitudes {
        let message = format!("`lora_dora: true` does not go with adapters on parameters: {names}");
        let hint = "remove `lora_dora`, or name the modules of attention in `lora_target_modules`";
        problems.push(config.mistake("lora_dora", message, Some(hint.into())));
    }
}
