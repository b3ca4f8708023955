"""Converts arrays for the engine: int32 and float32, contiguous, with a checked shape. Rows of unequal lengths are padded.

Takes what numpy takes, and arrays in host memory that speak DLPack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

#: A numpy array or what numpy makes one of, a tensor that speaks DLPack, or rows of unequal lengths.
Rows = npt.ArrayLike | Sequence[Any]

#: Arrays of a batch for the engine: ids, labels, positions, weights, and the tokens of each row where padding follows.
Arrays = tuple[Integers, Integers, Integers | None, Floats | None, list[int] | None]

#: Kinds of memory in DLPack that the host reads: its own, and what CUDA has page-locked.
HOST = (1, 3)

#: What stands in padding.
FILL = {"labels": -100}


def batch(
    input_ids: Rows,
    labels: Rows | None = None,
    position_ids: Rows | None = None,
    weights: Rows | None = None,
    axes: int = 2,
) -> Arrays:
    """The arrays of a batch; labels are the ids where there are none."""
    lengths = _unequal(input_ids, axes)
    filled = {
        name: value if value is None or lengths is None else _filled(name, value, lengths, axes)
        for name, value in (("labels", labels), ("position_ids", position_ids), ("weights", weights))
    }
    ids = integers(
        "input_ids", input_ids if lengths is None else _filled("input_ids", input_ids, lengths, axes), None, axes
    )
    return (
        ids,
        ids if labels is None else integers("labels", filled["labels"], ids.shape, axes),
        optional(integers, "position_ids", filled["position_ids"], ids.shape),
        optional(floats, "weights", filled["weights"], ids.shape),
        lengths,
    )


def integers(name: str, value: Any, shape: tuple[int, ...] | None = None, axes: int = 2) -> Integers:
    """Whole numbers as int32. Raises ValueError where they do not fit; nothing is rounded or cut."""
    array = _array(name, value)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name}: has type {array.dtype}, expected whole numbers")
    _check_shape(name, array, shape, axes)
    limits = np.iinfo(np.int32)
    if array.size and (array.min() < limits.min or array.max() > limits.max):
        raise ValueError(f"{name}: holds numbers beyond 32 bits")
    return np.ascontiguousarray(array, np.int32)


def floats(name: str, value: Any, shape: tuple[int, ...] | None = None, axes: int = 2) -> Floats:
    """Numbers as float32."""
    array = _array(name, value)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{name}: has type {array.dtype}, expected numbers")
    _check_shape(name, array, shape, axes)
    return np.ascontiguousarray(array, np.float32)


def optional(convert: Any, name: str, value: Any, shape: tuple[int, ...]) -> Any:
    """`convert`, or None for None."""
    return None if value is None else convert(name, value, shape, len(shape))


def _array(name: str, value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
        try:
            return np.asarray(value)
        except ValueError as error:
            raise ValueError(f"{name}: is no array: {error}") from None
    kind = int(value.__dlpack_device__()[0])
    if kind not in HOST:
        raise ValueError(f"{name}: lies on a device (DLPack's kind {kind}), expected host memory: pass `{name}.cpu()`")
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError) as error:
        raise ValueError(f"{name}: cannot be read by DLPack: {error}") from None


def _check_shape(name: str, array: np.ndarray, shape: tuple[int, ...] | None, axes: int) -> None:
    if shape is not None and array.shape != shape:
        raise ValueError(f"{name}: has shape {list(array.shape)}, expected {list(shape)} like input_ids")
    if array.ndim != axes or 0 in array.shape:
        letters = {2: "[B, T]", 3: "[accumulation, B, T]"}[axes]
        raise ValueError(f"{name}: has shape {list(array.shape)}, expected {letters}")


def _rows(name: str, value: Any, axes: int) -> list[Any]:
    """The rows of nested sequences. Raises ValueError for micro-batches with unequal numbers of rows."""
    if axes == 2:
        return list(value)
    counts = [len(part) for part in value]
    if len(set(counts)) > 1:
        raise ValueError(f"{name}: its micro-batches have {', '.join(map(str, counts))} rows, expected as many in each")
    return [row for part in value for row in part]


def _unequal(value: Any, axes: int) -> list[int] | None:
    """The lengths of rows that are not all equal; None for what is no nested sequence."""
    if not isinstance(value, (list, tuple)) or (
        axes == 3 and not all(isinstance(part, (list, tuple)) for part in value)
    ):
        return None
    rows = _rows("input_ids", value, axes)
    if not all(hasattr(row, "__len__") for row in rows):
        return None
    lengths = [len(row) for row in rows]
    return lengths if len(set(lengths)) > 1 else None


def _filled(name: str, value: Any, lengths: list[int], axes: int) -> np.ndarray:
    """Rows with padding at their ends, in an array."""
    rows = [_array(name, row) for row in _rows(name, value, axes)]
    if (found := [len(row) for row in rows]) != lengths:
        raise ValueError(f"{name}: its rows have {found} tokens, expected {lengths} like input_ids")
    if 0 in lengths:
        raise ValueError(f"{name}: row {lengths.index(0)} is empty")
    dtype = np.result_type(*rows)
    filled = np.full((len(rows), max(lengths)), FILL.get(name, 0), dtype)
    for place, row in zip(filled, rows, strict=True):
        if row.ndim != 1:
            raise ValueError(f"{name}: a row has shape {list(row.shape)}, expected [T]")
        place[: len(row)] = row
    return filled if axes == 2 else filled.reshape(len(value), -1, max(lengths))
