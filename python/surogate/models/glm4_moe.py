"""GLM-4.5 and 4.6: Llama with a rotation of half of each head, biases on queries, keys and values, and QK norm if the
config wants it. Layers after the first few have a mixture of experts, routed as in DeepSeek-V3, with a shared
expert."""

from __future__ import annotations

from collections.abc import Callable

from .. import layers
from ..dsl import Batch, Module, Reader, Tensor, model
from ..layers import EXPERTS_AS_PARAMETERS, CausalLM, Decoder, DecoderLayer, GatedMLP, RMSNorm
from .deepseek_v3 import SharedMixture, SparseFields, corrected_router, predicting_layers


class Glm4MoeConfig(SparseFields):
    vocab_size: int = 151552
    intermediate_size: int = 10944
    num_hidden_layers: int = 46
    num_attention_heads: int = 96
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    use_qk_norm: bool = False
    moe_intermediate_size: int = 1408
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int | None = 1

    share = 0.5

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        self.read_experts(reader, 128)


class Attention(layers.Attention):
    def __init__(self, c: Glm4MoeConfig) -> None:
        super().__init__(c, bias=c.attention_bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.use_qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.use_qk_norm else None

    def heads(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(self.split, self.project(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q), rotate(k), v


@model(
    "Glm4MoeForCausalLM",
    config=Glm4MoeConfig,
    model_type="glm4_moe",
    base="model",
    adapters=EXPERTS_AS_PARAMETERS,
    examples=["zai-org/GLM-4.5-Air"],
)
class Glm4Moe(CausalLM):
    def __init__(self, c: Glm4MoeConfig) -> None:
        def mlp(kind: str) -> Module:
            if kind == "dense":
                return GatedMLP(c.hidden_size, c.intermediate_size)
            return SharedMixture(c, corrected_router(c))

        by_kind = {kind: DecoderLayer(c, Attention(c), mlp(kind)) for kind in dict.fromkeys(c.kinds)}
        super().__init__(c, Decoder(c, by_kind, pattern=c.kinds))
        self.carried = predicting_layers(c)
