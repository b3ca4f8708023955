"""The loss of a language model: cross entropy of the next token, as fine-tuning and pretraining take it."""

from __future__ import annotations

from typing import Any

from ..dsl import Batch, Module, Results, ops, output, task


@task("causal_lm")
class CausalLM(Module):
    """Marks `token_loss` [B, T] and the sums over the micro-batch, `loss_sum` and `weight_sum`. The division by
    `weight_sum` is the update's work."""

    def __init__(self, config: Any) -> None:
        pass

    def forward(self, of: Results, batch: Batch) -> None:
        token_loss, _ = ops.cross_entropy(of["logits"], batch.targets)
        output("token_loss", token_loss)
        loss_sum, weight_sum = ops.weighted_sum(token_loss, batch.weights)
        output("loss_sum", loss_sum)
        output("weight_sum", weight_sum)
