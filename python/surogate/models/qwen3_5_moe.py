"""Qwen3.5 MoE (text model): Qwen3.5 with a mixture of experts in place of the feed-forward layer, and a shared expert with
a gate of its own."""

from __future__ import annotations

from typing import Literal

from ..dsl import Reader, model
from ..layers import STACKED_EXPERTS, CausalLM, Decoder, TextPart
from .qwen2_moe import GatedMixture, SharedExpertConfig
from .qwen3_5 import HybridConfig, hybrid, without_exceptions
from .qwen_vision import PROJECTORS, Qwen3VisionConfig, with_tower


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


def decoder(c: Qwen3_5MoeConfig, *, images: bool = False) -> Decoder:
    return hybrid(c, lambda: GatedMixture(c), images=images)


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
        super().__init__(c, decoder(c))


class Qwen3_5MoeImageConfig(Qwen3_5MoeConfig):
    section = "text_config"


class Qwen3_5MoeWhole(CausalLM):
    def __init__(self, c: Qwen3_5MoeImageConfig, v: Qwen3VisionConfig) -> None:
        super().__init__(c, with_tower(decoder(c, images=True), v))
        self.images, self.projectors = v.form(table=v.table, stretched=True), PROJECTORS


@model(
    "Qwen3_5MoeForConditionalGeneration",
    config=Qwen3_5MoeImageConfig,
    model_type="qwen3_5_moe",
    carried=["mtp.", "model.visual."],
    adapters=STACKED_EXPERTS,
    examples=["Qwen/Qwen3.5-35B-A3B"],
    images=(Qwen3_5MoeWhole, Qwen3VisionConfig),
)
class Qwen3_5MoeText(CausalLM):
    def __init__(self, c: Qwen3_5MoeImageConfig) -> None:
        super().__init__(c, TextPart(decoder(c)))
