"""Qwen3, dense: Llama with per-head QK norm before the rotation, an explicit head size, and a sliding
window in the layers that the config names."""

from __future__ import annotations

from collections.abc import Callable

from .. import layers
from ..dsl import Batch, Reader, Tensor, each, model
from ..layers import CausalLM, Decoder, DecoderConfig, DecoderLayer, GatedMLP, RMSNorm, layer_windows


class Qwen3Config(DecoderConfig):
    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int = 32
    head_dim: int = 128
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    max_window_layers: int | None = 28

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        self.windows = layer_windows(reader, self.num_hidden_layers, lambda i: i >= (self.max_window_layers or 0))


class Attention(layers.Attention):
    def __init__(self, c: Qwen3Config) -> None:
        super().__init__(c, bias=c.attention_bias, output_bias=c.attention_bias, window=each.of(c.windows))
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def heads(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.project(x)
        return rotate(self.q_norm(self.split(q))), rotate(self.k_norm(self.split(k))), self.split(v)


@model(
    "Qwen3ForCausalLM",
    config=Qwen3Config,
    model_type="qwen3",
    base="model",
    examples=["Qwen/Qwen3-0.6B", "Qwen/Qwen3-32B"],
)
class Qwen3(CausalLM):
    def __init__(self, c: Qwen3Config) -> None:
        mlp = GatedMLP(c.hidden_size, c.intermediate_size)
        super().__init__(c, Decoder(c, DecoderLayer(c, Attention(c), mlp)))
