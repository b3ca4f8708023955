"""Apertus: Llama with QK norm, and two plain matrices around xIELU, an activation with two learned numbers a layer, in place of
the gated layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from .. import layers
from ..dsl import Batch, Module, Parameter, Reader, Tensor, model, ops, output, region
from ..layers import CausalLM, Decoder, DecoderConfig, Linear, RMSNorm, Rotation

#: The rotation where the file names none.
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class ApertusConfig(DecoderConfig):
    vocab_size: int = 131072
    intermediate_size: int = 14336
    max_position_embeddings: int = 65536
    rms_norm_eps: float = 1e-5
    hidden_act: Literal["xielu"] = "xielu"  # type: ignore[assignment]
    attention_bias: bool = False
    pad_token_id: int | None = 3

    theta = 12000000.0

    def derive(self, reader: Reader) -> None:
        for name, usual in (("qk_norm", True), ("post_norm", False), ("mlp_bias", False)):
            if (found := reader.take(name)) not in (None, usual):
                reader.problem(name, f"{found!r} is not supported, expected {usual}")
        if not any(reader.fields.get(name) for name in ("rope_parameters", "rope_scaling")):
            if self.rope.theta not in (None, self.theta):
                reader.problem("rope_theta", f"{self.rope.theta} is not supported without `rope_parameters`, expected {self.theta}")
            self.rope = Rotation(self.theta, "llama3", dict(LLAMA3))
        super().derive(reader)


class Attention(layers.Attention):
    def __init__(self, c: ApertusConfig) -> None:
        super().__init__(c, bias=c.attention_bias, output_bias=c.attention_bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def heads(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(self.split, self.project(x))
        return rotate(self.q_norm(q)), rotate(self.k_norm(k)), v


class XIELU(Module):
    """The activation; it starts with slopes of 0.8. Files have `beta` and `eps` as numbers without axes."""

    def __init__(self) -> None:
        self.alpha_p = Parameter(1, init=math.log(math.expm1(0.8)))
        self.alpha_n = Parameter(1, init=math.log(math.expm1(0.3)))
        self.beta = Parameter(1, init=0.5, buffer=True, stored=())
        self.eps = Parameter(1, init=-1e-6, buffer=True, stored=())

    def forward(self, x: Tensor) -> Tensor:
        return ops.xielu(x, self.alpha_p, self.alpha_n, self.beta, self.eps)


class MLP(Module):
    def __init__(self, c: ApertusConfig) -> None:
        self.up_proj = Linear(c.hidden_size, c.intermediate_size)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, residual_projection=True)
        self.act_fn = XIELU()

    @region("mlp")
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)))


class Layer(Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, c: ApertusConfig) -> None:
        self.attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.feedforward_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, *shared: Any) -> Tensor:
        x = x + self.self_attn(self.attention_layernorm(x), *shared)
        x = x + self.mlp(self.feedforward_layernorm(x))
        output("hidden.layer.{i}", x)
        return x


@model(
    "ApertusForCausalLM",
    config=ApertusConfig,
    model_type="apertus",
    base="model",
    examples=["swiss-ai/Apertus-8B-Instruct-2509", "swiss-ai/Apertus-70B-2509"],
)
class Apertus(CausalLM):
    def __init__(self, c: ApertusConfig) -> None:
        super().__init__(c, Decoder(c, Layer(c)))
