//! What the compiler is requested. Plain values: the run configuration is mapped to them elsewhere.

use std::collections::BTreeMap;

use ops::optimizer::Blocks;
use program::{Among, Cluster, EntryKind, Variant};
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
    /// How base weights are stored.
    pub weights: DType,
    /// How the linears of the layers are stored instead, where they are frozen.
    pub quantised: Option<Quantisation>,
    /// Weights that their files hold in codes, by name: those among them that are linears of the layers are kept so, where
    /// they are frozen.
    pub stored: BTreeMap<String, Packing>,
    /// How activations are stored and matrices multiplied.
    pub compute: DType,
    /// Products that differ from that.
    pub recipe: Recipe,
    /// `None`: no gradients, and no entry that trains.
    pub training: Option<Training>,
    /// Adapters are part of the model, trained or not.
    pub adapter: Option<AdapterOptions>,
    /// What is compiled, besides the update.
    pub entries: Vec<EntryOptions>,
    /// Key of all random numbers.
    pub seed: u64,
    /// What may be decided about memory.
    pub plan: PlanOptions,
    pub sharding: Sharding,
}

impl CompileOptions {
    /// Whether programs of both have the same weights, stored alike.
    pub fn has_weights_of(&self, other: &CompileOptions) -> bool {
        (self.weights, self.quantised, &self.stored, &self.adapter)
            == (other.weights, other.quantised, &other.stored, &other.adapter)
            && (self.recipe == other.recipe && self.sharding == other.sharding)
    }
}

/// How a step is divided over devices: each has its own rows, and keeps and updates its piece of the optimizer states.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sharding {
    pub ranks: usize,
    /// Machines with as many ranks in a row each: a divisor of all.
    pub nodes: usize,
    /// Which ranks share the pieces.
    pub scope: Scope,
    /// Whether the plan may take all ranks where those of a node have no room.
    pub open_scope: bool,
    /// Ranks in a row that have the parts of one micro-batch, whose attention they share by heads: a divisor of all.
    pub sequence: usize,
    /// Bytes of gradients that are exchanged at once; a good size where it is not given.
    pub bucket_bytes: Option<usize>,
    /// A rank keeps the sums of its pieces of the gradients alone: every micro-step exchanges what it computed.
    pub gradients: bool,
    /// A rank keeps its pieces of the base weights alone: every entry gathers what it reads. Adapters stay whole.
    pub weights: bool,
    /// Whether the plan may cut gradients, or both, where that takes less time than everything else that makes it fit.
    pub open: bool,
    pub compression: Compression,
    /// Devices that have some layers each, with one rank; 1 where each has all.
    pub stages: usize,
    /// The one that is compiled, set while each is.
    pub stage: usize,
}

/// The ranks that share what is sharded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// Those of a node. All nodes have the same; their sums of the gradients are added up once a step.
    #[default]
    Node,
    /// All.
    World,
}

/// What gradients become for their way to the other ranks. Their sums are in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// They travel as they are, in f32.
    #[default]
    None,
    /// Rounded to the nearest bf16.
    Bf16,
    /// In blocks between nodes that have all shards each; inside a node they travel as they are.
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
    /// Who takes part.
    pub fn cluster(&self) -> Cluster {
        let Sharding { ranks, sequence, nodes, stages, .. } = *self;
        Cluster { ranks, sequence, nodes, shards: self.shards(), stages }
    }

    /// Micro-steps that a stage has under way at most: each has its batch tensors, and what came from the stage before.
    pub(crate) fn slots(&self) -> usize {
        self.stages - self.stage
    }

    /// Whether base weights are cut, so that none is whole but while an entry reads it.
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
    pub(crate) fn rail(&self) -> Among {
        Among { count: self.ranks / self.shards(), apart: self.shards() }
    }

    /// Among whom pieces are cut, the first to try first.
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

    /// What gradients become between nodes, if they are compressed there.
    pub(crate) fn blocks(&self) -> Option<Blocks> {
        match self.compression {
            Compression::Blocks(blocks) if self.rail().count > 1 => Some(blocks),
            Compression::Blocks(_) | Compression::None | Compression::Bf16 => None,
        }
    }

    /// Whether the update has two forms: behind a warm-up first moments are summed between nodes, in blocks.
    pub(crate) fn compresses_momentum(&self) -> bool {
        self.blocks().is_some_and(Blocks::are_of_momentum)
    }

    /// Bytes on the way for so many bytes of gradients.
    pub(crate) fn sent_bytes(&self, bytes: usize) -> usize {
        bytes / DType::F32.size() * self.sent().size()
    }

    /// What it may be, by ZeRO levels from the first on; one if that is decided.
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

    /// Whether a micro-step exchanges its gradients only where it is the last of its step.
    pub(crate) fn exchanges_last(&self) -> bool {
        self.shards() > 1 && !self.gradients
    }
}

/// One entry that is requested.
#[derive(Clone, Debug, PartialEq)]
pub struct EntryOptions {
    /// [`EntryKind::FirstMicroStep`] stands for the further micro-steps, too.
    pub kind: EntryKind,
    /// Tells it apart from others of its kind; empty for the usual one.
    pub name: String,
    /// The task whose loss is computed. `None`: the model alone.
    pub task: Option<String>,
    /// Whether the adapters are at work; where there are none it says nothing.
    pub adapter: bool,
    /// Names of outputs of model and task that are kept. A trailing `*` stands for any rest.
    pub outputs: Vec<String>,
    /// What is kept of earlier tokens. Rows of the model alone go on where their sequences were; other entries leave it as
    /// it is. All entries of a program have the same.
    pub cache: Option<KeyValueCache>,
    /// Shapes of its own; where there are none, those of the program.
    pub shapes: Vec<Variant>,
}

/// What is kept of earlier tokens: keys and values in pages that sequences share, and for each sequence one slot of what
/// does not grow with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyValueCache {
    /// Sequences that are kept at a time.
    pub sequences: usize,
    /// Pages of each layer's keys, and of its values.
    pub pages: usize,
    /// Tokens of a page.
    pub page: usize,
    /// Pages of the longest sequence.
    pub pages_per_sequence: usize,
}

/// What the plan may decide, and what is decided already. `None` leaves it to the plan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlanOptions {
    pub recompute: RecomputeOptions,
    /// Parts of the output head and its loss, at most one for each token.
    pub head_chunks: Option<usize>,
    /// Parts of the attention's backward pass, at most one for each row and key head.
    pub attention_chunks: Option<usize>,
    /// Most bytes of the whole plan, where that is less than the machine has.
    pub memory_limit: Option<usize>,
    /// Micro-steps of a step, for weighing what is done in each of them against what is done once; 0 counts as 1.
    pub micro_steps: usize,
    pub offload: OffloadOptions,
    /// Only so many of [`crate::OPTIONAL`] run, for finding the one that breaks a result; all where it is not given.
    pub passes: Option<usize>,
}

/// What lies in host memory while the device does not need it. `None` leaves it to the plan.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OffloadOptions {
    /// The residual stream that the backward pass reads.
    pub residual: Option<bool>,
    /// f32 copies of weights.
    pub master: Option<bool>,
    /// Optimizer states.
    pub optimizer: Option<bool>,
    /// Gradients, from the node of the backward pass that completes them until the update.
    pub gradients: Option<bool>,
    /// Frozen weights in codes.
    pub quants: Option<bool>,
    /// The update reads and writes states, copies and gradients where they lie, instead of moving them slice by slice.
    pub zero_copy: bool,
    /// What the host never reads may lie in write-combined memory.
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
    /// Norms between the parts.
    pub rmsnorm: Option<bool>,
    /// The whole feed-forward part.
    pub ffn: Option<bool>,
    /// Everything before the attention itself: projections, norms of heads, rotation.
    pub qkv: Option<bool>,
    /// The whole attention part.
    pub att: Option<bool>,
    /// The whole layer, from the residual stream that enters it.
    pub block: Option<bool>,
    /// With adapters, the norms' outputs: what the adapters read.
    pub lora: Option<bool>,
}

/// What is trained and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Training {
    /// What is not trained, and what learns at rates of its own.
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

    /// Whether micro-steps multiply their loss, so that small gradients do not vanish in f16: where an update follows,
    /// which divides by it again.
    pub(crate) fn scales_loss(&self) -> bool {
        self.compute == DType::F16 && self.training.as_ref().is_some_and(|training| training.optimizer.is_some())
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OptimizerKind {
    /// f32 moments.
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
    /// 0: no clipping.
    pub max_grad_norm: f64,
    /// How far the biases that experts are chosen by move in a step, towards even loads. `None`: they stay.
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

    /// Micro-steps that train.
    pub fn train(task: &str) -> EntryOptions {
        EntryOptions::new(EntryKind::FirstMicroStep, Some(task))
    }

    /// A task's loss alone.
    pub fn evaluate(task: &str) -> EntryOptions {
        EntryOptions::new(EntryKind::Evaluate, Some(task))
    }

    /// The model alone.
    pub fn forward() -> EntryOptions {
        EntryOptions::new(EntryKind::Forward, None)
    }

    /// The model alone, going on where its sequences were.
    pub fn generate(cache: KeyValueCache) -> EntryOptions {
        EntryOptions { cache: Some(cache), ..EntryOptions::forward() }
    }

    /// Whether its rows go on where their sequences were.
    pub(crate) fn generates(&self) -> bool {
        self.kind == EntryKind::Forward && self.cache.is_some()
    }

    /// The same entry next to one that generates: what is kept of earlier tokens stays as it is.
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
