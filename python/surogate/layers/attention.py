"""Grouped-query attention, with the parts in which architectures differ."""

from __future__ import annotations

from collections.abc import Callable

from ..dsl import Batch, Module, Parameter, Tensor, each, ops, region
from .config import DecoderConfig
from .linear import Linear


class Attention(Module):
    """`q_proj`, `k_proj`, `v_proj` (with `bias`) and `o_proj` (with `output_bias`).

    An architecture overrides `declare` and `project`, or `declare_output` and `project_output`, where its matrices are
    others, and `heads` where something happens to queries, keys and values before they meet. `scale` is the factor of
    the scores, `window` and `soft_cap` are those of `ops.attention`.
    """

    def __init__(
        self,
        c: DecoderConfig,
        *,
        bias: bool = False,
        output_bias: bool = False,
        scale: float | None = None,
        window: int | each[int] | None = None,
        soft_cap: float | None = None,
    ) -> None:
        self.head_dim = c.head_dim
        self.scale = c.head_dim**-0.5 if scale is None else scale
        self.window = window
        self.soft_cap = soft_cap
        self.dropout = c.attention_dropout or None
        #: A term of each head in the sum of its softmax [heads], where an architecture has one.
        self.sinks: Parameter | None = None
        #: True if the tokens of an image see each other both ways.
        self.sees_images = False
        self.declare(c, bias)
        self.declare_output(Linear(c.queries, c.hidden_size, bias=output_bias, residual_projection=True))

    def declare_output(self, projection: Linear) -> None:
        """The layer of `project_output`."""
        self.o_proj = projection

    def project_output(self, o: Tensor) -> Tensor:
        """[B, T, heads · head_dim] → [B, T, hidden_size]."""
        return self.o_proj(o)

    def declare(self, c: DecoderConfig, bias: bool) -> None:
        """The layers of `project`."""
        self.q_proj = Linear(c.hidden_size, c.queries, bias=bias)
        self.k_proj = Linear(c.hidden_size, c.keys, bias=bias)
        self.v_proj = Linear(c.hidden_size, c.keys, bias=bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, T, heads · head_dim]."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def split(self, x: Tensor) -> Tensor:
        """[B, T, heads · head_dim] → [B, T, heads, head_dim]."""
        return ops.split_heads(x, head_dim=self.head_dim)

    def heads(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as attention takes them."""
        q, k, v = self.project(x)
        return rotate(self.split(q)), rotate(self.split(k)), self.split(v)

    @region("attention")
    def forward(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> Tensor:
        """Causal self-attention on x [B, T, hidden_size]; `rotate` applies the rotary embedding to queries and keys."""
        return self.attend(*self.heads(x, rotate, batch), batch)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Attention and the projection of its output."""
        settings = dict(scale=self.scale, window=self.window, soft_cap=self.soft_cap, dropout=self.dropout)
        sinks = () if self.sinks is None else (self.sinks,)
        last = (batch.image_last,) if self.sees_images else ()
        o, _ = ops.attention(q, k, v, batch.document_start, *last, *sinks, **settings)
        return self.project_output(ops.merge_heads(o))
