"""What the architectures are called in GGUF files: names of tensors, keys of their sizes, order of rotated pairs.

Knows names; the values are read and written by the engine. An architecture without an entry here has no GGUF form.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from ..dsl.model import find
from ..errors import ModelConfigError
from ..layers.rotary import ORIGINAL_LENGTH
from . import build

Metadata = list[tuple[str, str, Any]]

#: Names of modules outside of the layers, and inside layer i.
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
LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)\.(weight|bias)")


@dataclass(frozen=True)
class Form:
    """How one architecture is written. With `interleaved`, rotated pairs lie beside each other."""

    name: str
    interleaved: bool = False


FORMS = {
    "LlamaForCausalLM": Form("llama", interleaved=True),
    "MistralForCausalLM": Form("llama", interleaved=True),
    "Qwen2ForCausalLM": Form("qwen2"),
    "Qwen3ForCausalLM": Form("qwen3"),
}


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
    if any(window is not None for window in getattr(config, "windows", [])):
        problems.append("`sliding_window`: readers of this form attend to everything; set it to null to say so")
    if problems:
        raise ModelConfigError(architecture.name, problems)
    key = form.name
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    metadata: Metadata = [("general.architecture", "text", key), ("general.type", "text", "model")]
    metadata.append(("general.name", "text", name))
    metadata += [(f"{key}.{name}", "u32", value) for name, value in sizes.items()]
    metadata.append((f"{key}.attention.layer_norm_rms_epsilon", "f32", config.rms_norm_eps))
    metadata.append((f"{key}.rope.freq_base", "f32", config.rope.theta))
    metadata += rotation + vocabulary
    tensors = [_source(parameter, form, config) for parameter in _parameters(build(fields))]
    repeated = ["lm_head.weight"] if config.tie_word_embeddings else []
    description = {"metadata": metadata, "tensors": tensors, "repeated": repeated, "frequencies": frequencies}
    return json.dumps(description)


def _rotation(form: Form, config: Any) -> tuple[Metadata, dict[str, Any] | None, list[str]]:
    """Keys of the scaling, settings of a table of factors, and what has no form."""
    rope, key = config.rope, f"{form.name}.rope.scaling"
    if rope.type == "default":
        return [], None, []
    if rope.type == "linear":
        return [(f"{key}.type", "text", "linear"), (f"{key}.factor", "f32", rope.settings["factor"])], None, []
    if rope.type == "yarn" and set(rope.settings) == {"factor", ORIGINAL_LENGTH}:
        length = rope.settings[ORIGINAL_LENGTH]
        keys = [(f"{key}.type", "text", "yarn"), (f"{key}.factor", "f32", rope.settings["factor"])]
        return [*keys, (f"{key}.original_context_length", "u32", length)], None, []
    if rope.type == "llama3" and form.interleaved:
        table = {"name": "rope_freqs.weight", "head_dim": config.head_dim, "theta": rope.theta, **rope.settings}
        return [], table, []
    return [], None, [f"`rope_scaling`: type {rope.type!r} with {sorted(rope.settings)} has no GGUF form here yet"]


def _parameters(ir: str) -> list[str]:
    """Names of all parameters, layer by layer."""
    model = json.loads(ir)
    names = [spec["name"] for spec in model["parameters"]]
    for item in model["body"]:
        for i in range(item.get("repeat", 0)):
            names += [spec["name"].replace("{i}", str(i)) for spec in item["block"].get("parameters", [])]
    return names


def _source(parameter: str, form: Form, config: Any) -> dict[str, Any]:
    if inside := LAYER.fullmatch(parameter):
        layer, module, part = inside.groups()
        source: dict[str, Any] = {"name": f"blk.{layer}.{INSIDE[module]}.{part}", "from": parameter}
        heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
        if form.interleaved and module in heads:
            source["interleave_heads"] = heads[module]
        return source
    module, part = parameter.rsplit(".", 1)
    return {"name": f"{OUTSIDE[module]}.{part}", "from": parameter}
