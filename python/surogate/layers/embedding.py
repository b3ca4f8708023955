"""Token embedding."""

from __future__ import annotations

from ..dsl import Module, Parameter, Tensor, ops


class Embedding(Module):
    """`weight` [vocabulary, size]. The row of `padding` gets no gradient from this side.

    A padding id outside of the vocabulary means none, counted from the end if negative.
    """

    def __init__(self, vocabulary: int, size: int, padding: int | None = None) -> None:
        self.weight = Parameter(vocabulary, size)
        if padding is not None and not -vocabulary <= padding < vocabulary:
            padding = None
        self.padding = None if padding is None else padding % vocabulary

    def forward(self, ids: Tensor) -> Tensor:
        """The rows [B, T, hidden_size] of token ids [B, T]."""
        return ops.embedding(ids, self.weight, padding_idx=self.padding)
