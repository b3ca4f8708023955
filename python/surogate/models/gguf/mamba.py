"""Forms of architectures with state-space models."""

from __future__ import annotations

from typing import Any

from ...layers.mamba import MOST_STEP, MambaSizes
from .dense import granite_sizes
from .experts import corrected
from .form import INSIDE, Form, Made, Metadata, Names, Steps, Target, cut, halves, shaped
from .sizes import NO_BIASES, f32s, llama, refused, replaced, routed, ssm, u32s


def mamba(prefix: str, sizes: Any = lambda c: c.sizes) -> Names:
    """Names of a mixer of Mamba-2, whose `sizes` a configuration has."""

    def of_heads(c: Any) -> list[int]:
        return [sizes(c).heads, 1]

    return {
        f"{prefix}.in_proj": "ssm_in",
        f"{prefix}.conv1d.weight": shaped("ssm_conv1d.weight", lambda c: [_channels(sizes(c)), sizes(c).width]),
        f"{prefix}.conv1d.bias": "ssm_conv1d.bias",
        f"{prefix}.dt_bias": "ssm_dt.bias",
        f"{prefix}.A_log": shaped("ssm_a", of_heads, "neg_exp"),
        f"{prefix}.D": shaped("ssm_d", of_heads),
        f"{prefix}.norm": shaped("ssm_norm.weight", lambda c: [sizes(c).groups, sizes(c).inner // sizes(c).groups]),
        f"{prefix}.out_proj": "ssm_out",
    }


def _channels(of: MambaSizes) -> int:
    return of.inner + 2 * of.groups * of.state


def mamba_sizes(of: MambaSizes) -> Metadata:
    return ssm(of.width, of.state, of.groups, of.heads, of.inner)


def mamba_problems(of: MambaSizes) -> list[str]:
    problems = []
    if of.bias or of.output_bias:
        problems.append("`mamba_proj_bias`: readers of this form have no biases of projections")
    if not of.conv_bias:
        problems.append("`mamba_conv_bias`: readers of this form want the bias of the convolution")
    if of.norm == "before":
        problems.append("`mamba_norm_before_gate`: readers of this form normalize after the gate")
    return problems


def limits_problems(of: MambaSizes) -> list[str]:
    free = of.limits[0] <= 0 and of.limits[1] >= MOST_STEP
    return [] if free else ["`time_step_limit`: readers of this form do not bound time steps"]


# Granite 4.

SHARED = {True: ("ffn_gate_shexp.weight", "ffn_up_shexp.weight", "ffn_down_shexp.weight"),
          False: ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")}  # fmt: skip


def _granite_shared(c: Any) -> list[Target]:
    gate, up, _ = SHARED[bool(c.num_experts)]
    return halves(gate, up, lambda c: c.shared_intermediate_size)(c)


GRANITE: Names = (
    INSIDE
    | mamba("mamba")
    | {
        "shared_mlp.input_linear": _granite_shared,
        "shared_mlp.output_linear": lambda c: [Target(SHARED[bool(c.num_experts)][2])],
        "block_sparse_moe.router.layer": "ffn_gate_inp",
        "block_sparse_moe.input_linear": halves(
            "ffn_gate_exps.weight", "ffn_up_exps.weight", lambda c: c.intermediate_size, 1
        ),
        "block_sparse_moe.output_linear": "ffn_down_exps",
    }
)


def granite_hybrid_sizes(config: Any) -> Metadata:
    shared = config.shared_intermediate_size
    own: Metadata = [("rope.scaling.finetuned", "bool", config.rotates)]
    if config.num_experts:
        own += routed(config, config.intermediate_size, expert_shared_feed_forward_length=shared)
    else:
        own += u32s(feed_forward_length=shared)
    if "mamba" in config.kinds:
        keys = [config.num_key_value_heads if kind == "attention" else 0 for kind in config.kinds]
        own += [("attention.head_count_kv", "i32s", keys), *mamba_sizes(config.sizes)]
    return replaced(granite_sizes(config), own)


def granite_hybrid_problems(config: Any) -> list[str]:
    problems = refused(config, NO_BIASES, "attention_bias")
    if "mamba" in config.kinds:
        problems += mamba_problems(config.sizes) + limits_problems(config.sizes)
    return problems


def granite_hybrid_name(config: Any) -> str:
    if "mamba" in config.kinds:
        return "granitehybrid"
    return "granitemoe" if config.num_experts else "granite"


# Falcon-H1: factors become part of the matrices.


def times(name: str, factor: Any) -> Made:
    """One tensor, multiplied with a number of the configuration."""
    return lambda c: [Target(name, [{"scale": factor(c)}])]


def _falcon_input(c: Any) -> list[Target]:
    """The five parts of the mixer's input, each with its factor."""
    shared = c.sizes.groups * c.sizes.state
    parts, begin = [], 0
    for size, factor in zip(
        [c.sizes.inner, c.sizes.inner, shared, shared, c.sizes.heads], c.ssm_multipliers, strict=True
    ):
        steps: Steps = [cut(0, begin, begin + size), {"scale": factor * c.ssm_in_multiplier}]
        parts.append(steps)
        begin += size
    return [Target("ssm_in.weight", joined=parts)]


def _falcon_table(c: Any) -> list[Target]:
    table = [Target("token_embd.weight", [{"scale": c.embedding_multiplier}])]
    head = Target("output.weight", [{"scale": c.lm_head_multiplier}])
    return [*table, head] if c.tie_word_embeddings else table


FALCON_OUTSIDE: Names = {
    "embed_tokens": _falcon_table,
    "final_layernorm": "output_norm",
    "lm_head": times("output.weight", lambda c: c.lm_head_multiplier),
}
FALCON: Names = (
    INSIDE
    | mamba("mamba")
    | {
        "self_attn.q_proj": times("attn_q.weight", lambda c: c.attention_in_multiplier),
        "self_attn.k_proj": times("attn_k.weight", lambda c: c.attention_in_multiplier * c.key_multiplier),
        "self_attn.v_proj": times("attn_v.weight", lambda c: c.attention_in_multiplier),
        "self_attn.o_proj": times("attn_output.weight", lambda c: c.attention_out_multiplier),
        "mamba.in_proj": _falcon_input,
        "mamba.out_proj": times("ssm_out.weight", lambda c: c.ssm_out_multiplier),
        "pre_ff_layernorm.weight": "ffn_norm",  # without an ending in this form
        "feed_forward.gate_proj": times("ffn_gate.weight", lambda c: c.mlp_multipliers[0]),
        "feed_forward.up_proj": "ffn_up",
        "feed_forward.down_proj": times("ffn_down.weight", lambda c: c.mlp_multipliers[1]),
    }
)


def falcon_sizes(config: Any) -> Metadata:
    return llama(config) + mamba_sizes(config.sizes)


def falcon_problems(config: Any) -> list[str]:
    problems = refused(config, NO_BIASES, "attention_bias", "mlp_bias", "projectors_bias")
    return problems + mamba_problems(config.sizes) + limits_problems(config.sizes)


# Nemotron-H: one mixer a layer.


def nemotron_mamba(c: Any) -> MambaSizes:
    return MambaSizes(
        heads=c.mamba_num_heads,
        head_dim=c.mamba_head_dim,
        groups=c.n_groups,
        state=c.ssm_state_size,
        width=c.conv_kernel,
        limits=(c.time_step_min, MOST_STEP),
        conv_bias=c.use_conv_bias,
        bias=c.use_bias,
        output_bias=c.use_bias,
    )


NEMOTRON_OUTSIDE: Names = {"embeddings": "token_embd", "norm_f": "output_norm", "lm_head": "output"}
NEMOTRON: Names = {
    "norm": "attn_norm",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.*.up_proj": "ffn_up_exps",
    "mixer.experts.*.down_proj": "ffn_down_exps",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
} | mamba("mixer", nemotron_mamba)


def nemotron_sizes(config: Any) -> Metadata:
    moe = "moe" in config.kinds
    inner = config.moe_intermediate_size if moe else config.intermediate_size
    keys = [config.num_key_value_heads if kind == "attention" else 0 for kind in config.kinds]
    own: Metadata = [
        ("attention.head_count_kv", "i32s", keys),
        ("feed_forward_length", "i32s", [inner if kind in ("mlp", "moe") else 0 for kind in config.kinds]),
        *mamba_sizes(nemotron_mamba(config)),
        *f32s(attention__layer_norm_epsilon=config.rms_norm_eps),
    ]
    if moe:
        own += [
            *routed(config, inner),
            *corrected(config),
            *u32s(
                expert_shared_count=1,
                expert_shared_feed_forward_length=config.moe_shared_expert_intermediate_size,
                moe_latent_size=config.moe_latent_size,
            ),
        ]
    return replaced(llama(config), own)


def nemotron_problems(config: Any) -> list[str]:
    problems = mamba_problems(nemotron_mamba(config)) if "mamba" in config.kinds else []
    if "mamba" not in config.kinds:
        problems.append("`layers_block_type`: readers of this form want a state-space model in some layer")
    if "moe" in config.kinds and "mlp" in config.kinds:
        problems.append("`layers_block_type`: in this form feed-forward layers all have experts, or none has")
    if config.window is not None:
        problems.append("`sliding_window`: readers of this form attend to everything; set it to null to say so")
    if config.mlp_bias and "moe" in config.kinds:
        problems.append("`mlp_bias`: readers of this form have no biases of experts")
    return problems


def nemotron_notes(config: Any) -> list[str]:
    if "mamba" not in config.kinds or config.time_step_min <= 0:
        return []
    return [f"readers do not raise time steps to `time_step_min`, {config.time_step_min:g}, as the model does"]


FORMS = {
    "GraniteMoeHybridForCausalLM": Form(
        "granitehybrid",
        interleaved=True,
        inside=GRANITE,
        sizes=granite_hybrid_sizes,
        problems=granite_hybrid_problems,
        named=granite_hybrid_name,
    ),
    "FalconH1ForCausalLM": Form(
        "falcon-h1", outside=FALCON_OUTSIDE, inside=FALCON, sizes=falcon_sizes, problems=falcon_problems
    ),
    "NemotronHForCausalLM": Form(
        "nemotron_h",
        outside=NEMOTRON_OUTSIDE,
        inside=NEMOTRON,
        sizes=nemotron_sizes,
        problems=nemotron_problems,
        notes=nemotron_notes,
        named=lambda config: "nemotron_h_moe" if "moe" in config.kinds else "nemotron_h",
    ),
}
