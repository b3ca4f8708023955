//! The options of the compiler. Plain values: the run configuration is mapped to them elsewhere.

use std::collections::BTreeMap;

use ops::optimizer::Blocks;
use program::{Cluster, EntryKind, ProcessGroup, Variant};
use tensor::DType;
use tensor::packed::Quantisation;
use tensor::storage::Packing;

use crate::adapter::AdapterOptions;
use crate::rates::Rates;
use crate::recipes::Recipe;

/// Steps in a row with finite gradients after which the loss scale is doubled.
pub(crate) const LOSS_SCALE_INTERVAL: u64 = 2000;

/// Everything that decides a program besides the model and the machine.
#[derive(Clone, Debug, PartialEq)]
pub struct CompileOptions {
    /// Shapes of the batches; each gets its own entry points.
    pub variants: Vec<Variant>,
    /// The element type of base weights.
    pub weights: DType,
    /// The packed form of the linears of the layers, where they are frozen; none for the type of the other weights.
    pub quantised: Option<Quantisation>,
    /// Weights that their files hold in codes, by name: those among them that are linears of the layers are kept so, where
    /// they are frozen.
    pub stored: BTreeMap<String, Packing>,
    /// The type of stored activations and of matrix products.
    pub compute: DType,
    /// The recipe: the products in other formats.
    pub recipe: Recipe,
    /// `None`: no gradients, and no entry that trains.
    pub training: Option<Training>,
    /// Adapters are part of the model, trained or not.
    pub adapter: Option<AdapterOptions>,
    /// The entries to compile, besides the update.
    pub entries: Vec<EntryOptions>,
    /// Key of all random numbers.
    pub seed: u64,
    /// The decisions about memory that are left to the plan.
    pub plan: PlanOptions,
    pub sharding: Sharding,
    /// Tokens of the longest document, where documents hold branches of a common beginning.
    pub branches: Option<usize>,
    /// True if the results of a token follow from its own sequence alone, bit for bit, whatever is computed with it: what
    /// is generated then has the log-probabilities of training.
    pub batch_invariant: bool,
}

impl CompileOptions {
    /// True if programs of both have the same weights, stored alike.
    pub fn has_weights_of(&self, other: &CompileOptions) -> bool {
        (self.weights, self.quantised, &self.stored, &self.adapter)
            == (other.weights, other.quantised, &other.stored, &other.adapter)
            && (self.recipe == other.recipe && self.sharding == other.sharding)
    }
}

/// The division of a step over devices: each has its own rows, and keeps and updates its piece of the optimizer states.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sharding {
    pub ranks: usize,
    /// Number of machines with equally many consecutive ranks each: a divisor of all ranks.
    pub nodes: usize,
    /// The ranks that share the pieces.
    pub scope: Scope,
    /// True if the plan may take all ranks where those of a node have no room.
    pub open_scope: bool,
    /// Ranks in a row that have the parts of one micro-batch, whose attention they share by heads: a divisor of all.
    pub sequence: usize,
    /// Bytes of gradients that are exchanged at once; a good size where it is not given.
    pub bucket_bytes: Option<usize>,
    /// True if a rank keeps only the sums of its own pieces of the gradients: every micro-step exchanges what it
    /// computed.
    pub gradients: bool,
    /// True if a rank keeps only its own pieces of the base weights: every entry gathers what it reads. Adapters are
    /// whole on every rank.
    pub weights: bool,
    /// True if the plan may cut gradients, or gradients and weights, where that takes less time than everything else
    /// that makes the run fit.
    pub open: bool,
    pub compression: Compression,
    /// Devices that have some layers each, with one rank; 1 where each has all.
    pub stages: usize,
    /// The stage that is compiled; set while each of them is.
    pub stage: usize,
}

/// The ranks that share what is sharded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// The ranks of a node. All nodes have the same pieces; their sums of the gradients are added up once a step.
    #[default]
    Node,
    /// All ranks of all nodes.
    World,
}

/// The form of gradients on their way to the other ranks. Their sums are in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// Sent in f32 without compression.
    #[default]
    None,
    /// Rounded to the nearest bf16.
    Bf16,
    /// In blocks between nodes that have all shards each; without compression inside a node.
    Blocks(Blocks),
}

impl Default for Sharding {
    fn default() -> Sharding {
        Sharding {
            ranks: 1,
            nodes: 1,
            scope: Scope::Node,
            open_scope: false,
            sequence: 1,
            bucket_bytes: None,
            gradients: false,
            weights: false,
            open: false,
            compression: Compression::None,
            stages: 1,
            stage: 0,
        }
    }
}

/// Bytes of gradients that are exchanged at once: 128 MiB take 0.4 ms of the links of an H200, long next to what
/// queueing takes and short next to a backward pass.
const BUCKET_BYTES: usize = 128 << 20;

impl Sharding {
    /// Returns the ranks, nodes and stages that take part.
    pub fn cluster(&self) -> Cluster {
        let Sharding { ranks, sequence, nodes, stages, .. } = *self;
        Cluster { ranks, sequence, nodes, shards: self.shards(), stages }
    }

    /// Largest number of micro-steps that a stage has in flight: each has its batch tensors, and what came from the
    /// stage before.
    pub(crate) fn slots(&self) -> usize {
        self.stages - self.stage
    }

    /// True if base weights are cut, so that none is whole but while an entry reads it.
    pub(crate) fn cuts_weights(&self) -> bool {
        self.weights && self.shards() > 1
    }

    /// Ranks in a row that have a piece each of what is cut.
    pub(crate) fn shards(&self) -> usize {
        match self.scope {
            Scope::Node => self.ranks / self.nodes,
            Scope::World => self.ranks,
        }
    }

    /// Ranks that have the same pieces, one of each node: they add up the sums of their nodes.
    pub(crate) fn inter_node_group(&self) -> ProcessGroup {
        ProcessGroup { size: self.ranks / self.shards(), stride: self.shards() }
    }

    /// Returns the choices of the ranks that share pieces, in the order in which they are tried.
    pub(crate) fn scopes(&self) -> Vec<Sharding> {
        let decided = Sharding { open_scope: false, ..*self };
        match self.open_scope && self.nodes > 1 {
            true => [Scope::Node, Scope::World].map(|scope| Sharding { scope, ..decided }).to_vec(),
            false => vec![decided],
        }
    }

    /// Most bytes of gradients that are exchanged at once.
    pub(crate) fn bucket(&self) -> usize {
        self.bucket_bytes.unwrap_or(BUCKET_BYTES)
    }

    /// The type in which gradients travel.
    pub(crate) fn sent(&self) -> DType {
        match self.compression {
            Compression::None | Compression::Blocks(_) => DType::F32,
            Compression::Bf16 => DType::BF16,
        }
    }

    /// Returns the compressed form of gradients between nodes, if they are compressed there.
    pub(crate) fn blocks(&self) -> Option<Blocks> {
        match self.compression {
            Compression::Blocks(blocks) if self.inter_node_group().size > 1 => Some(blocks),
            Compression::Blocks(_) | Compression::None | Compression::Bf16 => None,
        }
    }

    /// True if the update has two forms: after a warm-up, first moments are summed between nodes, in blocks.
    pub(crate) fn compresses_momentum(&self) -> bool {
        self.blocks().is_some_and(Blocks::are_of_momentum)
    }

    /// Returns the bytes that are sent for `bytes` bytes of gradients.
    pub(crate) fn sent_bytes(&self, bytes: usize) -> usize {
        bytes / DType::F32.size() * self.sent().size()
    }

    /// Returns the choices by ZeRO level, the first level first; one if it is decided.
    pub(crate) fn levels(&self) -> Vec<Sharding> {
        let decided = Sharding { open: false, ..*self };
        match self.open && self.shards() > 1 {
            true => [(false, false), (true, false), (true, true)]
                .map(|(gradients, weights)| Sharding { gradients, weights, ..decided })
                .to_vec(),
            false => vec![decided],
        }
    }

    /// The ZeRO level that it is; none for weights alone.
    pub(crate) fn level(&self) -> Option<usize> {
        match (self.gradients, self.weights) {
            (false, false) => Some(1),
            (true, false) => Some(2),
            (true, true) => Some(3),
            (false, true) => None,
        }
    }

    /// True if only the last micro-step of a step exchanges its gradients.
    pub(crate) fn exchanges_last(&self) -> bool {
        self.shards() > 1 && !self.gradients
    }
}

/// One entry that is requested.
#[derive(Clone, Debug, PartialEq)]
pub struct EntryOptions {
    /// [`EntryKind::FirstMicroStep`] stands for the further micro-steps, too.
    pub kind: EntryKind,
    /// A name that distinguishes it from others of its kind; empty for the usual one.
    pub name: String,
    /// The task whose loss is computed. `None`: the model alone.
    pub task: Option<String>,
    /// True if the adapters are applied; without effect where there are none.
    pub adapter: bool,
    /// Names of outputs of model and task that are kept. A trailing `*` stands for any rest.
    pub outputs: Vec<String>,
    /// The cache of earlier tokens. Rows of the model alone continue their sequences; other entries leave it unchanged.
    /// All entries of a program have the same.
    pub cache: Option<KeyValueCache>,
    /// Shapes of its own; where there are none, those of the program.
    pub shapes: Vec<Variant>,
}

/// The cache of earlier tokens: keys and values in pages that sequences share, and for each sequence one slot for the
/// state that does not grow with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyValueCache {
    /// Sequences that are kept at a time.
    pub sequences: usize,
    /// Pages of each layer's keys, and of its values.
    pub pages: usize,
    /// Number of tokens in a page.
    pub page: usize,
    /// Pages of the longest sequence.
    pub pages_per_sequence: usize,
}

/// The decisions of the plan, as far as they are made already. `None` leaves one to the plan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlanOptions {
    pub recompute: RecomputeOptions,
    /// Parts of the output head and its loss, at most one for each token.
    pub head_chunks: Option<usize>,
    /// Parts of the attention's backward pass, at most one for each row and key head.
    pub attention_chunks: Option<usize>,
    /// Most bytes of the whole plan, where that is less than the machine has.
    pub memory_limit: Option<usize>,
    /// Bytes of each device that something besides the program holds.
    pub reserved: usize,
    /// Micro-steps of a step, for weighing what is done in each of them against what is done once; 0 counts as 1.
    pub micro_steps: usize,
    pub offload: OffloadOptions,
    /// The number of [`crate::OPTIONAL`] passes that run, for finding the one that breaks a result; all where it is not
    /// given.
    pub passes: Option<usize>,
}

/// The tensors that lie in host memory while the device does not need them. `None` leaves one to the plan.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OffloadOptions {
    /// The residual stream that the backward pass reads.
    pub residual: Option<bool>,
    /// The f32 copies of weights.
    pub master: Option<bool>,
    /// All states of the optimizer.
    pub optimizer: Option<bool>,
    /// Gradients, from the node of the backward pass that completes them until the update.
    pub gradients: Option<bool>,
    /// The frozen weights in codes.
    pub quants: Option<bool>,
    /// The update reads and writes states, copies and gradients where they lie, instead of moving them slice by slice.
    pub zero_copy: bool,
    /// True if memory that the host never reads may be write-combined.
    pub write_combined: bool,
    /// Device memory of one slice of the update, bytes; a good size where it is not given.
    pub slice_bytes: Option<usize>,
}

/// Parts of a layer that the backward pass recomputes (`Some(true)`) or finds kept
/// (`Some(false)`). A whole includes its parts; contradictions are the caller's to refuse.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RecomputeOptions {
    /// Element-wise work of the feed-forward part.
    pub swiglu: Option<bool>,
    /// The norms between the parts.
    pub rmsnorm: Option<bool>,
    /// The whole feed-forward part of a layer.
    pub ffn: Option<bool>,
    /// Everything before the attention itself: projections, norms of heads, rotation.
    pub qkv: Option<bool>,
    /// The whole attention part of a layer.
    pub att: Option<bool>,
    /// The whole layer, from the residual stream that enters it.
    pub block: Option<bool>,
    /// With adapters, the norms' outputs: what the adapters read.
    pub lora: Option<bool>,
}

/// The settings of an entry that trains.
#[derive(Clone, Debug, PartialEq)]
pub struct Training {
    /// The parameters that are not trained, and those with rates of their own.
    pub rates: Rates,
    /// The model's own dropout is active.
    pub dropout: bool,
    /// NEFTune's alpha: the strength of the noise on embeddings; 0 for none.
    pub embedding_noise: f64,
    /// `None`: gradients are computed and kept, nothing is updated.
    pub optimizer: Option<OptimizerOptions>,
}

impl CompileOptions {
    /// The rate of biases that experts are chosen by, where there are no adapters.
    pub(crate) fn bias_rate(&self) -> Option<f64> {
        self.training.as_ref()?.optimizer.as_ref()?.bias_rate.filter(|_| self.adapter.is_none())
    }

    /// True if micro-steps multiply their loss, so that small gradients do not vanish in f16. Only where an update
    /// follows, which divides by the factor again.
    pub(crate) fn scales_loss(&self) -> bool {
        self.compute == DType::F16 && self.training.as_ref().is_some_and(|training| training.optimizer.is_some())
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OptimizerKind {
    /// AdamW with both moments in f32.
    AdamW,
    /// 8-bit moments in blocks of 256; tensors under 4096 elements keep f32 moments.
    AdamW8bit,
    /// Orthogonalised momentum for matrices; AdamW with f32 moments for vectors, embeddings and the output head.
    NorMuon {
        momentum: f64,
        beta2: f64,
        /// Decay only the weights that the step makes smaller anyway.
        cautious: bool,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub struct OptimizerOptions {
    pub kind: OptimizerKind,
    pub beta1: f64,
    pub beta2: f64,
    pub epsilon: f64,
    pub weight_decay: f64,
    /// The norm that gradients are clipped to; 0 for no clipping.
    pub max_grad_norm: f64,
    /// The step by which the biases that experts are chosen by move towards even loads. `None`: they do not move.
    pub bias_rate: Option<f64>,
    /// Keep an f32 copy of every trained weight that is stored in fewer bits. The copy is updated, the weight is
    /// the copy rounded to nearest.
    pub master: bool,
}

impl EntryOptions {
    /// The usual entry of a kind.
    pub fn new(kind: EntryKind, task: Option<&str>) -> EntryOptions {
        let task = task.map(str::to_owned);
        EntryOptions {
            kind,
            name: String::new(),
            task,
            adapter: true,
            outputs: Vec::new(),
            cache: None,
            shapes: Vec::new(),
        }
    }

    /// Returns an entry of micro-steps that train on a task.
    pub fn train(task: &str) -> EntryOptions {
        EntryOptions::new(EntryKind::FirstMicroStep, Some(task))
    }

    /// Returns an entry that computes a task's loss alone.
    pub fn evaluate(task: &str) -> EntryOptions {
        EntryOptions::new(EntryKind::Evaluate, Some(task))
    }

    /// Returns an entry of the model alone, without a task.
    pub fn forward() -> EntryOptions {
        EntryOptions::new(EntryKind::Forward, None)
    }

    /// Returns an entry of the model alone that continues the sequences in the cache.
    pub fn generate(cache: KeyValueCache) -> EntryOptions {
        EntryOptions { cache: Some(cache), ..EntryOptions::forward() }
    }

    /// True if its rows continue the sequences in the cache: those of a loss are whole documents.
    pub(crate) fn generates(&self) -> bool {
        self.kind == EntryKind::Forward && self.task.is_none() && self.cache.is_some()
    }

    /// The same entry next to one that generates: the cache of earlier tokens is left unchanged.
    pub fn keeping_cache(self, cache: KeyValueCache) -> EntryOptions {
        EntryOptions { cache: Some(cache), ..self }
    }

    /// The same entry for shapes of its own.
    pub fn in_shapes(self, shapes: Vec<Variant>) -> EntryOptions {
        EntryOptions { shapes, ..self }
    }

    /// The same entry, which keeps these outputs as well.
    pub fn keeping<'n>(mut self, outputs: impl IntoIterator<Item = &'n str>) -> EntryOptions {
        self.keep(outputs);
        self
    }

    /// Keeps these outputs as well.
    pub fn keep<'n>(&mut self, outputs: impl IntoIterator<Item = &'n str>) {
        for name in outputs {
            if !self.outputs.iter().any(|known| known == name) {
                self.outputs.push(name.to_owned());
            }
        }
    }

    /// True when the output of this name is requested.
    pub fn keeps(&self, name: &str) -> bool {
        self.outputs.iter().any(|wanted| match wanted.strip_suffix('*') {
            Some(prefix) => name.starts_with(prefix),
            None => wanted == name,
        })
    }
}
