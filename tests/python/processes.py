"""Processes of this machine, as Linux lists them."""

from __future__ import annotations

import contextlib
from pathlib import Path


def descendants(process: int) -> list[int]:
    """The processes that a process started, and theirs."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(entry.name))
    found = list(parents.get(process, ()))
    for number in found:
        found += parents.get(number, ())
    return found
