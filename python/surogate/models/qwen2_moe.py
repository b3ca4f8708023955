"""Qwen2 MoE: Qwen2 with a mixture of experts in place of the feed-forward layer, and a shared expert with a gate of
its own."""

from __future__ import annotations

from ..dsl import Reader, Tensor, each, model, ops
from ..layers import (
    EXPERTS_AS_PARAMETERS,
    Attention,
    CausalLM,
    Decoder,
    DecoderLayer,
    GatedMLP,
    Linear,
    Mixture,
    MixtureConfig,
    layer_windows,
    scale_rows,
)
from .qwen3_moe import kinds_of_layers, routed


class SharedExpertConfig(MixtureConfig):
    """Fields of mixtures with an expert that every token goes through."""

    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = 5632
    norm_topk_prob: bool = False


class Qwen2MoeConfig(SharedExpertConfig):
    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    max_position_embeddings: int = 32768
    max_window_layers: int | None = 28
    qkv_bias: bool = True
    decoder_sparse_step: int = 1
    num_experts_per_tok: int = 4

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        slides = lambda i: i % 2 == 0 and i < (self.max_window_layers or 0)  # noqa: E731
        self.windows = layer_windows(reader, self.num_hidden_layers, slides)
        self.kinds = kinds_of_layers(reader, self.num_hidden_layers, self.decoder_sparse_step)
        self.read_experts(reader, 60, self.kinds.count("sparse"))


class GatedMixture(Mixture):
    """The sum of the routed experts' output and sigmoid(x·`shared_expert_gate`) · `shared_expert`(x)."""

    def __init__(self, c: SharedExpertConfig) -> None:
        super().__init__(*routed(c, c.moe_intermediate_size, c.norm_topk_prob))
        self.shared_expert = GatedMLP(c.hidden_size, c.shared_expert_intermediate_size)
        self.shared_expert_gate = Linear(c.hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = ops.activation(self.shared_expert_gate(x), function="sigmoid")
        return super().forward(x) + scale_rows(self.shared_expert(x), gate)


@model(
    "Qwen2MoeForCausalLM",
    config=Qwen2MoeConfig,
    model_type="qwen2_moe",
    base="model",
    adapters=EXPERTS_AS_PARAMETERS,
    examples=["Qwen/Qwen1.5-MoE-A2.7B"],
)
class Qwen2Moe(CausalLM):
    def __init__(self, c: Qwen2MoeConfig) -> None:
        def layer(kind: str) -> DecoderLayer:
            mlp = GatedMLP(c.hidden_size, c.intermediate_size) if kind == "dense" else GatedMixture(c)
            return DecoderLayer(c, Attention(c, bias=c.qkv_bias, window=each.of(c.windows)), mlp)

        by_kind = {kind: layer(kind) for kind in dict.fromkeys(c.kinds)}
        super().__init__(c, Decoder(c, by_kind, pattern=c.kinds))
