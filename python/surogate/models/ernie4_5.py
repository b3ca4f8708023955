"""ERNIE 4.5: Llama with a rotation of neighboring columns, and an explicit head size."""

from __future__ import annotations

from ..dsl import model
from ..layers import Attention, CausalLM, Decoder, DecoderConfig, DecoderLayer, GatedMLP, RotaryEmbedding


class Ernie4_5Config(DecoderConfig):
    vocab_size: int = 103424
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 18
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True
    use_bias: bool = False

    theta = 500000.0


@model(
    "Ernie4_5ForCausalLM",
    config=Ernie4_5Config,
    model_type="ernie4_5",
    base="model",
    examples=["baidu/ERNIE-4.5-0.3B-PT"],
)
class Ernie4_5(CausalLM):
    def __init__(self, c: Ernie4_5Config) -> None:
        attention = Attention(c, bias=c.use_bias, output_bias=c.use_bias)
        layer = DecoderLayer(c, attention, GatedMLP(c.hidden_size, c.intermediate_size, bias=c.use_bias))
        super().__init__(c, Decoder(c, layer, rotary=RotaryEmbedding(c.head_dim, c.rope, interleaved=True)))
