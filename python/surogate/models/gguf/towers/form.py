"""The form of a vision tower with its projector in a GGUF file, and what all such files have.

Knows no tower.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..form import Metadata

#: A tensor of the file: its name, the parameter that it is made of, and the steps between them.
Source = dict[str, Any]

#: The function that readers compute where the file says this; without either key it is quick_gelu.
TANH, SILU = ("clip.use_gelu", "bool", True), ("clip.use_silu", "bool", True)

#: Channels of images, as readers of all towers have them.
CHANNELS = 3

#: Names in config.json of attributes that are called otherwise.
IN_CONFIG = {"theta": "rope_theta", "rotation": "rope_theta"}


@dataclass(frozen=True)
class Processor:
    """The preparation of images, as the file describes it."""

    mean: list[float]
    deviation: list[float]
    #: The longest edge of an image before it is cut in tiles, and the edge of a tile; none where images are not cut.
    tiles: tuple[int, int] | None
    #: Long images are also seen in crops.
    crops: bool


@dataclass(frozen=True)
class Tower:
    """A tower with its projector in a GGUF file. `c` is the config of the text, `v` that of the tower."""

    projector: str
    #: The path of the tower's layers.
    layers: str
    #: Names of modules inside of layer i, and outside of the layers.
    inside: dict[str, str]
    outside: dict[str, str]
    #: Keys of one's own after `clip.vision.`.
    sizes: Callable[[Any, Any, Processor], Metadata]
    #: Settings that readers would compute otherwise.
    problems: Callable[[Any, Any, Processor], list[str]]
    #: Keys of the activation.
    activation: Callable[[Any], Metadata]
    #: Tensors that are not those of a parameter as they are: the parameter's sources, or none.
    parts: Callable[[str, str, Any], list[Source] | None]
    #: Names of modules of layers whose rotated pairs become adjacent.
    interleaved: tuple[str, ...] = ()
    #: Norms whose weights act as 1 + w in the model.
    offset: tuple[str, ...] = ()
    #: A token whose embedding belongs to the file, and its name there.
    token: tuple[str, str] | None = None
    #: Sentences for the user on small differences in the arithmetic of readers.
    notes: Callable[[Any, Any, Processor], list[str]] = lambda c, v, processor: []


def conv(parameter: str, name: str, v: Any) -> list[Source] | None:
    """The convolution that makes patches to rows, with its axes; none for other parameters."""
    shape = [v.hidden_size, v.num_channels, v.patch_size, v.patch_size]
    of = {"name": name, "from": parameter, "exact": True, "steps": [{"reshape": shape}]}
    return [of] if name == "v.patch_embd.weight" else None


def encoder(
    v: Any, *, size: int, inner: int, count: int, heads: int, eps: float, width: int | None = None
) -> Metadata:
    """The keys that every tower has, after `clip.vision.`: `size` is the side of a usual image, `inner` that of the
    feed-forward layers."""
    whole = {
        "image_size": size,
        "patch_size": v.patch_size,
        "embedding_length": width or v.hidden_size,
        "feed_forward_length": inner,
        "block_count": count,
        "attention.head_count": heads,
    }
    return [*((name, "u32", value) for name, value in whole.items()), ("attention.layer_norm_epsilon", "f32", eps)]


def fixed(v: Any, **expected: Any) -> list[str]:
    """Problems of attributes of the tower's config that readers have fixed: they have the `expected` values."""
    return [
        f"`vision_config.{IN_CONFIG.get(name, name)}`: readers of this form have {value}, not {getattr(v, name)}"
        for name, value in {**expected, "num_channels": CHANNELS}.items()
        if getattr(v, name) != value
    ]


def distinct(v: Any, inner: int) -> list[str]:
    """The problem of a feed-forward layer of square matrices: readers take `up` for `down`, as old files have it."""
    said = f"`vision_config.intermediate_size`: readers of this form cannot tell it from `hidden_size`, {v.hidden_size}"
    return [said] if inner == v.hidden_size else []
