"""OLMoE: Llama with QK norms over all heads at once, and a mixture of experts in every layer."""

from __future__ import annotations

from typing import Literal

from ..dsl import Reader, model
from ..layers import EXPERTS_AS_PARAMETERS, CausalLM, Decoder, DecoderLayer, Mixture, MixtureConfig
from .olmo import Attention
from .qwen3_moe import routed


class OlmoeConfig(MixtureConfig):
    vocab_size: int = 50304
    hidden_size: int = 2048
    intermediate_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    attention_bias: bool = False
    clip_qkv: Literal[None] = None
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    router_aux_loss_coef: float = 0.01

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        self.read_experts(reader, 64)


@model(
    "OlmoeForCausalLM",
    config=OlmoeConfig,
    model_type="olmoe",
    base="model",
    adapters=EXPERTS_AS_PARAMETERS,
    examples=["allenai/OLMoE-1B-7B-0924"],
)
class Olmoe(CausalLM):
    def __init__(self, c: OlmoeConfig) -> None:
        super().__init__(c, Decoder(c, DecoderLayer(c, Attention(c), Mixture(*routed(c, c.intermediate_size, c.norm_topk_prob)))))
