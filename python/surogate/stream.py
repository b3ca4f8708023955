"""The log of a run as a stream of events, and as the history that they add up to.

Knows the names of events and that a resumed run goes back to its checkpoint; not what anybody does with them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]

#: What a process of a run ends with, if it can still write.
ENDS = {"finished", "interrupted", "failed"}

#: What it begins with.
OPENINGS = {"start", "resume"}


class Stream:
    """The events of a log that is still being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def read(self) -> list[Event]:
        """The events since the last call. A line that is not finished is left for the next."""
        try:
            with self.path.open("rb") as file:
                file.seek(0, 2)
                if file.tell() < self._offset:
                    # A process that goes on cuts off what the one before did not finish.
                    self._offset = file.tell()
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [event for line in whole.splitlines() if (event := _event(line)) is not None]


def _event(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


@dataclass
class History:
    """A run as its log tells it. Steps that were done again after a resume stand there once."""

    #: By step.
    steps: dict[int, Event] = field(default_factory=dict)
    #: By the steps that were done before.
    evaluations: dict[int, Event] = field(default_factory=dict)
    #: By step.
    device: dict[int, Event] = field(default_factory=dict)
    #: Where the run was opened, saved, ended.
    marks: list[Event] = field(default_factory=list)
    #: What the last process began with.
    opening: Event = field(default_factory=dict)
    #: What the last process ended with; none while it goes on, or if it was killed.
    end: Event | None = None
    #: Steps that were done when the last process began.
    since: int = 0

    def take(self, event: Event) -> None:
        """Adds the next event of the log."""
        kind: str = event["event"]
        step: int = event.get("step", 0)
        if kind in OPENINGS:
            self._go_back(step)
            self.opening, self.end, self.since = event, None, step
            self.marks.append(event)
        elif kind == "step":
            self.steps[step] = event
        elif kind == "evaluation":
            self.evaluations[step] = event
        elif kind == "device":
            self.device[step] = event
        elif kind == "checkpoint" or kind in ENDS:
            self.marks.append(event)
            self.end = event if kind in ENDS else None

    def _go_back(self, step: int) -> None:
        """Forgets what is done again."""
        self.steps = {at: event for at, event in self.steps.items() if at < step}
        self.device = {at: event for at, event in self.device.items() if at < step}
        self.evaluations = {at: event for at, event in self.evaluations.items() if at <= step}

    @property
    def manifest(self) -> Event:
        """What the run is made of; empty before its first line."""
        return self.opening.get("manifest") or {}

    @property
    def options(self) -> Event:
        """Every option with its value."""
        return self.opening.get("options") or {}

    @property
    def total(self) -> int | None:
        """Steps of the run."""
        return self.manifest.get("steps")

    @property
    def done(self) -> int:
        """Steps that are done."""
        return max(self.steps, default=-1) + 1


def log_of(run: Path) -> Path | None:
    """The log of the run in a folder, or the file itself if one is named."""
    if run.is_file():
        return run
    manifest = run / "manifest.json"
    if manifest.is_file():
        fields = json.loads(manifest.read_text())
        named, then = Path(fields.get("log", "")), Path(fields.get("output", run))
        # The folder may have been moved since.
        candidates = [named, run / named.name]
        if named.is_relative_to(then):
            candidates.insert(0, run / named.relative_to(then))
        found = [path for path in candidates if path.is_file()]
        if found:
            return found[0]
    logs = sorted(run.glob("log-*.json"))
    return logs[-1] if logs else None


def is_running(run: Path) -> bool:
    """Whether a process holds the folder of a run, as the system lists its locks; nothing is touched."""
    try:
        held, inode = Path("/proc/locks").read_text(), run.stat().st_ino
    except OSError:
        return False
    return any(" FLOCK " in line and f":{inode} " in line for line in held.splitlines())


def history_of(log: Path, check: Callable[[Event], None] = lambda event: None) -> History:
    """The history that a log tells by now. `check` sees every event before it is taken, and may refuse it."""
    history = History()
    for event in Stream(log).read():
        check(event)
        history.take(event)
    return history
