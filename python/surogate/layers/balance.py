"""What layers give their experts, carried from layer to layer for the log and the loss that evens it out."""

from __future__ import annotations

from typing import Any

from ..dsl import Module, Tensor
from .experts import Mixture


class Counted(Module):
    """A layer that is called with what the layers before it gave their experts, f32 [3, experts], and adds its own. The
    last argument is the batch."""

    def __init__(self, layer: Module) -> None:
        vars(self).update(vars(layer))  # the names of its parameters stay what they are
        mixtures = [part for _, part in layer.members() if isinstance(part, Mixture)]
        self.parts = (layer, mixtures)

    def forward(self, x: Tensor, load: Tensor, *shared: Any) -> tuple[Tensor, Tensor]:
        layer, mixtures = self.parts
        layer.path = self.path
        x = layer(x, *shared)
        for mixture in mixtures:
            load = load + mixture.load(shared[-1].present)
        return x, load
