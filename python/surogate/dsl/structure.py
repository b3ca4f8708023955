"""The parts of the language that are not operations: repeats, regions, outputs, the batch."""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import Any

from ..errors import ModelError
from .module import Layers
from .place import here
from .tensor import Tensor
from .trace import BATCH, Scope, Trace


class Batch:
    """The tensors of a micro-batch as attributes: `batch.input_ids` and the other names of docs/ir.md."""

    def __getattr__(self, name: str) -> Tensor:
        if name not in BATCH:
            raise AttributeError(f"a batch has no `{name}`; it has {', '.join(BATCH)}")
        return Trace.current().input(name)


def repeat(layers: Layers, carry: Tensor | tuple[Tensor, ...], *shared: Any) -> Any:
    """Applies every layer to the result of the one before it; gives the last result.

    `carry` is what goes from layer to layer (one tensor or a tuple of them), `shared` is handed to
    all layers unchanged. The layer's `forward(carry, *shared)` is recorded once.
    """
    trace, place = Trace.current(), here()
    if trace.scope is not trace.outer:
        raise ModelError(place, "a repeat inside of a repeat cannot be recorded")
    if layers.count < 1:
        raise ModelError(place, f"a repeat needs at least one iteration, not {layers.count}")
    initial = carry if isinstance(carry, tuple) else (carry,)
    initial = tuple(trace._operand("repeat", value, place) for value in initial)
    block = Scope(count=layers.count)
    inside = tuple(Tensor(trace.name(f"{layers.path}.input"), t.dtype, t.shape, block) for t in initial)
    trace.scope = block
    try:
        result = layers.layer(*inside, *shared)
    finally:
        trace.scope = trace.outer
    following = result if isinstance(result, tuple) else (result,)
    _check_carry(inside, following, place)
    results = tuple(Tensor(trace.name(f"{layers.path}.output"), t.dtype, t.shape, trace.outer) for t in initial)
    rows = zip(initial, inside, following, results, strict=True)
    trace.outer.items.append(
        {
            "repeat": layers.count,
            "carry": [{"initial": a.name, "inside": b.name, "next": c.name, "result": d.name} for a, b, c, d in rows],
            "block": {"parameters": block.parameters, "nodes": block.items, "outputs": block.outputs},
        }
    )
    return results if isinstance(carry, tuple) else results[0]


def _check_carry(inside: tuple[Tensor, ...], following: tuple[Tensor, ...], place: str | None) -> None:
    if len(inside) != len(following):
        raise ModelError(place, f"the layer takes {len(inside)} carried tensors and gives {len(following)}")
    for before, after in zip(inside, following, strict=True):
        if not isinstance(after, Tensor):
            raise ModelError(place, f"the layer gives {after!r} where a tensor is carried on")
        if (before.dtype, before.shape) != (after.dtype, after.shape):
            raise ModelError(place, f"the layer takes {before} and gives {after}: the types must be the same")


class region(ContextDecorator):
    """Names a part of the layer, for decisions about saving and recomputing.

    A context manager and a decorator of `forward`. Nested names are joined by a dot.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        Trace.current().regions.append(self.name)

    def __exit__(self, *_: object) -> None:
        Trace.current().regions.pop()


def output(name: str, value: Tensor) -> None:
    """Lets callers ask for a value by name; inside a repeat the name contains `{i}`."""
    Trace.current().output(name, value)
