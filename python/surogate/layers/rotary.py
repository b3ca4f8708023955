"""Rotary position embedding, with both spellings of its settings in config.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from ..dsl import Module, Reader, Tensor, ops
from ..dsl.config import FLOAT, WHOLE
from .window import FULL, SLIDING

#: Settings of each type; all are handed to the engine under their own names.
SETTINGS: dict[str, dict[str, type]] = {
    "default": {},
    "linear": {"factor": float},
    "dynamic": {"factor": float},
    "proportional": {"factor": float, "partial_rotary_factor": float},
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
    #: The share of a head's columns that is rotated.
    share: float | None = None
    #: Pairs that turn with time, row and column of a token, where the config says it, and whether they alternate.
    sections: tuple[int, ...] | None = None
    alternate: bool = False

    @classmethod
    def read(cls, reader: Reader, _field: str) -> Self:
        """Reads the settings of one rotary embedding for all layers, in any of their spellings."""
        parameters, scaling = reader.take("rope_parameters"), reader.take("rope_scaling")
        theta = reader.take("rope_theta")
        name = "rope_parameters" if parameters else "rope_scaling"
        if parameters and scaling and parameters != scaling:
            reader.problem("rope_scaling", "contradicts `rope_parameters`; give one of the two")
        values = parameters or scaling or {}
        if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
            reader.problem(name, f"{values!r} is not supported, expected one object of settings for all layers")
            return cls()
        return cls.of(reader, name, values, theta)

    @classmethod
    def of(cls, reader: Reader, name: str, values: dict[str, Any], theta: Any) -> Self:
        """The rotation of one object of settings, which stands in the file under `name`."""
        values = dict(values)
        theta = values.pop("rope_theta", theta)
        kind = values.pop("rope_type", None) or values.pop("type", None) or "default"
        values.pop("type", None)
        # Of the proportional type it is a setting: all columns belong to pairs, of which a part turns.
        share = None if kind == "proportional" else values.pop("partial_rotary_factor", None)
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
        return cls(None if theta is None else float(theta), kind, settings, share)

    def complete(
        self,
        reader: Reader,
        head_dim: int,
        max_position_embeddings: int,
        theta: float = 10000.0,
        share: float | None = None,
    ) -> Self:
        """The settings completed from the rest of the config. `theta` is the architecture's own base, `share` its own
        part of the columns; without one, all of them are rotated. Most types are relative to the model's own length
        where the config names no other, `dynamic` always.

        Most types are relative to the model's own length where the config names no other, `dynamic`
        always.
        """
        if share is None:
            if self.share not in (None, 1.0):
                reader.problem("rope_scaling.partial_rotary_factor", f"{self.share} is not supported, expected 1.0")
            share = 1.0
        elif self.share is not None:
            share = self.share
        if not (_is_number(share) and 0 < share <= 1):
            reader.problem("partial_rotary_factor", f"{share!r} is not supported, expected a number above 0, up to 1")
            share = 1.0
        columns = int(head_dim * share)
        if columns < 2 or columns % 2 and share != 1.0:
            reader.problem("partial_rotary_factor", f"makes {columns} of {head_dim} columns, expected pairs of them")
        settings = dict(self.settings)
        if self.type == "dynamic":
            settings[ORIGINAL_LENGTH] = max_position_embeddings
        elif ORIGINAL_LENGTH in SETTINGS.get(self.type, {}):
            settings.setdefault(ORIGINAL_LENGTH, max_position_embeddings)
        if self.type == "longrope":
            settings.setdefault("factor", max_position_embeddings / settings[ORIGINAL_LENGTH])
            pairs = columns // 2
            for key in ("short_factor", "long_factor"):
                if len(settings.get(key, [])) != pairs:
                    found = len(settings.get(key, []))
                    of = "head_dim / 2" if share == 1.0 else "half of the rotated columns"
                    reader.problem(f"rope_scaling.{key}", f"has {found} numbers, expected {of} = {pairs}")
        # In one order, so that equal models are equal text.
        settings = {key: settings[key] for key in SETTINGS.get(self.type, {}) if key in settings} | settings
        theta = theta if self.theta is None else self.theta
        return type(self)(theta, self.type, settings, share, self.sections, self.alternate)

    def axes(self, pairs: int, default: Sequence[int]) -> list[int]:
        """The axis of each pair: time, row or column. `default` are the sections of configs that do not say them."""
        sections = self.sections or tuple(default)
        if not self.alternate:
            return [axis for axis, count in enumerate(sections) for _ in range(count)][:pairs]
        return [axis if (axis := i % 3) and i // 3 < sections[axis] else 0 for i in range(pairs)]


class ImageRotation(Rotation):
    """A rotation whose settings may say which pairs turn with which axis of an image. A text has the same position on all
    axes, so its model does not need them."""

    @classmethod
    def read(cls, reader: Reader, field: str) -> Rotation:
        """Reads the sections of the axes (time, row, column), then the settings as for text."""
        found: dict[str, Any] = {}
        for name in ("rope_parameters", "rope_scaling"):
            values = reader.fields.get(name)
            if isinstance(values, dict):
                found |= {key: values[key] for key in ("mrope_section", "mrope_interleaved") if key in values}
                rest = {key: value for key, value in values.items() if key not in found}
                for kind in ("type", "rope_type"):
                    if rest.get(kind) == "mrope":
                        rest[kind] = "default"
                reader.fields = reader.fields | {name: rest}
        sections = found.get("mrope_section")
        if sections is not None and not (isinstance(sections, list) and len(sections) == 3 and all(map(_is_count, sections))):
            reader.problem("mrope_section", f"{sections!r} is not supported, expected three whole numbers")
            sections = None
        of = Rotation.read(reader, field)
        return replace(of, sections=tuple(sections) if sections else None, alternate=bool(found.get("mrope_interleaved")))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True)
class Rotations:
    """The rotation of each kind of layer, as a field of a config class: `rope: Rotations`.

    Transformers 5 has settings by kind in `rope_parameters`. In 4, `rope_theta` and `rope_scaling` are those of full
    attention; layers with a window are not scaled, and their base is `rope_local_base_freq` where an architecture has
    that field.
    """

    by_kind: dict[str, Rotation] = field(default_factory=dict)

    @classmethod
    def read(cls, reader: Reader, _field: str) -> Self:
        """Reads the settings for each kind of layer, full and sliding attention."""
        parameters = reader.fields.get("rope_parameters")
        if not isinstance(parameters, dict) or not all(isinstance(values, dict) for values in parameters.values()):
            full, local = Rotation.read(reader, _field), reader.take("rope_local_base_freq")
            if local is not None and not (_is_number(local) and local > 0):
                reader.problem("rope_local_base_freq", f"{local!r} is not supported, expected a number above 0")
                local = None
            return cls({FULL: full} if local is None else {FULL: full, SLIDING: Rotation(float(local))})
        for name in ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq"):
            if reader.take(name) is not None and name != "rope_parameters":
                reader.problem(name, "contradicts `rope_parameters`, which has settings by kind of layer")
        found = {
            kind: Rotation.of(reader, f"rope_parameters.{kind}", values, None) for kind, values in parameters.items()
        }
        return cls(found)

    def with_local_theta(self, theta: float) -> Self:
        """With a base of layers with a window, for configs that have none."""
        local = self.by_kind.get(SLIDING, Rotation())
        return self if local.theta else type(self)({**self.by_kind, SLIDING: replace(local, theta=theta)})

    def complete(
        self,
        reader: Reader,
        head_dim: int | dict[str, int],
        max_position_embeddings: int,
        theta: float,
        share: float | None = None,
    ) -> dict[str, Rotation]:
        """The settings of each kind completed as those of a :class:`Rotation`; kinds may have heads of other sizes.
        Layers with a window have the base of the others where a config of transformers 4 names none of their own."""
        full = self.by_kind.get(FULL, Rotation())
        own = {FULL: full, SLIDING: self.by_kind.get(SLIDING, Rotation(full.theta))}
        sizes = head_dim if isinstance(head_dim, dict) else dict.fromkeys(own, head_dim)
        return {
            kind: of.complete(reader, sizes[kind], max_position_embeddings, theta, share) for kind, of in own.items()
        }


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
    """Frequencies of the rotation; a call gives the function that rotates queries and keys. Pairs are (i, i + n/2) of
    the n rotated columns, or (2i, 2i + 1) with `interleaved`. With `axes`, each pair turns with one of the axes of its
    token's positions [B, T, axes]."""

    def __init__(
        self, head_dim: int, rope: Rotation, *, interleaved: bool = False, axes: Sequence[int] | None = None
    ) -> None:
        self.axes = None if axes is None else list(axes)
        self.columns = head_dim if rope.share is None else int(head_dim * rope.share)
        self.rope = rope
        self.interleaved = interleaved or None

    def forward(self, positions: Tensor) -> Callable[..., Tensor]:
        """A function that rotates queries or keys by positions [B, T]."""
        settings = dict(
            head_dim=self.columns, theta=self.rope.theta, scaling_type=self.rope.type, **self.rope.settings
        )
        if self.rope.type in OF_BATCH:
            frequencies, scaling = ops.rope_frequencies_of_batch(positions, **settings)
        else:
            frequencies, scaling = ops.rope_frequencies(**settings, axes=self.axes)
        given = {"interleaved": True} if self.interleaved else {}
        return lambda x, **attributes: ops.rope(x, positions, frequencies, scaling, **given, **attributes)


class RotaryByKind(Module):
    """A rotation for each kind of layer; a call gives the functions by kind."""

    def __init__(self, **kinds: RotaryEmbedding) -> None:
        vars(self).update(kinds)
        self.kinds = list(kinds)

    def forward(self, positions: Tensor) -> dict[str, Callable[..., Tensor]]:
        """A rotating function for each kind of layer, by positions [B, T]."""
        return {kind: getattr(self, kind)(positions) for kind in self.kinds}
