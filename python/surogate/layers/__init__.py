"""Layers that several architectures share. Each computes what the class of the same name in
transformers computes, under the same parameter names."""

from .embedding import Embedding
from .linear import Linear
from .loss import language_model_loss
from .mlp import SwiGLU
from .norm import RMSNorm
from .rotary import RotaryEmbedding, Rotation

__all__ = ["Embedding", "Linear", "RMSNorm", "RotaryEmbedding", "Rotation", "SwiGLU", "language_model_loss"]
