"""Normalization over the last axis."""

from __future__ import annotations

from ..dsl import Module, Parameter, Tensor, ops


class RMSNorm(Module):
    """`weight` [size]; y = x / √(mean(x²) + eps) · weight, or · (1 + weight) with `offset`."""

    def __init__(self, size: int, eps: float, *, offset: bool = False) -> None:
        self.weight = Parameter(size, init="zeros" if offset else "ones")
        self.eps = eps
        self.offset = offset or None

    def forward(self, x: Tensor) -> Tensor:
        """x ÷ √(mean(x²) + eps) over the last axis, scaled by `weight` or `1 + weight`."""
        y, _ = ops.rmsnorm(x, self.weight, eps=self.eps, offset=self.offset)
        return y


class GroupedRMSNorm(RMSNorm):
    """`weight` [size]; the same within each of `groups` groups of neighboring columns."""

    def __init__(self, size: int, eps: float, groups: int) -> None:
        super().__init__(size, eps)
        self.groups, self.columns = groups, size // groups

    def forward(self, x: Tensor) -> Tensor:
        if self.groups == 1:
            return super().forward(x)
        y, _ = ops.unit_norm(ops.split_heads(x, head_dim=self.columns), eps=self.eps)
        return ops.scale_columns(ops.merge_heads(y), self.weight)


class LayerNorm(Module):
    """`weight` and `bias` [size]; y = (x - mean) / √(variance + eps) · weight + bias."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = Parameter(size, init="ones")
        self.bias = Parameter(size, init="zeros")
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(x − mean) ÷ √(variance + eps) · weight + bias, over the last axis."""
        y, _, _ = ops.layernorm(x, self.weight, self.bias, eps=self.eps)
        return y
