"""LFM2 MoE: LFM2 with a mixture of experts in all but the first layers. Experts are chosen by sigmoids and a bias that
gradients do not train."""

from __future__ import annotations

from typing import Literal

from ..dsl import Module, Parameter, Reader, Tensor, model, ops
from ..layers import CausalLM, Experts, Mixture, Router, Routing, count_of_experts, experts_as_parameters
from .lfm2 import ConvolutionDecoder, ConvolutionFields, FeedForward, Layer

#: Added to the sum of the weights of a token.
EPSILON = 1e-6

#: `feed_forward.w1` and the like of dense layers are linear modules, and no name of a module means a parameter.
STACKS = experts_as_parameters("w1", "w3", "w2")["stacks"]
ADAPTERS = {"routers": ["feed_forward.gate"], "bare": ["gate"], "stacks": STACKS}


class Lfm2MoeConfig(ConvolutionFields):
    hidden_size: int = 2048
    intermediate_size: int = 7168
    moe_intermediate_size: int = 1792
    num_dense_layers: int | None = 2
    num_experts_per_tok: int = 4
    use_expert_bias: bool = True
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    output_router_logits: Literal[False] = False

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        self.num_experts = count_of_experts(reader, 32)
        if self.num_experts_per_tok > self.num_experts:
            reader.problem("num_experts_per_tok", f"{self.num_experts_per_tok} is more than {self.num_experts} experts")
        dense = 2 if self.num_dense_layers is None else self.num_dense_layers
        if dense < self.num_hidden_layers:
            self.routing = Routing(self.num_experts, self.num_experts_per_tok, scores="sigmoid")
        self.kinds = [f"{'dense' if i < dense else 'sparse'}_{kind}" for i, kind in enumerate(self.layer_types)]


class SigmoidRouter(Router):
    """Weights are sigmoids of the scores, perhaps over their sum, times a factor. The choice is made with `correction`
    added to them."""

    def __init__(self, c: Lfm2MoeConfig, correction: Parameter | None) -> None:
        super().__init__(c.hidden_size, c.num_experts, top_k=c.num_experts_per_tok, normalise=c.norm_topk_prob)
        self.correction = correction
        self.scores = "sigmoid"
        self.factor = c.routed_scaling_factor

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        given = () if self.correction is None else (self.correction,)
        return ops.route(
            logits,
            *given,
            top_k=self.top_k,
            scores=self.scores,
            normalise=self.normalise,
            epsilon=EPSILON if self.normalise else None,
            factor=self.factor,
        )


class BiasedMixture(Mixture):
    def __init__(self, c: Lfm2MoeConfig) -> None:
        self.expert_bias = Parameter(c.num_experts, init="zeros", buffer=True) if c.use_expert_bias else None
        experts = Experts(c.num_experts, c.hidden_size, c.moe_intermediate_size, ("w1", "w3", "w2"))
        super().__init__(SigmoidRouter(c, self.expert_bias), experts, c.num_experts)


@model(
    "Lfm2MoeForCausalLM",
    config=Lfm2MoeConfig,
    model_type="lfm2_moe",
    base="model",
    adapters=ADAPTERS,
    examples=["LiquidAI/LFM2-8B-A1B"],
)
class Lfm2Moe(CausalLM):
    def __init__(self, c: Lfm2MoeConfig) -> None:
        def layer(kind: str) -> Module:
            width, operator = kind.split("_", 1)
            return Layer(c, operator, FeedForward(c) if width == "dense" else BiasedMixture(c))

        by_kind = {kind: layer(kind) for kind in dict.fromkeys(c.kinds)}
        super().__init__(c, ConvolutionDecoder(c, by_kind, pattern=c.kinds))
