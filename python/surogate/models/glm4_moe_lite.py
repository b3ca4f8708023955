"""GLM-4.7-Flash: DeepSeek-V3 with sizes of its own. The config says which layers have experts; without it all do but
the first."""

from __future__ import annotations

from ..dsl import Reader, model
from ..layers import EXPERTS_AS_PARAMETERS, Routing
from .deepseek_v3 import DeepseekV3, DeepseekV3Config

KINDS = ("dense", "sparse")


class Glm4MoeLiteConfig(DeepseekV3Config):
    vocab_size: int = 154880
    hidden_size: int = 2048
    intermediate_size: int = 10240
    moe_intermediate_size: int = 1536
    num_hidden_layers: int = 47
    num_attention_heads: int = 20
    num_key_value_heads: int = 20
    routed_scaling_factor: float = 1.8
    q_lora_rank: int | None = 768
    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    n_group: int = 1
    topk_group: int = 1
    num_experts_per_tok: int = 4
    max_position_embeddings: int = 202752
    rms_norm_eps: float = 1e-5
    first_k_dense_replace: int | None = 1

    experts = 64

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        kinds = reader.take("mlp_layer_types")
        if kinds is None:
            if self.first_k_dense_replace != 1:
                message = f"{self.first_k_dense_replace!r} is not supported without `mlp_layer_types`, expected 1"
                reader.problem("first_k_dense_replace", message)
            return
        count = self.num_hidden_layers
        if not isinstance(kinds, list) or len(kinds) < count or not all(kind in KINDS for kind in kinds):
            reader.problem("mlp_layer_types", f"expected a list with 'dense' or 'sparse' for each of {count} layers")
            return
        self.kinds = kinds[:count]
        self.routing = None
        if "sparse" in self.kinds:
            self.routing = Routing(self.num_experts, self.num_experts_per_tok, scores="sigmoid")


@model(
    "Glm4MoeLiteForCausalLM",
    config=Glm4MoeLiteConfig,
    model_type="glm4_moe_lite",
    base="model",
    adapters=EXPERTS_AS_PARAMETERS,
    examples=["zai-org/GLM-4.7-Flash"],
)
class Glm4MoeLite(DeepseekV3):
    pass
