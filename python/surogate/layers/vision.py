"""Parts of vision towers, and the way of their results into a decoder.

All patches of a batch are one row [1, P, columns], in the order of `crates/data/src/patches.rs`: those that make one
token are neighbors. An image, or a window of it, is an interval of patches, which attention sees alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from ..dsl import Batch, ModelConfig, Module, Parameter, Reader, Tensor, ops, region
from .activation import activation
from .linear import Linear
from .scale import scale_rows


class TowerConfig(ModelConfig):
    """Base of the configs of towers: the fields of `vision_config`, and of the whole the token that stands for a part of an
    image."""

    section = "vision_config"
    hidden_size: int = 768
    intermediate_size: int = 3072
    patch_size: int = 14
    num_channels: int = 3

    #: The name of the token's field, and the token of configs that do not say it.
    token: ClassVar[tuple[str, int]] = ("image_token_id", 0)
    #: The base of the rotation's frequencies in configs that do not say it.
    theta_default: ClassVar[float] = 10000.0

    @classmethod
    def from_dict(cls, architecture: str, fields: dict[str, Any]) -> Any:
        """Reads the tower's settings, and keeps those of the whole model with the id of the image token."""
        config = super().from_dict(architecture, fields)
        config.whole = fields
        name, default = cls.token
        config.image_token = fields.get(name, fields.get("image_token_id", fields.get("image_token_index", default)))
        return config

    def derive(self, reader: Reader) -> None:
        """Accepts fields without a meaning for a tower; refuses dropout."""
        # Fields that say nothing of a tower.
        for name in ("tie_word_embeddings", "initializer_factor"):
            reader.take(name)
        if dropout := reader.take("attention_dropout"):
            reader.problem("attention_dropout", f"{dropout!r} is not supported in a vision tower, expected 0")

    def read_theta(self, reader: Reader) -> float:
        """The base of the rotation's frequencies, in a section of its own or among the fields."""
        parameters, theta = reader.take("rope_parameters"), reader.take("rope_theta")
        if isinstance(parameters, dict):
            theta = parameters.get("rope_theta", theta)
        if theta is None:
            return self.theta_default
        if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
            reader.problem("rope_theta", f"{theta!r} is not supported, expected a number above 0")
            return self.theta_default
        return float(theta)

    @property
    def width(self) -> int:
        """Bytes of a patch."""
        return self.num_channels * self.patch_size**2


class PatchEmbedding(Linear):
    """The convolution that makes patches to rows: a product, as patches do not overlap. `axes` are those of a patch in files."""

    def __init__(self, axes: Sequence[int], outputs: int, *, bias: bool = False) -> None:
        width = 1
        for extent in axes:
            width *= extent
        super().__init__(width, outputs, bias=bias)
        self.weight = Parameter(outputs, width, stored=(outputs, *axes))


def pixels(batch: Batch, width: int, **order: int | bool) -> Tensor:
    """The normalized patches in the type of the activations [1, P, frames · width], from `width` bytes each; `order` as
    :func:`ops.pixels` has it."""
    return ops.pixels(batch.of("patches", width), batch.pixel_values, dtype="float", **order)


Interval = tuple[Tensor, Tensor]


def of_image(batch: Batch) -> Interval:
    """The first and the last patch of the image of each patch."""
    return batch.image_first_patch, batch.image_last_patch


def of_window(batch: Batch) -> Interval:
    """The first and the last patch of the window of each patch."""
    return batch.window_first_patch, batch.window_last_patch


def attend(q: Tensor, k: Tensor, v: Tensor, interval: Interval, scale: float) -> Tensor:
    """Attention inside of intervals, both ways, and heads side by side."""
    o, _ = ops.attention(q, k, v, *interval, scale=scale)
    return ops.merge_heads(o)


class TowerAttention(Module):
    """`q_proj`, `k_proj`, `v_proj` and the output projection `out` under the architecture's name."""

    def __init__(self, hidden: int, heads: int, *, bias: bool, out: str, head_dim: int | None = None) -> None:
        self.head_dim = head_dim or hidden // heads
        columns = heads * self.head_dim
        self.q_proj, self.k_proj, self.v_proj = (Linear(hidden, columns, bias=bias) for _ in range(3))
        self.out = out
        setattr(self, out, Linear(columns, hidden, bias=bias))

    @region("attention")
    def forward(self, x: Tensor, rotate: Callable[..., Tensor] | None, interval: Interval) -> Tensor:
        """Attention on patches x [1, P, hidden_size], each over the patches of its `interval`."""
        q, k, v = (ops.split_heads(of(x), head_dim=self.head_dim) for of in (self.q_proj, self.k_proj, self.v_proj))
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        return getattr(self, self.out)(attend(q, k, v, interval, self.head_dim**-0.5))


class PlainMLP(Module):
    """Two linear layers under the architecture's names."""

    def __init__(self, hidden: int, inner: int, act: str, names: tuple[str, str], outputs: int | None = None) -> None:
        self.names, self.act = names, act
        setattr(self, names[0], Linear(hidden, inner, bias=True))
        setattr(self, names[1], Linear(inner, outputs or hidden, bias=True))

    @region("mlp")
    def forward(self, x: Tensor) -> Tensor:
        """second(act(first(x))) on x [1, P, hidden_size]."""
        first, second = (getattr(self, name) for name in self.names)
        return second(activation(self.act, first(x)))


class AxialRotary(Module):
    """Rotation of patches by row and column: of the first half of the pairs by the row, of the second by the column.
    `order` are the indexes of their frequencies, of which there are `columns` / 2."""

    def __init__(self, columns: int, theta: float, order: Sequence[int]) -> None:
        self.columns, self.theta, self.order = columns, theta, list(order)

    @classmethod
    def of_halves(cls, head_dim: int, theta: float) -> AxialRotary:
        """Both axes have the frequencies of half a head."""
        return cls(head_dim // 2, theta, [*range(head_dim // 4)] * 2)

    @classmethod
    def of_turns(cls, head_dim: int, theta: float) -> AxialRotary:
        """Rows have the even frequencies of a head, columns the odd ones."""
        return cls(head_dim, theta, [*range(0, head_dim // 2, 2), *range(1, head_dim // 2, 2)])

    def forward(self, batch: Batch) -> Callable[[Tensor], Tensor]:
        """A function that rotates queries or keys by the row and column of each patch."""
        pairs = len(self.order)
        axes = [0] * (pairs // 2) + [1] * (pairs // 2)
        settings = dict(head_dim=self.columns, theta=self.theta, axes=axes, order=self.order)
        frequencies, scaling = ops.rope_frequencies(**settings)
        return lambda x: ops.rope(x, batch.patch_places, frequencies, scaling)


def merged(x: Tensor, side: int) -> Tensor:
    """The patches of a token side by side: [1, P, columns] → [1, P/side², side² · columns]."""
    return ops.merge_heads(ops.fold_rows(x, size=side * side))


def pooled(x: Tensor, side: int) -> Tensor:
    """The mean of the patches of a token: [1, P, columns] → [1, P/side², columns]."""
    return ops.merge_heads(ops.sum_heads(ops.fold_rows(x, size=side * side))) * (1 / (side * side))


def taken(features: Tensor, batch: Batch, side: int) -> Tensor:
    """The rows of images at the places of their tokens [B, T, columns], zeros for text."""
    return ops.take_rows(features, batch.image_rows, batch.of("image_tokens", side * side))


def placed(x: Tensor, features: Tensor, batch: Batch, side: int) -> Tensor:
    """x [B, T, columns] with the rows of images in the place of their tokens."""
    text = ops.cast(ops.split_heads(batch.text, head_dim=1), dtype="float")
    return scale_rows(x, text) + taken(features, batch, side)
