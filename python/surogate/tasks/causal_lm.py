"""The loss of a language model: cross entropy of the next token, as fine-tuning and pretraining take it."""

from __future__ import annotations

from typing import Any

from ..dsl import Batch, Module, Results, Tensor, ops, output, task


@task("causal_lm")
class CausalLM(Module):
    """Marks `token_loss` and `likeliest`, the token that the model takes for the next, both [B, T], and the sums over
    the micro-batch, `loss_sum` and `weight_sum`. The division by
    `weight_sum` is the update's work. Of mixtures of experts also `router_report`, and where the config wants the loads of
    experts balanced, the loss of uneven ones is added to that of every token."""

    def __init__(self, config: Any) -> None:
        self.balance = getattr(config, "balance", None)
        self.routing = getattr(config, "routing", None)

    def forward(self, of: Results, batch: Batch) -> None:
        """Outputs the cross entropy and the likeliest token at each position, and the sums for the loss."""
        token_loss, _ = ops.cross_entropy(of["logits"], batch.targets)
        output("token_loss", token_loss)
        output("likeliest", ops.likeliest(of["logits"]))
        self.reduce(token_loss, of, batch)

    def reduce(self, token_loss: Tensor, of: Results, batch: Batch) -> None:
        """Marks the sums of the tokens' losses, [B, T], and what mixtures of experts report."""
        if self.routing:
            top_k = self.routing.top_k
            output("router_report", ops.router_report(of["expert_load"], top_k=top_k))
            if self.balance:
                factor = self.balance.coefficient * self.routing.experts
                token_loss = ops.balanced_loss(token_loss, of["expert_load"], factor=factor, top_k=top_k)
        loss_sum, weight_sum = ops.weighted_sum(token_loss, batch.weights)
        output("loss_sum", loss_sum)
        output("weight_sum", weight_sum)
