"""The decoder stack of most models: pre-norm layers between an embedding and a final norm.

Does not know what attention computes: each architecture has its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..dsl import Batch, Layers, Module, Tensor, output, repeat
from .embedding import Embedding
from .norm import RMSNorm


class DecoderLayer(Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Marks `hidden.layer.{i}`."""

    def __init__(self, hidden_size: int, eps: float, attention: Module, mlp: Module) -> None:
        self.input_layernorm = RMSNorm(hidden_size, eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)
        self.mlp = mlp

    def forward(self, x: Tensor, *shared: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *shared)
        x = x + self.mlp(self.post_attention_layernorm(x))
        output("hidden.layer.{i}", x)
        return x


class Decoder(Module):
    """Embedding, layers as :class:`Layers` takes them, norm. The layers' attention gets (x, rotate, batch).

    Marks `hidden.embed` and `hidden.final_norm`.
    """

    def __init__(
        self,
        embedding: Embedding,
        rotary: Module,
        pattern: int | Sequence[str],
        layer: DecoderLayer | Mapping[str, DecoderLayer],
        norm: RMSNorm,
    ) -> None:
        self.embed_tokens = embedding
        self.rotary_emb = rotary
        self.layers = Layers(pattern, layer)
        self.norm = norm

    def forward(self, batch: Batch) -> Tensor:
        x = self.embed_tokens(batch.input_ids)
        output("hidden.embed", x)
        x = repeat(self.layers, x, self.rotary_emb(batch.position_ids), batch)
        x = self.norm(x)
        output("hidden.final_norm", x)
        return x
