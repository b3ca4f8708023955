"""A model's own dropout, active only in training."""

from __future__ import annotations

from ..dsl import Batch, Tensor, ops


def dropout(x: Tensor, p: float, batch: Batch) -> Tensor:
    """x / (1 - p) where kept, else 0. Nothing is recorded for a probability of 0."""
    return ops.dropout(x, batch.micro_step, p=p) if p else x
