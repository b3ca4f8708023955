"""Modules and parameters. A parameter's name in the file is its attribute path.

`self.model.layers[…].self_attn.q_proj.weight` is `model.layers.{i}.self_attn.q_proj.weight`, so the
mapping to Hugging Face files needs no table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from .place import here
from .trace import Trace


class Parameter:
    """A weight. `init` says how it starts when the model is trained from scratch.

    `residual_projection` marks a weight that writes into the residual stream, `transposed` the matrix of
    a linear layer that the file keeps as [inputs, outputs].
    """

    def __init__(
        self,
        *shape: int,
        init: Literal["normal", "ones", "zeros"] = "normal",
        residual_projection: bool = False,
        transposed: bool = False,
    ) -> None:
        self.shape = shape
        self.init = init
        self.residual_projection = residual_projection
        self.transposed = transposed
        self.name: str | None = None
        self.place = here()

    def to_ir(self, initializer_range: float) -> dict[str, Any]:
        """The parameter as the IR writes it."""
        init: Any = {"normal": {"std": initializer_range}} if self.init == "normal" else self.init
        row = {"name": self.name, "shape": list(self.shape), "init": init}
        if self.residual_projection:
            row["residual_projection"] = True
        if self.transposed:
            row["transposed"] = True
        return row


class Module:
    """A part of a model: parameters and modules as attributes, and a `forward` that is recorded.

    Calling the module records its `forward`.
    """

    path: str = ""

    def forward(self, *inputs: Any) -> Any:
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
        """Whether a parameter is a direct attribute."""
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
    """`count` layers of the same kind, recorded once: `Layers(n, Layer(config))`.

    Used with :func:`repeat`.
    """

    def __init__(self, count: int, layer: Module) -> None:
        self.count = count
        self.layer = layer

    def forward(self, *inputs: Any) -> Any:
        raise TypeError("layers are used with repeat(layers, x, …)")

    def name_parameters(self, path: str = "") -> list[Parameter]:
        self.path = path
        return self.layer.name_parameters(f"{path}.{{i}}" if path else "{i}")
