"""Reads untrusted JSON files (model configuration, tokenizer) and enforces the limits that later code relies on.

Knows JSON, not what any field means.
"""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

from ..errors import ConfigError

#: Objects and lists inside of each other, at most: the engine reads 128.
DEPTH = 64

#: Bytes of a file, at most: the largest tokenizers have some ten million.
BYTES = 256 << 20


def read(path: Path) -> Any:
    """Reads a file. Raises ConfigError, which names the field: nested too deeply, or a number that is none."""
    try:
        status = path.stat()
        # What is no regular file may never end, or wait for a writer.
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path}: is not a regular file")
        if status.st_size > BYTES:
            raise ConfigError(f"{path}: has {status.st_size} bytes, expected at most {BYTES}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except RecursionError:
        raise ConfigError(f"{path}: is nested more than {DEPTH} deep, expected less") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    check(value, str(path))
    return value


def parse(text: str, place: str) -> Any:
    """Parses a line of a file. Raises ConfigError, which names the place."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ConfigError(f"{place}: is nested more than {DEPTH} deep, expected less") from None
    except ValueError as error:
        raise ConfigError(f"{place}: is not JSON: {error}") from None
    check(value, place)
    return value


def check(value: Any, what: str) -> None:
    """Raises ConfigError for a number that is not finite and for what is nested too deeply."""
    waiting: list[tuple[str, int, Any]] = [("", 0, value)]
    while waiting:
        place, depth, value = waiting.pop()
        if depth > DEPTH:
            raise ConfigError(f"{what}: `{_shown(place)}` is nested more than {DEPTH} deep, expected less")
        if isinstance(value, dict):
            waiting += [(f"{place}.{key}" if place else key, depth + 1, of) for key, of in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{place}[{i}]", depth + 1, of) for i, of in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{what}: `{_shown(place)}` is {value}, expected a finite number")


def _shown(place: str) -> str:
    return place if len(place) <= 100 else f"{place[:97]}..."
