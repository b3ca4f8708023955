"""The architectures in GGUF files: tensor names, keys of sizes, order of rotated pairs.

Knows names; the engine reads and writes the values. An architecture without an entry here cannot be exported to GGUF.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..dsl.model import find
from ..errors import ModelConfigError
from ..layers.rotary import ORIGINAL_LENGTH
from ..layers.window import FULL, SLIDING
from . import build

Metadata = list[tuple[str, str, Any]]

#: Names of modules of Llama and its kin, outside of the layers and inside layer i.
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INSIDE = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
#: Layers with norms after their halves too, by what each architecture calls them.
SANDWICH = INSIDE | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GLM4_INSIDE = INSIDE | {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "mlp.gate_up_proj": "ffn_up",
}
SEED_OSS_INSIDE = INSIDE | {"post_attention_layernorm": "post_attention_norm"}
PHI3_INSIDE = INSIDE | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.*)\.(weight|bias)")

#: The same of GPT-2.
GPT2_OUTSIDE = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
}
GPT2_INSIDE = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def _full(config: Any) -> Any:
    """The rotation, that of full attention where kinds of layers have their own."""
    return config.rope[FULL] if isinstance(config.rope, dict) else config.rope


def _rotated(config: Any) -> int:
    return int(config.head_dim * (_full(config).share or 1.0))


def _llama_sizes(config: Any) -> Metadata:
    """The sizes of Llama and of architectures like it, by key."""
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": _rotated(config),
        "vocab_size": config.vocab_size,
    }
    return [
        *((name, "u32", value) for name, value in sizes.items()),
        ("attention.layer_norm_rms_epsilon", "f32", config.rms_norm_eps),
        ("rope.freq_base", "f32", _full(config).theta),
    ]


def _gemma_sizes(config: Any) -> Metadata:
    caps = [(name, getattr(config, name)) for name in ("attn_logit_softcapping", "final_logit_softcapping")]
    window = [("attention.sliding_window", "u32", config.window)] if config.window else []
    return [*_llama_sizes(config), *((name, "f32", value) for name, value in caps if value is not None), *window]


def _granite_sizes(config: Any) -> Metadata:
    factors = {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }
    return [*_llama_sizes(config), *((name, "f32", value) for name, value in factors.items())]


def _gpt2_sizes(config: Any) -> Metadata:
    sizes = {
        "context_length": config.n_positions,
        "embedding_length": config.n_embd,
        "block_count": config.n_layer,
        "feed_forward_length": config.n_inner,
        "attention.head_count": config.n_head,
        "vocab_size": config.vocab_size,
    }
    epsilon = ("attention.layer_norm_epsilon", "f32", config.layer_norm_epsilon)
    return [*((name, "u32", value) for name, value in sizes.items()), epsilon]


def _llama_problems(config: Any) -> list[str]:
    """Settings for which the form has no key."""
    windows = [*getattr(config, "windows", []), getattr(config, "window", None)]
    shorter = any(window is not None and window < config.max_position_embeddings for window in windows)
    said = "`sliding_window`: readers of this form attend to everything; set it to null to say so"
    return [said] if shorter else []


def _gemma_problems(config: Any, period: int, largest: int) -> list[str]:
    """`largest` is the number of layers of the one size whose scores readers divide by other numbers."""
    problems = []
    if config.attention_bias:
        problems.append("`attention_bias`: readers of this form have no biases")
    scaled = config.hidden_size / config.num_attention_heads if config.num_hidden_layers == largest else config.head_dim
    if config.query_pre_attn_scalar != scaled:
        problems.append(f"`query_pre_attn_scalar`: readers of this form divide by the root of {scaled:g}")
    kinds = [SLIDING if (i + 1) % period else FULL for i in range(config.num_hidden_layers)]
    if config.layer_types != kinds:
        problems.append(f"`layer_types`: in this form every layer number {period} sees everything, the others have a window")
    if config.hidden_activation not in ("gelu_pytorch_tanh", "gelu_new"):
        problems.append(f"`hidden_activation`: readers of this form compute gelu_tanh, not {config.hidden_activation}")
    return problems


def _gemma2_problems(config: Any) -> list[str]:
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    missing = [f"`{name}`: readers of this form have a cap" for name in names if getattr(config, name) is None]
    return _gemma_problems(config, 2, 46) + missing


def _gemma3_problems(config: Any) -> list[str]:
    problems = _gemma_problems(config, 6, 62)
    if config.final_logit_softcapping is not None:
        problems.append("`final_logit_softcapping`: readers of this form have no cap")
    if (config.rope[SLIDING].theta, config.rope[SLIDING].type) != (10000.0, "default"):
        problems.append("`rope_local_base_freq`: readers of this form rotate layers with a window by 10000")
    return problems


def _olmo2_problems(config: Any) -> list[str]:
    return ["`attention_bias`: readers of this form have no biases"] if config.attention_bias else []


def _ernie4_5_problems(config: Any) -> list[str]:
    return ["`use_bias`: readers of this form have no biases in feed-forward layers"] if config.use_bias else []


def _exaone4_sizes(config: Any) -> Metadata:
    window = [("attention.sliding_window", "u32", config.window)] if config.window else []
    return [*_llama_sizes(config), *window]


def _exaone4_problems(config: Any) -> list[str]:
    """Readers know which layers have a window by their number alone."""
    kinds = [SLIDING if (i + 1) % 4 else FULL for i in range(config.num_hidden_layers)]
    if config.num_hidden_layers == 64 and (config.window is None or config.layer_types != kinds):
        return ["`layer_types`: in this form every fourth of 64 layers sees everything, the others have a window"]
    if config.num_hidden_layers != 64 and config.window is not None:
        return ["`sliding_window`: in this form only models of 64 layers have one; null says that there is none"]
    return []


def _seed_oss_problems(config: Any) -> list[str]:
    names = ("attention_out_bias", "mlp_bias")
    return [f"`{name}`: readers of this form have no such biases" for name in names if getattr(config, name)]


def _smollm3_problems(config: Any) -> list[str]:
    every_fourth = [(i + 1) % 4 != 0 for i in range(config.num_hidden_layers)]
    said = "`no_rope_layers`: readers of this form leave every fourth layer without positions, and no other"
    return _llama_problems(config) + ([] if config.rotated == every_fourth else [said])


def _gpt2_problems(config: Any) -> list[str]:
    problems = []
    if config.activation_function not in ("gelu_new", "gelu_pytorch_tanh"):
        problems.append(
            f"`activation_function`: readers of this form compute gelu_new, not {config.activation_function}"
        )
    if not config.scale_attn_weights or config.scale_attn_by_inverse_layer_idx:
        problems.append("`scale_attn_weights`: readers of this form divide scores by the root of the head size alone")
    return problems


@dataclass(frozen=True)
class Form:
    """The description of an architecture in a GGUF file."""

    name: str
    #: Rotated pairs are adjacent.
    interleaved: bool = False
    #: Matrices of layers are kept as [in, out] by the model.
    transposed: bool = False
    #: Weights of norms act as 1 + w in the model.
    offset: bool = False
    outside: dict[str, str] = field(default_factory=lambda: OUTSIDE)
    inside: dict[str, str] = field(default_factory=lambda: INSIDE)
    sizes: Callable[[Any], Metadata] = _llama_sizes
    problems: Callable[[Any], list[str]] = _llama_problems


FORMS = {
    "LlamaForCausalLM": Form("llama", interleaved=True),
    "MistralForCausalLM": Form("llama", interleaved=True),
    "Qwen2ForCausalLM": Form("qwen2"),
    "Qwen3ForCausalLM": Form("qwen3"),
    "SmolLM3ForCausalLM": Form("smollm3", interleaved=True, problems=_smollm3_problems),
    "Gemma2ForCausalLM": Form(
        "gemma2", offset=True, inside=SANDWICH, sizes=_gemma_sizes, problems=_gemma2_problems
    ),
    "Gemma3ForCausalLM": Form(
        "gemma3", offset=True, inside=SANDWICH, sizes=_gemma_sizes, problems=_gemma3_problems
    ),
    "Phi3ForCausalLM": Form("phi3", inside=PHI3_INSIDE),
    "GraniteForCausalLM": Form("granite", interleaved=True, sizes=_granite_sizes),
    "Olmo2ForCausalLM": Form("olmo2", inside=SANDWICH, problems=_olmo2_problems),
    "Glm4ForCausalLM": Form("glm4", inside=GLM4_INSIDE),
    "Ernie4_5ForCausalLM": Form("ernie4_5", problems=_ernie4_5_problems),
    "Exaone4ForCausalLM": Form("exaone4", inside=SANDWICH, sizes=_exaone4_sizes, problems=_exaone4_problems),
    "SeedOssForCausalLM": Form("seed_oss", inside=SEED_OSS_INSIDE, problems=_seed_oss_problems),
    "GPT2LMHeadModel": Form(
        "gpt2",
        transposed=True,
        outside=GPT2_OUTSIDE,
        inside=GPT2_INSIDE,
        sizes=_gpt2_sizes,
        problems=_gpt2_problems,
    ),
}

#: Tensors that readers take as f32 alone.
EXACT = {"position_embd.weight"}


def vocabulary_size(fields: dict[str, Any]) -> int:
    """Rows of the embedding table. Raises ModelConfigError for a configuration that is not supported."""
    architecture = find(fields)
    config: Any = architecture.config.from_dict(architecture.name, fields)
    return config.vocab_size


def describe(fields: dict[str, Any], vocabulary: Metadata, name: str) -> str:
    """The description of a model's file as JSON: metadata, and the source of every tensor.

    Raises ModelConfigError for what has no form in GGUF.
    """
    architecture = find(fields)
    form = FORMS.get(architecture.name)
    if form is None:
        known = ", ".join(FORMS)
        raise ModelConfigError(
            architecture.name, [f"`architectures`: {architecture.name} has no GGUF form here yet; these have: {known}"]
        )
    config: Any = architecture.config.from_dict(architecture.name, fields)
    rotation, frequencies, problems = _rotation(form, config)
    problems += form.problems(config)
    if problems:
        raise ModelConfigError(architecture.name, problems)
    metadata: Metadata = [("general.architecture", "text", form.name), ("general.type", "text", "model")]
    metadata.append(("general.name", "text", name))
    metadata += [(f"{form.name}.{key}", kind, value) for key, kind, value in form.sizes(config)]
    metadata += rotation + vocabulary
    tensors = [_source(parameter, form, config) for parameter in _parameters(build(fields))]
    repeated = ["lm_head.weight"] if config.tie_word_embeddings else []
    description = {"metadata": metadata, "tensors": tensors, "repeated": repeated, "frequencies": frequencies}
    return json.dumps(description)


def _rotation(form: Form, config: Any) -> tuple[Metadata, dict[str, Any] | None, list[str]]:
    """Keys of the scaling, settings of a table of factors, and what has no form."""
    rope, key = _full(config) if hasattr(config, "rope") else None, f"{form.name}.rope.scaling"
    if rope is None or rope.type == "default":
        return [], None, []
    if rope.type == "linear":
        return [(f"{key}.type", "text", "linear"), (f"{key}.factor", "f32", rope.settings["factor"])], None, []
    if rope.type == "yarn" and set(rope.settings) == {"factor", ORIGINAL_LENGTH}:
        length = rope.settings[ORIGINAL_LENGTH]
        keys = [(f"{key}.type", "text", "yarn"), (f"{key}.factor", "f32", rope.settings["factor"])]
        return [*keys, (f"{key}.original_context_length", "u32", length)], None, []
    if rope.type == "llama3" and form.name in ("llama", "exaone4"):
        table = {"name": "rope_freqs.weight", "head_dim": config.head_dim, "theta": rope.theta, **rope.settings}
        return [], table, []
    return [], None, [f"`rope_scaling`: type {rope.type!r} with {sorted(rope.settings)} has no GGUF form here yet"]


def _parameters(ir: str) -> list[str]:
    """Names of all parameters, layer by layer."""
    model = json.loads(ir)
    names = [spec["name"] for spec in model["parameters"]]
    for item in model["body"]:
        for i in range(item.get("repeat", 0)):
            block = item["blocks"][item["pattern"][i] if "pattern" in item else 0]
            names += [spec["name"].replace("{i}", str(i)) for spec in block["parameters"]]
    return names


def _source(parameter: str, form: Form, config: Any) -> dict[str, Any]:
    if inside := LAYER.fullmatch(parameter):
        layer, module, part = inside.groups()
        source: dict[str, Any] = {"name": f"blk.{layer}.{form.inside[module]}.{part}", "from": parameter}
        if form.interleaved and module in ("self_attn.q_proj", "self_attn.k_proj"):
            queries = module == "self_attn.q_proj"
            source["interleave_heads"] = config.num_attention_heads if queries else config.num_key_value_heads
        if form.offset and "norm" in source["name"]:
            source["plus_one"] = True
        if form.transposed and part == "weight" and "norm" not in source["name"]:
            source["transpose"] = True
        return source
    module, part = parameter.rsplit(".", 1)
    name = f"{form.outside[module]}.{part}"
    source = {"name": name, "from": parameter, **({"exact": True} if name in EXACT else {})}
    return source | ({"plus_one": True} if form.offset and "norm" in name else {})
