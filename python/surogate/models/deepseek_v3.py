"""DeepSeek-V3 and R1: multi-head latent attention, with low-rank queries, keys and values and one rotated key part for all
heads. Layers after the first few have a mixture of experts with sigmoid scores, experts chosen within groups by a correction
bias that gradients do not train, and a shared expert."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Literal

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
    Router,
    Routing,
    count_of_experts,
)

#: Of the norms of the latents, whatever the config says of the others.
LATENT_EPS = 1e-6


class SharedFields(DecoderConfig):
    """Fields of layers with experts, of which some are shared by all tokens."""

    moe_intermediate_size: int = 2048
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int | None = 3
    output_router_logits: Literal[False] = False
    moe_layer_freq: Literal[1] = 1
    # In the files; transformers does not read them.
    pretraining_tp: int = 1
    ep_size: int = 1
    aux_loss_alpha: float = 0.0
    seq_aux: bool = True
    router_aux_loss_coef: float = 0.0

    def read_routing(
        self, reader: Reader, experts: int, scores: str, groups: int, kept: int, *, least: int = 2
    ) -> None:
        """`num_experts`, by default `experts`, in groups of `least` or more, and `routing` and `kinds` of the layers."""
        self.num_experts = count_of_experts(reader, experts, "n_routed_experts")
        of_group, rest = divmod(self.num_experts, groups)
        if rest or groups > 1 and of_group < least:
            count = {1: "one", 2: "two"}[least]
            message = f"{groups} does not divide {self.num_experts} experts into groups of {count} or more"
            reader.problem("n_group", message)
        if kept > groups:
            reader.problem("topk_group", f"{kept} is more than {groups} groups")
        elif self.num_experts_per_tok > of_group * kept:
            message = f"{self.num_experts_per_tok} is more than {of_group * kept} experts"
            reader.problem("num_experts_per_tok", message)
        dense = self.first_k_dense_replace or 0
        self.kinds = ["dense" if i < dense else "sparse" for i in range(self.num_hidden_layers)]
        if "sparse" in self.kinds:
            self.routing = Routing(self.num_experts, self.num_experts_per_tok, scores=scores)


class SparseFields(SharedFields):
    """The same where sigmoids and a correction bias choose the experts."""

    norm_topk_prob: bool = True
    n_group: int = 8
    topk_group: int = 4
    num_nextn_predict_layers: int | None = 1
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"

    def read_experts(self, reader: Reader, experts: int) -> None:
        """`num_experts`, by default `experts`, and the `kinds` of the layers."""
        self.read_routing(reader, experts, "sigmoid", self.n_group, self.topk_group)


def predicting_layers(c: SparseFields) -> list[str]:
    """Beginnings of the names of the layers after the last, which predict tokens further ahead and are not computed."""
    more = range(c.num_hidden_layers, c.num_hidden_layers + (c.num_nextn_predict_layers or 0))
    return [f"model.layers.{i}." for i in more]


class SharedMixture(Mixture):
    """The sum of the routed experts' output and `shared_experts`(x), whose matrices have biases with `bias`."""

    def __init__(self, c: SharedFields, router: Router, *, bias: bool = False) -> None:
        super().__init__(router, Experts(c.num_experts, c.hidden_size, c.moe_intermediate_size), c.num_experts)
        self.shared_experts = GatedMLP(c.hidden_size, c.moe_intermediate_size * c.n_shared_experts, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shared_experts(x)


def corrected_router(c: SparseFields) -> CorrectedRouter:
    return CorrectedRouter(
        c.hidden_size,
        c.num_experts,
        top_k=c.num_experts_per_tok,
        normalise=c.norm_topk_prob,
        factor=c.routed_scaling_factor,
        groups=c.n_group,
        kept_groups=c.topk_group,
    )


class LatentFields(DecoderConfig):
    """Fields of multi-head latent attention."""

    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
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
        self.scale = self.qk_head_dim**-0.5
        if every := self.rope.settings.get("mscale_all_dim"):
            factor = self.rope.settings["factor"]
            self.scale *= (0.1 * every * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0


class DeepseekV3Config(LatentFields, SparseFields):
    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    num_hidden_layers: int = 61
    num_attention_heads: int = 128
    num_key_value_heads: int = 128
    max_position_embeddings: int = 4096
    rope_interleave: bool = True

    #: Experts of configs that do not count them.
    experts: ClassVar[int] = 256

    def derive(self, reader: Reader) -> None:
        super().derive(reader)
        self.read_experts(reader, self.experts)


class LatentAttention(Module):
    """q = `q_b_proj`(norm(`q_a_proj`(x))), or `q_proj`(x) without `q_lora_rank`; of each head the last columns are rotated.
    `kv_a_proj_with_mqa`(x) is the latent of keys and values, of which `kv_b_proj` makes each head's own columns of the key
    and its value, and the rotated columns of the keys of all heads."""

    def __init__(self, c: LatentFields) -> None:
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
            if kind == "dense":
                return GatedMLP(c.hidden_size, c.intermediate_size)
            return SharedMixture(c, corrected_router(c))

        by_kind = {kind: DecoderLayer(c, LatentAttention(c), mlp(kind)) for kind in dict.fromkeys(c.kinds)}
        rotary = RotaryEmbedding(c.qk_rope_head_dim, c.rope, interleaved=c.rope_interleave)
        super().__init__(c, Decoder(c, by_kind, pattern=c.kinds, rotary=rotary))
        self.carried = predicting_layers(c)
