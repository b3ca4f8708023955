"""Weights that follow from the names and shapes of tensors, so that a recording of a small model needs none of them."""

from __future__ import annotations

import zlib

import numpy as np


def drawn(name: str, shape: list[int]) -> np.ndarray:
    """The float32 values of a tensor: of vectors around 1 for weights of norms and around 0 for others, of matrices so that
    products keep their size."""
    count = int(np.prod(shape))
    phase = zlib.crc32(name.encode()) % 1000
    values = np.sin(np.arange(count) * 1.61803398875 * (1 + phase / 1000) + phase)
    if len(shape) > 1:
        return (values * 1.2 * shape[-1] ** -0.5).reshape(shape).astype(np.float32)
    return (values * 0.2 + (1.0 if name.endswith("norm.weight") else 0.0)).reshape(shape).astype(np.float32)
