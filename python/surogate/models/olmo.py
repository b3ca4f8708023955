"""OLMo 2 and 3: norms after attention and feed-forward layer instead of before them, and QK norms over all heads at once.
OLMo 3 has a sliding window in three of four layers, and scales the rotation of the other layers only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import layers
from ..dsl import Batch, Module, Reader, Tensor, model, output
from ..layers import (
    FULL,
    SLIDING,
    CausalLM,
    Decoder,
    DecoderConfig,
    GatedMLP,
    RMSNorm,
    RotaryByKind,
    RotaryEmbedding,
    Rotations,
    layer_types,
    window,
)


class Olmo2Config(DecoderConfig):
    vocab_size: int = 50304
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    attention_bias: bool = False


class Olmo3Config(Olmo2Config):
    rope: Rotations

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        self.window = window(reader, 4096)
        kinds = [SLIDING if (i + 1) % 4 else FULL for i in range(self.num_hidden_layers)]
        self.layer_types = layer_types(reader, self.num_hidden_layers, kinds)


class Attention(layers.Attention):
    def __init__(self, c: Olmo2Config, window: int | None = None) -> None:
        super().__init__(c, bias=c.attention_bias, output_bias=c.attention_bias, window=window)
        self.q_norm = RMSNorm(c.queries, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.keys, c.rms_norm_eps)

    def heads(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.project(x)
        return rotate(self.split(self.q_norm(q))), rotate(self.split(self.k_norm(k))), self.split(v)


class Layer(Module):
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    def __init__(self, c: DecoderConfig, attention: Module) -> None:
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size)
        self.post_feedforward_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, *shared: Any) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x, *shared))
        x = x + self.post_feedforward_layernorm(self.mlp(x))
        output("hidden.layer.{i}", x)
        return x


@model("Olmo2ForCausalLM", config=Olmo2Config, model_type="olmo2", base="model", examples=["allenai/OLMo-2-1124-7B"])
class Olmo2(CausalLM):
    def __init__(self, c: Olmo2Config) -> None:
        super().__init__(c, Decoder(c, Layer(c, Attention(c))))


@model("Olmo3ForCausalLM", config=Olmo3Config, model_type="olmo3", base="model", examples=["allenai/Olmo-3-7B"])
class Olmo3(CausalLM):
    def __init__(self, c: Olmo3Config) -> None:
        kinds = sorted(set(c.layer_types))
        rotary = RotaryByKind(**{kind: RotaryEmbedding(c.head_dim, c.rope[kind]) for kind in kinds})
        by_kind = {kind: Layer(c, Attention(c, c.window if kind == SLIDING else None)) for kind in kinds}
        super().__init__(c, Decoder(c, by_kind, pattern=c.layer_types, rotary=rotary))
