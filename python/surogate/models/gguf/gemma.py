"""Forms of the Gemma models."""

from __future__ import annotations

from typing import Any

from ...layers.window import FULL, SLIDING
from .form import OUTSIDE, SANDWICH, Form, Metadata, Names, Target, cut
from .sizes import NO_BIASES, f32s, fields, llama, pattern, refused, replaced, routed, tanh_problems, u32s, window

# Gemma 1, 2 and 3.


def gemma_sizes(config: Any) -> Metadata:
    caps = [(name, name) for name in ("attn_logit_softcapping", "final_logit_softcapping")]
    return [*llama(config), *fields(config, *caps), *window(config)]


def gemma_problems(config: Any) -> list[str]:
    own_head = (
        [] if config.tie_word_embeddings else ["`tie_word_embeddings`: readers of this form have no head of its own"]
    )
    return (
        refused(config, NO_BIASES, "attention_bias") + tanh_problems(config, "hidden_act", config.function) + own_head
    )


def windowed_gemma_problems(config: Any, period: int, largest: int) -> list[str]:
    """`largest` is the number of layers of the one size whose scores readers divide by other numbers."""
    problems = refused(config, NO_BIASES, "attention_bias")
    scaled = config.hidden_size / config.num_attention_heads if config.num_hidden_layers == largest else config.head_dim
    if config.query_pre_attn_scalar != scaled:
        problems.append(f"`query_pre_attn_scalar`: readers of this form divide by the root of {scaled:g}")
    kinds = [SLIDING if (i + 1) % period else FULL for i in range(config.num_hidden_layers)]
    if config.layer_types != kinds:
        problems.append(
            f"`layer_types`: in this form every layer number {period} sees everything, the others have a window"
        )
    return problems + tanh_problems(config, "hidden_activation", config.hidden_activation)


def gemma2_problems(config: Any) -> list[str]:
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    missing = [f"`{name}`: readers of this form have a cap" for name in names if getattr(config, name) is None]
    return windowed_gemma_problems(config, 2, 46) + missing


def gemma3_problems(config: Any) -> list[str]:
    problems = windowed_gemma_problems(config, 6, 62)
    if config.final_logit_softcapping is not None:
        problems.append("`final_logit_softcapping`: readers of this form have no cap")
    if (config.rope[SLIDING].theta, config.rope[SLIDING].type) != (10000.0, "default"):
        problems.append("`rope_local_base_freq`: readers of this form rotate layers with a window by 10000")
    return problems


GEMMA3 = Form("gemma3", offset=True, inside=SANDWICH, sizes=gemma_sizes, problems=gemma3_problems)


# Gemma 4.

GEMMA4_OUTSIDE: Names = OUTSIDE | {
    # Rows of tokens beyond the vocabulary are read by none.
    "embed_tokens_per_layer": lambda c: [Target("per_layer_token_embd.weight", [cut(0, 0, c.vocab_size)])],
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
}
GEMMA4: Names = SANDWICH | {
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}


def gemma4_sizes(config: Any) -> Metadata:
    """Readers have a cap of logits where the file does not say that there is none."""
    (full, _), (near, _) = config.heads[FULL], config.heads[SLIDING]
    wide = [config.intermediate_size * (2 if config.use_double_wide_mlp and kind.endswith(".shared") else 1)
            for kind in config.kinds]  # fmt: skip
    keys = [config.heads[kind][1] for kind in config.layer_types]
    own: Metadata = [
        *u32s(
            attention__key_length=full,
            attention__value_length=full,
            attention__key_length_swa=near,
            attention__value_length_swa=near,
            attention__shared_kv_layers=config.num_kv_shared_layers or 0,
            rope__dimension_count=full,
            rope__dimension_count_swa=near,
            embedding_length_per_layer_input=config.hidden_size_per_layer_input or 0,
        ),
        *f32s(
            rope__freq_base_swa=config.rope[SLIDING].theta,
            final_logit_softcapping=config.final_logit_softcapping or 0.0,
        ),
        ("feed_forward_length", "i32s", wide),
        ("attention.head_count_kv", "i32s", keys),
        *pattern(config.layer_types),
        *window(config),
    ]
    if config.enable_moe_block:
        own += routed(config, config.moe_intermediate_size, used=config.top_k_experts)
    return replaced(llama(config), own)


def gemma4_problems(config: Any) -> list[str]:
    problems = refused(config, NO_BIASES, "attention_bias")
    problems += tanh_problems(config, "hidden_activation", config.hidden_activation)
    if config.window is None:
        problems.append("`sliding_window`: readers of this form want one")
    near = config.rope[SLIDING]
    if near.type != "default":
        problems.append("`rope_parameters.sliding_attention`: readers of this form do not scale it")
    return problems


def gemma4_factors(config: Any) -> dict[str, list[float]]:
    """The frequencies of layers without a window: pairs that do not turn have a factor that makes theirs nothing."""
    size, rope = config.heads[FULL][0], config.rope[FULL]
    share = rope.settings.get("partial_rotary_factor", 1.0) if rope.type == "proportional" else 1.0
    turning = int(size * share / 2)
    return {"rope_freqs.weight": [1.0] * turning + [1e30] * (size // 2 - turning)}


GEMMA4_FORM = Form(
    "gemma4",
    outside=GEMMA4_OUTSIDE,
    inside=GEMMA4,
    sizes=gemma4_sizes,
    problems=gemma4_problems,
    constants=gemma4_factors,
)


FORMS = {
    "GemmaForCausalLM": Form("gemma", offset=True, sizes=llama, problems=gemma_problems),
    "Gemma2ForCausalLM": Form("gemma2", offset=True, inside=SANDWICH, sizes=gemma_sizes, problems=gemma2_problems),
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Gemma4ForCausalLM": GEMMA4_FORM,
    "Gemma4ForConditionalGeneration": GEMMA4_FORM,
    "Gemma4UnifiedForCausalLM": GEMMA4_FORM,
    "Gemma4UnifiedForConditionalGeneration": GEMMA4_FORM,
}
