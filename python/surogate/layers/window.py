"""Reads from config.json which layers use sliding-window attention, and of which size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..dsl import Reader

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_windows(reader: Reader, layers: int, slides: Callable[[int], bool]) -> list[int | None]:
    """The window of every layer, None where it sees all keys before it.

    Reads `use_sliding_window`, `sliding_window` (keys that a query sees, its own included) and
    `layer_types`; `slides` says which layers have a window where the config names no types.
    """
    used, window = reader.take("use_sliding_window") or False, reader.take("sliding_window")
    types = reader.take("layer_types")
    if not isinstance(used, bool):
        reader.problem("use_sliding_window", f"{used!r} is not supported, expected true or false")
        return [None] * layers
    if used and (isinstance(window, bool) or not isinstance(window, int | None) or (window is not None and window < 1)):
        reader.problem("sliding_window", f"{window!r} is not supported, expected a whole number above 0 or null")
        return [None] * layers
    if types is None:
        return [window if used and window and slides(i) else None for i in range(layers)]
    sliding = [kind == SLIDING for kind in layer_types(reader, layers, [FULL] * layers)]
    if any(sliding) and not (used and window):
        reader.problem("layer_types", f"{SLIDING!r} needs `use_sliding_window: true` and a `sliding_window`")
    return [window if slide else None for slide in sliding]


def window(reader: Reader, default: int | None) -> int | None:
    """`sliding_window`: keys that a query sees, its own included. A missing field is the default, null is no window."""
    found = reader.take("sliding_window") if "sliding_window" in reader.fields else default
    if found is not None and (isinstance(found, bool) or not isinstance(found, int) or found < 1):
        reader.problem("sliding_window", f"{found!r} is not supported, expected a whole number above 0 or null")
    return found


def layer_types(
    reader: Reader, layers: int, default: Sequence[str], known: Sequence[str] = (FULL, SLIDING)
) -> list[str]:
    """`layer_types`, the kind of every layer, or `default` where the config has none."""
    types = reader.take("layer_types")
    if types is None:
        return list(default)
    if not isinstance(types, list) or len(types) < layers:
        reader.problem("layer_types", f"expected a list with the type of each of the {layers} layers")
        return list(default)
    for kind in sorted({str(kind) for kind in types} - set(known)):
        reader.problem("layer_types", f"{kind!r} is not supported, expected {' or '.join(map(repr, known))}")
    return types[:layers]
