"""SmolLM3: Llama, except that some layers do not rotate queries and keys."""

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


class SmolLM3Config(HeadsConfig):
    vocab_size: int = 128256
    hidden_size: int = 2048
    intermediate_size: int = 11008
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope: Rotation
    no_rope_layer_interval: int = 4
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 128004
    hidden_act: Literal["silu"] = "silu"
    attention_dropout: float = 0.0

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        if reader.fields.get("pad_token_id", 0) is None:  # null is none, where a missing field is the default
            self.pad_token_id = None
        self.rope = self.rope.complete(reader, self.head_dim, self.max_position_embeddings, theta=2000000.0)
        rotated = reader.take("no_rope_layers")  # 1 where a layer rotates, whatever the name says
        if rotated is None:
            rotated = [(i + 1) % self.no_rope_layer_interval for i in range(self.num_hidden_layers)]
        if not isinstance(rotated, list) or len(rotated) < self.num_hidden_layers:
            reader.problem("no_rope_layers", f"expected a list of {self.num_hidden_layers} zeros and ones")
            rotated = [1] * self.num_hidden_layers
        self.rotated = [bool(rotates) for rotates in rotated[: self.num_hidden_layers]]
        self.windows = layer_windows(reader, self.num_hidden_layers, lambda i: not self.rotated[i])


class Attention(Module):
    def __init__(self, c: SmolLM3Config) -> None:
        self.q_proj = Linear(c.hidden_size, c.queries, bias=c.attention_bias)
        self.k_proj = Linear(c.hidden_size, c.keys, bias=c.attention_bias)
        self.v_proj = Linear(c.hidden_size, c.keys, bias=c.attention_bias)
        self.o_proj = Linear(c.queries, c.hidden_size, bias=c.attention_bias, residual_projection=True)
        self.head_dim = c.head_dim
        self.scale = c.head_dim**-0.5
        self.dropout = c.attention_dropout or None
        self.skip = each.of([None if rotates else True for rotates in c.rotated])
        self.window = each.of(c.windows)

    @region("attention")
    def forward(self, x: Tensor, rotate, batch: Batch) -> Tensor:
        q = self.q_proj(x)
        k = self.k_proj(x)
        v = self.v_proj(x)
        q = rotate(ops.split_heads(q, head_dim=self.head_dim), skip=self.skip)
        k = rotate(ops.split_heads(k, head_dim=self.head_dim), skip=self.skip)
        v = ops.split_heads(v, head_dim=self.head_dim)
        o, _ = ops.attention(q, k, v, batch.document_start, scale=self.scale, window=self.window, dropout=self.dropout)
        return self.o_proj(ops.merge_heads(o))


@model("SmolLM3ForCausalLM", config=SmolLM3Config, model_type="smollm3", base="model")
class SmolLM3(Module):
    def __init__(self, c: SmolLM3Config) -> None:
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
