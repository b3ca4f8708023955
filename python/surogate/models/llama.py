"""Llama 2, 3.x and models of the same architecture, such as SmolLM: pre-norm decoder with grouped-query
attention, rotary positions and a gated feed-forward layer."""

from __future__ import annotations

from typing import Literal

from ..dsl import model
from ..layers import Attention, CausalLM, Decoder, DecoderConfig, DecoderLayer, GatedMLP


class LlamaConfig(DecoderConfig):
    attention_bias: bool = False
    mlp_bias: bool = False
    pretraining_tp: Literal[1] = 1


@model(
    "LlamaForCausalLM",
    config=LlamaConfig,
    model_type="llama",
    base="model",
    examples=["meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B", "HuggingFaceTB/SmolLM2-135M"],
)
class Llama(CausalLM):
    def __init__(self, c: LlamaConfig) -> None:
        attention = Attention(c, bias=c.attention_bias, output_bias=c.attention_bias)
        mlp = GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        super().__init__(c, Decoder(c, DecoderLayer(c, attention, mlp)))
