"""SmolLM3: Llama, except that some layers do not rotate queries and keys."""

from __future__ import annotations

from collections.abc import Callable

from .. import layers
from ..dsl import Batch, Reader, Tensor, each, model
from ..layers import CausalLM, Decoder, DecoderConfig, DecoderLayer, GatedMLP, layer_windows


class SmolLM3Config(DecoderConfig):
    vocab_size: int = 128256
    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    max_position_embeddings: int = 32768
    no_rope_layer_interval: int = 4
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 128004

    theta = 2000000.0

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        rotated = reader.take("no_rope_layers")  # 1 where a layer rotates, whatever the name says
        if rotated is None:
            rotated = [(i + 1) % self.no_rope_layer_interval for i in range(self.num_hidden_layers)]
        if not isinstance(rotated, list) or len(rotated) < self.num_hidden_layers:
            reader.problem("no_rope_layers", f"expected a list of {self.num_hidden_layers} zeros and ones")
            rotated = [1] * self.num_hidden_layers
        self.rotated = [bool(rotates) for rotates in rotated[: self.num_hidden_layers]]
        self.windows = layer_windows(reader, self.num_hidden_layers, lambda i: not self.rotated[i])


class Attention(layers.Attention):
    def __init__(self, c: SmolLM3Config) -> None:
        super().__init__(c, bias=c.attention_bias, output_bias=c.attention_bias, window=each.of(c.windows))
        self.skip = each.of([None if rotates else True for rotates in c.rotated])

    def heads(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.project(x)
        return rotate(self.split(q), skip=self.skip), rotate(self.split(k), skip=self.skip), self.split(v)


@model(
    "SmolLM3ForCausalLM",
    config=SmolLM3Config,
    model_type="smollm3",
    base="model",
    examples=["HuggingFaceTB/SmolLM3-3B"],
)
class SmolLM3(CausalLM):
    def __init__(self, c: SmolLM3Config) -> None:
        mlp = GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        super().__init__(c, Decoder(c, DecoderLayer(c, Attention(c), mlp)))
