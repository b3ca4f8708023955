//! The forward pass of scaled dot-product attention as a cuDNN graph: causal full rows, grouped heads, bf16.
//!
//! It is written as the composite of matmuls, reductions and pointwise operations that cuDNN's fused engines recognize:
//! the order and precision of the operations are part of the pattern. The unified attention descriptor cannot be used
//! for training before cuDNN 9.21. Knows no instruction.

use super::Cudnn;
use super::graph::{Dims, Graph, Node, Plan, Target, Tensor, dense};
use crate::disk_cache::DiskCache;
use crate::error::Result;
use crate::sys::cudnn::{data_type, pointwise, reduction};
use std::sync::Arc;

/// Strides in elements of a [B, T, heads, head_dim] tensor; head_dim itself is dense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Strides {
    pub row: i64,
    pub token: i64,
    pub head: i64,
}

/// Extents, layouts and scale of one attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sdpa {
    pub batch: i64,
    /// Number of tokens of a row.
    pub length: i64,
    pub query_heads: i64,
    pub kv_heads: i64,
    pub head_dim: i64,
    pub scale: f32,
    pub q: Strides,
    pub k: Strides,
    pub v: Strides,
    pub o: Strides,
}

/// Ids under which addresses are bound.
pub mod id {
    pub const Q: i64 = 1;
    pub const K: i64 = 2;
    pub const V: i64 = 3;
    pub const O: i64 = 4;
    /// f32 [B, heads, T]: log-sum-exp.
    pub const LSE: i64 = 5;
}

impl Sdpa {
    /// O = softmax(scale · Q·Kᵀ, causal) · V and the log-sum-exp.
    pub fn forward(&self, cudnn: &Arc<Cudnn>, target: &Target, plans: &DiskCache) -> Result<Plan> {
        let mut g = Graph::new(cudnn);
        let q = self.queries(&mut g, id::Q, self.q)?;
        let kt = self.keys_transposed(&mut g)?;
        let v = Tensor::new(data_type::BFLOAT16, self.key_dims(), [self.v.row, self.v.head, self.v.token, 1]);
        let v = g.memory(id::V, v)?;
        let o = self.queries(&mut g, id::O, self.o)?;
        let scores = [self.batch, self.query_heads, self.length, self.length];
        let row = [self.batch, self.query_heads, self.length, 1];
        let lse = g.memory(id::LSE, Tensor::new(data_type::FLOAT, row, dense(row)))?;
        let scale = g.scalar(self.scale)?;
        let mut x = g.inside_f32(scores)?;
        let (max, sum) = (g.inside_f32(row)?, g.inside_f32(row)?);
        g.matmul(q, kt, x)?;
        x = g.pointwise(pointwise::MUL, x, Some(scale))?;
        x = mask_future(&mut g, x)?;
        g.reduce(reduction::MAX, x, max)?;
        let shifted = g.pointwise(pointwise::SUB, x, Some(max))?;
        let e = g.pointwise(pointwise::EXP, shifted, None)?;
        g.reduce(reduction::ADD, e, sum)?;
        let log = g.pointwise(pointwise::LOG, sum, None)?;
        g.pointwise_into(pointwise::ADD, data_type::FLOAT, max, Some(log), None, lse)?;
        let p = g.inside(Tensor::new(data_type::BFLOAT16, scores, dense(scores)))?;
        g.pointwise_into(pointwise::DIV, data_type::FLOAT, e, Some(sum), None, p)?;
        g.matmul(p, v, o)?;
        g.plan(target, plans, &format!("attention forward {self:?}"))
    }

    fn key_dims(&self) -> Dims {
        [self.batch, self.kv_heads, self.length, self.head_dim]
    }

    /// Adds [B, heads, T, head_dim] in memory with the given layout.
    fn queries(&self, g: &mut Graph, id: i64, s: Strides) -> Result<Node> {
        let dims = [self.batch, self.query_heads, self.length, self.head_dim];
        g.memory(id, Tensor::new(data_type::BFLOAT16, dims, [s.row, s.head, s.token, 1]))
    }

    /// K with its last two axes exchanged.
    fn keys_transposed(&self, g: &mut Graph) -> Result<Node> {
        let ([b, h, t, d], s) = (self.key_dims(), self.k);
        g.memory(id::K, Tensor::new(data_type::BFLOAT16, [b, h, d, t], [s.row, s.head, 1, s.token]))
    }
}

/// Sets the scores of later keys to −∞.
fn mask_future(g: &mut Graph, x: Node) -> Result<Node> {
    let (row, column) = (g.index(x, 2)?, g.index(x, 3)?);
    let seen = g.compare(pointwise::CMP_GE, row, column)?;
    let nothing = g.scalar(f32::NEG_INFINITY)?;
    g.select(seen, x, nothing)
}
