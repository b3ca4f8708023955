"""Seed-OSS: Llama with an explicit head size, biases on queries, keys and values, and dropout of what attention and
feed-forward layer add."""

from __future__ import annotations

from typing import Any, Literal

from ..dsl import Reader, Tensor, model, output
from ..layers import Attention, CausalLM, Decoder, DecoderConfig, DecoderLayer, GatedMLP, dropout


class SeedOssConfig(DecoderConfig):
    vocab_size: int = 155136
    intermediate_size: int = 27648
    num_hidden_layers: int = 64
    num_attention_heads: int = 80
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 524288
    pad_token_id: int | None = 1
    attention_bias: bool = True
    attention_out_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.1
    residual_dropout: float = 0.1
    pretraining_tp: Literal[1] = 1

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        if not 0 <= self.residual_dropout < 1:
            reader.problem("residual_dropout", f"{self.residual_dropout} is not supported, expected 0 up to below 1")


class Layer(DecoderLayer):
    def __init__(self, c: SeedOssConfig) -> None:
        attention = Attention(c, bias=c.attention_bias, output_bias=c.attention_out_bias)
        super().__init__(c, attention, GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias))
        self.dropout = c.residual_dropout

    def forward(self, x: Tensor, *shared: Any) -> Tensor:
        batch = shared[-1]
        x = x + dropout(self.self_attn(self.input_layernorm(x), *shared), self.dropout, batch)
        x = x + dropout(self.mlp(self.post_attention_layernorm(x)), self.dropout, batch)
        output("hidden.layer.{i}", x)
        return x


@model(
    "SeedOssForCausalLM",
    config=SeedOssConfig,
    model_type="seed_oss",
    base="model",
    examples=["ByteDance-Seed/Seed-OSS-36B-Base", "ByteDance-Seed/Seed-OSS-36B-Instruct"],
)
class SeedOss(CausalLM):
    def __init__(self, c: SeedOssConfig) -> None:
        super().__init__(c, Decoder(c, Layer(c)))
