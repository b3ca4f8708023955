"""The gated feed-forward layer: down(f(gate(x)) · up(x))."""

from __future__ import annotations

from ..dsl import Module, Tensor, ops, region
from .activation import SAME, activation
from .linear import Linear


class GatedMLP(Module):
    """`gate_proj`, `up_proj` and `down_proj`; f is `function`, by the name that transformers has for it."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, function: str = "silu", bias: bool = False
    ) -> None:
        self.function = function
        self.intermediate_size = intermediate_size
        self.declare(hidden_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, residual_projection=True)

    def declare(self, hidden_size: int, bias: bool) -> None:
        """The layers of `project`."""
        self.gate_proj = Linear(hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = Linear(hidden_size, self.intermediate_size, bias=bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """gate(x) and up(x)."""
        return self.gate_proj(x), self.up_proj(x)

    @region("mlp")
    def forward(self, x: Tensor) -> Tensor:
        """down(function(gate(x)) · up(x)) on x [B, T, hidden_size]."""
        gate, up = self.project(x)
        if SAME.get(self.function, self.function) == "silu":
            return self.down_proj(ops.swiglu(gate, up))
        return self.down_proj(activation(self.function, gate) * up)


class FusedGatedMLP(GatedMLP):
    """`gate_up_proj`, whose rows are gate and up one after another, and `down_proj`."""

    def declare(self, hidden_size: int, bias: bool) -> None:
        """Declares one matrix of the gate's rows, then those of the up projection."""
        self.gate_up_proj = Linear(hidden_size, 2 * self.intermediate_size, bias=bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The halves of the fused projection, gate and up, each [B, T, intermediate_size]."""
        return ops.split(self.gate_up_proj(x), sizes=[self.intermediate_size] * 2)
