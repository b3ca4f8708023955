"""The form of an architecture in a GGUF file, and the tensors of such a file as the engine reads their description.

Knows no architecture.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

#: Keys, types and values of the file's beginning.
Metadata = list[tuple[str, str, Any]]

#: Changes of a tensor on its way into the file, in their order.
Steps = list[dict[str, Any]]


@dataclass(frozen=True)
class Target:
    """A tensor of the file that is made of a parameter, or of a part of it. `name` is that in a layer."""

    name: str
    steps: Steps = field(default_factory=list)
    #: Parts of the parameter that follow each other in the tensor, each with its steps.
    joined: list[Steps] = field(default_factory=list)


#: The tensors that are made of a parameter, by the configuration.
Made = Callable[[Any], list[Target]]


#: Names of the file by those of modules, or of parameters; `experts.*` stands for each expert.
Names = dict[str, str | Made]

#: Names of modules of Llama and its kin, outside of the layers and inside a layer.
OUTSIDE: Names = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
INSIDE: Names = {
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
SANDWICH: Names = INSIDE | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


@dataclass(frozen=True)
class Form:
    """The description of an architecture in a GGUF file."""

    name: str
    #: Rotated pairs are adjacent in the file, and half a head from each other in the model.
    interleaved: bool = False
    #: Matrices of layers are kept as [in, out] by the model.
    transposed: bool = False
    #: Weights of norms act as 1 + w in the model.
    offset: bool = False
    #: Names outside of the layers, and in a layer.
    outside: Names = field(default_factory=lambda: dict(OUTSIDE))
    inside: Names = field(default_factory=lambda: dict(INSIDE))
    sizes: Callable[[Any], Metadata] = lambda _: []
    #: Further keys, which do not begin with the name of the architecture.
    more: Callable[[Any], Metadata] = lambda _: []
    #: Settings that readers of the form compute otherwise or not at all, each with its reason.
    problems: Callable[[Any], list[str]] = lambda _: []
    #: Sentences for the user on small differences in the arithmetic of readers.
    notes: Callable[[Any], list[str]] = lambda _: []
    #: Vectors of the file that are no parameters, by name.
    constants: Callable[[Any], dict[str, list[float]]] = lambda _: {}
    #: Readers want a head in the file, even where it is the embedding's table.
    own_head: bool = False
    #: The name of the form for models of such a configuration, where that is another.
    named: Callable[[Any], str] | None = None

    def name_for(self, config: Any) -> str:
        """The architecture that the file names for such a configuration."""
        return self.named(config) if self.named else self.name


#: A parameter of a layer.
LAYER = re.compile(r"(?:model\.(?:language_model\.|text_model\.)?layers|transformer\.h)\.(\d+)\.(.*)")
#: The part that has the layers.
PART = re.compile(r"(?:model\.(?:language_model\.|text_model\.)?|transformer\.)")
EXPERT = re.compile(r"experts\.\d+\.")
#: The norm of a state-space model or a delta net: its weight is no offset in any architecture.
PLAIN_NORM = "ssm_norm"


def sources(parameters: list[str], form: Form, config: Any) -> list[dict[str, Any]]:
    """The tensors of the file in the order of the parameters. Experts that are parameters of their own are stacked."""
    made: dict[str, dict[str, Any]] = {}
    for parameter in parameters:
        for source in _made_of(parameter, form, config):
            stacked = isinstance(source["from"], list) and "join" not in source
            if stacked and source["name"] in made:
                made[source["name"]]["from"] += source["from"]
            else:
                made[source["name"]] = source
    return list(made.values())


def _made_of(parameter: str, form: Form, config: Any) -> list[dict[str, Any]]:
    if inside := LAYER.fullmatch(parameter):
        layer, path = inside.groups()
        prefix, names = f"blk.{layer}.", form.inside
    else:
        path, prefix, names = PART.sub("", parameter, count=1), "", form.outside
    key = EXPERT.sub("experts.*.", path)
    module, _, part = key.rpartition(".")
    if part in ("weight", "bias") and module in names:
        value, suffix = names[module], f".{part}"
    else:
        module, value, suffix = key, names[key], ""
    if not isinstance(value, str):
        return [_changed(parameter, prefix, target) for target in value(config)]
    source: dict[str, Any] = {"name": f"{prefix}{value}{suffix}", "from": parameter}
    if "experts.*." in key:
        source["from"] = [parameter]
    if form.interleaved and module in ("self_attn.q_proj", "self_attn.k_proj"):
        queries = module == "self_attn.q_proj"
        source["interleave_heads"] = config.num_attention_heads if queries else config.num_key_value_heads
    if form.offset and "norm" in source["name"] and PLAIN_NORM not in source["name"]:
        source["plus_one"] = True
    if form.transposed and prefix and suffix == ".weight" and "norm" not in source["name"]:
        source["transpose"] = True
    return [source]


def _changed(parameter: str, prefix: str, target: Target) -> dict[str, Any]:
    name = f"{prefix}{target.name}"
    if target.joined:
        parts = [{"from": parameter, "steps": steps} for steps in target.joined]
        return {"name": name, "from": parts, "join": True}
    return {"name": name, "from": parameter, **({"steps": target.steps} if target.steps else {})}


def cut(axis: int, begin: int, end: int) -> dict[str, Any]:
    """The step that keeps `begin` to `end` of an axis."""
    return {"slice": {"axis": axis, "from": begin, "to": end}}


def halves(first: str, second: str, size: Callable[[Any], int], axis: int = 0) -> Made:
    """Two tensors of `size` elements of an axis each, one after the other in the parameter."""

    def made(config: Any) -> list[Target]:
        half = size(config)
        return [Target(first, [cut(axis, 0, half)]), Target(second, [cut(axis, half, 2 * half)])]

    return made


def shaped(name: str, shape: Callable[[Any], list[int]], *before: dict[str, Any] | str) -> Made:
    """One tensor with other axes, after the steps `before`."""
    return lambda config: [Target(name, [*before, {"reshape": shape(config)}])]  # type: ignore[list-item]


def experts(module: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Names:
    """Names of the stacks of experts that are matrices of their own in the model."""
    parts = zip(names, ("gate", "up", "down"), strict=True)
    return {f"{module}.experts.*.{name}": f"ffn_{part}_exps" for name, part in parts}


def shared_expert(module: str) -> Names:
    """Names of an expert that all tokens go through."""
    return {f"{module}.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
