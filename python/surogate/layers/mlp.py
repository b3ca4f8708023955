"""The gated feed-forward layer: down(silu(gate(x)) · up(x))."""

from __future__ import annotations

from ..dsl import Module, Tensor, ops, region
from .linear import Linear


class SwiGLU(Module):
    """`gate_proj`, `up_proj` and `down_proj`."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, residual_projection=True)

    @region("mlp")
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        up = self.up_proj(x)
        return self.down_proj(ops.swiglu(gate, up))
