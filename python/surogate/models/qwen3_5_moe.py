"""Qwen3.5 mixtures: Qwen3.5 with experts in place of the feed-forward layer, and one more that every token goes through,
behind a gate of its own."""

from __future__ import annotations

from typing import Literal

from ..dsl import Reader, model
from ..layers import STACKED_EXPERTS, CausalLM
from .qwen2_moe import GatedMixture, SharedExpertConfig
from .qwen3_5 import HybridConfig, hybrid, without_exceptions


class Qwen3_5MoeConfig(HybridConfig, SharedExpertConfig):
    hidden_size: int = 2048
    num_hidden_layers: int = 40
    num_key_value_heads: int = 2
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts_per_tok: int = 8
    norm_topk_prob: Literal[True] = True

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        without_exceptions(reader)
        self.read_experts(reader, 256)


@model(
    "Qwen3_5MoeForCausalLM",
    config=Qwen3_5MoeConfig,
    model_type="qwen3_5_moe_text",
    base="model",
    carried=["mtp."],
    adapters=STACKED_EXPERTS,
)
class Qwen3_5Moe(CausalLM):
    def __init__(self, c: Qwen3_5MoeConfig) -> None:
        super().__init__(c, hybrid(c, lambda: GatedMixture(c)))
