"""Scalings of the rotation as keys and tables of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

from ...layers.rotary import ORIGINAL_LENGTH
from .form import Form, Metadata
from .sizes import f32s, rotated, rotation_of, u32s

#: Forms whose readers take a table of factors of the frequencies.
WITH_TABLE = ("llama", "exaone4", "apertus", "mistral3", "granite", "smollm3")


def rotation(form: Form, name: str, config: Any) -> tuple[Metadata, dict[str, Any] | None, list[str]]:
    """Keys of the scaling, settings of a table of factors, and what has no form."""
    rope = rotation_of(config) if hasattr(config, "rope") else None
    if rope is None or rope.type == "default":
        return [], None, []
    settings, keys = rope.settings, [(f"{name}.rope.scaling.type", "text", rope.type)]
    if rope.type == "linear":
        return keys + _named(name, f32s(factor=settings["factor"])), None, []
    if rope.type == "yarn":
        return keys + _named(name, _yarn(settings)), None, _yarn_problems(settings, name)
    if rope.type == "llama3" and name in WITH_TABLE:
        table = {"name": "rope_freqs.weight", "head_dim": rotated(config), "theta": rope.theta, **settings}
        return [], table, []
    if rope.type == "longrope" and name == "phi3":
        own = u32s(original_context_length=settings[ORIGINAL_LENGTH]) + f32s(attn_factor=_attention(settings))
        return keys + _named(name, own), None, []
    if rope.type == "proportional" and name == "gemma4":
        return [], None, [] if settings.get("factor", 1.0) == 1.0 else ["`rope_parameters.factor`: readers have none"]
    return [], None, [f"`rope_scaling`: type {rope.type!r} with {sorted(settings)} has no GGUF form here yet"]


def rotation_notes(config: Any) -> list[str]:
    """Sentences on the scaling that readers compute a little otherwise."""
    rope = rotation_of(config) if hasattr(config, "rope") else None
    if rope is not None and rope.type == "longrope":
        return [
            "readers choose the short or the long factors by the size of the context, the model by the text's length"
        ]
    if rope is None or rope.type != "yarn" or rope.settings.get("truncate", True):
        return []
    return ["readers round the bounds of YaRN to whole pairs; the model (`truncate: false`) does not"]


def _named(name: str, keys: Metadata) -> Metadata:
    return [(f"{name}.rope.scaling.{key}", kind, value) for key, kind, value in keys]


def _yarn(settings: dict[str, Any]) -> Metadata:
    """Readers multiply with 1 + ln(factor)/10 themselves; `attn_factor` is what they multiply that with."""
    usual = 0.1 * math.log(settings["factor"]) + 1.0 if settings["factor"] > 1 else 1.0
    given = settings.get("attention_factor")
    return [
        *f32s(
            factor=settings["factor"],
            attn_factor=None if given is None else given / usual,
            yarn_beta_fast=settings.get("beta_fast"),
            yarn_beta_slow=settings.get("beta_slow"),
        ),
        *u32s(original_context_length=settings[ORIGINAL_LENGTH]),
    ]


def _yarn_problems(settings: dict[str, Any], name: str) -> list[str]:
    if name in ("deepseek2", "mistral3"):
        return []  # which have keys of their own for both
    scaled = [key for key in ("mscale", "mscale_all_dim") if settings.get(key) not in (None, 1.0)]
    return [f"`rope_scaling.{key}`: readers of this form have no such factor" for key in scaled]


def _attention(settings: dict[str, Any]) -> float:
    """The factor of cosines and sines of a rotation with two tables."""
    if (given := settings.get("attention_factor")) is not None:
        return float(given)
    factor = settings["factor"]
    return math.sqrt(1 + math.log(factor) / math.log(settings[ORIGINAL_LENGTH])) if factor > 1 else 1.0
