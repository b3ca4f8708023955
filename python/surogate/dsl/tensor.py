"""Symbolic tensors: what a model's `forward` computes with.

A tensor here has a name, an element type and a shape, but no numbers and no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from .trace import Scope

#: An extent: a number, or the name of a batch dimension (`B` rows, `T` tokens of a row).
Dim = int | str


@dataclass(frozen=True, eq=False)
class Tensor:
    """A value of the graph. `dtype` is `float` (the recipe decides) or a concrete type like `f32`."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    scope: Scope = field(repr=False)

    def __add__(self, other: Tensor | float) -> Tensor:
        from . import ops

        return ops.add(self, other) if isinstance(other, Tensor) else ops.shift(self, offset=float(other))

    __radd__ = __add__

    def __neg__(self) -> Tensor:
        return self * -1.0

    def __sub__(self, other: Tensor | float) -> Tensor:
        return self + -other

    def __rsub__(self, other: float) -> Tensor:
        return -self + other

    def __mul__(self, other: Tensor | float) -> Tensor:
        from . import ops

        return ops.mul(self, other) if isinstance(other, Tensor) else ops.scale(self, factor=float(other))

    __rmul__ = __mul__

    def __bool__(self) -> bool:
        raise TypeError(f"`{self.name}` has no value while the model is recorded: `if` can only depend on the config")

    def type(self) -> dict[str, Any]:
        """The type as the IR writes it."""
        return {"dtype": self.dtype, "shape": list(self.shape)}

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


T = TypeVar("T")


class each(Generic[T]):
    """An attribute whose value differs between the iterations of a `repeat`.

    `attention(q, k, v, start, scale=s, window=each([512, None, 512, None]))`; `None` leaves the
    attribute out of that iteration.
    """

    def __init__(self, values: Sequence[T | None]) -> None:
        self.values = list(values)

    @classmethod
    def of(cls, values: Sequence[T | None]) -> each[T] | T | None:
        """`values` as an attribute: the one value where it is the same everywhere."""
        return values[0] if all(value == values[0] for value in values) else cls(values)
