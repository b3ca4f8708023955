"""Soft caps: values that approach a limit instead of passing it."""

from __future__ import annotations

from ..dsl import Tensor
from .activation import activation


def soft_cap(x: Tensor, limit: float | None) -> Tensor:
    """limit · tanh(x / limit). Nothing is recorded without a limit."""
    return x if limit is None else activation("tanh", x * (1.0 / limit)) * limit
