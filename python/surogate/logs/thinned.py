"""A long series of events by step, of which a bounded number is kept: memory and drawing time do not grow with the
length of the run.

Knows steps and numbers; not what is drawn of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]

#: Windows of steps at most. A series of fewer steps is kept whole.
WINDOWS = 4096

#: Events of a window at most, of which five or six stay when it is thinned: that is not done at every step.
ROOM = 8

#: Peaks of these stay: of each window the events with the lowest and the highest value.
PEAKS = ("loss", "grad_norm")

#: Whole texts and lists have no place in a series.
NUMBER = (int, float, type(None))


@dataclass
class Window:
    """Some steps that follow each other."""

    steps: int = 0
    seconds: float = 0.0
    memory: float = 0.0
    #: By step: the first, and the peaks.
    kept: dict[int, Event] = field(default_factory=dict)


class Thinned:
    """A mapping from step to event. Sums and maxima are those of all events, whichever are kept."""

    def __init__(self, windows: int = WINDOWS) -> None:
        self._most = windows
        #: Steps of a window, a power of two.
        self.stride = 1
        self._windows: dict[int, Window] = {}

    def add(self, step: int, event: Event) -> None:
        """The event of a step; one that is there already is replaced."""
        slim = {name: value for name, value in event.items() if isinstance(value, NUMBER)}
        window = self._windows.setdefault(step // self.stride, Window())
        if step not in window.kept or self.stride > 1:
            window.steps += 1
            window.seconds += slim.get("seconds") or 0.0
        window.memory = max(window.memory, slim.get("memory") or 0.0)
        window.kept[step] = slim
        if len(window.kept) > ROOM:
            _thin(window)
        while len(self._windows) > self._most:
            self._halve()

    def _halve(self) -> None:
        self.stride *= 2
        halved: dict[int, Window] = {}
        for index in sorted(self._windows):
            part, whole = self._windows[index], halved.setdefault(index // 2, Window())
            whole.steps += part.steps
            whole.seconds += part.seconds
            whole.memory = max(whole.memory, part.memory)
            whole.kept.update(part.kept)
        for window in halved.values():
            _thin(window)
        self._windows = halved

    def cut(self, step: int) -> None:
        """Forgets this step and those after it. In the middle of a window its seconds are divided evenly."""
        for index in [index for index in self._windows if (index + 1) * self.stride > step]:
            window = self._windows[index]
            left = min(window.steps, max(0, step - index * self.stride))
            window.kept = {at: event for at, event in window.kept.items() if at < step}
            if not window.kept:
                del self._windows[index]
                continue
            window.seconds *= left / window.steps
            window.steps = left

    def items(self) -> Iterator[tuple[int, Event]]:
        """In the order of steps."""
        for index in sorted(self._windows):
            kept = self._windows[index].kept
            yield from ((at, kept[at]) for at in sorted(kept))

    def values(self) -> Iterator[Event]:
        """The kept events in the order of their steps."""
        return (event for _, event in self.items())

    def keys(self) -> set[int]:
        """The steps of the kept events."""
        return {at for at, _ in self.items()}

    def regular(self) -> Iterator[Event]:
        """The first of each window: every step, or every second, fourth, …"""
        return (window.kept[min(window.kept)] for _, window in sorted(self._windows.items()))

    def __bool__(self) -> bool:
        return bool(self._windows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thinned) and dict(self.items()) == dict(other.items())

    @property
    def count(self) -> int:
        """Events, those that are not kept included."""
        return sum(window.steps for window in self._windows.values())

    @property
    def seconds(self) -> float:
        """The sum of `seconds`."""
        return sum(window.seconds for window in self._windows.values())

    @property
    def memory(self) -> float:
        """The highest `memory`."""
        return max((window.memory for window in self._windows.values()), default=0.0)

    @property
    def last(self) -> Event | None:
        """The event of the last step."""
        if not self._windows:
            return None
        kept = self._windows[max(self._windows)].kept
        return kept[max(kept)]


def _thin(window: Window) -> None:
    """Keeps the first, the last and the peaks."""
    if len(window.kept) <= 2:
        return
    stay = {min(window.kept), max(window.kept)}
    for name in PEAKS:
        values = [(value, at) for at, event in window.kept.items() if (value := event.get(name)) is not None]
        values = [(value, at) for value, at in values if math.isfinite(value)]
        if values:
            stay |= {min(values)[1], max(values)[1]}
    window.kept = {at: window.kept[at] for at in sorted(stay)}
