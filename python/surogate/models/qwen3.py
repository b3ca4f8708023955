"""Qwen3, dense: Llama with per-head QK norm before the rotation, an explicit head size, and a sliding
window in the layers that the config names."""

from __future__ import annotations

from typing import Literal

from ..dsl import Batch, Module, Reader, Tensor, each, model, ops, output, region
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
    layer_windows,
)


class Qwen3Config(HeadsConfig):
    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope: Rotation
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    hidden_act: Literal["silu"] = "silu"
    attention_dropout: float = 0.0
    max_window_layers: int | None = 28

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        self.rope = self.rope.complete(reader, self.head_dim, self.max_position_embeddings)
        self.windows = layer_windows(reader, self.num_hidden_layers, lambda i: i >= (self.max_window_layers or 0))


class Attention(Module):
    def __init__(self, c: Qwen3Config) -> None:
        self.q_proj = Linear(c.hidden_size, c.queries, bias=c.attention_bias)
        self.k_proj = Linear(c.hidden_size, c.keys, bias=c.attention_bias)
        self.v_proj = Linear(c.hidden_size, c.keys, bias=c.attention_bias)
        self.o_proj = Linear(c.queries, c.hidden_size, bias=c.attention_bias, residual_projection=True)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.head_dim = c.head_dim
        self.scale = c.head_dim**-0.5
        self.dropout = c.attention_dropout or None
        self.window = each.of(c.windows)

    @region("attention")
    def forward(self, x: Tensor, rotate, batch: Batch) -> Tensor:
        q = self.q_proj(x)
        k = self.k_proj(x)
        v = self.v_proj(x)
        q = rotate(self.q_norm(ops.split_heads(q, head_dim=self.head_dim)))
        k = rotate(self.k_norm(ops.split_heads(k, head_dim=self.head_dim)))
        v = ops.split_heads(v, head_dim=self.head_dim)
        o, _ = ops.attention(q, k, v, batch.document_start, scale=self.scale, window=self.window, dropout=self.dropout)
        return self.o_proj(ops.merge_heads(o))


@model("Qwen3ForCausalLM", config=Qwen3Config, model_type="qwen3", base="model")
class Qwen3(Module):
    def __init__(self, c: Qwen3Config) -> None:
        mlp = SwiGLU(c.hidden_size, c.intermediate_size)
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
