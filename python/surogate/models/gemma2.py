"""Gemma 2: norms before and after attention and feed-forward layer, scaled embeddings, soft caps on scores and
logits, and a sliding window in every other layer."""

from __future__ import annotations

from typing import Any, Literal

from ..dsl import Batch, Module, Reader, Tensor, each, model, ops, output
from ..layers import (
    FULL,
    SLIDING,
    Activation,
    Attention,
    CausalLM,
    Decoder,
    DecoderConfig,
    GatedMLP,
    RMSNorm,
    TextPart,
    layer_types,
    soft_cap,
    window,
)


class Gemma2Config(DecoderConfig):
    vocab_size: int = 256000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    hidden_activation: Activation = "gelu_pytorch_tanh"
    hidden_act: str | None = None  # in older files; transformers does not read it
    attention_bias: bool = False
    query_pre_attn_scalar: float = 256
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    use_bidirectional_attention: Literal[False] = False

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        for name in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                reader.problem(name, f"{value} is not supported, expected a number above 0")
        self.window = window(reader, 4096)
        self.layer_types = self.kinds_of_layers(reader)

    def kinds_of_layers(self, reader: Reader) -> list[str]:
        count = self.num_hidden_layers
        return layer_types(reader, count, ([SLIDING, FULL] * count)[:count])


class Norm(RMSNorm):
    """Scales by 1 + weight."""

    def __init__(self, c: DecoderConfig, size: int | None = None) -> None:
        super().__init__(size or c.hidden_size, c.rms_norm_eps, offset=True)


class Layer(Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, c: Gemma2Config, attention: Module) -> None:
        self.input_layernorm = Norm(c)
        self.self_attn = attention
        self.post_attention_layernorm = Norm(c)
        self.pre_feedforward_layernorm = Norm(c)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, function=c.hidden_activation)
        self.post_feedforward_layernorm = Norm(c)

    def forward(self, x: Tensor, *shared: Any) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), *shared))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        output("hidden.layer.{i}", x)
        return x


class ScaledDecoder(Decoder):
    """Embeddings are multiplied by √hidden_size, which has their type."""

    def __init__(self, c: DecoderConfig, layer: Any, **parts: Any) -> None:
        super().__init__(c, layer, norm=Norm(c), **parts)
        self.factor = c.hidden_size**0.5

    def embed(self, batch: Batch) -> Tensor:
        return ops.scale(self.embed_tokens(batch.input_ids), factor=self.factor, rounded=True)


class CappedLM(CausalLM):
    """Logits have a soft cap."""

    def __init__(self, c: Gemma2Config, decoder: Decoder | TextPart) -> None:
        super().__init__(c, decoder)
        self.limit = c.final_logit_softcapping

    def head(self, x: Tensor) -> Tensor:
        return soft_cap(self.lm_head(x), self.limit)


@model(
    "Gemma2ForCausalLM",
    config=Gemma2Config,
    model_type="gemma2",
    base="model",
    examples=["google/gemma-2-2b", "google/gemma-2-27b"],
)
class Gemma2(CappedLM):
    def __init__(self, c: Gemma2Config) -> None:
        attention = Attention(
            c,
            bias=c.attention_bias,
            output_bias=c.attention_bias,
            scale=c.query_pre_attn_scalar**-0.5,
            window=each.of([c.window if kind == SLIDING else None for kind in c.layer_types]),
            soft_cap=c.attn_logit_softcapping,
        )
        super().__init__(c, ScaledDecoder(c, Layer(c, attention)))
