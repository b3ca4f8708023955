"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from typing import Any, Literal

from ..dsl import Module, Reader, Tensor, model, output
from ..layers import Attention, CausalLM, Decoder, Experts, Mixture, MixtureConfig, RMSNorm, Router, experts_as_parameters, window


class MixtralConfig(MixtureConfig):
    intermediate_size: int = 14336
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    router_jitter_noise: Literal[0.0] = 0.0

    theta = 1000000.0

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        self.window = window(reader, None)
        self.read_experts(reader, 8)


#: The names of gate, up and down projection of an expert.
NAMES = ("w1", "w3", "w2")

ADAPTERS = experts_as_parameters(*NAMES, renamed={"block_sparse_moe": "mlp"})


class Layer(Module):
    """x + attention(norm(x)), then x + mixture(norm(x))."""

    def __init__(self, c: MixtureConfig, attention: Attention, mixture: Mixture) -> None:
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.block_sparse_moe = mixture

    def forward(self, x: Tensor, *shared: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *shared)
        x = x + self.block_sparse_moe(self.post_attention_layernorm(x))
        output("hidden.layer.{i}", x)
        return x


@model(
    "MixtralForCausalLM",
    config=MixtralConfig,
    model_type="mixtral",
    base="model",
    adapters=ADAPTERS,
    examples=["mistralai/Mixtral-8x7B-v0.1"],
)
class Mixtral(CausalLM):
    def __init__(self, c: MixtralConfig) -> None:
        router = Router(c.hidden_size, c.num_experts, top_k=c.num_experts_per_tok, normalise=True)
        experts = Experts(c.num_experts, c.hidden_size, c.intermediate_size, NAMES)
        mixture = Mixture(router, experts, c.num_experts)
        super().__init__(c, Decoder(c, Layer(c, Attention(c, window=c.window), mixture)))
