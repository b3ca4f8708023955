"""StarCoder2: Llama with LayerNorm, biases, two plain matrices in place of the gated layer, and optionally a window."""

from __future__ import annotations

from typing import Any

from ..dsl import Batch, Module, Reader, Tensor, model, output, region
from ..layers import (
    Activation,
    Attention,
    CausalLM,
    Decoder,
    DecoderConfig,
    DecoderLayer,
    LayerNorm,
    Linear,
    activation,
    dropout,
    window,
)


class Starcoder2Config(DecoderConfig):
    vocab_size: int = 49152
    hidden_size: int = 3072
    intermediate_size: int = 12288
    num_hidden_layers: int = 30
    num_attention_heads: int = 24
    num_key_value_heads: int = 2
    max_position_embeddings: int = 4096
    hidden_act: Activation = "gelu_pytorch_tanh"  # type: ignore[assignment]
    norm_epsilon: float = 1e-5
    use_bias: bool = True
    residual_dropout: float = 0.0
    embedding_dropout: float = 0.0
    tie_word_embeddings: bool = True

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        for name in ("mlp_type", "norm_type"):  # of the first files; transformers does not read them
            reader.take(name)
        for name in ("residual_dropout", "embedding_dropout"):
            if not 0 <= getattr(self, name) < 1:
                reader.problem(name, f"{getattr(self, name)} is not supported, expected 0 up to below 1")
        self.window = window(reader, None)


class MLP(Module):
    """`c_proj`(function(`c_fc`(x)))."""

    def __init__(self, c: Starcoder2Config) -> None:
        self.function = c.hidden_act
        self.c_fc = Linear(c.hidden_size, c.intermediate_size, bias=c.use_bias)
        self.c_proj = Linear(c.intermediate_size, c.hidden_size, bias=c.use_bias, residual_projection=True)

    @region("mlp")
    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(activation(self.function, self.c_fc(x)))


class Layer(DecoderLayer):
    def __init__(self, c: Starcoder2Config) -> None:
        super().__init__(c, Attention(c, bias=c.use_bias, output_bias=c.use_bias, window=c.window), MLP(c))
        self.input_layernorm = LayerNorm(c.hidden_size, c.norm_epsilon)
        self.post_attention_layernorm = LayerNorm(c.hidden_size, c.norm_epsilon)
        self.dropout = c.residual_dropout

    def forward(self, x: Tensor, *shared: Any) -> Tensor:
        batch = shared[-1]
        x = x + dropout(self.self_attn(self.input_layernorm(x), *shared), self.dropout, batch)
        x = x + dropout(self.mlp(self.post_attention_layernorm(x)), self.dropout, batch)
        output("hidden.layer.{i}", x)
        return x


class Stack(Decoder):
    def __init__(self, c: Starcoder2Config) -> None:
        super().__init__(c, Layer(c), norm=LayerNorm(c.hidden_size, c.norm_epsilon))
        self.dropout = c.embedding_dropout

    def embed(self, batch: Batch) -> Tensor:
        return dropout(super().embed(batch), self.dropout, batch)


@model(
    "Starcoder2ForCausalLM",
    config=Starcoder2Config,
    model_type="starcoder2",
    base="model",
    examples=["bigcode/starcoder2-3b", "bigcode/starcoder2-15b"],
)
class Starcoder2(CausalLM):
    def __init__(self, c: Starcoder2Config) -> None:
        super().__init__(c, Stack(c))
