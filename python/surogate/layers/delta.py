"""The gated delta net: linear attention with a state that forgets and corrects itself."""

from __future__ import annotations

from typing import Any

from ..dsl import Batch, Module, Parameter, Tensor, ops, region
from .linear import Linear
from .norm import RMSNorm

#: Added to the squares of a query or a key before it gets the length 1.
EPS = 1e-6

#: The most columns of a head that the rule takes.
MOST_COLUMNS = 128


def pieces(columns: int) -> int:
    """The number of heads of the rule that one of n columns is: as few as divide them."""
    return next(n for n in range(1, columns + 1) if columns % n == 0 and columns // n <= MOST_COLUMNS)


def repeated(x: Tensor, count: int) -> Tensor:
    """[B, T, heads] → [B, T, heads · count], the number of each head `count` times."""
    if count == 1:
        return x
    one = ops.split_heads(ops.split_heads(x, head_dim=1), head_dim=1)
    return ops.merge_heads(ops.merge_heads(ops.repeat_heads(one, heads=count)))


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

    `key_heads` of `key_dim` columns are shared by `heads` of `value_dim`. An architecture overrides the pairs of `declare` and
    `project`, `declare_convolution` and `convolve`, `declare_output` and `project_output` where its matrices are others, and
    `share` where corrections are.
    """

    def __init__(
        self, hidden_size: int, eps: float, *, key_heads: int, heads: int, key_dim: int, value_dim: int, width: int
    ) -> None:
        self.key_heads, self.key_dim, self.value_dim = key_heads, key_dim, value_dim
        self.sizes = [key_heads * key_dim, key_heads * key_dim, heads * value_dim]
        self.pieces = pieces(value_dim)
        self.declare(hidden_size, heads)
        self.declare_convolution(width)
        self.dt_bias = Parameter(heads, init="ones")
        self.A_log = Parameter(heads, init="zeros")
        self.declare_output(RMSNorm(value_dim, eps), Linear(heads * value_dim, hidden_size, residual_projection=True))

    def declare(self, hidden_size: int, heads: int) -> None:
        """The layers of `project`."""
        self.in_proj_qkv = Linear(hidden_size, sum(self.sizes))
        self.in_proj_z = Linear(hidden_size, self.sizes[2])
        self.in_proj_b = Linear(hidden_size, heads)
        self.in_proj_a = Linear(hidden_size, heads)

    def project(self, x: Tensor) -> tuple[Any, Tensor, Tensor, Tensor]:
        """Queries, keys and values as `convolve` takes them, the gate of the result, and for each head what becomes the share
        of a correction and the decay."""
        return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)

    def declare_convolution(self, width: int) -> None:
        """The layer of `convolve`."""
        self.conv1d = ChannelConv(sum(self.sizes), width)

    def convolve(self, qkv: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each channel mixed over the tokens before."""
        q, k, v = ops.split(ops.activation(self.conv1d(qkv, batch), function="silu"), sizes=self.sizes)
        return q, k, v

    def declare_output(self, norm: RMSNorm, projection: Linear) -> None:
        """The layers of `project_output`."""
        self.norm, self.out_proj = norm, projection

    def project_output(self, o: Tensor, gate: Tensor) -> Tensor:
        """[B, T, heads, value_dim] of results and gates → [B, T, hidden_size]."""
        return self.out_proj(ops.merge_heads(ops.swiglu(gate, self.norm(o))))

    def share(self, b: Tensor) -> Tensor:
        """The share of what is missing that a token corrects, for each head."""
        return ops.activation(b, function="sigmoid")

    def unit(self, x: Tensor) -> Tensor:
        """Heads of length 1."""
        y, _ = ops.unit_norm(
            ops.split_heads(x, head_dim=self.key_dim), eps=EPS / self.key_dim, factor=self.key_dim**-0.5
        )
        return y

    def rule(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, share: Tensor, batch: Batch) -> Tensor:
        """The rule on heads of q, k and v: the columns of a value head depend on no other column, so that a wide one is several
        with the same decay and share."""
        if self.pieces == 1:
            return ops.gated_delta(q, k, v, decay, share, batch.document_start)
        narrow = ops.split_heads(ops.merge_heads(v), head_dim=self.value_dim // self.pieces)
        decay, share = repeated(decay, self.pieces), repeated(share, self.pieces)
        o = ops.gated_delta(q, k, narrow, decay, share, batch.document_start)
        return ops.split_heads(ops.merge_heads(o), head_dim=self.value_dim)

    @region("attention")
    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Linear attention with the gated delta rule on x [B, T, hidden_size], within each document."""
        qkv, z, b, a = self.project(x)
        q, k, v = self.convolve(qkv, batch)
        v = ops.split_heads(v, head_dim=self.value_dim)
        share = self.share(b)
        decay = ops.delta_decay(a, self.A_log, self.dt_bias)
        o = self.rule(self.unit(q), self.unit(k), v, decay, share, batch)
        return self.project_output(o, ops.split_heads(z, head_dim=self.value_dim))
