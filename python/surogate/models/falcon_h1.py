"""Falcon-H1: attention and a Mamba-2 state-space model side by side in every layer, with multipliers on what goes into and
comes out of them."""

from __future__ import annotations

from collections.abc import Callable

from .. import layers
from ..dsl import Batch, Module, Reader, Tensor, model, ops, output, region
from ..layers import CausalLM, DecoderConfig, Linear, Mamba2, MambaFields, RMSNorm
from .granite import ScaledDecoder


class FalconH1Config(MambaFields, DecoderConfig):
    vocab_size: int = 128000
    intermediate_size: int = 14336
    num_key_value_heads: int = 8
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 0
    attention_bias: bool = False
    mlp_bias: bool = False
    projectors_bias: bool = False
    mamba_d_ssm: int | None = 1024
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    embedding_multiplier: float = 1.0
    lm_head_multiplier: float = 1.0
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        for name in ("num_logits_to_keep", "mamba_use_mlp", "layers_block_type"):
            reader.take(name)
        norm = ("before" if self.mamba_norm_before_gate else "after") if self.mamba_rms_norm else None
        inner = self.mamba_expand * self.hidden_size if self.mamba_d_ssm is None else self.mamba_d_ssm
        self.read_mamba(reader, inner, output_bias=self.projectors_bias, norm=norm)
        self.mlp_multipliers = self.numbers(reader, "mlp_multipliers", 2)
        self.ssm_multipliers = self.numbers(reader, "ssm_multipliers", 5)

    def numbers(self, reader: Reader, name: str, count: int) -> list[float]:
        """A list of `count` factors, by default ones."""
        found = reader.take(name)
        if found is None:
            return [1.0] * count
        right = isinstance(found, list) and len(found) == count
        if not right or any(isinstance(of, bool) or not isinstance(of, int | float) for of in found):
            reader.problem(name, f"{found!r} is not supported, expected a list of {count} numbers")
            return [1.0] * count
        return [float(of) for of in found]


class Attention(layers.Attention):
    def __init__(self, c: FalconH1Config) -> None:
        super().__init__(c, bias=c.attention_bias, output_bias=c.attention_bias)
        self.factor = c.key_multiplier

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        return q, k * self.factor, v


class MLP(layers.GatedMLP):
    """down(up · silu(gate · m₀)) · m₁."""

    def __init__(self, c: FalconH1Config) -> None:
        super().__init__(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.factors = c.mlp_multipliers

    @region("mlp")
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.project(x)
        return self.down_proj(ops.swiglu(gate * self.factors[0], up)) * self.factors[1]


class Layer(Module):
    """x + `mamba`(norm(x)) + `self_attn`(norm(x)), each with its factors, then x + `feed_forward`(norm(x))."""

    def __init__(self, c: FalconH1Config) -> None:
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mamba = Mamba2(c.hidden_size, c.rms_norm_eps, c.sizes, factors=c.ssm_multipliers)
        self.self_attn = Attention(c)
        self.pre_ff_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.feed_forward = MLP(c)
        self.of_mamba = (c.ssm_in_multiplier, c.ssm_out_multiplier)
        self.of_attention = (c.attention_in_multiplier, c.attention_out_multiplier)

    def forward(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> Tensor:
        h = self.input_layernorm(x)
        before, after = self.of_mamba
        y = self.mamba(h * before, batch) * after
        before, after = self.of_attention
        x = x + y + self.self_attn(h * before, rotate, batch) * after
        x = x + self.feed_forward(self.pre_ff_layernorm(x))
        output("hidden.layer.{i}", x)
        return x


class ParallelDecoder(ScaledDecoder):
    """A decoder whose last norm has another name."""

    def declare_norm(self, norm: Module) -> None:
        self.final_layernorm = norm

    def last(self, x: Tensor) -> Tensor:
        return self.final_layernorm(x)


@model(
    "FalconH1ForCausalLM",
    config=FalconH1Config,
    model_type="falcon_h1",
    base="model",
    adapters={"bare": ["out_proj"]},  # which PEFT refuses: fused kernels read its matrix past an adapter
    examples=["tiiuae/Falcon-H1-0.5B-Base", "tiiuae/Falcon-H1-7B-Instruct"],
)
class FalconH1(CausalLM):
    def __init__(self, c: FalconH1Config) -> None:
        super().__init__(c, ParallelDecoder(c, Layer(c)))
        self.factor = c.lm_head_multiplier

    def head(self, x: Tensor) -> Tensor:
        return self.lm_head(x * self.factor)
