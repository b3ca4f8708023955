"""DeepSeek-V3 and R1: multi-head latent attention, with low-rank queries, keys and values and one rotated key part for all
heads. Layers after the first few have a mixture of experts with sigmoid scores, experts chosen within groups by a correction
bias that gradients do not train, and a shared expert."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from ..dsl import Batch, Module, Reader, Tensor, model, ops, region
from ..layers import (
    EXPERTS_AS_PARAMETERS,
    CausalLM,
    CorrectedRouter,
    Decoder,
    DecoderConfig,
    DecoderLayer,
    Experts,
    GatedMLP,
    Linear,
    Mixture,
    RMSNorm,
    RotaryEmbedding,
    Routing,
    count_of_experts,
)

#: Of the norms of the latents, whatever the config says of the others.
LATENT_EPS = 1e-6


class SparseFields(DecoderConfig):
    """Fields of the layers with experts."""

    moe_intermediate_size: int = 2048
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    n_group: int = 8
    topk_group: int = 4
    first_k_dense_replace: int | None = 3
    num_nextn_predict_layers: int | None = 1
    output_router_logits: Literal[False] = False
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    moe_layer_freq: Literal[1] = 1
    # In the files; transformers does not read them.
    pretraining_tp: int = 1
    ep_size: int = 1
    aux_loss_alpha: float = 0.0
    seq_aux: bool = True
    router_aux_loss_coef: float = 0.0

    def read_experts(self, reader: Reader, experts: int) -> None:
        """`num_experts`, by default `experts`, and the `kinds` of the layers."""
        self.num_experts = count_of_experts(reader, experts, "n_routed_experts")
        of_group, rest = divmod(self.num_experts, self.n_group)
        if rest or self.n_group > 1 and of_group < 2:
            reader.problem("n_group", f"{self.n_group} does not divide {self.num_experts} experts into groups of two or more")
        if self.topk_group > self.n_group:
            reader.problem("topk_group", f"{self.topk_group} is more than {self.n_group} groups")
        elif self.num_experts_per_tok > of_group * self.topk_group:
            reader.problem("num_experts_per_tok", f"{self.num_experts_per_tok} is more than {of_group * self.topk_group} experts")
        dense = self.first_k_dense_replace or 0
        if dense < self.num_hidden_layers:
            self.routing = Routing(self.num_experts, self.num_experts_per_tok, scores="sigmoid")
        self.kinds = ["dense" if i < dense else "sparse" for i in range(self.num_hidden_layers)]


def predicting_layers(c: SparseFields) -> list[str]:
    """Beginnings of the names of the layers behind the last, which predict tokens further ahead and are not computed."""
    more = range(c.num_hidden_layers, c.num_hidden_layers + (c.num_nextn_predict_layers or 0))
    return [f"model.layers.{i}." for i in more]


class SharedMixture(Mixture):
    """What the experts of a token give, and `shared_experts`(x)."""

    def __init__(self, c: SparseFields) -> None:
        router = CorrectedRouter(
            c.hidden_size,
            c.num_experts,
            top_k=c.num_experts_per_tok,
            normalise=c.norm_topk_prob,
            factor=c.routed_scaling_factor,
            groups=c.n_group,
            kept_groups=c.topk_group,
        )
        super().__init__(router, Experts(c.num_experts, c.hidden_size, c.moe_intermediate_size), c.num_experts)
        self.shared_experts = GatedMLP(c.hidden_size, c.moe_intermediate_size * c.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shared_experts(x)


class DeepseekV3Config(SparseFields):
    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    num_hidden_layers: int = 61
    num_attention_heads: int = 128
    num_key_value_heads: int = 128
    max_position_embeddings: int = 4096
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_interleave: bool = True
    attention_bias: bool = False

    def derive(self, reader: Reader) -> None:
        if self.head_dim not in (0, self.qk_rope_head_dim):
            reader.problem("head_dim", f"{self.head_dim} is not qk_rope_head_dim, the columns that are rotated")
        self.head_dim = self.qk_rope_head_dim
        super().derive(reader)
        if self.num_key_value_heads != self.num_attention_heads:
            reader.problem("num_key_value_heads", f"{self.num_key_value_heads} is not supported: keys are made for every head")
        self.qk_head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        given = reader.take("qk_head_dim")
        if given not in (None, self.qk_head_dim):
            reader.problem("qk_head_dim", f"{given!r} is not qk_nope_head_dim + qk_rope_head_dim")
        self.read_experts(reader, 256)
        self.scale = self.qk_head_dim**-0.5
        if every := self.rope.settings.get("mscale_all_dim"):
            factor = self.rope.settings["factor"]
            self.scale *= (0.1 * every * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0


class LatentAttention(Module):
    """q = `q_b_proj`(norm(`q_a_proj`(x))), or `q_proj`(x) without `q_lora_rank`; of each head the last columns are rotated.
    `kv_a_proj_with_mqa`(x) is the latent of keys and values, of which `kv_b_proj` makes each head's own columns of the key
    and its value, and the rotated columns of the keys of all heads."""

    def __init__(self, c: DeepseekV3Config) -> None:
        self.own, self.rotated, self.values = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        self.count, self.latent, self.scale = c.num_attention_heads, c.kv_lora_rank, c.scale
        self.dropout = c.attention_dropout or None
        queries = self.count * c.qk_head_dim
        self.q_proj = Linear(c.hidden_size, queries) if c.q_lora_rank is None else None
        if c.q_lora_rank is not None:
            self.q_a_proj = Linear(c.hidden_size, c.q_lora_rank, bias=c.attention_bias)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, LATENT_EPS)
            self.q_b_proj = Linear(c.q_lora_rank, queries)
        self.kv_a_proj_with_mqa = Linear(c.hidden_size, self.latent + self.rotated, bias=c.attention_bias)
        self.kv_a_layernorm = RMSNorm(self.latent, LATENT_EPS)
        self.kv_b_proj = Linear(self.latent, self.count * (self.own + self.values))
        out = self.count * self.values
        self.o_proj = Linear(out, c.hidden_size, bias=c.attention_bias, residual_projection=True)

    def queries(self, x: Tensor, rotate: Callable[..., Tensor]) -> Tensor:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.q_proj is None else self.q_proj(x)
        own, rotated = ops.split(ops.split_heads(q, head_dim=self.own + self.rotated), sizes=[self.own, self.rotated])
        return ops.concat(own, rotate(rotated))

    def keys_and_values(self, x: Tensor, rotate: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        latent, shared = ops.split(self.kv_a_proj_with_mqa(x), sizes=[self.latent, self.rotated])
        both = ops.split_heads(self.kv_b_proj(self.kv_a_layernorm(latent)), head_dim=self.own + self.values)
        own, values = ops.split(both, sizes=[self.own, self.values])
        rotated = ops.repeat_heads(rotate(ops.split_heads(shared, head_dim=self.rotated)), heads=self.count)
        return ops.concat(own, rotated), values

    @region("attention")
    def forward(self, x: Tensor, rotate: Callable[..., Tensor], batch: Batch) -> Tensor:
        q, (k, v) = self.queries(x, rotate), self.keys_and_values(x, rotate)
        o, _ = ops.attention(q, k, v, batch.document_start, scale=self.scale, dropout=self.dropout)
        return self.o_proj(ops.merge_heads(o))


@model(
    "DeepseekV3ForCausalLM",
    config=DeepseekV3Config,
    model_type="deepseek_v3",
    base="model",
    adapters=EXPERTS_AS_PARAMETERS,
    examples=["deepseek-ai/DeepSeek-V3", "moonshotai/Moonlight-16B-A3B"],
)
class DeepseekV3(CausalLM):
    def __init__(self, c: DeepseekV3Config) -> None:
        def mlp(kind: str) -> Module:
            return GatedMLP(c.hidden_size, c.intermediate_size) if kind == "dense" else SharedMixture(c)

        by_kind = {kind: DecoderLayer(c, LatentAttention(c), mlp(kind)) for kind in dict.fromkeys(c.kinds)}
        rotary = RotaryEmbedding(c.qk_rope_head_dim, c.rope, interleaved=c.rope_interleave)
        super().__init__(c, Decoder(c, by_kind, pattern=c.kinds, rotary=rotary))
        self.carried = predicting_layers(c)
