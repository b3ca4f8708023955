"""Validates the events of a log before a page is built from them: a log may come from anywhere.

Knows the fields that pages read and their types, not how pages use them. Other fields and events may hold any
JSON value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..logs.stream import ENDS, OPENINGS, Event

#: Levels that a value may be nested in; those of the engine have six.
DEEPEST = 32

#: Numbers beyond are no measurements, and the arithmetic of axes ends there.
LARGEST, SMALLEST = 1e100, 1e-100

#: Whole numbers up to here are exact as floats.
MOST = 1 << 53


@dataclass(frozen=True)
class Kind:
    """A type of value, in words for a message."""

    words: str
    fits: Callable[[Any], bool]
    #: Whether the field may be missing.
    may_lack: bool = False


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value == 0 or (math.isfinite(value) and SMALLEST <= abs(value) <= LARGEST)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST


def _or_null(kind: Kind) -> Kind:
    return Kind(f"{kind.words} or null", lambda value: value is None or kind.fits(value), may_lack=True)


NUMBER = Kind("a finite number", _is_number)
COUNT = Kind("a whole number from 0", _is_count)
TEXT = Kind("a text", lambda value: isinstance(value, str))
GROUP = Kind("an object", lambda value: isinstance(value, dict), may_lack=True)
TEXTS = Kind("an object of texts", lambda value: isinstance(value, dict) and all(isinstance(v, str) for v in value.values()))
NAMES = Kind("a list of texts", lambda value: isinstance(value, list) and all(isinstance(v, str) for v in value))
MAYBE, AMOUNT = _or_null(NUMBER), _or_null(COUNT)


@dataclass(frozen=True)
class Lacking:
    """A shape whose value may be missing or null."""

    shape: Any


_PART = {"class": TEXT, "bytes": COUNT, "note": TEXT}
_WORDS = dict.fromkeys(("subject", "layers", "decision", "reason"), TEXT)
_DECISION = {"bytes": COUNT, "seconds": MAYBE, "words": Lacking(_WORDS)}
_PLAN = {
    "memory": Lacking([_PART]),
    "activations": Lacking([_PART]),
    "phases": Lacking([{"class": TEXT, "bytes": COUNT}]),
    "decisions": Lacking([_DECISION]),
    "machine_memory": AMOUNT,
}
_SET = {
    "name": TEXT,
    **dict.fromkeys(("rows_read", "rows_kept", "documents", "tokens", "trained_tokens", "longest"), COUNT),
    "dropped": [{"rows": COUNT, "reason": TEXT, "example": TEXT}],
}
_DATA = {
    "datasets": [_SET],
    **dict.fromkeys(("documents", "held_out", "rows", "row_tokens", "micro_batches"), COUNT),
    "layout": TEXT,
    "fill": NUMBER,
}
_MANIFEST = {
    "steps": AMOUNT,
    "machine": Lacking({"memory": AMOUNT}),
    "parameters": Lacking({"total": AMOUNT, "trained": AMOUNT}),
    "digests": GROUP,
}
_OPENING = {
    "step": COUNT,
    "time": TEXT,
    "manifest": Lacking(_MANIFEST),
    "options": Lacking({"max_grad_norm": MAYBE}),
    "given": Lacking(NAMES),
    "because": Lacking(TEXTS),
    "plan": Lacking(_PLAN),
    "data": Lacking(_DATA),
}
#: Of mixtures of experts.
ROUTERS = ("busiest_expert", "router_entropy", "router_loss")
#: Of tasks with metrics of their own, on steps and evaluations.
ANSWERS = (
    *("rewards/accuracies", "accuracy", "rewards/margins", "margin", "rewards/chosen", "rewards/rejected"),
    *("min_reward", "mean_reward", "max_reward", "logps/chosen", "logps/rejected", "kl"),
    *("divergence", "cross_entropy", "entropy"),
    *("reward", "completions/mean_length", "completions/clipped_ratio", "sampling/sampling_logp_difference/mean"),
)
_STEP = {
    "step": COUNT,
    **dict.fromkeys(("seconds", "tokens_per_second"), NUMBER),
    **dict.fromkeys(("loss", "grad_norm", "learning_rate", "mfu", "ceiling", *ROUTERS, *ANSWERS), MAYBE),
    "memory": AMOUNT,
}
_IMAGE = {"name": TEXT, **dict.fromkeys(("width", "height", "tokens"), COUNT), "copy": Lacking(TEXT)}
_SAMPLE = {**dict.fromkeys(("prompt", "text", "finish"), TEXT), "images": Lacking([_IMAGE])}
_INSTRUMENTS = ("clock_mhz", "power_watts", "power_limit_watts", "utilization", "memory_utilization", "memory_used")

SHAPES: dict[str, Any] = {
    "step": _STEP,
    "evaluation": {"step": COUNT, **dict.fromkeys(("loss", *ANSWERS), MAYBE)},
    "samples": {"step": COUNT, "samples": [_SAMPLE]},
    "device": {"step": COUNT, **dict.fromkeys(_INSTRUMENTS, MAYBE)},
    "checkpoint": {"step": Lacking(COUNT), "time": TEXT},
    **dict.fromkeys(OPENINGS, _OPENING),
    **dict.fromkeys(ENDS, {"step": Lacking(COUNT), "time": TEXT}),
}


def problem(event: Event) -> str | None:
    """The problem of an event; None if a page can be made of it."""
    shape = SHAPES.get(event["event"])
    return None if shape is None else _unwritable(event, DEEPEST) or _differing(event, shape, "")


def _unwritable(value: Any, levels: int) -> str | None:
    if levels == 0:
        return f"values are nested in more than {DEEPEST} levels"
    if isinstance(value, str):
        return "a text holds half of a character" if any("\ud800" <= letter <= "\udfff" for letter in value) else None
    inside = value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else []
    return next((found for item in inside if (found := _unwritable(item, levels - 1))), None)


def _differing(value: Any, shape: Any, path: str) -> str | None:
    if isinstance(shape, Lacking):
        return None if value is None else _differing(value, shape.shape, path)
    if isinstance(shape, Kind):
        is_missing = value is None and shape.may_lack
        return None if is_missing or shape.fits(value) else _expected(path, value, shape.words)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return _expected(path, value, "a list")
        found = (_differing(item, shape[0], f"{path}[{number}]") for number, item in enumerate(value))
    else:
        if not isinstance(value, dict):
            return _expected(path, value, "an object")
        parts = ((name, f"{path}.{name}" if path else name) for name in shape)
        found = (_differing(value.get(name), shape[name], place) for name, place in parts)
    return next((problem for problem in found if problem), None)


def _expected(path: str, value: Any, words: str) -> str:
    found = "missing" if value is None else f"{value!r:.40}"
    return f"`{path}` is {found}, expected {words}"
