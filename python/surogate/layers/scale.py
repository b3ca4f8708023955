"""Rows times a number each."""

from __future__ import annotations

from ..dsl import Tensor, ops


def scale_rows(x: Tensor, factor: Tensor) -> Tensor:
    """x [B, T, N] · factor [B, T, 1]."""
    each = ops.repeat_heads(ops.split_heads(factor, head_dim=1), heads=x.shape[-1])
    return x * ops.merge_heads(each)
