"""Qwen2 and 2.5: Llama with biases on queries, keys and values, and a sliding window in the layers
that the config names."""

from __future__ import annotations

from ..dsl import Reader, each, model
from ..layers import Attention, CausalLM, Decoder, DecoderConfig, DecoderLayer, GatedMLP, layer_windows


class Qwen2Config(DecoderConfig):
    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int = 32
    max_position_embeddings: int = 32768
    max_window_layers: int | None = 28

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        self.windows = layer_windows(reader, self.num_hidden_layers, lambda i: i >= (self.max_window_layers or 0))


@model("Qwen2ForCausalLM", config=Qwen2Config, model_type="qwen2", base="model", examples=["Qwen/Qwen2.5-7B"])
class Qwen2(CausalLM):
    def __init__(self, c: Qwen2Config) -> None:
        attention = Attention(c, bias=True, window=each.of(c.windows))
        super().__init__(c, Decoder(c, DecoderLayer(c, attention, GatedMLP(c.hidden_size, c.intermediate_size))))
