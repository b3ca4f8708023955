"""Activation functions by the names that config.json has for them."""

from __future__ import annotations

from typing import Literal

from ..dsl import Tensor, ops

#: What an architecture's config may name.
Activation = Literal[
    "gelu", "gelu_python", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish", "tanh"
]

#: Names of transformers that mean another function of the engine.
SAME = {
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "silu",
}


def activation(name: str, x: Tensor) -> Tensor:
    """The function that transformers knows by this name."""
    return ops.activation(x, function=SAME.get(name, name))
