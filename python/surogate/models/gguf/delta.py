"""Forms of architectures with gated delta nets."""

from __future__ import annotations

from typing import Any

from ...layers.window import FULL
from .axes import alternating
from .experts import QWEN_MOE, SHARED_GATE
from .form import INSIDE, Form, Made, Metadata, Names, Steps, Target, cut, shaped, shared_expert
from .sizes import NO_BIASES, llama, refused, routed, ssm, u32s


def _tiled(c: Any, size: int, before: Steps, after: list[int]) -> Steps:
    """The steps that order heads of values by their number under a key head first: readers repeat all key heads."""
    groups, each = c.linear_num_key_heads, c.linear_num_value_heads // c.linear_num_key_heads
    return [*before, {"reshape": [groups, each, size, *after]}, {"permute": [1, 0, 2, *range(3, 3 + len(after))]},
            {"reshape": [groups * each * size, *after]}]  # fmt: skip


def _keys(c: Any) -> int:
    return int(c.linear_num_key_heads * c.linear_key_head_dim)


def _values(c: Any) -> int:
    return int(c.linear_num_value_heads * c.linear_value_head_dim)


def _mixed(name: str, width: Any) -> Made:
    """Rows of queries and keys, then those of values in another order."""

    def made(c: Any) -> list[Target]:
        both = 2 * _keys(c)
        flat = {"reshape": [both + _values(c), width(c)]}
        rows = _tiled(c, c.linear_value_head_dim, [flat, cut(0, both, both + _values(c))], [width(c)])
        return [Target(name, joined=[[flat, cut(0, 0, both)], rows])]

    return made


def _heads(name: str, *before: Any) -> Made:
    """One number for each head of values."""
    return lambda c: [Target(name, _tiled(c, 1, list(before), []))]


def _output(c: Any) -> list[Target]:
    groups, each = c.linear_num_key_heads, c.linear_num_value_heads // c.linear_num_key_heads
    size, hidden = c.linear_value_head_dim, c.hidden_size
    by_head = {"reshape": [hidden, groups, each, size]}
    return [Target("ssm_out.weight", [by_head, {"permute": [0, 2, 1, 3]}, {"reshape": [hidden, groups * each * size]}])]


DELTA: Names = {
    "linear_attn.in_proj_qkv": _mixed("attn_qkv.weight", lambda c: c.hidden_size),
    "linear_attn.in_proj_z": lambda c: [
        Target("attn_gate.weight", _tiled(c, c.linear_value_head_dim, [], [c.hidden_size]))
    ],
    "linear_attn.in_proj_b": lambda c: [Target("ssm_beta.weight", _tiled(c, 1, [], [c.hidden_size]))],
    "linear_attn.in_proj_a": lambda c: [Target("ssm_alpha.weight", _tiled(c, 1, [], [c.hidden_size]))],
    "linear_attn.conv1d": _mixed("ssm_conv1d.weight", lambda c: c.linear_conv_kernel_dim),
    "linear_attn.A_log": _heads("ssm_a", "neg_exp"),
    "linear_attn.dt_bias": _heads("ssm_dt.bias"),
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": _output,
}


def _next_inputs(c: Any) -> list[Target]:
    """The parts of one matrix, which has them by key head."""
    size, values = c.linear_key_head_dim, _values(c) // c.linear_num_key_heads
    by_head = {"reshape": [c.linear_num_key_heads, 2 * size + 2 * values, c.hidden_size]}

    def part(begin: int, count: int) -> Steps:
        rows = {"reshape": [c.linear_num_key_heads * count, c.hidden_size]}
        return [by_head, cut(1, begin, begin + count), rows]

    mixed = [part(0, size), part(size, size), part(2 * size, values)]
    return [Target("attn_qkv.weight", joined=mixed), Target("attn_gate.weight", part(2 * size + values, values))]


NEXT: Names = {
    "linear_attn.in_proj_qkvz": _next_inputs,
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": shaped("ssm_conv1d.weight", lambda c: [2 * _keys(c) + _values(c), c.linear_conv_kernel_dim]),
    "linear_attn.A_log": lambda _: [Target("ssm_a", ["neg_exp"])],  # type: ignore[list-item]
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
AFTER: Names = {"post_attention_layernorm": "post_attention_norm"}
QWEN_SHARED: Names = shared_expert("mlp.shared_expert") | SHARED_GATE


def delta_sizes(config: Any) -> Metadata:
    period = config.layer_types.index(FULL) + 1 if FULL in config.layer_types else config.num_hidden_layers + 1
    return [
        *ssm(
            config.linear_conv_kernel_dim,
            config.linear_key_head_dim,
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            _values(config),
        ),
        *u32s(full_attention_interval=period),
    ]


def qwen3_5_sizes(config: Any) -> Metadata:
    return llama(config) + delta_sizes(config) + alternating(config, (11, 11, 10))


def mixture(config: Any) -> Metadata:
    shared = config.shared_expert_intermediate_size
    return routed(config, config.moe_intermediate_size, expert_shared_feed_forward_length=shared)


def delta_problems(config: Any) -> list[str]:
    problems = refused(config, NO_BIASES, "attention_bias")
    period = delta_sizes(config)[-1][2]
    kinds = [FULL if (i + 1) % period == 0 else "linear_attention" for i in range(config.num_hidden_layers)]
    if config.layer_types != kinds:
        problems.append(f"`layer_types`: in this form every layer number {period} has attention, and no other")
    if config.linear_key_head_dim != config.linear_value_head_dim:
        problems.append("`linear_value_head_dim`: readers of this form want heads of keys and values of one size")
    return problems


def qwen3_next_problems(config: Any) -> list[str]:
    problems = delta_problems(config)
    if "dense" in config.kinds:
        problems.append("`mlp_only_layers`: in this form every layer has experts")
    if not config.norm_topk_prob:
        problems.append("`norm_topk_prob`: readers of this form divide by the sum of the weights of a token's experts")
    return problems


#: The epsilon that readers use in norms of queries and keys of delta nets, whatever the config says of the others.
UNIT_EPS = 1e-6


def delta_notes(config: Any) -> list[str]:
    if config.rms_norm_eps == UNIT_EPS:
        return []
    said = f"readers normalize queries and keys of delta nets with `rms_norm_eps`, {config.rms_norm_eps:g}"
    return [f"{said}; the model does with {UNIT_EPS:g}"]


QWEN35 = Form(
    "qwen35",
    offset=True,
    inside=INSIDE | DELTA | AFTER,
    sizes=qwen3_5_sizes,
    problems=delta_problems,
    notes=delta_notes,
)
QWEN35_MOE = Form(
    "qwen35moe",
    offset=True,
    inside=QWEN_MOE | DELTA | AFTER | QWEN_SHARED,
    sizes=lambda config: qwen3_5_sizes(config) + mixture(config),
    problems=delta_problems,
    notes=delta_notes,
)


FORMS = {
    "Qwen3NextForCausalLM": Form(
        "qwen3next",
        offset=True,
        inside=QWEN_MOE | NEXT | AFTER | QWEN_SHARED,
        sizes=lambda config: llama(config) + delta_sizes(config) + mixture(config),
        problems=qwen3_next_problems,
        notes=delta_notes,
    ),
    "Qwen3_5ForCausalLM": QWEN35,
    "Qwen3_5ForConditionalGeneration": QWEN35,
    "Qwen3_5MoeForCausalLM": QWEN35_MOE,
    "Qwen3_5MoeForConditionalGeneration": QWEN35_MOE,
}
