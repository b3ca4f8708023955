"""Qwen3-VL MoE: Qwen3-VL with the mixtures of Qwen3 MoE, whose experts lie in two stacks of matrices."""

from __future__ import annotations

from ..dsl import Module, model
from ..layers import CausalLM, Decoder, DecoderLayer, GatedMLP, ImageRotation, Mixture, Router, StackedExperts, TextPart
from .qwen3 import Attention
from .qwen3_moe import Qwen3MoeConfig
from .qwen3_vl import DeepstackWhole
from .qwen_vision import Qwen3VisionConfig

#: Matrices of experts are parameters in files, too: published ones are [inputs, outputs], those of transformers 5 are not.
ADAPTERS = {
    "bare": ["gate"],
    "routers": ["mlp.gate"],
    "stacks": [{"name": "gate_up_proj", "swapped": True}, {"name": "down_proj", "swapped": True}],
}


class Qwen3VLMoeTextConfig(Qwen3MoeConfig):
    section = "text_config"
    intermediate_size: int = 5632
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    max_position_embeddings: int = 128000
    moe_intermediate_size: int = 1408
    num_experts_per_tok: int = 4
    rope: ImageRotation

    theta = 500000.0
    experts = 60


def mlp(c: Qwen3VLMoeTextConfig, kind: str) -> Module:
    """The feed-forward layer of a "dense" or a "sparse" layer."""
    if kind == "dense":
        return GatedMLP(c.hidden_size, c.intermediate_size)
    router = Router(c.hidden_size, c.num_experts, top_k=c.num_experts_per_tok, normalise=True)
    return Mixture(router, StackedExperts(c.num_experts, c.hidden_size, c.moe_intermediate_size), c.num_experts)


class Qwen3VLMoeWhole(DeepstackWhole):
    def __init__(self, c: Qwen3VLMoeTextConfig, v: Qwen3VisionConfig) -> None:
        super().__init__(c, v, c.kinds, lambda kind: mlp(c, kind))


@model(
    "Qwen3VLMoeForConditionalGeneration",
    config=Qwen3VLMoeTextConfig,
    model_type="qwen3_vl_moe",
    carried=["model.visual."],
    adapters=ADAPTERS,
    examples=["Qwen/Qwen3-VL-30B-A3B-Instruct"],
    images=(Qwen3VLMoeWhole, Qwen3VisionConfig),
)
class Qwen3VLMoeText(CausalLM):
    def __init__(self, c: Qwen3VLMoeTextConfig) -> None:
        by_kind = {kind: DecoderLayer(c, Attention(c), mlp(c, kind)) for kind in dict.fromkeys(c.kinds)}
        super().__init__(c, TextPart(Decoder(c, by_kind, pattern=c.kinds)))
