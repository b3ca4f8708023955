"""ERNIE 4.5 MoE: ERNIE 4.5 with a mixture of experts in a range of layers. A correction bias that gradients do not
train is added to the softmax of the scores for the choice alone, and shared experts see every token."""

from __future__ import annotations

from typing import Literal

from ..dsl import Module, Parameter, Reader, Tensor, model, ops
from ..layers import (
    EXPERTS_AS_PARAMETERS,
    Attention,
    CausalLM,
    Decoder,
    DecoderConfig,
    DecoderLayer,
    Experts,
    GatedMLP,
    Linear,
    Mixture,
    RotaryEmbedding,
    Router,
    Routing,
    count_of_experts,
)


class Ernie4_5MoeConfig(DecoderConfig):
    vocab_size: int = 103424
    hidden_size: int = 2560
    intermediate_size: int = 12288
    num_hidden_layers: int = 28
    num_attention_heads: int = 20
    num_key_value_heads: int = 4
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True
    use_bias: bool = False
    moe_intermediate_size: int = 1536
    moe_k: int = 6
    moe_num_shared_experts: int | None = 2
    moe_layer_start_index: int | None = 1
    moe_layer_end_index: int | None = -1
    moe_layer_interval: int = 1
    moe_norm_min: Literal[1e-12] = 1e-12
    # In transformers the loss of uneven loads counts choices that are made without the correction, which none are.
    output_router_logits: Literal[False] = False
    router_aux_loss_coef: float = 0.001

    theta = 500000.0

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        if reader.fields.get("num_experts_per_tok") not in (None, self.moe_k):
            reader.problem("num_experts_per_tok", "contradicts `moe_k`; give one of the two")
        reader.take("num_experts_per_tok")
        self.num_experts = count_of_experts(reader, 64, "moe_num_experts")
        if self.moe_k > self.num_experts:
            reader.problem("moe_k", f"{self.moe_k} is more than {self.num_experts} experts")
        count = self.num_hidden_layers
        first = 1 if self.moe_layer_start_index is None else self.moe_layer_start_index
        last = count - 1 if self.moe_layer_end_index in (None, -1) else self.moe_layer_end_index
        sparse = [first <= i <= last and (i + 1) % self.moe_layer_interval == 0 for i in range(count)]
        self.kinds = ["sparse" if of else "dense" for of in sparse]
        if any(sparse):
            self.routing = Routing(self.num_experts, self.moe_k)
        if (self.moe_num_shared_experts or 0) < 0:
            message = f"{self.moe_num_shared_experts} is not supported, expected 0 or more"
            reader.problem("moe_num_shared_experts", message)


class Statics(Module):
    """`e_score_correction_bias` [1, experts], which is not trained."""

    def __init__(self, experts: int) -> None:
        self.e_score_correction_bias = Parameter(1, experts, init="zeros", buffer=True)


class BiasedRouter(Router):
    """Weights are the softmax of the scores, which are f32, over the sum of the chosen ones. The choice is made with
    `correction` added to the softmax."""

    def __init__(self, c: Ernie4_5MoeConfig, correction: Parameter) -> None:
        super().__init__(c.hidden_size, c.num_experts, top_k=c.moe_k, normalise=True, f32=True)
        self.correction = correction

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return ops.route(logits, self.correction, top_k=self.top_k, scores=self.scores, normalise=self.normalise)


class ErnieMixture(Mixture):
    """The sum of the routed experts' output and `shared_experts`(x), if there are any."""

    def __init__(self, c: Ernie4_5MoeConfig) -> None:
        self.moe_statics = Statics(c.num_experts)
        router = BiasedRouter(c, self.moe_statics.e_score_correction_bias)
        super().__init__(router, Experts(c.num_experts, c.hidden_size, c.moe_intermediate_size), c.num_experts)
        size = c.moe_intermediate_size * (c.moe_num_shared_experts or 0)
        self.shared_experts = GatedMLP(c.hidden_size, size, bias=c.use_bias) if size else None

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        return result if self.shared_experts is None else result + self.shared_experts(x)


@model(
    "Ernie4_5_MoeForCausalLM",
    config=Ernie4_5MoeConfig,
    model_type="ernie4_5_moe",
    base="model",
    carried=["model.mtp_"],
    adapters=EXPERTS_AS_PARAMETERS,
    examples=["baidu/ERNIE-4.5-21B-A3B-PT"],
)
class Ernie4_5Moe(CausalLM):
    def __init__(self, c: Ernie4_5MoeConfig) -> None:
        def layer(kind: str) -> DecoderLayer:
            dense = kind == "dense"
            mlp = GatedMLP(c.hidden_size, c.intermediate_size, bias=c.use_bias) if dense else ErnieMixture(c)
            return DecoderLayer(c, Attention(c, bias=c.use_bias, output_bias=c.use_bias), mlp)

        by_kind = {kind: layer(kind) for kind in dict.fromkeys(c.kinds)}
        rotary = RotaryEmbedding(c.head_dim, c.rope, interleaved=True)
        super().__init__(c, Decoder(c, by_kind, pattern=c.kinds, rotary=rotary))
        tied = self.model.embed_tokens.weight if c.tie_word_embeddings else None
        self.lm_head = Linear(c.hidden_size, c.vocab_size, bias=c.use_bias, tied=tied)
