"""The mixer of Mamba-2: a state-space model whose states decay by a rate of each head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..dsl import Batch, ModelConfig, Module, Parameter, Reader, Tensor, ops, region
from .delta import ChannelConv, pieces, repeated
from .linear import Linear
from .norm import GroupedRMSNorm

#: The most columns of B and C that one scan takes.
MOST_STATE = 128

#: Limits of time steps above are none.
MOST_STEP = 3.4e38


@dataclass(frozen=True)
class MambaSizes:
    """The sizes of a mixer: `heads` of `head_dim` columns, which share B and C of `state` columns in `groups`. `limits` are those of
    time steps. `norm`: "after" the gate, "before" it, or none."""

    heads: int
    head_dim: int
    groups: int
    state: int
    width: int
    limits: tuple[float, float]
    conv_bias: bool = True
    bias: bool = False
    output_bias: bool = False
    norm: str | None = "after"

    @property
    def inner(self) -> int:
        """Columns of all heads."""
        return self.heads * self.head_dim


class Mamba2(Module):
    """`in_proj` gives z, x, B, C and the time steps dt side by side. After `conv1d` and SiLU over x, B and C, each head
    has h ← e^(dt·A)·h + dt·x⊗B with A = −e^`A_log` and gives C·h + `D`·x; z gates it. `factors` multiply the five parts of
    `in_proj`."""

    def __init__(
        self, hidden_size: int, eps: float, sizes: MambaSizes, *, factors: Sequence[float] | None = None
    ) -> None:
        self.sizes = sizes
        self.shared = sizes.groups * sizes.state
        self.factors = factors
        channels = sizes.inner + 2 * self.shared
        self.in_proj = Linear(hidden_size, sizes.inner + channels + sizes.heads, bias=sizes.bias)
        self.conv1d = ChannelConv(channels, sizes.width, bias=sizes.conv_bias)
        self.dt_bias = Parameter(sizes.heads, init="ones")
        self.A_log = Parameter(sizes.heads, init="zeros")
        self.D = Parameter(sizes.heads, init="ones")
        if sizes.norm:
            self.norm = GroupedRMSNorm(sizes.inner, eps, sizes.groups)
        self.out_proj = Linear(sizes.inner, hidden_size, bias=sizes.output_bias, residual_projection=True)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z, the channels of the convolution, and dt."""
        inner, shared, heads = self.sizes.inner, self.shared, self.sizes.heads
        if self.factors is None:
            return ops.split(self.in_proj(x), sizes=[inner, inner + 2 * shared, heads])
        parts = ops.split(self.in_proj(x), sizes=[inner, inner, shared, shared, heads])
        z, x, b, c, dt = (part * factor for part, factor in zip(parts, self.factors, strict=True))
        return z, ops.concat(ops.concat(x, b), c), dt

    def steps(self, dt: Tensor) -> tuple[Tensor, Tensor]:
        """Time steps and the logarithms of decays, f32 [B, T, heads]."""
        dt = ops.shift_columns(ops.cast(dt, dtype="f32"), self.dt_bias)
        dt = ops.activation(dt, function="softplus")
        low, high = self.sizes.limits
        if low > 0 or high < MOST_STEP:
            dt = ops.clip(dt, low=low, high=min(high, MOST_STEP))
        rate = ops.activation(ops.shift_columns(dt * 0.0, self.A_log), function="exp")
        return dt, dt * rate * -1.0

    def scan(self, x: Tensor, b: Tensor, c: Tensor, dt: Tensor, batch: Batch) -> Tensor:
        """C·h of every token, [B, T, inner]. A state is a sum over its rows: those beyond the most are scans of their own. Its columns
        do not depend on each other: a wide head is several."""
        count = pieces(self.sizes.head_dim)
        step, decay = (repeated(of, count) for of in self.steps(dt))
        x = ops.split_heads(x, head_dim=self.sizes.head_dim // count)
        b, c = (ops.split_heads(of, head_dim=self.sizes.state) for of in (b, c))
        state = self.sizes.state
        sizes = [min(MOST_STATE, state - first) for first in range(0, state, MOST_STATE)]
        parts = [(b, c)] if len(sizes) == 1 else zip(ops.split(b, sizes=sizes), ops.split(c, sizes=sizes), strict=True)
        result = None
        for own_b, own_c in parts:
            y = ops.gated_delta(own_c, own_b, x, decay, step, batch.document_start, scale=1.0, additive=True)
            result = y if result is None else result + y
        return ops.merge_heads(result)

    def skip(self, x: Tensor, dt: Tensor) -> Tensor:
        """`D`·x, [B, T, inner]. Columns plus the parameter of their head, so that its gradient is a sum over tokens."""
        each = ops.split_heads(ops.shift_columns(dt * 0.0, self.D), head_dim=1)
        each = ops.repeat_heads(ops.split_heads(each, head_dim=1), heads=self.sizes.head_dim)
        return x * ops.merge_heads(ops.merge_heads(each))

    @region("attention")
    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        z, channels, dt = self.project(x)
        channels = ops.activation(self.conv1d(channels, batch), function="silu")
        x, b, c = ops.split(channels, sizes=[self.sizes.inner, self.shared, self.shared])
        y = self.scan(x, b, c, dt, batch) + self.skip(x, dt)
        if self.sizes.norm == "before":
            y = self.norm(y)
        y = ops.swiglu(z, y)
        return self.out_proj(self.norm(y) if self.sizes.norm == "after" else y)


def time_limits(value: object) -> tuple[float, float] | None:
    """`time_step_limit` in the spellings of transformers 4 and 5; None if it is not two numbers in order."""
    if value is None:
        return 0.0, MOST_STEP
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    numbers = [number["__float__"] if isinstance(number, dict) and len(number) == 1 else number for number in value]
    try:
        low, high = (float(number) for number in numbers)
    except (TypeError, ValueError):
        return None
    return (low, min(high, MOST_STEP)) if 0 <= low <= high else None


class MambaFields(ModelConfig):
    """Fields of mixers in the spelling that most architectures share."""

    mamba_n_heads: int = 128
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    def read_mamba(
        self, reader: Reader, inner: int, *, output_bias: bool | None = None, norm: str | None = "after"
    ) -> None:
        """`sizes` of the mixers, whose heads have `inner` columns together. The bias of the output is by default that of the
        input."""
        reader.take("mamba_chunk_size")  # the order of sums
        head_dim, rest = divmod(inner, self.mamba_n_heads)
        if rest or reader.take("mamba_d_head") not in (None, "auto", head_dim):
            reader.problem("mamba_d_head", f"expected heads of {inner} columns together, in {self.mamba_n_heads} heads")
        if self.mamba_n_heads % self.mamba_n_groups:
            reader.problem("mamba_n_groups", f"{self.mamba_n_groups} does not divide {self.mamba_n_heads} heads")
        limits = time_limits(reader.take("time_step_limit"))
        if limits is None:
            reader.problem("time_step_limit", "is not supported, expected two numbers in order")
        self.sizes = MambaSizes(
            heads=self.mamba_n_heads,
            head_dim=head_dim,
            groups=self.mamba_n_groups,
            state=self.mamba_d_state,
            width=self.mamba_d_conv,
            limits=limits or (0.0, MOST_STEP),
            conv_bias=self.mamba_conv_bias,
            bias=self.mamba_proj_bias,
            output_bias=self.mamba_proj_bias if output_bias is None else output_bias,
            norm=norm,
        )
