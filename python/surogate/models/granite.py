"""Granite 3: Llama with multipliers on embeddings, attention scores, residual branches and logits."""

from __future__ import annotations

from typing import Any

from ..dsl import Batch, Reader, Tensor, model, output
from ..layers import Attention, CausalLM, Decoder, DecoderConfig, DecoderLayer, GatedMLP


class GraniteConfig(DecoderConfig):
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        if self.logits_scaling == 0:
            reader.problem("logits_scaling", "0 is not supported: logits are divided by it")


class Layer(DecoderLayer):
    def __init__(self, c: GraniteConfig) -> None:
        attention = Attention(
            c, bias=c.attention_bias, output_bias=c.attention_bias, scale=c.attention_multiplier
        )
        super().__init__(c, attention, GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias))
        self.factor = c.residual_multiplier

    def forward(self, x: Tensor, *shared: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *shared) * self.factor
        x = x + self.mlp(self.post_attention_layernorm(x)) * self.factor
        output("hidden.layer.{i}", x)
        return x


class ScaledDecoder(Decoder):
    """Embeddings are multiplied by `embedding_multiplier`."""

    def __init__(self, c: Any, layer: Any, **parts: Any) -> None:
        super().__init__(c, layer, **parts)
        self.factor = c.embedding_multiplier

    def embed(self, batch: Batch) -> Tensor:
        return self.embed_tokens(batch.input_ids) * self.factor


class ScaledLM(CausalLM):
    """Logits are divided by `logits_scaling`."""

    def __init__(self, c: GraniteConfig, decoder: Decoder) -> None:
        super().__init__(c, decoder)
        self.factor = 1.0 / c.logits_scaling

    def head(self, x: Tensor) -> Tensor:
        # The same as dividing the logits, which are far wider.
        return self.lm_head(x * self.factor)


@model(
    "GraniteForCausalLM",
    config=GraniteConfig,
    model_type="granite",
    base="model",
    examples=["ibm-granite/granite-3.3-8b-base"],
)
class Granite(ScaledLM):
    def __init__(self, c: GraniteConfig) -> None:
        super().__init__(c, ScaledDecoder(c, Layer(c)))
