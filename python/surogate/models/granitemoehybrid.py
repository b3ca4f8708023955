"""Granite 4: Granite with Mamba-2 state-space models in most layers, attention without positions in the others, and in each a
shared feed-forward layer, together with a mixture of experts where the config has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from .. import layers
from ..dsl import Batch, Module, Parameter, Reader, Tensor, model, ops, output, region
from ..layers import Linear, Mamba2, MambaFields, Mixture, RMSNorm, Router
from .granite import GraniteConfig, ScaledDecoder, ScaledLM

KINDS = {"linear_attention": "mamba", "full_attention": "attention", "mamba": "mamba", "attention": "attention"}

#: Of experts, which are two parameters of a module `experts` to PEFT, and of routers, which are no linear modules to it.
ADAPTERS = {
    "bare": ["layer"],
    "stacks": [
        {"name": "gate_up_proj", "held": ["block_sparse_moe.input_linear.weight", "block_sparse_moe.experts"]},
        {"name": "down_proj", "held": ["block_sparse_moe.output_linear.weight", "block_sparse_moe.experts"]},
    ],
}


class GraniteMoeHybridConfig(MambaFields, GraniteConfig, layers.MixtureConfig):
    position_embedding_type: Literal["rope", "nope", None] = None
    shared_intermediate_size: int = 1024
    mlp_bias: Literal[False] = False

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        self.rotates = self.position_embedding_type == "rope"
        self.read_mamba(reader, self.mamba_expand * self.hidden_size)
        types = layers.layer_types(reader, self.num_hidden_layers, ["mamba"] * self.num_hidden_layers, list(KINDS))
        self.kinds = [KINDS.get(kind, "mamba") for kind in types]
        self.num_experts = 0
        if reader.fields.get("num_local_experts", 8) == 0:
            reader.take("num_local_experts")
        else:
            self.read_experts(reader, 8)


class Attention(layers.Attention):
    def __init__(self, c: GraniteMoeHybridConfig) -> None:
        super().__init__(c, bias=c.attention_bias, output_bias=c.attention_bias, scale=c.attention_multiplier)
        self.rotates = c.rotates

    def heads(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        if self.rotates:
            return super().heads(x, rotate, batch)
        q, k, v = map(self.split, self.project(x))
        return q, k, v


class SharedMLP(Module):
    """`output_linear`(silu(gate) · up), both of `input_linear`(x)."""

    def __init__(self, hidden_size: int, inner: int) -> None:
        self.sizes = [inner, inner]
        self.input_linear = Linear(hidden_size, 2 * inner)
        self.output_linear = Linear(inner, hidden_size, residual_projection=True)

    @region("mlp")
    def forward(self, x: Tensor) -> Tensor:
        return self.output_linear(ops.swiglu(*ops.split(self.input_linear(x), sizes=self.sizes)))


class Matrices(Module):
    """`weight` [experts, outputs, inputs]."""

    def __init__(self, *shape: int, residual_projection: bool = False) -> None:
        self.weight = Parameter(*shape, residual_projection=residual_projection)


class LinearRouter(Router):
    """A router whose matrix is that of its `layer`."""

    def __init__(self, hidden_size: int, experts: int, *, top_k: int) -> None:
        # The softmax over the chosen experts alone is that over all, divided by the sum of the chosen ones.
        super().__init__(hidden_size, experts, top_k=top_k, normalise=True)
        self.layer = Matrices(experts, hidden_size)
        del self.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = ops.linear(x, self.layer.weight)
        weights, index = self.choose(logits)
        self.chosen = (logits, index)
        return weights, index


class StackedMixture(Mixture):
    """A mixture whose matrices, `input_linear` and `output_linear`, are stacked in files."""

    def __init__(self, c: GraniteMoeHybridConfig) -> None:
        count, inner = c.num_experts, c.intermediate_size
        router = LinearRouter(c.hidden_size, count, top_k=c.num_experts_per_tok)
        self.input_linear = Matrices(count, 2 * inner, c.hidden_size)
        self.output_linear = Matrices(count, c.hidden_size, inner, residual_projection=True)
        self.sizes = [inner, inner]
        super().__init__(router, self.rows, count, name="router")  # type: ignore[arg-type]

    def rows(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """The experts' results of their rows."""
        both = ops.split(ops.grouped_linear(rows, self.input_linear.weight, offsets, groups=self.count), sizes=self.sizes)
        return ops.grouped_linear(ops.swiglu(*both), self.output_linear.weight, offsets, groups=self.count)


class Layer(Module):
    """x + mixer(norm(x)), then x + `shared_mlp`(norm(x)) with the mixture of the same; both sums times a factor."""

    def __init__(self, c: GraniteMoeHybridConfig, kind: str) -> None:
        self.name = "mamba" if kind == "mamba" else "self_attn"
        mixer = Mamba2(c.hidden_size, c.rms_norm_eps, c.sizes) if kind == "mamba" else Attention(c)
        setattr(self, self.name, mixer)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.shared_mlp = SharedMLP(c.hidden_size, c.shared_intermediate_size)
        self.block_sparse_moe = StackedMixture(c) if c.num_experts else None
        self.factor = c.residual_multiplier

    def forward(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> Tensor:
        given: tuple[Any, ...] = (batch,) if self.name == "mamba" else (rotate, batch)
        x = x + getattr(self, self.name)(self.input_layernorm(x), *given) * self.factor
        h = self.post_attention_layernorm(x)
        y = self.shared_mlp(h)
        if self.block_sparse_moe is not None:
            y = self.block_sparse_moe(h) + y
        x = x + y * self.factor
        output("hidden.layer.{i}", x)
        return x


@model(
    "GraniteMoeHybridForCausalLM",
    config=GraniteMoeHybridConfig,
    model_type="granitemoehybrid",
    base="model",
    adapters=ADAPTERS,
    examples=["ibm-granite/granite-4.0-h-tiny", "ibm-granite/granite-4.0-h-micro"],
)
class GraniteMoeHybrid(ScaledLM):
    def __init__(self, c: GraniteMoeHybridConfig) -> None:
        by_kind = {kind: Layer(c, kind) for kind in dict.fromkeys(c.kinds)}
        super().__init__(c, ScaledDecoder(c, by_kind, pattern=c.kinds))
