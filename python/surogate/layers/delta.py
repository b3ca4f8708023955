"""The gated delta net: linear attention with a state that forgets and corrects itself."""

from __future__ import annotations

from ..dsl import Batch, Module, Parameter, Tensor, ops, region
from .linear import Linear
from .norm import RMSNorm

#: Added to the squares of a query or a key before it gets the length 1.
EPS = 1e-6


class ChannelConv(Module):
    """`weight` [channels, 1, width]: each channel over the last `width` tokens of its document, and optionally `bias`
    [channels]."""

    def __init__(self, channels: int, width: int, *, bias: bool = False) -> None:
        self.weight = Parameter(channels, 1, width)
        self.bias = Parameter(channels, init="zeros") if bias else None

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Causal convolution of x [B, T, channels] over time, within each document."""
        y = ops.causal_conv(x, self.weight, batch.document_start)
        return y if self.bias is None else ops.shift_columns(y, self.bias)


class GatedDeltaNet(Module):
    """`conv1d` over queries, keys and values, the gated delta rule, a norm of each head with a gate, and `out_proj`.

    `key_heads` of `key_dim` columns are shared by `heads` of `value_dim`. An architecture overrides `declare` and `project`
    where its matrices are others.
    """

    def __init__(
        self, hidden_size: int, eps: float, *, key_heads: int, heads: int, key_dim: int, value_dim: int, width: int
    ) -> None:
        self.key_heads, self.key_dim, self.value_dim = key_heads, key_dim, value_dim
        self.sizes = [key_heads * key_dim, key_heads * key_dim, heads * value_dim]
        self.declare(hidden_size, heads)
        self.conv1d = ChannelConv(sum(self.sizes), width)
        self.dt_bias = Parameter(heads, init="ones")
        self.A_log = Parameter(heads, init="zeros")
        self.norm = RMSNorm(value_dim, eps)
        self.out_proj = Linear(heads * value_dim, hidden_size, residual_projection=True)

    def declare(self, hidden_size: int, heads: int) -> None:
        """The layers of `project`."""
        self.in_proj_qkv = Linear(hidden_size, sum(self.sizes))
        self.in_proj_z = Linear(hidden_size, self.sizes[2])
        self.in_proj_b = Linear(hidden_size, heads)
        self.in_proj_a = Linear(hidden_size, heads)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values one after another, the gate of the result, and for each head what becomes the share of
        a correction and the decay."""
        return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)

    def unit(self, x: Tensor) -> Tensor:
        """Heads of length 1."""
        y, _ = ops.unit_norm(
            ops.split_heads(x, head_dim=self.key_dim), eps=EPS / self.key_dim, factor=self.key_dim**-0.5
        )
        return y

    @region("attention")
    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Linear attention with the gated delta rule on x [B, T, hidden_size], within each document."""
        qkv, z, b, a = self.project(x)
        qkv = ops.activation(self.conv1d(qkv, batch), function="silu")
        q, k, v = ops.split(qkv, sizes=self.sizes)
        v = ops.split_heads(v, head_dim=self.value_dim)
        share = ops.activation(b, function="sigmoid")
        decay = ops.delta_decay(a, self.A_log, self.dt_bias)
        o = ops.gated_delta(self.unit(q), self.unit(k), v, decay, share, batch.document_start)
        gate = ops.split_heads(z, head_dim=self.value_dim)
        return self.out_proj(ops.merge_heads(ops.swiglu(gate, self.norm(o))))
