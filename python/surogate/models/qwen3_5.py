"""Qwen3.5 (text model): gated delta nets, and in every fourth layer attention with a gated output. Norms scale by
1 + weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from .. import layers
from ..dsl import Batch, Module, Reader, Tensor, model, ops, output, region
from ..layers import (
    FULL,
    CausalLM,
    Decoder,
    DecoderConfig,
    GatedDeltaNet,
    GatedMLP,
    ImageRotation,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    TextPart,
    layer_types,
)
from .qwen_vision import PROJECTORS, Qwen3VisionConfig, with_tower

LINEAR = "linear_attention"

class HybridConfig(DecoderConfig):
    """Fields of models with gated delta nets and gated attention."""

    vocab_size: int = 248320
    num_attention_heads: int = 16
    head_dim: int = 256
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    rope: ImageRotation
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    attn_output_gate: Literal[True] = True
    mamba_ssm_dtype: Literal["float32"] = "float32"  # of the states

    share = 0.25

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        for name in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
            reader.take(name)  # of tensors that are carried over
        period = reader.take("full_attention_interval")
        period = 4 if period is None else period
        if isinstance(period, bool) or not isinstance(period, int) or period < 1:
            reader.problem("full_attention_interval", f"{period!r} is not supported, expected a whole number above 0")
            period = 4
        count = self.num_hidden_layers
        default = [LINEAR if (i + 1) % period else FULL for i in range(count)]
        self.layer_types = layer_types(reader, count, default, (LINEAR, FULL))
        if self.linear_num_value_heads % self.linear_num_key_heads:
            reader.problem(
                "linear_num_key_heads", f"{self.linear_num_key_heads} does not divide `linear_num_value_heads`"
            )
        for name, most in (
            ("linear_key_head_dim", 128),
            ("linear_value_head_dim", 128),
            ("linear_conv_kernel_dim", 8),
        ):
            if getattr(self, name) > most:
                reader.problem(name, f"{getattr(self, name)} is not available yet, expected at most {most}")


def without_exceptions(reader: Reader) -> None:
    """All layers have the same feed-forward layer, whatever `mlp_only_layers` says in transformers."""
    if reader.take("mlp_only_layers"):
        reader.problem("mlp_only_layers", "is not supported, expected an empty list")


class Qwen3_5Config(HybridConfig):
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 32
    num_key_value_heads: int = 4

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        without_exceptions(reader)


class Norm(RMSNorm):
    """Scales by 1 + weight."""

    def __init__(self, c: DecoderConfig, size: int) -> None:
        super().__init__(size, c.rms_norm_eps, offset=True)


class Attention(layers.Attention):
    """`q_proj` gives queries and gates: of each head the one after the other."""

    def __init__(self, c: HybridConfig) -> None:
        super().__init__(c, bias=c.attention_bias, output_bias=c.attention_bias)
        self.q_norm = Norm(c, c.head_dim)
        self.k_norm = Norm(c, c.head_dim)

    def declare(self, c: HybridConfig, bias: bool) -> None:
        self.q_proj = Linear(c.hidden_size, 2 * c.queries, bias=bias)
        self.k_proj = Linear(c.hidden_size, c.keys, bias=bias)
        self.v_proj = Linear(c.hidden_size, c.keys, bias=bias)

    @region("attention")
    def forward(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> Tensor:
        both = ops.split_heads(self.q_proj(x), head_dim=2 * self.head_dim)
        q, gate = ops.split(both, sizes=[self.head_dim] * 2)
        q, k = rotate(self.q_norm(q)), rotate(self.k_norm(self.split(self.k_proj(x))))
        v = self.split(self.v_proj(x))
        o, _ = ops.attention(q, k, v, batch.document_start, scale=self.scale, dropout=self.dropout)
        return self.o_proj(ops.merge_heads(o * ops.activation(gate, function="sigmoid")))


def delta_sizes(c: HybridConfig) -> dict[str, int]:
    """The sizes of a gated delta net, by argument."""
    return dict(
        key_heads=c.linear_num_key_heads,
        heads=c.linear_num_value_heads,
        key_dim=c.linear_key_head_dim,
        value_dim=c.linear_value_head_dim,
        width=c.linear_conv_kernel_dim,
    )


class LinearLayer(Module):
    """x + delta net(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, c: HybridConfig, net: Module, mlp: Module) -> None:
        self.input_layernorm = Norm(c, c.hidden_size)
        self.linear_attn = net
        self.post_attention_layernorm = Norm(c, c.hidden_size)
        self.mlp = mlp

    def forward(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> Tensor:
        x = x + self.linear_attn(self.input_layernorm(x), batch)
        x = x + self.mlp(self.post_attention_layernorm(x))
        output("hidden.layer.{i}", x)
        return x


class FullLayer(Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, c: HybridConfig, mlp: Module) -> None:
        self.input_layernorm = Norm(c, c.hidden_size)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = Norm(c, c.hidden_size)
        self.mlp = mlp

    def forward(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotate, batch)
        x = x + self.mlp(self.post_attention_layernorm(x))
        output("hidden.layer.{i}", x)
        return x


#: Pairs that turn with time, row and column of a token where the config does not say it.
SECTIONS = (11, 11, 10)


def hybrid(c: HybridConfig, mlp: Callable[[], Module], *, images: bool = False) -> Decoder:
    """Layers of both kinds with such feed-forward layers. With `images`, heads turn with row and column, too."""

    def layer(kind: str) -> Module:
        if kind == FULL:
            return FullLayer(c, mlp())
        return LinearLayer(c, GatedDeltaNet(c.hidden_size, c.rms_norm_eps, **delta_sizes(c)), mlp())

    by_kind = {kind: layer(kind) for kind in dict.fromkeys(c.layer_types)}
    axes = c.rope.axes(int(c.head_dim * (c.rope.share or 1.0)) // 2, SECTIONS) if images else None
    rotary = RotaryEmbedding(c.head_dim, c.rope, axes=axes)
    return Decoder(c, by_kind, pattern=c.layer_types, norm=Norm(c, c.hidden_size), rotary=rotary)


def decoder(c: Qwen3_5Config, *, images: bool = False) -> Decoder:
    return hybrid(c, lambda: GatedMLP(c.hidden_size, c.intermediate_size), images=images)


@model(
    "Qwen3_5ForCausalLM",
    config=Qwen3_5Config,
    model_type="qwen3_5_text",
    base="model",
    carried=["mtp."],
)
class Qwen3_5(CausalLM):
    def __init__(self, c: Qwen3_5Config) -> None:
        super().__init__(c, decoder(c))


class Qwen3_5ImageConfig(Qwen3_5Config):
    section = "text_config"


class Qwen3_5Whole(CausalLM):
    def __init__(self, c: Qwen3_5ImageConfig, v: Qwen3VisionConfig) -> None:
        super().__init__(c, with_tower(decoder(c, images=True), v))
        self.images, self.projectors = v.form(table=v.table, stretched=True), PROJECTORS


@model(
    "Qwen3_5ForConditionalGeneration",
    config=Qwen3_5ImageConfig,
    model_type="qwen3_5",
    carried=["mtp.", "model.visual."],
    images=(Qwen3_5Whole, Qwen3VisionConfig),
    examples=["Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-27B"],
)
class Qwen3_5Text(CausalLM):
    def __init__(self, c: Qwen3_5ImageConfig) -> None:
        super().__init__(c, TextPart(decoder(c)))
