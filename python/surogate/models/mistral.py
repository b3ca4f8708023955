"""Mistral 7B and models of the same architecture: Llama without biases, with a sliding window in every
layer if the config sets one."""

from __future__ import annotations

from ..dsl import Reader, model
from ..layers import Attention, CausalLM, Decoder, DecoderConfig, DecoderLayer, GatedMLP, window


class MistralConfig(DecoderConfig):
    intermediate_size: int = 14336
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        self.window = window(reader, 4096)


@model(
    "MistralForCausalLM",
    config=MistralConfig,
    model_type="mistral",
    base="model",
    examples=["mistralai/Mistral-7B-v0.3"],
)
class Mistral(CausalLM):
    def __init__(self, c: MistralConfig) -> None:
        mlp = GatedMLP(c.hidden_size, c.intermediate_size)
        super().__init__(c, Decoder(c, DecoderLayer(c, Attention(c, window=c.window), mlp)))
