"""OLMo Hybrid: gated delta nets with a norm before them, whose queries, keys and values have matrices and convolutions of their
own, and in every fourth layer the attention of OLMo 3, perhaps without positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import layers
from ..dsl import Batch, Reader, Tensor, model, ops
from ..layers import FULL, CausalLM, ChannelConv, Decoder, GatedMLP, Linear, RMSNorm, layer_types
from .olmo import Attention, Layer, Olmo2Config
from .qwen3_5 import LINEAR, LinearLayer, delta_sizes


class OlmoHybridConfig(Olmo2Config):
    vocab_size: int = 100352
    hidden_size: int = 3840
    num_attention_heads: int = 30
    max_position_embeddings: int = 65536
    rms_norm_eps: float = 1e-6
    pad_token_id: int | None = 100277
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel_dim: int = 4
    linear_allow_neg_eigval: bool = True

    def derive(self, reader: Reader) -> None:
        for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor"):
            reader.take(f"linear_{name}")  # of initial values
        if reader.take("linear_use_gate") is False:
            reader.problem("linear_use_gate", "False is not supported, expected True")
        rope = reader.fields.get("rope_parameters") or reader.fields
        #: Published models have positions in no layer.
        self.rotates = not isinstance(rope, dict) or rope.get("rope_theta", self.theta) is not None
        super().derive(reader)
        count = self.num_hidden_layers
        default = [FULL if i % 4 == 3 else LINEAR for i in range(count)]
        default[-1] = FULL if FULL not in default else default[-1]
        self.layer_types = layer_types(reader, count, default, (LINEAR, FULL))
        self.linear_num_key_heads = self.linear_num_key_heads or self.num_attention_heads
        self.linear_num_value_heads = self.linear_num_value_heads or self.num_attention_heads
        self.linear_key_head_dim = self.linear_key_head_dim or int(0.75 * self.hidden_size / self.linear_num_key_heads)
        self.linear_value_head_dim = self.linear_value_head_dim or 2 * self.linear_key_head_dim
        if self.linear_num_value_heads % self.linear_num_key_heads:
            reader.problem("linear_num_key_heads", f"{self.linear_num_key_heads} does not divide `linear_num_value_heads`")
        for name, most in (("linear_key_head_dim", 128), ("linear_conv_kernel_dim", 8)):
            if getattr(self, name) > most:
                reader.problem(name, f"{getattr(self, name)} is not available yet, expected at most {most}")


class DeltaNet(layers.GatedDeltaNet):
    """Corrections may be twice what is missing, with `linear_allow_neg_eigval`."""

    def __init__(self, c: OlmoHybridConfig) -> None:
        self.most = 2.0 if c.linear_allow_neg_eigval else 1.0
        super().__init__(c.hidden_size, 1e-5, **delta_sizes(c))  # of the heads' norm, whatever the config says

    def declare(self, hidden_size: int, heads: int) -> None:
        self.q_proj, self.k_proj, self.v_proj = (Linear(hidden_size, size) for size in self.sizes)
        self.a_proj, self.b_proj = Linear(hidden_size, heads), Linear(hidden_size, heads)
        self.g_proj = Linear(hidden_size, self.sizes[2])

    def declare_convolution(self, width: int) -> None:
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ChannelConv(size, width) for size in self.sizes)

    def declare_output(self, norm: RMSNorm, projection: Linear) -> None:
        self.o_norm, self.o_proj = norm, projection

    def project(self, x: Tensor) -> tuple[Any, Tensor, Tensor, Tensor]:
        return (self.q_proj(x), self.k_proj(x), self.v_proj(x)), self.g_proj(x), self.b_proj(x), self.a_proj(x)

    def convolve(self, qkv: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        q, k, v = (ops.activation(of(x, batch), function="silu") for of, x in zip(convolutions, qkv, strict=True))
        return q, k, v

    def share(self, b: Tensor) -> Tensor:
        return super().share(b) * self.most

    def project_output(self, o: Tensor, gate: Tensor) -> Tensor:
        return self.o_proj(ops.merge_heads(ops.swiglu(gate, self.o_norm(o))))


class Recurrent(LinearLayer):
    """x + delta net(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, c: OlmoHybridConfig) -> None:
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.linear_attn = DeltaNet(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size)


class FullLayer(Layer):
    """A layer of OLMo 3 whose queries and keys turn where the config wants it."""

    def __init__(self, c: OlmoHybridConfig) -> None:
        super().__init__(c, Attention(c))
        self.rotates = c.rotates

    def forward(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> Tensor:
        return super().forward(x, rotate if self.rotates else lambda heads: heads, batch)


@model(
    "OlmoHybridForCausalLM",
    config=OlmoHybridConfig,
    model_type="olmo_hybrid",
    base="model",
    examples=["allenai/Olmo-Hybrid-7B"],
)
class OlmoHybrid(CausalLM):
    def __init__(self, c: OlmoHybridConfig) -> None:
        by_kind = {kind: FullLayer(c) if kind == FULL else Recurrent(c) for kind in dict.fromkeys(c.layer_types)}
        super().__init__(c, Decoder(c, by_kind, pattern=c.layer_types))
