"""Llama 2, 3.x and models of the same architecture, such as SmolLM: pre-norm decoder with grouped-query
attention, rotary positions and a gated feed-forward layer."""

from __future__ import annotations

from typing import Literal

from ..dsl import Batch, Module, Reader, Tensor, model, ops, output, region
from ..layers import (
    Decoder,
    DecoderLayer,
    Embedding,
    HeadsConfig,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    Rotation,
    SwiGLU,
)


class LlamaConfig(HeadsConfig):
    vocab_size: int = 32000
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope: Rotation
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    hidden_act: Literal["silu"] = "silu"
    attention_dropout: float = 0.0
    pretraining_tp: Literal[1] = 1

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        self.rope = self.rope.complete(reader, self.head_dim, self.max_position_embeddings)


class Attention(Module):
    def __init__(self, c: LlamaConfig) -> None:
        self.q_proj = Linear(c.hidden_size, c.queries, bias=c.attention_bias)
        self.k_proj = Linear(c.hidden_size, c.keys, bias=c.attention_bias)
        self.v_proj = Linear(c.hidden_size, c.keys, bias=c.attention_bias)
        self.o_proj = Linear(c.queries, c.hidden_size, bias=c.attention_bias, residual_projection=True)
        self.head_dim = c.head_dim
        self.scale = c.head_dim**-0.5
        self.dropout = c.attention_dropout or None

    @region("attention")
    def forward(self, x: Tensor, rotate, batch: Batch) -> Tensor:
        q = self.q_proj(x)
        k = self.k_proj(x)
        v = self.v_proj(x)
        q = rotate(ops.split_heads(q, head_dim=self.head_dim))
        k = rotate(ops.split_heads(k, head_dim=self.head_dim))
        v = ops.split_heads(v, head_dim=self.head_dim)
        o, _ = ops.attention(q, k, v, batch.document_start, scale=self.scale, dropout=self.dropout)
        return self.o_proj(ops.merge_heads(o))


@model("LlamaForCausalLM", config=LlamaConfig, model_type="llama", base="model")
class Llama(Module):
    def __init__(self, c: LlamaConfig) -> None:
        mlp = SwiGLU(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.model = Decoder(
            Embedding(c.vocab_size, c.hidden_size, c.pad_token_id),
            RotaryEmbedding(c.head_dim, c.rope),
            c.num_hidden_layers,
            DecoderLayer(c.hidden_size, c.rms_norm_eps, Attention(c), mlp),
            RMSNorm(c.hidden_size, c.rms_norm_eps),
        )
        tied = self.model.embed_tokens.weight if c.tie_word_embeddings else None
        self.lm_head = Linear(c.hidden_size, c.vocab_size, tied=tied)

    def forward(self, batch: Batch) -> None:
        output("logits", self.lm_head(self.model(batch)))
