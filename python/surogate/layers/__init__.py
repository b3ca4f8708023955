"""Layers that several architectures share. Each computes what the class of the same name in
transformers computes, under the same parameter names."""

from .decoder import Decoder, DecoderLayer
from .embedding import Embedding
from .heads import HeadsConfig
from .linear import Linear
from .loss import language_model_loss
from .mlp import SwiGLU
from .norm import RMSNorm
from .rotary import RotaryEmbedding, Rotation
from .window import layer_windows

__all__ = [
    "Decoder",
    "DecoderLayer",
    "Embedding",
    "HeadsConfig",
    "Linear",
    "RMSNorm",
    "RotaryEmbedding",
    "Rotation",
    "SwiGLU",
    "language_model_loss",
    "layer_windows",
]
