"""The parts of the language that are not operations: repeats, regions, outputs, the batch."""

from __future__ import annotations

from collections.abc import Mapping
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
    all layers unchanged; one that is a mapping by kind gives each kind of layer its own. Of each kind,
    `forward(carry, *shared)` is recorded once.
    """
    trace = Trace.current()
    place = here() or trace._made_at()
    if trace.scope is not trace.outer:
        raise ModelError(place, "a repeat can only be recorded in the body of the model")
    if layers.count < 1:
        raise ModelError(place, f"a repeat needs at least one iteration, not {layers.count}")
    initial = carry if isinstance(carry, tuple) else (carry,)
    initial = tuple(trace._operand("repeat", value, place) for value in initial)
    blocks = [_block(layers, kind, initial, shared, place) for kind in layers.kinds]
    results = tuple(Tensor(trace.name(f"{layers.path}.output"), t.dtype, t.shape, trace.outer) for t in initial)
    kinds = list(layers.kinds)
    pattern = {} if len(kinds) == 1 else {"pattern": [kinds.index(kind) for kind in layers.pattern]}
    rows = zip(initial, results, strict=True)
    trace.outer.items.append(
        {
            "repeat": layers.count,
            "stack": layers.path,
            **pattern,
            "carry": [{"initial": a.name, "result": b.name} for a, b in rows],
            "blocks": blocks,
        }
    )
    return results if isinstance(carry, tuple) else results[0]


def _block(
    layers: Layers, kind: str, initial: tuple[Tensor, ...], shared: tuple[Any, ...], place: str | None
) -> dict[str, Any]:
    """Records the layer of one kind."""
    trace = Trace.current()
    block = Scope(layers=[name == kind for name in layers.pattern], stack=layers.path)
    inside = tuple(Tensor(trace.name(f"{layers.path}.input"), t.dtype, t.shape, block) for t in initial)
    trace.scope = block
    try:
        own = (value[kind] if isinstance(value, Mapping) else value for value in shared)
        result = layers.kinds[kind](*inside, *own)
    finally:
        trace.scope = trace.outer
    following = result if isinstance(result, tuple) else (result,)
    _check_carry(inside, following, place)
    return {
        "carry": [{"inside": a.name, "next": b.name} for a, b in zip(inside, following, strict=True)],
        "parameters": block.parameters,
        "nodes": block.items,
        "outputs": block.outputs,
    }


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
