"""The loss of a language model, and its outputs."""

from __future__ import annotations

from ..dsl import Batch, Tensor, ops, output


def language_model_loss(logits: Tensor, batch: Batch) -> None:
    """Cross entropy of the next token. The division by `weight_sum` is the update's work.

    Marks `logits`, `token_loss` [B, T], and the sums over the micro-batch `loss_sum`, `weight_sum`.
    """
    output("logits", logits)
    token_loss, _ = ops.cross_entropy(logits, batch.targets)
    output("token_loss", token_loss)
    loss_sum, weight_sum = ops.weighted_sum(token_loss, batch.weights)
    output("loss_sum", loss_sum)
    output("weight_sum", weight_sum)
