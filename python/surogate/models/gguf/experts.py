"""Forms of architectures with mixtures of experts and the usual attention in every layer."""

from __future__ import annotations

from typing import Any

from ...layers.window import FULL, SLIDING
from .axes import alternating, alternating_notes
from .form import (
    INSIDE,
    Form,
    Made,
    Metadata,
    Names,
    Target,
    cut,
    experts,
    halves,
    shaped,
    shared_expert,
)
from .sizes import (
    NO_BIASES,
    SIGMOID,
    dense_problems,
    f32s,
    leading_dense,
    llama,
    refused,
    replaced,
    rotated,
    routed,
    u32s,
    window,
    windows_problems,
)

ROUTER: Names = {"mlp.gate": "ffn_gate_inp"}
QWEN_MOE: Names = INSIDE | ROUTER | experts("mlp")


def normalised(config: Any, always: bool) -> list[str]:
    """Returns the problems of experts' weights in a form whose readers divide them by their sum, or never do."""
    said = "divide by" if always else "do not divide by"
    wrong = bool(config.norm_topk_prob) != always
    return (
        [f"`norm_topk_prob`: readers of this form {said} the sum of the weights of a token's experts"] if wrong else []
    )


def qwen3_moe_sizes(config: Any) -> Metadata:
    return llama(config) + routed(config, config.moe_intermediate_size)


def qwen3_moe_problems(config: Any) -> list[str]:
    return windows_problems(config) + dense_problems(config) + normalised(config, True)


def qwen3_vl_moe_sizes(config: Any) -> Metadata:
    return qwen3_moe_sizes(config) + alternating(config, (24, 20, 20))


def qwen3_vl_moe_problems(config: Any) -> list[str]:
    return windows_problems(config) + dense_problems(config)  # which divides by the sum whatever the config says


def stacked(prefix: str, names: tuple[str, str] = ("gate_up_proj", "down_proj"), inner: str = "") -> Names:
    """Names of experts that are two stacks in the model, gate and up of each expert one after the other."""
    split = halves(
        "ffn_gate_exps.weight", "ffn_up_exps.weight", lambda c: getattr(c, inner or "moe_intermediate_size"), 1
    )
    return {f"{prefix}.{names[0]}": split, f"{prefix}.{names[1]}": "ffn_down_exps.weight"}


def qwen2_moe_sizes(config: Any) -> Metadata:
    shared = config.shared_expert_intermediate_size
    return llama(config) + routed(config, config.moe_intermediate_size, expert_shared_feed_forward_length=shared)


def qwen2_moe_problems(config: Any) -> list[str]:
    return windows_problems(config) + dense_problems(config) + normalised(config, False)


SHARED_GATE: Names = {
    "mlp.shared_expert_gate": shaped("ffn_gate_inp_shexp.weight", lambda c: [c.hidden_size]),
}


def olmoe_problems(config: Any) -> list[str]:
    problems = refused(config, NO_BIASES, "attention_bias") + normalised(config, False)
    if config.num_key_value_heads != config.num_attention_heads:
        problems.append("`num_key_value_heads`: readers of this form want a head of keys for each of queries")
    return problems


def mixtral_sizes(config: Any) -> Metadata:
    return llama(config) + routed(config, config.intermediate_size)


# GPT-OSS: gate and up are neighboring columns of one stack.


def _of_pairs(name: str, which: int, *, bias: bool) -> Made:
    def made(c: Any) -> list[Target]:
        outer = [c.num_experts] if bias else [c.num_experts, c.hidden_size]
        axis = len(outer) + 1
        steps: list[dict[str, Any]] = [
            {"reshape": [*outer, c.intermediate_size, 2]},
            cut(axis, which, which + 1),
            {"reshape": [*outer, c.intermediate_size]},
        ]
        return [Target(name, steps if bias else [*steps, {"permute": [0, 2, 1]}])]

    return made


def _both(*made: Made) -> Made:
    return lambda config: [target for of in made for target in of(config)]


GPT_OSS: Names = INSIDE | {
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_up_proj": _both(
        _of_pairs("ffn_gate_exps.weight", 0, bias=False), _of_pairs("ffn_up_exps.weight", 1, bias=False)
    ),
    "mlp.experts.gate_up_proj_bias": _both(
        _of_pairs("ffn_gate_exps.bias", 0, bias=True), _of_pairs("ffn_up_exps.bias", 1, bias=True)
    ),
    "mlp.experts.down_proj": lambda _: [Target("ffn_down_exps.weight", [{"permute": [0, 2, 1]}])],
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
}


def gpt_oss_sizes(config: Any) -> Metadata:
    return llama(config) + routed(config, config.intermediate_size) + window(config)


def gpt_oss_problems(config: Any) -> list[str]:
    problems = []
    for name, known in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if getattr(config, name) != known:
            problems.append(f"`{name}`: readers of this form compute with {known}")
    if not config.attention_bias:
        problems.append("`attention_bias`: readers of this form want the biases")
    kinds = [FULL if i % 2 else SLIDING for i in range(config.num_hidden_layers)]
    if config.window is None or config.layer_types != kinds:
        problems.append("`layer_types`: in this form every second layer sees everything, the others have a window")
    return problems


# Mixtures with a correction of the choice.


def ernie4_5_moe_sizes(config: Any) -> Metadata:
    inner, shared = config.moe_intermediate_size, config.moe_num_shared_experts or 0
    more = u32s(
        interleave_moe_layer_step=config.moe_layer_interval,
        leading_dense_block_count=leading_dense(config),
        expert_shared_count=shared,
        expert_shared_feed_forward_length=inner * shared,
    )
    return llama(config) + routed(config, inner, used=config.moe_k) + more


def ernie4_5_moe_problems(config: Any) -> list[str]:
    first, step = leading_dense(config), config.moe_layer_interval
    kinds = ["sparse" if i >= first and (i + 1) % step == 0 else "dense" for i in range(config.num_hidden_layers)]
    problems = refused(config, NO_BIASES, "use_bias")
    if config.kinds != kinds:
        problems.append("`moe_layer_end_index`: in this form layers with experts do not end before the last one")
    return problems


def glm4_moe_sizes(config: Any) -> Metadata:
    return [
        *llama(config),
        *routed(config, config.moe_intermediate_size),
        *corrected(config),
        *u32s(expert_shared_count=config.n_shared_experts, leading_dense_block_count=leading_dense(config)),
    ]


def corrected(config: Any) -> Metadata:
    """The rule of experts chosen by sigmoids and a correction."""
    return [
        *u32s(expert_gating_func=SIGMOID, expert_group_count=config.n_group, expert_group_used_count=config.topk_group),
        *f32s(expert_weights_scale=config.routed_scaling_factor),
        ("expert_weights_norm", "bool", config.norm_topk_prob),
    ]


CORRECTION: Names = {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}


def minimax_sizes(config: Any) -> Metadata:
    return [
        *replaced(llama(config), u32s(rope__dimension_count=rotated(config))),
        *routed(config, config.intermediate_size),
        *u32s(expert_gating_func=SIGMOID),
    ]


W: tuple[str, str, str] = ("w1", "w3", "w2")
BLOCK: Names = INSIDE | {"block_sparse_moe.gate": "ffn_gate_inp"} | experts("block_sparse_moe", W)

FORMS = {
    "Qwen3MoeForCausalLM": Form("qwen3moe", inside=QWEN_MOE, sizes=qwen3_moe_sizes, problems=qwen3_moe_problems),
    "Qwen3VLMoeForConditionalGeneration": Form(
        "qwen3vlmoe",
        inside=INSIDE | ROUTER | stacked("mlp.experts"),
        sizes=qwen3_vl_moe_sizes,
        problems=qwen3_vl_moe_problems,
        notes=lambda config: alternating_notes(config, (24, 20, 20)),
    ),
    "Qwen2MoeForCausalLM": Form(
        "qwen2moe",
        inside=QWEN_MOE | shared_expert("mlp.shared_expert") | SHARED_GATE,
        sizes=qwen2_moe_sizes,
        problems=qwen2_moe_problems,
    ),
    "OlmoeForCausalLM": Form("olmoe", inside=QWEN_MOE, sizes=mixtral_sizes, problems=olmoe_problems),
    "MixtralForCausalLM": Form("llama", interleaved=True, inside=BLOCK, sizes=mixtral_sizes, problems=windows_problems),
    "GptOssForCausalLM": Form("gpt-oss", inside=GPT_OSS, sizes=gpt_oss_sizes, problems=gpt_oss_problems, own_head=True),
    "Ernie4_5_MoeForCausalLM": Form(
        "ernie4_5-moe",
        inside=QWEN_MOE
        | shared_expert("mlp.shared_experts")
        | {"mlp.moe_statics.e_score_correction_bias": shaped("exp_probs_b.bias", lambda c: [c.num_experts])},
        sizes=ernie4_5_moe_sizes,
        problems=ernie4_5_moe_problems,
    ),
    "Glm4MoeForCausalLM": Form(
        "glm4moe",
        inside=QWEN_MOE
        | shared_expert("mlp.shared_experts")
        | CORRECTION
        | {"post_attention_layernorm": "post_attention_norm"},
        sizes=glm4_moe_sizes,
        problems=windows_problems,
    ),
    "MiniMaxM2ForCausalLM": Form(
        "minimax-m2",
        inside=BLOCK | {"block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias"},
        sizes=minimax_sizes,
        problems=windows_problems,
    ),
}
