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

#: Shapes of a batch, by the number of axes.
AXES = {2: "[B, T]", 3: "[accumulation, B, T]"}

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
    _check_shape(name, array, shape, axes)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name}: has type {array.dtype}, expected whole numbers")
    limits = np.iinfo(np.int32)
    if array.size and (array.min() < limits.min or array.max() > limits.max):
        raise ValueError(f"{name}: holds numbers beyond 32 bits")
    return np.ascontiguousarray(array, np.int32)


def floats(name: str, value: Any, shape: tuple[int, ...] | None = None, axes: int = 2) -> Floats:
    """Numbers as float32."""
    array = _array(name, value)
    _check_shape(name, array, shape, axes)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{name}: has type {array.dtype}, expected numbers")
    return np.ascontiguousarray(array, np.float32)


def for_tokens(name: str, value: Any, input_ids: Rows, shape: tuple[int, ...]) -> Floats:
    """Numbers for tokens, [accumulation, B, T]: rows have the lengths of those of the ids, whose array has this shape, and may be
    padded with 0 up to the longest. The first axis may be missing where it is 1."""
    lengths = _unequal(input_ids, 2 if depth(input_ids) == 2 else 3)
    axes = 2 if depth(value) == 2 else 3
    if lengths is not None:
        rows = [_array(name, row) for row in _rows(name, value, axes)]
        if len(rows) == len(lengths):
            longest = max(lengths)
            of_lengths = zip(rows, lengths, strict=True)
            rows = [row if len(row) > longest or row[of:].any() else row[:of] for row, of in of_lengths]
        filled = _filled(name, rows, lengths, 2)
        value = filled if axes == 2 else filled.reshape(len(value), -1, filled.shape[1])
    return floats(name, value, shape[1:] if axes == 2 and shape[0] == 1 else shape, axes).reshape(shape)


def for_rows(name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers for rows, [accumulation, B], given like that or as [B]."""
    expected = f"expected {list(shape)} finite numbers, one for each row"
    try:
        array = _array(name, value)
    except ValueError as error:
        raise ValueError(f"batch: {error}; {expected}") from None
    array = array[None] if array.ndim == 1 else array
    largest = np.finfo(np.float32).max
    if array.shape != shape or array.dtype.kind not in "fiub" or not (np.abs(array * 1.0) <= largest).all():
        raise ValueError(f"batch: {name} is {list(array.shape)} of {array.dtype}, {expected}")
    return array


def depth(rows: Any) -> int:
    """Axes of an array, or of sequences in each other."""
    if hasattr(rows, "ndim"):
        return int(rows.ndim)
    return 1 + depth(rows[0]) if isinstance(rows, (list, tuple)) and len(rows) > 0 else 0


def row_lengths(input_ids: Rows, shape: tuple[int, ...]) -> list[int]:
    """The tokens of each row of ids, whose array has this shape, [accumulation, B, T]."""
    return _unequal(input_ids, 2 if depth(input_ids) == 2 else 3) or [shape[2]] * (shape[0] * shape[1])


def optional(convert: Any, name: str, value: Any, shape: tuple[int, ...]) -> Any:
    """`convert`, or None for None."""
    return None if value is None else convert(name, value, shape, len(shape))


def _array(name: str, value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
        try:
            return np.asarray(value)
        except ValueError as error:
            why = "its rows have unequal lengths" if "inhomogeneous" in str(error) else error
            raise ValueError(f"{name}: is no array: {why}") from None
    kind = int(value.__dlpack_device__()[0])
    if kind not in HOST:
        raise ValueError(f"{name}: lies on a device (DLPack's kind {kind}), expected host memory: pass `{name}.cpu()`")
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError) as error:
        raise ValueError(f"{name}: cannot be read by DLPack: {error}") from None


def _check_shape(name: str, array: np.ndarray, shape: tuple[int, ...] | None, axes: int) -> None:
    found = f"has shape {list(array.shape)}" if array.size else f"is empty: has shape {list(array.shape)}"
    if shape is not None and array.shape != shape:
        raise ValueError(f"{name}: {found}, expected {list(shape)} like input_ids")
    if array.ndim != axes or array.size == 0:
        raise ValueError(f"{name}: {found}, expected {AXES[axes]}")


def _rows(name: str, value: Any, axes: int) -> list[Any]:
    """The rows of nested sequences. Raises ValueError for micro-batches with unequal numbers of rows."""
    if axes == 2:
        return list(value)
    if any(isinstance(row, (int, float, np.generic)) for part in value for row in part):
        raise ValueError(f"{name}: holds rows in the place of micro-batches, expected {AXES[3]}")
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
