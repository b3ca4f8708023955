"""Loads of experts, carried from layer to layer for the log and for the loss that evens them out."""

from __future__ import annotations

from typing import Any

from ..dsl import Module, Tensor


class Counted(Module):
    """A layer that is called with what the layers before it gave their experts, f32 [3, experts], after x, and adds its own:
    what its parts with a `load` say. The last argument is the batch."""

    def __init__(self, layer: Module) -> None:
        vars(self).update(vars(layer))  # the names of its parameters stay what they are
        self.parts = (layer, [part for _, part in layer.members() if hasattr(part, "load")])

    def forward(self, x: Tensor, load: Tensor, *given: Any) -> tuple[Tensor, ...]:
        """Applies the layer, and adds the loads of its mixtures to `load` [3, experts]."""
        layer, counted = self.parts
        layer.path = self.path
        result = layer(x, *given)
        x, *others = result if isinstance(result, tuple) else (result,)
        for part in counted:
            load = load + part.load(given[-1].present)
        return x, load, *others
