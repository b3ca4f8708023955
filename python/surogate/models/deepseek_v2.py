"""DeepSeek-V2 and V2-Lite: the latent attention of DeepSeek-V3, and a mixture of experts by the softmax of the scores,
perhaps of the best groups, with shared experts."""

from __future__ import annotations

from typing import Literal

from ..dsl import Module, Reader, Tensor, model, ops
from ..layers import (
    EXPERTS_AS_PARAMETERS,
    CausalLM,
    Decoder,
    DecoderLayer,
    GatedMLP,
    RotaryEmbedding,
    Router,
)
from .deepseek_v3 import LatentAttention, LatentFields, SharedFields, SharedMixture


class DeepseekV2Config(LatentFields, SharedFields):
    vocab_size: int = 102400
    moe_intermediate_size: int = 1407
    n_shared_experts: int = 2
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int | None = 0
    n_group: int | None = None
    topk_group: int | None = None
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
    scoring_func: Literal["softmax"] = "softmax"
    norm_topk_prob: Literal[False] = False  # transformers does not read it, the code published with the model does
    rope_interleave: Literal[True] = True
    mlp_bias: bool = False

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        if reader.fields.get("num_experts_per_tok") is None:
            reader.problem("num_experts_per_tok", "is missing, expected a whole number above 0")
        self.groups, self.kept = 1, 1
        if self.topk_method == "group_limited_greedy":
            self.groups, self.kept = self.n_group or 0, self.topk_group or 0
        for name, value in (("n_group", self.groups), ("topk_group", self.kept)):
            if value < 1:
                reader.problem(name, f"{getattr(self, name)!r} is not supported, expected a whole number above 0")
        if self.groups > 0 and self.kept > 0:
            self.read_routing(reader, 64, "softmax", self.groups, self.kept, least=1)


class ScaledRouter(Router):
    """Weights are the softmax of all scores, which are f32, times `routed_scaling_factor`. A group is as good as its
    best expert."""

    def __init__(self, c: DeepseekV2Config) -> None:
        super().__init__(c.hidden_size, c.num_experts, top_k=c.num_experts_per_tok, normalise=False, f32=True)
        self.factor = c.routed_scaling_factor
        grouped = c.groups > 1
        self.groups, self.kept = c.groups if grouped else None, c.kept if grouped else None
        self.counted = 1 if grouped else None

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return ops.route(
            logits,
            top_k=self.top_k,
            scores=self.scores,
            factor=self.factor,
            groups=self.groups,
            kept_groups=self.kept,
            counted=self.counted,
        )


@model(
    "DeepseekV2ForCausalLM",
    config=DeepseekV2Config,
    model_type="deepseek_v2",
    base="model",
    adapters=EXPERTS_AS_PARAMETERS,
    examples=["deepseek-ai/DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V2"],
)
class DeepseekV2(CausalLM):
    def __init__(self, c: DeepseekV2Config) -> None:
        def mlp(kind: str) -> Module:
            if kind == "dense":
                return GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
            return SharedMixture(c, ScaledRouter(c), bias=c.mlp_bias)

        by_kind = {kind: DecoderLayer(c, LatentAttention(c), mlp(kind)) for kind in dict.fromkeys(c.kinds)}
        rotary = RotaryEmbedding(c.qk_rope_head_dim, c.rope, interleaved=True)
        super().__init__(c, Decoder(c, by_kind, pattern=c.kinds, rotary=rotary))
