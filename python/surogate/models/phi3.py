"""Phi-3, 3.5 and 4: Llama with one matrix for queries, keys and values, one for gate and up, and a rotation that may
apply to a part of each head only."""

from __future__ import annotations

from .. import layers
from ..dsl import Reader, Tensor, model, ops
from ..layers import CausalLM, Decoder, DecoderConfig, DecoderLayer, FusedGatedMLP, Linear, window


class Phi3Config(DecoderConfig):
    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 32000
    original_max_position_embeddings: int = 4096
    resid_pdrop: float = 0.0
    embd_pdrop: float = 0.0  # in the files; transformers does not read it
    attention_bias: bool = False  # likewise

    share = 1.0

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        self.window = window(reader, None)


class Attention(layers.Attention):
    def declare(self, c: Phi3Config, bias: bool) -> None:
        self.sizes = [c.queries, c.keys, c.keys]
        self.qkv_proj = Linear(c.hidden_size, sum(self.sizes), bias=bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return ops.split(self.qkv_proj(x), sizes=self.sizes)


@model(
    "Phi3ForCausalLM",
    config=Phi3Config,
    model_type="phi3",
    base="model",
    examples=["microsoft/Phi-3.5-mini-instruct", "microsoft/phi-4"],
)
class Phi3(CausalLM):
    def __init__(self, c: Phi3Config) -> None:
        mlp = FusedGatedMLP(c.hidden_size, c.intermediate_size)
        super().__init__(c, Decoder(c, DecoderLayer(c, Attention(c, window=c.window), mlp)))
