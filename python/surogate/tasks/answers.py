"""Parts of losses of answers. Values of pairs, or of answers with verdicts, lie in the first entries of tensors [B, T]."""

from __future__ import annotations

from ..dsl import Batch, Tensor, ops


def log_sigmoid(x: Tensor) -> Tensor:
    """log σ(x) by elements, as −softplus(−x): finite for large |x|."""
    return -ops.activation(-x, function="softplus")


def sigmoid(x: Tensor) -> Tensor:
    """σ(x) by elements."""
    return ops.activation(x, function="sigmoid")


def exp(x: Tensor) -> Tensor:
    """e^x by elements."""
    return ops.activation(x, function="exp")


def reciprocal(x: Tensor) -> Tensor:
    """1 ÷ x by elements."""
    return ops.activation(x, function="reciprocal")


def smoothed(margin: Tensor, smoothing: float) -> Tensor:
    """−(1 − ε)·log σ(margin) − ε·log σ(−margin)"""
    loss = -log_sigmoid(margin) * (1.0 - smoothing)
    return loss - log_sigmoid(-margin) * smoothing if smoothing else loss


def none(count: Tensor) -> Tensor:
    """1 where there is nothing to count, so that nothing is divided by 0."""
    return 1.0 - ops.activation(count, function="step")


def mean_over_batch(values: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean over the micro-batch, in every entry; 0 where no weight is above 0."""
    total = ops.batch_sum(weights)
    return ops.batch_sum(values * weights) * reciprocal(total + none(total))


class Side:
    """Sums over the answers of one side of each pair."""

    def __init__(self, at: int, tokens: Tensor, reference: Tensor | None, batch: Batch) -> None:
        self.at, self.documents = at, batch.documents
        #: Σ log π(y), and the same minus that of the reference.
        self.logps = self.sum(tokens)
        self.reference = None if reference is None else self.sum(reference)
        self.ratio = self.logps if self.reference is None else self.logps - self.reference
        #: Tokens of the answer; an entry without a pair has 1, so that nothing is divided by 0.
        self.length = self.sum(batch.weights) + (1.0 - batch.pair_weights)
        #: 1 for the tokens of this side, prompts included.
        self.tokens = ops.document_spread(batch.pair_weights, self.documents, every=2, at=at)
        #: 1 for the targets of the answers of this side.
        self.mask = self.tokens * batch.weights

    def sum(self, tokens: Tensor) -> Tensor:
        """The sum over the tokens of this side's answer, for each pair."""
        return ops.document_sum(tokens, self.documents, every=2, at=self.at)

    def mean(self, value: Tensor) -> Tensor:
        """A sum for each pair, divided by the number of the answer's tokens."""
        return value * reciprocal(self.length)
