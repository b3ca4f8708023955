"""Token embedding."""

from __future__ import annotations

from ..dsl import Module, Parameter, Tensor
from ..dsl import ops


class Embedding(Module):
    """`weight` [vocabulary, size]. The row of `padding` gets no gradient from this side.

    A padding id outside of the vocabulary means none, counted from the end if negative.
    """

    def __init__(self, vocabulary: int, size: int, padding: int | None = None) -> None:
        self.weight = Parameter(vocabulary, size)
        inside = padding is not None and -vocabulary <= padding < vocabulary
        self.padding = padding % vocabulary if inside else None

    def forward(self, ids: Tensor) -> Tensor:
        return ops.embedding(ids, self.weight, padding_idx=self.padding)
