"""Modules and parameters. A parameter's name in the file is its attribute path.

`self.model.layers[…].self_attn.q_proj.weight` is `model.layers.{i}.self_attn.q_proj.weight`, so the
mapping to Hugging Face files needs no table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self

from ..errors import ModelError
from .place import here
from .trace import Trace


class Parameter:
    """A weight. `init` says how it starts when the model is trained from scratch: a number is that of all its elements.

    `residual_projection` marks a weight that writes into the residual stream, `transposed` the matrix of
    a linear layer that the file keeps as [inputs, outputs], `bias` a bias of more than one axis, which no weight decay
    acts on. A `buffer` counts in the forward pass, is kept in f32 and has no gradient. `stored` is the shape in files, where
    that is another: a matrix whose rows or columns they have as several axes, a number without axes.
    """

    def __init__(
        self,
        *shape: int,
        init: Literal["normal", "ones", "zeros", "inf", "-inf"] | float = "normal",
        residual_projection: bool = False,
        transposed: bool = False,
        bias: bool = False,
        buffer: bool = False,
        stored: Sequence[int] | None = None,
    ) -> None:
        self.shape = shape
        self.init = init
        self.residual_projection = residual_projection
        self.transposed = transposed
        self.bias = bias
        self.buffer = buffer
        self.stored = stored
        self.name: str | None = None
        #: Layers that have one of it each.
        self.layers = 1
        self.place = here()

    def to_ir(self, initializer_range: float) -> dict[str, Any]:
        """The parameter as the IR writes it."""
        init: Any = {"normal": {"std": initializer_range}} if self.init == "normal" else self.init
        if isinstance(init, float):
            init = {"constant": {"value": init}}
        row = {"name": self.name, "shape": list(self.shape), "init": init}
        if self.residual_projection:
            row["residual_projection"] = True
        if self.transposed:
            row["transposed"] = True
        if self.bias:
            row["bias"] = True
        if self.buffer:
            row["buffer"] = True
        if self.stored is not None:
            row["stored"] = list(self.stored)
        return row


class Module:
    """A part of a model: parameters and modules as attributes, and a `forward` that is recorded.

    Calling the module records its `forward`.
    """

    path: str = ""
    #: The line of the model that made it.
    place: str | None = None

    def __new__(cls, *_: Any, **__: Any) -> Self:
        made = super().__new__(cls)
        if (place := here()) is not None:
            made.place = place
        return made

    def forward(self, *inputs: Any) -> Any:
        """Records the operations of the module on symbolic tensors; each kind of module defines it."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def __call__(self, *inputs: Any) -> Any:
        trace = Trace.current()
        trace.modules.append(self)
        try:
            return self.forward(*inputs)
        finally:
            trace.modules.pop()

    def members(self) -> Iterator[tuple[str, Any]]:
        """The attributes that are parameters or modules, in the order in which they were set."""
        return ((name, value) for name, value in vars(self).items() if isinstance(value, (Parameter, Module)))

    def owns_parameters(self) -> bool:
        """True if a parameter is a direct attribute."""
        return any(isinstance(value, Parameter) for _, value in self.members())

    def name_parameters(self, path: str = "") -> list[Parameter]:
        """Gives every parameter below its name and lists them. One that is reached twice (tied
        weights) keeps the first name."""
        self.path = path
        found: list[Parameter] = []
        for name, value in self.members():
            full = f"{path}.{name}" if path else name
            if isinstance(value, Module):
                found += value.name_parameters(full)
            elif value.name is None:
                value.name = full
                found.append(value)
        return found


class Layers(Module):
    """Layers one after another. `Layers(n, Layer(config))` are n of one kind, recorded once.

    `Layers(["sliding", "sliding", "full"], {"sliding": Layer(…), "full": Layer(…)})` follow a pattern of kinds, each
    recorded once, with weights and attributes of its own. Used with :func:`repeat`.
    """

    def __init__(self, pattern: int | Sequence[str], layer: Module | Mapping[str, Module]) -> None:
        if isinstance(layer, Module):
            layer = {"": layer}
        self.pattern = [next(iter(layer))] * pattern if isinstance(pattern, int) else list(pattern)
        self.kinds = dict(layer)
        if set(self.pattern) != set(self.kinds):
            names = (", ".join(sorted(names)) for names in (set(self.pattern), set(self.kinds)))
            raise ModelError(here(), "the pattern has the kinds {}, the layers given are {}".format(*names))

    @property
    def count(self) -> int:
        """The number of layers, all kinds together."""
        return len(self.pattern)

    def forward(self, *inputs: Any) -> Any:
        """Raises TypeError: layers are not called, `repeat` records them."""
        raise TypeError("layers are used with repeat(layers, x, …)")

    def name_parameters(self, path: str = "") -> list[Parameter]:
        """Names the parameters of each kind of layer, with `{i}` for the number of the layer."""
        self.path = path
        inside = f"{path}.{{i}}" if path else "{i}"
        found = []
        for kind, layer in self.kinds.items():
            named = layer.name_parameters(inside)
            for parameter in named:
                parameter.layers = self.pattern.count(kind)
            found += named
        return found
