"""Forms of architectures with multi-head latent attention."""

from __future__ import annotations

from typing import Any

from ..deepseek_v3 import LATENT_EPS
from .experts import CORRECTION, ROUTER, corrected
from .form import INSIDE, Form, Metadata, Names, Target, cut, experts, shared_expert
from .sizes import NO_BIASES, SOFTMAX, f32s, leading_dense, llama, refused, replaced, rotation_of, routed, u32s


def keys_and_values(c: Any) -> list[Target]:
    """The matrix of each head that makes its own columns of the key, transposed, since readers apply it to queries, and
    that of its values."""
    by_head = {"reshape": [c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank]}
    own = c.qk_nope_head_dim
    return [
        Target("attn_k_b.weight", [by_head, cut(1, 0, own), {"permute": [0, 2, 1]}]),
        Target("attn_v_b.weight", [by_head, cut(1, own, own + c.v_head_dim)]),
    ]


LATENT: Names = (
    INSIDE
    | ROUTER
    | CORRECTION
    | experts("mlp")
    | shared_expert("mlp.shared_experts")
    | {
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": keys_and_values,
    }
)


def latent_sizes(config: Any) -> Metadata:
    """Readers compute one key and value for all heads, of the latent's columns."""
    every = rotation_of(config).settings.get("mscale_all_dim")
    return replaced(
        llama(config),
        u32s(
            attention__head_count_kv=1,
            attention__q_lora_rank=config.q_lora_rank,
            attention__kv_lora_rank=config.kv_lora_rank,
            attention__key_length=config.kv_lora_rank + config.qk_rope_head_dim,
            attention__value_length=config.kv_lora_rank,
            attention__key_length_mla=config.qk_head_dim,
            attention__value_length_mla=config.v_head_dim,
            rope__dimension_count=config.qk_rope_head_dim,
            leading_dense_block_count=leading_dense(config),
            expert_shared_count=config.n_shared_experts,
        ),
        routed(config, config.moe_intermediate_size),
        f32s(rope__scaling__yarn_log_multiplier=None if every is None else 0.1 * every),
    )


def v3_sizes(config: Any) -> Metadata:
    return latent_sizes(config) + corrected(config)


def v2_sizes(config: Any) -> Metadata:
    own = u32s(expert_gating_func=SOFTMAX)
    return latent_sizes(config) + own + f32s(expert_weights_scale=config.routed_scaling_factor)


def latent_problems(config: Any) -> list[str]:
    problems = refused(config, NO_BIASES, "attention_bias")
    dense = ["dense" if i < leading_dense(config) else "sparse" for i in range(config.num_hidden_layers)]
    if config.kinds != dense:
        problems.append("`mlp_layer_types`: in this form only the first layers have no experts")
    if not config.rope_interleave:
        problems.append("`rope_interleave`: readers of this form turn neighboring columns")
    settings = rotation_of(config).settings
    if rotation_of(config).type == "yarn" and settings.get("mscale") != settings.get("mscale_all_dim"):
        problems.append("`rope_scaling.mscale`: readers of this form have one factor for this and `mscale_all_dim`")
    return problems


def v2_problems(config: Any) -> list[str]:
    problems = latent_problems(config) + refused(config, NO_BIASES, "mlp_bias")
    if config.groups > 1:
        problems.append("`topk_method`: readers of this form choose experts among all, or groups by their best two")
    return problems


def latent_notes(config: Any) -> list[str]:
    if config.rms_norm_eps == LATENT_EPS:
        return []
    return [
        f"readers normalize latents with `rms_norm_eps`, {config.rms_norm_eps:g}; the model does with {LATENT_EPS:g}"
    ]


V3 = Form("deepseek2", inside=LATENT, sizes=v3_sizes, problems=latent_problems, notes=latent_notes)

FORMS = {
    "DeepseekV2ForCausalLM": Form("deepseek2", inside=LATENT, sizes=v2_sizes, problems=v2_problems, notes=latent_notes),
    "DeepseekV3ForCausalLM": V3,
    "Glm4MoeLiteForCausalLM": V3,
}
