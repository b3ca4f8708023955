"""The recorder: collects the operations of a `forward` and writes them as JSON.

Knows how values, repeats and outputs are written in the IR (docs/ir.md). Does not know what any
operation means: types come from the engine's shape rules.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import _native
from ..errors import ModelError
from .place import here
from .tensor import Tensor, each

if TYPE_CHECKING:
    from .module import Module, Parameter

IR_VERSION = 3

#: What a batch brings, by name: the engine's list of `{name, dtype, shape, doc}`.
BATCH: dict[str, dict[str, Any]] = {row["name"]: row for row in json.loads(_native.batch_inputs())}


@dataclass(eq=False)
class Scope:
    """The model's outer body, the block of one repeat, or a task."""

    #: Of a repeat's block, which of the stack's layers are of its kind.
    layers: list[bool] | None = None
    #: The repeat or the task that it belongs to.
    stack: str = ""
    items: list[dict[str, Any]] = field(default_factory=list)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    outputs: list[dict[str, str]] = field(default_factory=list)
    #: What is read of a batch; of a repeat's block it stands with the body around it.
    inputs: dict[str, Tensor] = field(default_factory=dict)
    #: The outputs as tensors.
    results: dict[str, Tensor] = field(default_factory=dict)


class Trace:
    """One recording. `Trace.current()` is the one that operations append to."""

    _active: Trace | None = None

    def __init__(self, architecture: str, initializer_range: float) -> None:
        self.architecture = architecture
        self.initializer_range = initializer_range
        self.outer = Scope()
        self.scope = self.outer
        #: The body that is being recorded: the model's, or a task's.
        self.body = self.outer
        self.tasks: dict[str, tuple[Scope, list[Parameter], dict[str, list[str]]]] = {}
        self.regions: list[str] = []
        self.modules: list[Module] = []
        #: The stack that an output is of.
        self.named: dict[str, str] = {}
        self._names: set[str] = set(BATCH)

    @classmethod
    def current(cls) -> Trace:
        """The recording in progress. Raises ModelError if there is none."""
        if cls._active is None:
            raise ModelError(here(), "operations can only be used inside the `forward` of a model that is being built")
        return cls._active

    @contextmanager
    def recording(self) -> Iterator[Trace]:
        """Makes this the current recording inside a `with` block; recordings nest."""
        previous, Trace._active = Trace._active, self
        try:
            yield self
        finally:
            Trace._active = previous

    @contextmanager
    def task(self, name: str, declared: list[Parameter], lists: dict[str, list[str]]) -> Iterator[None]:
        """Records operations as a task's, which may read all that the model's outer body has. Its `lists` are written
        where they are not empty."""
        self.scope = self.body = Scope()
        self.tasks[name] = (self.scope, declared, lists)
        names = set(self._names)
        try:
            yield
        finally:
            # Of several tasks a program has one in each entry: their values may have the same names.
            self.scope = self.body = self.outer
            self._names = names

    def input(self, name: str, size: int | None = None) -> Tensor:
        """A batch tensor; it becomes an input of the model or the task on first use. `size` is the number that its
        description leaves open."""
        for body in (self.outer, self.body):
            if name in body.inputs:
                return body.inputs[name]
        row = BATCH[name]
        open_axes = {"N": size, "P/N": f"P/{size}" if size != 1 else "P"}
        shape = tuple(open_axes.get(axis, axis) for axis in row["shape"])
        if None in shape:
            raise ModelError(here(), f"`{name}` has an extent that the model says: use batch.of({name!r}, size)")
        self.body.inputs[name] = Tensor(name, row["dtype"], shape, self.outer)
        return self.body.inputs[name]

    def parameter(self, parameter: Parameter) -> Tensor:
        """The tensor of a parameter, declared where it is first used."""
        name = parameter.name
        if name is None:
            raise ModelError(here(), "a parameter must be an attribute of a module of the model before it is used")
        inside = "{i}" in name
        if inside and self.scope is self.body:
            raise ModelError(here(), f"`{name}` belongs to a repeated layer and cannot be used outside of its repeat")
        scope = self.scope if inside else self.body
        if self.outer.parameters.get(name) is not parameter:
            scope.parameters[name] = parameter
        return Tensor(name, "float", parameter.shape, scope)

    def emit(self, op: str, inputs: tuple[Any, ...], attributes: dict[str, Any]) -> list[Tensor]:
        """Appends one operation and gives its results, with the types that its shape rule infers."""
        place = here() or self._made_at()
        tensors = [self._operand(op, value, place) for value in inputs]
        types = self._infer(op, tensors, attributes, place)
        names = self._fresh(op, len(types))
        results = [Tensor(n, t["dtype"], tuple(t["shape"]), self.scope) for n, t in zip(names, types, strict=True)]
        node: dict[str, Any] = {"op": op, "inputs": [t.name for t in tensors], "outputs": names, "types": types}
        written = {k: {"each": v.values} if isinstance(v, each) else v for k, v in attributes.items() if v is not None}
        if written:
            node["attrs"] = written
        if self.regions:
            node["region"] = ".".join(self.regions)
        if place:
            node["at"] = place
        self.scope.items.append(node)
        return results

    def _made_at(self) -> str | None:
        """The line that made the innermost module which a line of the model made."""
        return next((module.place for module in reversed(self.modules) if module.place), None)

    def _operand(self, op: str, value: Any, place: str | None) -> Tensor:
        from .module import Parameter

        if isinstance(value, Parameter):
            return self.parameter(value)
        if not isinstance(value, Tensor):
            raise ModelError(place, f"{op}: an input is {value!r}, expected a tensor or a parameter")
        if value.scope not in (self.scope, self.body, self.outer):
            raise ModelError(place, f"{op}: `{value.name}` was computed inside a repeat that has ended; carry it out")
        return value

    def _infer(
        self, op: str, tensors: list[Tensor], attributes: dict[str, Any], place: str | None
    ) -> list[dict[str, Any]]:
        inputs = json.dumps([t.type() for t in tensors])
        results = set()
        for concrete in self._iterations(op, attributes, place):
            try:
                results.add(_native.infer(op, inputs, concrete))
            except ValueError as error:
                raise ModelError(place, str(error)) from None
        if len(results) > 1:
            raise ModelError(
                place, f"{op}: the iterations of a repeat give different types: {' and '.join(sorted(results))}"
            )
        return json.loads(results.pop())

    def _iterations(self, op: str, attributes: dict[str, Any], place: str | None) -> set[str]:
        """The attributes of every iteration as JSON text, equal ones once."""
        varying = {name: value.values for name, value in attributes.items() if isinstance(value, each)}
        for name, values in varying.items():
            if self.scope.layers is None:
                raise ModelError(place, f"{op}: `{name}` differs by iteration, but this is not inside a repeat")
            if len(values) != len(self.scope.layers):
                count = len(self.scope.layers)
                raise ModelError(place, f"{op}: `{name}` has {len(values)} values for {count} iterations")
        texts = set()
        layers = [i for i, own in enumerate(self.scope.layers or []) if own]
        for i in layers if varying else [0]:
            concrete = {**attributes, **{name: values[i] for name, values in varying.items()}}
            texts.add(json.dumps({name: value for name, value in concrete.items() if value is not None}))
        return texts

    def _fresh(self, op: str, count: int) -> list[str]:
        """Names for results: the module's path if it is a single weight's layer, else path and op."""
        module = self.modules[-1] if self.modules else None
        parts = [module.path.replace(".{i}", "")] if module is not None and module.path else []
        if module is None or not module.owns_parameters():
            parts.append(op)
        stem = ".".join(parts)
        base, suffix = stem, 2
        while base in self._names:
            base, suffix = f"{stem}_{suffix}", suffix + 1
        names = [base if i == 0 else f"{base}.{i}" for i in range(count)]
        self._names.update(names)
        return names

    def name(self, stem: str) -> str:
        """A new value name that starts with `stem`."""
        name, suffix = stem, 2
        while name in self._names:
            name, suffix = f"{stem}_{suffix}", suffix + 1
        self._names.add(name)
        return name

    def output(self, name: str, value: Tensor) -> None:
        """Makes a value available to callers under a public name."""
        place = here() or self._made_at()
        value = self._operand("output", value, place)
        inside = self.scope.layers is not None
        if ("{i}" in name) != inside:
            expected = "must contain {i}" if inside else "must not contain {i}"
            raise ModelError(place, f"output `{name}`: the name {expected} here")
        scope = self.scope
        if name in scope.results or self.named.setdefault(name, scope.stack) != scope.stack:
            raise ModelError(place, f"output `{name}` is given twice")
        scope.outputs.append({"name": name, "value": value.name})
        scope.results[name] = value

    def to_json(self, declared: list[Parameter], head: dict[str, Any]) -> str:
        """The IR. `declared` are the model's parameters in the order of their modules, `head` what is
        said of the whole model."""
        used = list(self.outer.parameters.values())
        for item in self.outer.items:
            for block in item.get("blocks", []):
                used += block["parameters"].values()
                block["parameters"] = self._parameters(block["parameters"], declared)
        _check_use(declared, used)
        model = {
            "surogate_ir": IR_VERSION,
            "architecture": self.architecture,
            **head,
            "inputs": _inputs(self.outer),
            "parameters": self._parameters(self.outer.parameters, declared),
            "body": self.outer.items,
            "outputs": self.outer.outputs,
            "tasks": [self._task(name, *of) for name, of in self.tasks.items()],
        }
        return json.dumps(model, indent=1, ensure_ascii=False)

    def _task(
        self, name: str, scope: Scope, declared: list[Parameter], lists: dict[str, list[str]]
    ) -> dict[str, Any]:
        _check_use(declared, list(scope.parameters.values()))
        return {
            "name": name,
            "inputs": _inputs(scope),
            "parameters": self._parameters(scope.parameters, declared),
            "nodes": scope.items,
            "outputs": scope.outputs,
            **{key: values for key, values in lists.items() if values},
        }

    def _parameters(self, parameters: dict[str, Parameter], declared: list[Parameter]) -> list[dict[str, Any]]:
        order = {id(parameter): index for index, parameter in enumerate(declared)}
        rows = sorted(parameters.values(), key=lambda parameter: order[id(parameter)])
        return [parameter.to_ir(self.initializer_range) for parameter in rows]


def _inputs(scope: Scope) -> list[dict[str, Any]]:
    """In the order of the engine's list."""
    read = (scope.inputs[name] for name in BATCH if name in scope.inputs)
    return [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in read]


def _check_use(declared: list[Parameter], used: list[Parameter]) -> None:
    unused = [parameter for parameter in declared if not any(parameter is one for one in used)]
    if unused:
        raise ModelError(unused[0].place, f"parameter `{unused[0].name}` is declared but `forward` never uses it")
