"""Converts arrays for the engine: int32 and float32, contiguous, with a checked shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


def integers(name: str, value: npt.ArrayLike, shape: tuple[int, ...] | None = None, axes: int = 2) -> Integers:
    """Whole numbers as int32. Raises ValueError where they do not fit; nothing is rounded or cut."""
    array = np.asarray(value)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name}: has type {array.dtype}, expected whole numbers")
    _check_shape(name, array, shape, axes)
    limits = np.iinfo(np.int32)
    if array.size and (array.min() < limits.min or array.max() > limits.max):
        raise ValueError(f"{name}: holds numbers beyond 32 bits")
    return np.ascontiguousarray(array, np.int32)


def floats(name: str, value: npt.ArrayLike, shape: tuple[int, ...] | None = None, axes: int = 2) -> Floats:
    """Numbers as float32."""
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{name}: has type {array.dtype}, expected numbers")
    _check_shape(name, array, shape, axes)
    return np.ascontiguousarray(array, np.float32)


def optional(convert: Any, name: str, value: npt.ArrayLike | None, shape: tuple[int, ...]) -> Any:
    """`convert`, or None for None."""
    return None if value is None else convert(name, value, shape, len(shape))


def _check_shape(name: str, array: np.ndarray, shape: tuple[int, ...] | None, axes: int) -> None:
    if shape is not None and array.shape != shape:
        raise ValueError(f"{name}: has shape {list(array.shape)}, expected {list(shape)} like input_ids")
    if array.ndim != axes or 0 in array.shape:
        letters = {2: "[B, T]", 3: "[accumulation, B, T]"}[axes]
        raise ValueError(f"{name}: has shape {list(array.shape)}, expected {letters}")
