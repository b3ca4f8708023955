"""Layers shared by several architectures. Each computes the same as the class of the same name in
transformers, with the same parameter names."""

from .activation import Activation, activation
from .decoder import Decoder, DecoderLayer
from .dropout import dropout
from .embedding import Embedding
from .heads import HeadsConfig
from .linear import Conv1D, Linear
from .mlp import SwiGLU
from .norm import LayerNorm, RMSNorm
from .rotary import RotaryEmbedding, Rotation
from .window import layer_windows

__all__ = [
    "Activation",
    "Conv1D",
    "Decoder",
    "DecoderLayer",
    "Embedding",
    "HeadsConfig",
    "LayerNorm",
    "Linear",
    "RMSNorm",
    "RotaryEmbedding",
    "Rotation",
    "SwiGLU",
    "activation",
    "dropout",
    "layer_windows",
]
