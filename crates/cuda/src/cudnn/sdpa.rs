//! Scaled dot-product attention as cuDNN graphs: causal, grouped heads, bf16, forward and backward,
//! over full rows or over documents packed behind each other.
//!
//! Written out as the composite of matmuls, reductions and pointwise operations that cuDNN's fused
//! engines recognise: the order of operations and their precisions are part of the pattern. The
//! unified attention descriptor is not usable for training before cuDNN 9.21. No instruction here.

use super::Cudnn;
use super::graph::{Dims, Graph, Node, Plan, Target, Tensor, dense};
use crate::disk_cache::DiskCache;
use crate::error::Result;
use crate::sys::cudnn::{data_type, pointwise, reduction};
use std::sync::Arc;

/// Elements between neighbours of a [B, T, heads, head_dim] tensor; head_dim itself is dense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Strides {
    pub row: i64,
    pub token: i64,
    pub head: i64,
}

/// Extents, layouts and scale of one attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sdpa {
    /// Rows, or slots for documents when ragged.
    pub batch: i64,
    /// Tokens of a row, or of the longest document when ragged.
    pub length: i64,
    pub query_heads: i64,
    pub kv_heads: i64,
    pub head_dim: i64,
    pub scale: f32,
    /// Slots lie at offsets given at run time and have lengths given at run time.
    pub ragged: bool,
    pub q: Strides,
    pub k: Strides,
    pub v: Strides,
    pub o: Strides,
}

/// Layouts of the gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gradients {
    pub d_o: Strides,
    pub d_q: Strides,
    pub d_k: Strides,
    pub d_v: Strides,
    /// The same bits in every run; on Hopper it keeps batch · heads · length² bf16 in workspace.
    pub deterministic: bool,
}

/// Ids under which addresses are bound.
pub mod id {
    pub const Q: i64 = 1;
    pub const K: i64 = 2;
    pub const V: i64 = 3;
    pub const O: i64 = 4;
    /// f32: log-sum-exp; [B, heads, T], or [tokens, heads] when ragged.
    pub const LSE: i64 = 5;
    pub const D_O: i64 = 6;
    pub const D_Q: i64 = 7;
    pub const D_K: i64 = 8;
    pub const D_V: i64 = 9;
    /// f32 scratch like the log-sum-exp.
    pub const DELTA: i64 = 10;
    /// f32 scratch [tokens, heads, head_dim], unless deterministic.
    pub const D_Q_SUM: i64 = 11;
    /// bf16 scratch, ragged grouped heads only: one dK (dV) per query head.
    pub const D_K_HEADS: i64 = 12;
    pub const D_V_HEADS: i64 = 13;
    /// i32 [slots]: the documents' lengths, once per side.
    pub const QUERY_LENGTHS: i64 = 14;
    pub const KEY_LENGTHS: i64 = 15;
    /// The first of the offset tensors.
    pub const OFFSETS: i64 = 32;
}

/// An i64 [slots + 1] tensor to be bound: token index × `unit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offsets {
    pub id: i64,
    pub unit: i64,
}

/// A compiled attention pass and the offset tensors that it reads.
pub struct SdpaPlan {
    pub plan: Plan,
    pub offsets: Vec<Offsets>,
}

impl Sdpa {
    fn groups(&self) -> i64 {
        self.query_heads / self.kv_heads
    }

    /// Whether the backward pass needs the scratch under [`id::D_K_HEADS`] and [`id::D_V_HEADS`].
    pub fn needs_head_gradients(&self) -> bool {
        self.ragged && self.groups() > 1
    }

    /// O = softmax(scale · Q·Kᵀ, causal) · V and the log-sum-exp.
    pub fn forward(&self, cudnn: &Arc<Cudnn>, target: &Target, plans: &DiskCache) -> Result<SdpaPlan> {
        let mut b = Builder::new(cudnn, *self)?;
        let q = b.heads(id::Q, Side::Query, self.q)?;
        let kt = b.heads_transposed(id::K, self.k)?;
        let v = b.heads(id::V, Side::Key, self.v)?;
        let o = b.heads(id::O, Side::Query, self.o)?;
        let lse = b.rows(id::LSE)?;
        let (scores, row) = (b.scores(), b.row_dims());
        let scale = b.graph.scalar(self.scale)?;
        let mut x = b.graph.inside_f32(scores)?;
        let (max, sum) = (b.graph.inside_f32(row)?, b.graph.inside_f32(row)?);
        b.graph.matmul(q, kt, x, [b.query_lengths, b.key_lengths, None])?;
        x = b.graph.pointwise(pointwise::MUL, x, Some(scale))?;
        x = b.mask_padding(x)?;
        x = b.mask_future(x)?;
        b.graph.reduce(reduction::MAX, x, max)?;
        let shifted = b.graph.pointwise(pointwise::SUB, x, Some(max))?;
        let e = b.graph.pointwise(pointwise::EXP, shifted, None)?;
        b.graph.reduce(reduction::ADD, e, sum)?;
        let log = b.graph.pointwise(pointwise::LOG, sum, None)?;
        b.graph.pointwise_into(pointwise::ADD, data_type::FLOAT, max, Some(log), None, lse)?;
        let p = b.graph.inside(Tensor::new(data_type::BFLOAT16, scores, dense(scores)))?;
        b.graph.pointwise_into(pointwise::DIV, data_type::FLOAT, e, Some(sum), None, p)?;
        b.graph.matmul(p, v, o, [b.query_lengths, None, b.key_lengths])?;
        b.plan(target, plans, "attention forward")
    }

    /// dQ, dK, dV from dO, with the probabilities computed again from the log-sum-exp.
    pub fn backward(
        &self,
        gradients: &Gradients,
        cudnn: &Arc<Cudnn>,
        target: &Target,
        plans: &DiskCache,
    ) -> Result<SdpaPlan> {
        let mut b = Builder::new(cudnn, *self)?;
        let q = b.heads(id::Q, Side::Query, self.q)?;
        let kt = b.heads_transposed(id::K, self.k)?;
        let vt = b.heads_transposed(id::V, self.v)?;
        let o = b.heads(id::O, Side::Query, self.o)?;
        let d_o = b.heads(id::D_O, Side::Query, gradients.d_o)?;
        let lse = b.rows(id::LSE)?;
        let d_q = b.heads(id::D_Q, Side::Query, gradients.d_q)?;
        let one = b.graph.scalar(1.0)?;
        let scale = b.graph.scalar(self.scale)?;
        let delta = b.delta(d_o, o, one)?;
        let p = b.probabilities(q, kt, lse, scale)?;
        let pt = b.transpose_scores(p)?;
        b.sum_over_queries(pt, d_o, id::D_V, id::D_V_HEADS, gradients.d_v)?;
        let ds = b.score_gradients(d_o, vt, delta, p, scale)?;
        let dst = b.transpose_scores(ds)?;
        b.sum_over_queries(dst, q, id::D_K, id::D_K_HEADS, gradients.d_k)?;
        b.query_gradients(ds, kt, d_q, gradients.deterministic)?;
        b.plan(target, plans, "attention backward")
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Query,
    Key,
    Rows,
}

struct Builder {
    graph: Graph,
    sdpa: Sdpa,
    offsets: Vec<(Side, Offsets, Node)>,
    query_lengths: Option<Node>,
    key_lengths: Option<Node>,
}

impl Builder {
    fn new(cudnn: &Arc<Cudnn>, sdpa: Sdpa) -> Result<Builder> {
        let graph = Graph::new(cudnn);
        let mut b = Builder { graph, sdpa, offsets: vec![], query_lengths: None, key_lengths: None };
        if sdpa.ragged {
            let lengths = Tensor::new(data_type::INT32, [sdpa.batch, 1, 1, 1], [1; 4]);
            b.query_lengths = Some(b.graph.memory(id::QUERY_LENGTHS, lengths)?);
            b.key_lengths = Some(b.graph.memory(id::KEY_LENGTHS, lengths)?);
        }
        Ok(b)
    }

    fn plan(self, target: &Target, plans: &DiskCache, what: &str) -> Result<SdpaPlan> {
        let offsets = self.offsets.iter().map(|(_, offsets, _)| *offsets).collect();
        let plan = self.graph.plan(target, plans, &format!("{what} {:?}", self.sdpa))?;
        Ok(SdpaPlan { plan, offsets })
    }

    /// The offset tensor for a unit; `None` when every row is full.
    fn offsets(&mut self, side: Side, unit: i64) -> Result<Option<Node>> {
        if !self.sdpa.ragged {
            return Ok(None);
        }
        if let Some((.., node)) = self.offsets.iter().find(|(s, o, _)| *s == side && o.unit == unit) {
            return Ok(Some(*node));
        }
        let id = id::OFFSETS + self.offsets.len() as i64;
        let node = self.graph.memory(id, Tensor::new(data_type::INT64, [self.sdpa.batch + 1, 1, 1, 1], [1; 4]))?;
        self.offsets.push((side, Offsets { id, unit }, node));
        Ok(Some(node))
    }

    fn head_dims(&self, side: Side) -> Dims {
        let Sdpa { batch, length, query_heads, kv_heads, head_dim, .. } = self.sdpa;
        [batch, if side == Side::Key { kv_heads } else { query_heads }, length, head_dim]
    }

    fn row_dims(&self) -> Dims {
        [self.sdpa.batch, self.sdpa.query_heads, self.sdpa.length, 1]
    }

    fn scores(&self) -> Dims {
        [self.sdpa.batch, self.sdpa.query_heads, self.sdpa.length, self.sdpa.length]
    }

    /// [B, heads, T, head_dim] in memory with the given layout.
    fn heads(&mut self, id: i64, side: Side, s: Strides) -> Result<Node> {
        let offsets = self.offsets(side, s.token)?;
        let tensor = Tensor::new(data_type::BFLOAT16, self.head_dims(side), [s.row, s.head, s.token, 1]);
        self.graph.memory(id, tensor.ragged(offsets))
    }

    /// K or V with its last two axes exchanged.
    fn heads_transposed(&mut self, id: i64, s: Strides) -> Result<Node> {
        let offsets = self.offsets(Side::Key, s.token)?;
        let [b, h, t, d] = self.head_dims(Side::Key);
        let tensor = Tensor::new(data_type::BFLOAT16, [b, h, d, t], [s.row, s.head, 1, s.token]);
        self.graph.memory(id, tensor.ragged(offsets))
    }

    /// One f32 per query: [B, heads, T] dense, or [tokens, heads] when ragged.
    fn rows(&mut self, id: i64) -> Result<Node> {
        let dims = self.row_dims();
        let offsets = self.offsets(Side::Rows, self.sdpa.query_heads)?;
        let strides = if self.sdpa.ragged { token_major(dims) } else { dense(dims) };
        self.graph.memory(id, Tensor::new(data_type::FLOAT, dims, strides).ragged(offsets))
    }

    /// Scores outside a document's length become −∞.
    fn mask_padding(&mut self, x: Node) -> Result<Node> {
        let (Some(queries), Some(keys)) = (self.query_lengths, self.key_lengths) else { return Ok(x) };
        let g = &mut self.graph;
        let (row, column) = (g.index(x, 2)?, g.index(x, 3)?);
        let row = g.compare(pointwise::CMP_LT, row, queries)?;
        let column = g.compare(pointwise::CMP_LT, column, keys)?;
        let inside = g.compare(pointwise::LOGICAL_AND, row, column)?;
        let nothing = g.scalar(f32::NEG_INFINITY)?;
        g.select(inside, x, nothing)
    }

    /// Scores of later keys become −∞.
    fn mask_future(&mut self, x: Node) -> Result<Node> {
        let g = &mut self.graph;
        let (row, column) = (g.index(x, 2)?, g.index(x, 3)?);
        let seen = g.compare(pointwise::CMP_GE, row, column)?;
        let nothing = g.scalar(f32::NEG_INFINITY)?;
        g.select(seen, x, nothing)
    }

    /// Σ over head_dim of dO · O, in memory.
    fn delta(&mut self, d_o: Node, o: Node, one: Node) -> Result<Node> {
        let [b, h, t, d] = self.head_dims(Side::Query);
        let products = self.graph.inside(Tensor::new(data_type::FLOAT, [b, h, t, d], [h * t * d, t * d, h * d, 1]))?;
        self.graph.pointwise_into(pointwise::MUL, data_type::FLOAT, d_o, Some(o), None, products)?;
        let sum = self.graph.inside_f32(self.row_dims())?;
        self.graph.reduce(reduction::ADD, products, sum)?;
        let delta = self.rows(id::DELTA)?;
        self.graph.pointwise_into(pointwise::MUL, data_type::FLOAT, sum, Some(one), None, delta)?;
        Ok(delta)
    }

    /// exp(scale · Q·Kᵀ − lse), masked.
    fn probabilities(&mut self, q: Node, kt: Node, lse: Node, scale: Node) -> Result<Node> {
        let mut x = self.graph.inside_f32(self.scores())?;
        self.graph.matmul(q, kt, x, [self.query_lengths, self.key_lengths, None])?;
        x = self.graph.pointwise(pointwise::MUL, x, Some(scale))?;
        x = self.mask_padding(x)?;
        x = self.graph.pointwise(pointwise::SUB, x, Some(lse))?;
        x = self.mask_future(x)?;
        self.graph.pointwise(pointwise::EXP, x, None)
    }

    /// dS = P ∘ (dO·Vᵀ − delta) · scale.
    fn score_gradients(&mut self, d_o: Node, vt: Node, delta: Node, p: Node, scale: Node) -> Result<Node> {
        let dp = self.graph.inside_f32(self.scores())?;
        self.graph.matmul(d_o, vt, dp, [self.query_lengths, self.key_lengths, None])?;
        let x = self.graph.pointwise(pointwise::SUB, dp, Some(delta))?;
        let x = self.graph.pointwise(pointwise::MUL, x, Some(p))?;
        self.graph.pointwise(pointwise::MUL, x, Some(scale))
    }

    /// [.., queries, keys] as bf16 [.., keys, queries].
    fn transpose_scores(&mut self, x: Node) -> Result<Node> {
        let [b, h, t, _] = self.scores();
        self.graph.reshape(x, Tensor::new(data_type::BFLOAT16, [b, h, t, t], [h * t * t, t * t, 1, t]))
    }

    /// dK or dV: weightsᵀ·x per query head, summed over the heads that share one key head.
    fn sum_over_queries(&mut self, weights: Node, x: Node, id: i64, heads_id: i64, s: Strides) -> Result<()> {
        let gradient = self.heads(id, Side::Key, s)?;
        let extents = [self.key_lengths, None, self.query_lengths];
        let groups = self.sdpa.groups();
        if groups == 1 {
            return self.graph.matmul(weights, x, gradient, extents);
        }
        let dims = self.head_dims(Side::Query);
        let per_head = if self.sdpa.ragged {
            // cuDNN multiplies the offsets of dK by the group size for this tensor, so its tokens
            // lie `groups` times as far apart as dK's.
            let offsets = self.offsets(Side::Key, s.token)?;
            let strides = [s.row * groups, s.head, s.token * groups, 1];
            self.graph.memory(heads_id, Tensor::new(data_type::BFLOAT16, dims, strides).ragged(offsets))?
        } else {
            self.graph.inside(Tensor::new(data_type::BFLOAT16, dims, dense(dims)))?
        };
        self.graph.matmul(weights, x, per_head, extents)?;
        self.graph.reduce(reduction::ADD, per_head, gradient)
    }

    /// dQ = dS·K, directly or through an f32 sum that blocks add to in any order.
    fn query_gradients(&mut self, ds: Node, kt: Node, d_q: Node, deterministic: bool) -> Result<()> {
        let s = self.sdpa.k;
        let offsets = self.offsets(Side::Key, s.token)?;
        let k = Tensor::new(data_type::BFLOAT16, self.head_dims(Side::Key), [s.row, s.head, s.token, 1]);
        let k = self.graph.reshape(kt, k.ragged(offsets))?;
        let extents = [self.query_lengths, None, self.key_lengths];
        if deterministic {
            return self.graph.matmul(ds, k, d_q, extents);
        }
        let dims = self.head_dims(Side::Query);
        let offsets = self.offsets(Side::Query, self.sdpa.query_heads * self.sdpa.head_dim)?;
        let strides = if self.sdpa.ragged { token_major(dims) } else { dense(dims) };
        let sum = self.graph.memory(id::D_Q_SUM, Tensor::new(data_type::FLOAT, dims, strides).ragged(offsets))?;
        self.graph.matmul(ds, k, sum, extents)?;
        self.graph.pointwise_into(pointwise::IDENTITY, data_type::FLOAT, sum, None, None, d_q)
    }
}

/// Strides of [B, heads, T, D] when it is stored as [B, T, heads, D].
fn token_major([_, h, t, d]: Dims) -> Dims {
    [h * t * d, d, h * d, 1]
}
