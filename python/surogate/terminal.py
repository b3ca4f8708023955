"""Terminal output. Control characters in untrusted names, paths and values are escaped here.

The only file of the package that prints.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from . import _native

#: Codes of a terminal that begin and end dimmed text.
DIM = ("\x1b[2m", "\x1b[0m")

#: Seconds before the first note on work that takes long, and between further ones.
NOTES_AFTER = (2.0, 10.0)


class Collected:
    """The messages of a command, as one JSON object instead of lines."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.lines: list[str] = []


_collected: Collected | None = None


@contextmanager
def collecting() -> Iterator[Collected]:
    """Collects what is shown until the end of the block, instead of printing it."""
    global _collected
    _collected = Collected()
    try:
        yield _collected
    finally:
        _collected = None


def state(**facts: Any) -> None:
    """Fields of the JSON object of a command, for programs. Nothing without `--json`."""
    if _collected is not None:
        _collected.facts |= facts


def show(text: str, end: str = "\n") -> None:
    """To standard output."""
    if _collected is not None:
        _collected.lines += text.splitlines()
        return
    print(_native.visible(text), end=end)


def show_piece(text: str) -> None:
    """To standard output at once: a piece of a text whose lines are its own. A file or a pipe gets it as it is."""
    print(_native.visible_text(text) if sys.stdout.isatty() else text, end="", flush=True)


def show_prompt(text: str) -> None:
    """A text that is continued, dimmed, before its continuation: on a terminal alone. Files and pipes get what is new."""
    if not sys.stdout.isatty():
        return
    begin, end = ("", "") if os.environ.get("NO_COLOR") else DIM
    put(begin)
    show_piece(text)
    put(end)


def put(code: str) -> None:
    """Switches a colour of the terminal: a code of this package."""
    print(code, end="", flush=True)


def show_coloured(text: str) -> None:
    """To standard output as it is: the engine has made visible what is not its own in it."""
    print(text)


@contextmanager
def waiting(what: str | Callable[[], str]) -> Iterator[None]:
    """Says on standard error what is being done, if it takes long, and again from time to time."""
    begun, over = monotonic(), threading.Event()
    first, next_ones = NOTES_AFTER

    def tell() -> None:
        pause = first
        while not over.wait(pause):
            words = what if isinstance(what, str) else what()
            warn(f"surogate: {words}, {monotonic() - begun:.0f} s so far")
            pause = next_ones

    teller = threading.Thread(target=tell, name="waiting", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def warn(text: str) -> None:
    """To standard error, apart from output that a program reads. Passwords in addresses are hidden: a log may keep it."""
    print(_native.visible(_native.without_userinfo(text)), file=sys.stderr)
