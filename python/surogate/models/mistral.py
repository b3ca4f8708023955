"""Mistral 7B and models of the same architecture: Llama without biases, with a sliding window in every
layer if the config sets one."""

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


class MistralConfig(HeadsConfig):
    vocab_size: int = 32000
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-6
    rope: Rotation
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    hidden_act: Literal["silu"] = "silu"
    attention_dropout: float = 0.0

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        self.rope = self.rope.complete(reader, self.head_dim, self.max_position_embeddings)
        # A missing field is the default, null is no window.
        window = reader.take("sliding_window") if "sliding_window" in reader.fields else 4096
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            reader.problem("sliding_window", f"{window!r} is not supported, expected a whole number above 0 or null")
        self.window = window


class Attention(Module):
    def __init__(self, c: MistralConfig) -> None:
        self.q_proj = Linear(c.hidden_size, c.queries)
        self.k_proj = Linear(c.hidden_size, c.keys)
        self.v_proj = Linear(c.hidden_size, c.keys)
        self.o_proj = Linear(c.queries, c.hidden_size, residual_projection=True)
        self.head_dim = c.head_dim
        self.scale = c.head_dim**-0.5
        self.dropout = c.attention_dropout or None
        self.window = c.window

    @region("attention")
    def forward(self, x: Tensor, rotate, batch: Batch) -> Tensor:
        q = self.q_proj(x)
        k = self.k_proj(x)
        v = self.v_proj(x)
        q = rotate(ops.split_heads(q, head_dim=self.head_dim))
        k = rotate(ops.split_heads(k, head_dim=self.head_dim))
        v = ops.split_heads(v, head_dim=self.head_dim)
        o, _ = ops.attention(q, k, v, batch.document_start, scale=self.scale, window=self.window, dropout=self.dropout)
        return self.o_proj(ops.merge_heads(o))


@model("MistralForCausalLM", config=MistralConfig, model_type="mistral", base="model")
class Mistral(Module):
    def __init__(self, c: MistralConfig) -> None:
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
