"""Gemma 1: Llama with scaled embeddings, norms that scale by 1 + weight, and a gated layer of GELU."""

from __future__ import annotations

from typing import Literal

from ..dsl import Reader, model
from ..layers import Activation, Attention, CausalLM, DecoderConfig, DecoderLayer, GatedMLP
from .gemma2 import Norm, ScaledDecoder

#: The name of GELU by its error function in published files, which were trained with that by tanh.
LEGACY = "gelu"


class GemmaConfig(DecoderConfig):
    vocab_size: int = 256000
    hidden_size: int = 3072
    intermediate_size: int = 24576
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int = 256
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    hidden_act: Activation = "gelu_pytorch_tanh"  # type: ignore[assignment]
    hidden_activation: Activation | None = None
    attention_bias: bool = False
    use_bidirectional_attention: Literal[False, None] = None

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        named = self.hidden_activation or self.hidden_act
        self.function = "gelu_pytorch_tanh" if named == LEGACY else named


class Layer(DecoderLayer):
    """A layer whose norms scale by 1 + weight."""

    def __init__(self, c: GemmaConfig, attention: Attention, mlp: GatedMLP) -> None:
        super().__init__(c, attention, mlp)
        self.input_layernorm, self.post_attention_layernorm = Norm(c), Norm(c)


@model(
    "GemmaForCausalLM",
    config=GemmaConfig,
    model_type="gemma",
    base="model",
    examples=["google/gemma-2b", "google/gemma-1.1-7b-it"],
)
class Gemma(CausalLM):
    def __init__(self, c: GemmaConfig) -> None:
        attention = Attention(c, bias=c.attention_bias, output_bias=c.attention_bias)
        mlp = GatedMLP(c.hidden_size, c.intermediate_size, function=c.function)
        super().__init__(c, ScaledDecoder(c, Layer(c, attention, mlp)))
