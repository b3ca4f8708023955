"""Forms of architectures with gated short convolutions."""

from __future__ import annotations

from typing import Any

from ...layers.window import FULL
from .form import INSIDE, OUTSIDE, Form, Metadata, Names, experts, shaped
from .sizes import SIGMOID, llama, replaced, routed, u32s

W: tuple[str, str, str] = ("w1", "w3", "w2")
LFM2: Names = INSIDE | {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "conv.conv": shaped("shortconv.conv.weight", lambda c: [c.hidden_size, c.conv_L_cache]),
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
LFM2_MOE: Names = (
    LFM2
    | experts("feed_forward", W)
    | {"feed_forward.gate": "ffn_gate_inp", "feed_forward.expert_bias": "exp_probs_b.bias"}
)
LFM2_OUTSIDE: Names = OUTSIDE | {"embedding_norm": "token_embd_norm"}


def lfm2_sizes(config: Any) -> Metadata:
    keys = [config.num_key_value_heads if kind == FULL else 0 for kind in config.layer_types]
    own: Metadata = [("attention.head_count_kv", "i32s", keys)]
    return replaced(llama(config), own, u32s(shortconv__l_cache=config.conv_L_cache))


def lfm2_moe_sizes(config: Any) -> Metadata:
    dense = sum(kind.startswith("dense") for kind in config.kinds)
    more = u32s(leading_dense_block_count=dense, expert_gating_func=SIGMOID)
    return lfm2_sizes(config) + routed(config, config.moe_intermediate_size) + more


def lfm2_moe_problems(config: Any) -> list[str]:
    problems = []
    if not config.norm_topk_prob:
        problems.append("`norm_topk_prob`: readers of this form divide by the sum of the weights of a token's experts")
    if not config.use_expert_bias:
        problems.append("`use_expert_bias`: readers of this form want the bias of the choice")
    if config.routed_scaling_factor != 1.0:
        problems.append("`routed_scaling_factor`: readers of this form have none")
    return problems


FORMS = {
    "Lfm2ForCausalLM": Form("lfm2", outside=LFM2_OUTSIDE, inside=LFM2, sizes=lfm2_sizes),
    "Lfm2MoeForCausalLM": Form(
        "lfm2moe", outside=LFM2_OUTSIDE, inside=LFM2_MOE, sizes=lfm2_moe_sizes, problems=lfm2_moe_problems
    ),
}
