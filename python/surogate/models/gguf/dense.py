"""Forms of architectures with plain feed-forward layers, and attention in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...layers.window import FULL, SLIDING
from ..mistral3 import Ministral3Config
from .form import INSIDE, SANDWICH, Form, Made, Metadata, Names, Target
from .sizes import (
    NO_BIASES,
    f32s,
    llama,
    pattern,
    refused,
    rotation_of,
    tanh_problems,
    u32s,
    window,
    windows_problems,
)

# OLMo 2 and 3.


def olmo_sizes(config: Any) -> Metadata:
    kinds = getattr(config, "layer_types", None)
    return llama(config) + (window(config) + pattern(kinds) if kinds and config.window else [])


def olmo_problems(config: Any) -> list[str]:
    problems = refused(config, NO_BIASES, "attention_bias")
    if config.hidden_size != config.head_dim * config.num_attention_heads:
        problems.append("`head_dim`: readers of this form divide `hidden_size` by the number of heads")
    if getattr(config, "window", None) is None:
        return problems
    kinds = [SLIDING if (i + 1) % 4 else FULL for i in range(config.num_hidden_layers)]
    if config.layer_types != kinds:
        problems.append("`layer_types`: in this form every fourth layer sees everything, the others have a window")
    if (config.rope[SLIDING].theta, config.rope[SLIDING].type) != (config.rope[FULL].theta, "default"):
        problems.append("`rope_parameters`: readers of this form scale only layers without a window, all by one base")
    return problems


# Others of the kin of Llama.


def granite_sizes(config: Any) -> Metadata:
    factors = {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }
    return [*llama(config), *((name, "f32", value) for name, value in factors.items())]


def ernie4_5_problems(config: Any) -> list[str]:
    return refused(config, "readers of this form have no biases in feed-forward layers", "use_bias")


def exaone4_problems(config: Any) -> list[str]:
    """Readers know which layers have a window by their number alone."""
    kinds = [SLIDING if (i + 1) % 4 else FULL for i in range(config.num_hidden_layers)]
    if config.num_hidden_layers == 64 and (config.window is None or config.layer_types != kinds):
        return ["`layer_types`: in this form every fourth of 64 layers sees everything, the others have a window"]
    if config.num_hidden_layers != 64 and config.window is not None:
        return ["`sliding_window`: in this form only models of 64 layers have one; null says that there is none"]
    return []


def smollm3_problems(config: Any) -> list[str]:
    every_fourth = [(i + 1) % 4 != 0 for i in range(config.num_hidden_layers)]
    said = "`no_rope_layers`: readers of this form leave every fourth layer without positions, and no other"
    return windows_problems(config) + ([] if config.rotated == every_fourth else [said])


def gpt2_sizes(config: Any) -> Metadata:
    return [
        *u32s(
            context_length=config.n_positions,
            embedding_length=config.n_embd,
            block_count=config.n_layer,
            feed_forward_length=config.n_inner,
            attention__head_count=config.n_head,
            vocab_size=config.vocab_size,
        ),
        *f32s(attention__layer_norm_epsilon=config.layer_norm_epsilon),
    ]


def gpt2_problems(config: Any) -> list[str]:
    problems = []
    if config.activation_function not in ("gelu_new", "gelu_pytorch_tanh"):
        problems.append(
            f"`activation_function`: readers of this form compute gelu_new, not {config.activation_function}"
        )
    if not config.scale_attn_weights or config.scale_attn_by_inverse_layer_idx:
        problems.append("`scale_attn_weights`: readers of this form divide scores by the root of the head size alone")
    return problems


def phi3_factors(config: Any) -> dict[str, list[float]]:
    """The factors of short and of long texts."""
    rope = config.rope
    if rope.type != "longrope":
        return {}
    return {f"rope_factors_{length}.weight": rope.settings[f"{length}_factor"] for length in ("long", "short")}


def layer_norm(config: Any, epsilon: float) -> Metadata:
    """The sizes of Llama with the norms of mean and variance."""
    rest = [entry for entry in llama(_WithEpsilon(config)) if not entry[0].endswith("rms_epsilon")]
    return [*rest, *f32s(attention__layer_norm_epsilon=epsilon)]


class _WithEpsilon:
    """A configuration without `rms_norm_eps`, with one that is not written."""

    def __init__(self, config: Any) -> None:
        self.config, self.rms_norm_eps = config, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)


def starcoder2_sizes(config: Any) -> Metadata:
    return layer_norm(config, config.norm_epsilon)


def starcoder2_problems(config: Any) -> list[str]:
    return windows_problems(config) + tanh_problems(config, "hidden_act", config.hidden_act)


def cohere2_sizes(config: Any) -> Metadata:
    return [*layer_norm(config, config.layer_norm_eps), *f32s(logit_scale=config.logit_scale), *window(config)]


def cohere2_problems(config: Any) -> list[str]:
    problems = refused(config, NO_BIASES, "attention_bias")
    kinds = [SLIDING if (i + 1) % 4 else FULL for i in range(config.num_hidden_layers)]
    if config.window is None or config.layer_types != kinds:
        problems.append("`layer_types`: in this form every fourth layer sees everything, the others have a window")
    if not config.tie_word_embeddings:
        problems.append("`tie_word_embeddings`: readers of this form have no head of its own")
    if config.hidden_size != config.head_dim * config.num_attention_heads:
        problems.append("`head_dim`: readers of this form divide `hidden_size` by the number of heads")
    return problems


#: Numbers of the activation of a layer.
XIELU = ("alpha_p", "alpha_n", "beta", "eps")


def apertus_numbers(config: Any) -> Metadata:
    """The numbers of the activation are those of the layers' parameters."""
    values: Metadata = []
    for name in XIELU:
        names = [f"model.layers.{i}.mlp.act_fn.{name}" for i in range(config.num_hidden_layers)]
        values.append((f"xielu.{name}", "f32s_of", names))
    return values


def nowhere(_: Any) -> list[Target]:
    """Parameters that are numbers of the metadata."""
    return []


APERTUS: Names = INSIDE | {
    "attention_layernorm": "attn_norm",
    "feedforward_layernorm": "ffn_norm",
    **{f"mlp.act_fn.{name}": nowhere for name in XIELU},
}


# Mistral 3 and Ministral 3, whose queries grow with their position.


def mistral3_sizes(config: Any) -> Metadata:
    if not isinstance(config, Ministral3Config):
        return llama(config)
    scaled = f32s(rope__scaling__yarn_log_multiplier=rotation_of(config).settings.get("mscale_all_dim", 0.0))
    own = llama(config) + (scaled if rotation_of(config).type == "yarn" else [])
    return own + (f32s(attention__temperature_scale=config.beta) if config.beta else [])


def mistral3_problems(config: Any) -> list[str]:
    problems = windows_problems(config)
    settings = rotation_of(config).settings
    if settings.get("mscale", 1.0) != settings.get("mscale_all_dim", 1.0):
        problems.append("`rope_parameters.mscale`: readers of this form have one factor for both")
    if getattr(config, "beta", None) and rotation_of(config).type != "yarn":
        problems.append("`llama_4_scaling_beta`: readers of this form scale queries only with YaRN")
    return problems


def mistral3_name(config: Any) -> str:
    """A Mistral is a Llama to readers."""
    return "mistral3" if isinstance(config, Ministral3Config) else "llama"


MISTRAL3 = Form("mistral3", interleaved=True, sizes=mistral3_sizes, problems=mistral3_problems, named=mistral3_name)


# Granite with windows and sinks.


def granite_swa_sizes(config: Any) -> Metadata:
    kinds = [config.by_kind[kind] for kind in config.kinds]
    return [
        *granite_sizes(config),
        *window(config),
        ("attention.sliding_window_pattern", "bools", [slides for slides, _ in kinds]),
        ("attention.rope_pattern", "bools", [theta > 0 for _, theta in kinds]),
    ]


def granite_swa_problems(config: Any) -> list[str]:
    problems = []
    bases = {theta for _, theta in config.by_kind.values() if theta > 0}
    if bases - {rotation_of(config).theta}:
        problems.append("`layer_rope_theta`: readers of this form turn all layers by `rope_theta`, or not at all")
    if config.window is None:
        problems.append("`sliding_window`: readers of this form want one")
    return problems


# Muse Glimmer: what readers have as weights of norms is a number in the model.


def raised(name: str) -> Made:
    """A norm that scales by 1 + weight."""
    return lambda _: [Target(f"{name}.weight", [{"add": 1.0}])]


MUSE: Names = SANDWICH | {
    "self_attn.gate_proj": "attn_gate",
    "input_layernorm": raised("attn_norm"),
    "post_attention_layernorm": raised("post_attention_norm"),
    "pre_feedforward_layernorm": raised("ffn_norm"),
    "post_feedforward_layernorm": raised("post_ffw_norm"),
}


def muse_sizes(config: Any) -> Metadata:
    return [
        *llama(config),
        *f32s(final_logit_softcapping=config.final_logit_softcapping, logit_scale=config.output_multiplier),
        *window(config),
        ("attention.sliding_window_pattern", "bools", [slides for slides, _ in config.kinds]),
    ]


def muse_norms(config: Any) -> dict[str, list[float]]:
    """The factor of queries as the weight of their norm."""
    found = {}
    for i in range(config.num_hidden_layers):
        found[f"blk.{i}.attn_q_norm.weight"] = [config.qk_scale_factor] * config.head_dim
        found[f"blk.{i}.attn_k_norm.weight"] = [1.0] * config.head_dim
    return found


def muse_problems(config: Any) -> list[str]:
    problems = refused(config, NO_BIASES, "attention_bias")
    if config.hidden_activation != "silu":
        problems.append(f"`hidden_activation`: readers of this form compute silu, not {config.hidden_activation}")
    if config.post_norm_eps != 1e-8:
        problems.append("`post_norm_eps`: readers of this form normalize with 1e-08")
    if any(slides != rotates for slides, rotates in config.kinds):
        problems.append("`layer_rope_theta`: in this form the layers with a window turn, and no others")
    return problems


def hunyuan_problems(config: Any) -> list[str]:
    return refused(config, NO_BIASES, "attention_bias")


HUNYUAN: Names = INSIDE | {
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
}
GLM4: Names = INSIDE | {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "mlp.gate_up_proj": "ffn_up",
}
GPT2_OUTSIDE: Names = {
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "lm_head": "output",
}
GPT2_INSIDE: Names = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
PHI3 = Form(
    "phi3",
    inside=INSIDE | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    sizes=llama,
    problems=windows_problems,
    constants=phi3_factors,
)
PHI4MM = replace(PHI3, inside={f"{name}.base_layer" if name.endswith("_proj") else name: to for name, to in PHI3.inside.items()})
LLAMA = Form("llama", interleaved=True, sizes=llama, problems=windows_problems)

FORMS = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "SmolVLMForConditionalGeneration": LLAMA,
    "Idefics3ForConditionalGeneration": LLAMA,
    "Qwen2ForCausalLM": Form("qwen2", sizes=llama, problems=windows_problems),
    "Qwen3ForCausalLM": Form("qwen3", sizes=llama, problems=windows_problems),
    "SmolLM3ForCausalLM": Form("smollm3", interleaved=True, sizes=llama, problems=smollm3_problems),
    "Phi3ForCausalLM": PHI3,
    "Phi4MultimodalForCausalLM": PHI3,
    "Phi4MMForCausalLM": PHI4MM,
    "GraniteForCausalLM": Form("granite", interleaved=True, sizes=granite_sizes, problems=windows_problems),
    "GraniteSWAForCausalLM": Form(
        "granite_swa",
        interleaved=True,
        inside=INSIDE | {"self_attn.sinks": "attn_sinks.weight"},
        sizes=granite_swa_sizes,
        problems=granite_swa_problems,
    ),
    "MuseGlimmerForConditionalGeneration": Form(
        "muse-glimmer",
        interleaved=True,
        inside=MUSE,
        sizes=muse_sizes,
        problems=muse_problems,
        constants=muse_norms,
    ),
    "Olmo2ForCausalLM": Form("olmo2", inside=SANDWICH, sizes=olmo_sizes, problems=olmo_problems, own_head=True),
    "Olmo3ForCausalLM": Form("olmo2", inside=SANDWICH, sizes=olmo_sizes, problems=olmo_problems, own_head=True),
    "Glm4ForCausalLM": Form("glm4", inside=GLM4, sizes=llama, problems=windows_problems),
    "Ernie4_5ForCausalLM": Form("ernie4_5", sizes=llama, problems=ernie4_5_problems),
    "Exaone4ForCausalLM": Form(
        "exaone4", inside=SANDWICH, sizes=lambda config: llama(config) + window(config), problems=exaone4_problems
    ),
    "SeedOssForCausalLM": Form(
        "seed_oss",
        inside=INSIDE | {"post_attention_layernorm": "post_attention_norm"},
        sizes=llama,
        problems=lambda config: refused(config, NO_BIASES, "attention_out_bias", "mlp_bias"),
    ),
    "Starcoder2ForCausalLM": Form(
        "starcoder2",
        inside=INSIDE | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
        sizes=starcoder2_sizes,
        problems=starcoder2_problems,
    ),
    "Cohere2ForCausalLM": Form("cohere2", sizes=cohere2_sizes, problems=cohere2_problems),
    "ApertusForCausalLM": Form("apertus", inside=APERTUS, sizes=llama, more=apertus_numbers, problems=hunyuan_problems),
    "Ministral3ForCausalLM": MISTRAL3,
    "Mistral3ForConditionalGeneration": MISTRAL3,
    "HunYuanDenseV1ForCausalLM": Form("hunyuan-dense", inside=HUNYUAN, sizes=llama, problems=hunyuan_problems),
    "GPT2LMHeadModel": Form(
        "gpt2",
        transposed=True,
        outside=GPT2_OUTSIDE,
        inside=GPT2_INSIDE,
        sizes=gpt2_sizes,
        problems=gpt2_problems,
    ),
}
