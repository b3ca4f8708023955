"""The parts of the language that are not operations: repeats, regions, outputs, the batch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ContextDecorator
from typing import Any

from ..errors import ModelError
from .module import Layers
from .place import here
from .tensor import Dim, Tensor, each
from .trace import BATCH, Scope, Trace


class Batch:
    """The tensors of a micro-batch as attributes: `batch.input_ids` and the other names of docs/ir.md."""

    def __getattr__(self, name: str) -> Tensor:
        if name not in BATCH:
            raise AttributeError(f"a batch has no `{name}`; it has {', '.join(BATCH)}")
        return Trace.current().input(name)

    def of(self, name: str, size: int) -> Tensor:
        """A tensor of which the architecture says a number: `batch.of("patches", 588)`, patches of 588 bytes."""
        if name not in BATCH:
            raise AttributeError(f"a batch has no `{name}`; it has {', '.join(BATCH)}")
        return Trace.current().input(name, size)


class Unset:
    """A carried value of this type that there is none of until a layer gives it."""

    def __init__(self, *shape: Dim, dtype: str = "float") -> None:
        self.shape = shape
        self.dtype = dtype


def repeat(layers: Layers, carry: Any, *shared: Any) -> Any:
    """Applies every layer to the result of the one before it; gives the last result.

    `carry` is what goes from layer to layer (one tensor or a tuple of them, :class:`Unset` for what a layer gives before
    others read it), `shared` is handed to all layers unchanged; one that is a mapping by kind gives each kind of layer its
    own, one that is :class:`each` of tensors each layer. Of each kind, `forward(carry, *shared)` is recorded once.
    """
    trace = Trace.current()
    place = here() or trace._made_at()
    if trace.scope is not trace.outer:
        raise ModelError(place, "a repeat can only be recorded in the body of the model")
    if layers.count < 1:
        raise ModelError(place, f"a repeat needs at least one iteration, not {layers.count}")
    initial = carry if isinstance(carry, tuple) else (carry,)
    initial = tuple(v if isinstance(v, Unset) else trace._operand("repeat", v, place) for v in initial)
    given = {id(value): _Each(layers, value, place) for value in shared if _is_of_tensors(value)}
    blocks = [_block(layers, kind, initial, shared, given, place) for kind in layers.kinds]
    results = tuple(Tensor(trace.name(f"{layers.path}.output"), t.dtype, t.shape, trace.outer) for t in initial)
    kinds = list(layers.kinds)
    pattern = {} if len(kinds) == 1 else {"pattern": [kinds.index(kind) for kind in layers.pattern]}
    rows = zip(initial, results, strict=True)
    trace.outer.items.append(
        {
            "repeat": layers.count,
            "stack": layers.path,
            **pattern,
            "carry": [({} if isinstance(a, Unset) else {"initial": a.name}) | {"result": b.name} for a, b in rows],
            **({"each": [{"inside": of.name, "values": of.values} for of in given.values()]} if given else {}),
            "blocks": blocks,
        }
    )
    return results if isinstance(carry, tuple) else results[0]


def _is_of_tensors(value: Any) -> bool:
    """True for `each` of values, False for `each` of attributes."""
    return isinstance(value, each) and any(isinstance(of, Tensor) for of in value.values)


class _Each:
    """Values of which each layer reads its own, and their name inside."""

    def __init__(self, layers: Layers, of: each[Tensor], place: str | None) -> None:
        trace = Trace.current()
        tensors = [trace._operand("repeat", value, place) for value in of.values]
        if len(tensors) != layers.count:
            raise ModelError(place, f"a repeat of {layers.count} layers is given {len(tensors)} values, one for each")
        if len({(tensor.dtype, tensor.shape) for tensor in tensors}) > 1:
            raise ModelError(place, "the values that the layers of a repeat are given differ in type")
        self.name = trace.name(f"{layers.path}.each")
        self.values = [tensor.name for tensor in tensors]
        self.dtype, self.shape = tensors[0].dtype, tensors[0].shape

    def inside(self, block: Scope) -> Tensor:
        return Tensor(self.name, self.dtype, self.shape, block)


def _block(
    layers: Layers,
    kind: str,
    initial: tuple[Tensor | Unset, ...],
    shared: tuple[Any, ...],
    given: dict[int, _Each],
    place: str | None,
) -> dict[str, Any]:
    """Records the layer of one kind."""
    trace = Trace.current()
    block = Scope(layers=[name == kind for name in layers.pattern], stack=layers.path)
    inside = tuple(Tensor(trace.name(f"{layers.path}.input"), t.dtype, t.shape, block) for t in initial)
    trace.scope = block
    try:
        inner = (given[id(value)].inside(block) if id(value) in given else value for value in shared)
        own = (value[kind] if isinstance(value, Mapping) else value for value in inner)
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
