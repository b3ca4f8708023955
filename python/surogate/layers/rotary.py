"""Rotary position embedding, with both spellings of its settings in config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from ..dsl import Module, Reader, Tensor, ops
from ..dsl.config import FLOAT, WHOLE

#: Settings of each type; all are handed to the engine under their own names.
SETTINGS: dict[str, dict[str, type]] = {
    "default": {},
    "linear": {"factor": float},
    "dynamic": {"factor": float},
    "llama3": {
        "factor": float,
        "low_freq_factor": float,
        "high_freq_factor": float,
        "original_max_position_embeddings": int,
    },
    "yarn": {
        "factor": float,
        "original_max_position_embeddings": int,
        "attention_factor": float,
        "beta_fast": float,
        "beta_slow": float,
        "mscale": float,
        "mscale_all_dim": float,
        "truncate": bool,
    },
    "longrope": {
        "factor": float,
        "original_max_position_embeddings": int,
        "attention_factor": float,
        "short_factor": list,
        "long_factor": list,
    },
}

REQUIRED = {
    "linear": ["factor"],
    "dynamic": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor"],
    "yarn": ["factor"],
    "longrope": ["short_factor", "long_factor"],
}

#: Types whose frequencies follow from the largest position of the batch.
OF_BATCH = ("dynamic", "longrope")

ORIGINAL_LENGTH = "original_max_position_embeddings"


@dataclass(frozen=True)
class Rotation:
    """Type, base and scaling of the rotation, as a field of a config class: `rope: Rotation`.

    Read from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (4).
    """

    theta: float | None = None
    type: str = "default"
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, reader: Reader, _field: str) -> Self:
        parameters, scaling = reader.take("rope_parameters"), reader.take("rope_scaling")
        theta = reader.take("rope_theta")
        name = "rope_parameters" if parameters else "rope_scaling"
        if parameters and scaling and parameters != scaling:
            reader.problem("rope_scaling", "contradicts `rope_parameters`; give one of the two")
        values = parameters or scaling or {}
        if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
            reader.problem(name, f"{values!r} is not supported, expected one object of settings for all layers")
            return cls()
        values = dict(values)
        theta = values.pop("rope_theta", theta)
        kind = values.pop("rope_type", None) or values.pop("type", None) or "default"
        values.pop("type", None)
        partial = values.pop("partial_rotary_factor", None)
        if partial not in (None, 1, 1.0):
            reader.problem(f"{name}.partial_rotary_factor", f"{partial} is not supported, expected 1.0")
        if theta is not None and not (_is_number(theta) and theta > 0):
            reader.problem("rope_theta", f"{theta!r} is not supported, expected a number above 0")
            theta = None
        settings = _settings(reader, name, kind, values)
        outside = reader.take(ORIGINAL_LENGTH)  # wins, as in transformers
        if outside is not None and ORIGINAL_LENGTH in SETTINGS.get(str(kind), {}):
            if _fits(outside, int):
                settings[ORIGINAL_LENGTH] = int(outside)
            else:
                reader.problem(ORIGINAL_LENGTH, f"{outside!r} is not supported, expected {EXPECTED[int]}")
        return cls(None if theta is None else float(theta), kind, settings)

    def complete(self, reader: Reader, head_dim: int, max_position_embeddings: int, theta: float = 10000.0) -> Self:
        """With what follows from the rest of the config. `theta` is the architecture's own base.

        Most types are relative to the model's own length where the config names no other, `dynamic`
        always.
        """
        settings = dict(self.settings)
        if self.type == "dynamic":
            settings[ORIGINAL_LENGTH] = max_position_embeddings
        elif ORIGINAL_LENGTH in SETTINGS.get(self.type, {}):
            settings.setdefault(ORIGINAL_LENGTH, max_position_embeddings)
        if self.type == "longrope":
            settings.setdefault("factor", max_position_embeddings / settings[ORIGINAL_LENGTH])
            for key in ("short_factor", "long_factor"):
                if len(settings.get(key, [])) != head_dim // 2:
                    found = len(settings.get(key, []))
                    reader.problem(
                        f"rope_scaling.{key}", f"has {found} numbers, expected head_dim / 2 = {head_dim // 2}"
                    )
        return type(self)(theta if self.theta is None else self.theta, self.type, settings)


def _is_number(value: Any) -> bool:
    # False for NaN, and exact for whole numbers of any size.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -FLOAT <= value <= FLOAT


EXPECTED = {int: "a whole number above 0", float: "a number", bool: "true or false", list: "a list of numbers"}


def _fits(value: Any, kind: type) -> bool:
    if kind is list:
        return isinstance(value, list) and all(_is_number(v) for v in value)
    if kind is int:
        return _is_number(value) and 1 <= value <= WHOLE and value == int(value)
    return isinstance(value, bool) if kind is bool else _is_number(value)


def _settings(reader: Reader, name: str, kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """The settings that `kind` knows; problems for the rest."""
    if not isinstance(kind, str) or kind not in SETTINGS:
        reader.problem(f"{name}.rope_type", f"{kind!r} is not available yet, expected {', '.join(SETTINGS)}")
        return {}
    known, settings = SETTINGS[kind], {}
    for key, value in values.items():
        if value is None or value == 0 and key.startswith(("mscale", "beta")):  # 0 means unset, as in transformers
            continue
        if key not in known:
            if kind != "default":
                reader.problem(f"{name}.{key}", f"is not a setting of rope type {kind!r}")
        elif not _fits(value, known[key]):
            reader.problem(f"{name}.{key}", f"{value!r} is not supported, expected {EXPECTED[known[key]]}")
        else:
            settings[key] = [float(v) for v in value] if known[key] is list else known[key](value)
    for key in REQUIRED.get(kind, []):
        if key not in settings:
            reader.problem(f"{name}.{key}", f"is missing, rope type {kind!r} needs it")
    return settings


class RotaryEmbedding(Module):
    """Frequencies of the rotation; a call gives the function that rotates queries and keys."""

    def __init__(self, head_dim: int, rope: Rotation) -> None:
        self.head_dim = head_dim
        self.rope = rope

    def forward(self, positions: Tensor) -> Callable[..., Tensor]:
        settings = dict(
            head_dim=self.head_dim, theta=self.rope.theta, scaling_type=self.rope.type, **self.rope.settings
        )
        if self.rope.type in OF_BATCH:
            frequencies, scaling = ops.rope_frequencies_of_batch(positions, **settings)
        else:
            frequencies, scaling = ops.rope_frequencies(**settings)
        return lambda x, **attributes: ops.rope(x, positions, frequencies, scaling, **attributes)
