"""The log of a run as a stream of events, and as a history.

Knows the names of events and that a resumed run goes back to its checkpoint, not how they are used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from .thinned import Event, Thinned

#: Bytes that are read at once.
BLOCK = 4 << 20

#: Openings, checkpoints and ends that are remembered: the first and the last ones.
MARKS = 200

#: Answers to `sample_prompts` that are remembered, in evaluations: the first and the last ones.
SAMPLES = 40

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
        """The next events, of some MiB at most; none when all are read. A line that is not finished is left."""
        try:
            with self.path.open("rb") as file:
                end = file.seek(0, 2)
                # A resumed process truncates the unfinished line of the previous one.
                self._offset = min(self._offset, end)
                while True:
                    file.seek(self._offset)
                    whole = _whole_lines(file)
                    self._offset += len(whole)
                    events = [event for line in whole.splitlines() if (event := _event(line)) is not None]
                    if events or not whole:
                        return events
        except FileNotFoundError:
            return []

    def go_to_last_opening(self) -> None:
        """Skips to the last opening: events before it are those of the run's earlier processes."""
        at = 0
        try:
            with self.path.open("rb") as file:
                while whole := _whole_lines(file):
                    for line in whole.splitlines(keepends=True):
                        if (event := _event(line)) is not None and event["event"] in OPENINGS:
                            self._offset = at
                        at += len(line)
                    file.seek(at)
        except FileNotFoundError:
            pass


def _whole_lines(file: BinaryIO) -> bytes:
    """Lines from here on: those in a block, or one that is longer."""
    data = file.read(BLOCK)
    while b"\n" not in data and (more := file.read(BLOCK)):
        data += more
    return data[: data.rfind(b"\n") + 1]


def _event(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


@dataclass
class History:
    """A run as recorded in its log. Steps repeated after a resume appear once."""

    #: By step.
    steps: Thinned = field(default_factory=Thinned)
    #: By the steps that were done before.
    evaluations: Thinned = field(default_factory=Thinned)
    #: Answers to `sample_prompts`, by the steps that were done before: the first and the last ones.
    samples: dict[int, Event] = field(default_factory=dict)
    #: By step.
    device: Thinned = field(default_factory=Thinned)
    #: Where the run was opened, saved, ended: not all, where they are many.
    marks: list[Event] = field(default_factory=list)
    #: What the last process began with.
    opening: Event = field(default_factory=dict)
    #: What the last process ended with; none during the run, or if it was killed.
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
            self._mark({name: event.get(name) for name in ("event", "step", "time")})
        elif kind == "step":
            self.steps.add(step, event)
        elif kind == "evaluation":
            self.evaluations.add(step, event)
        elif kind == "samples":
            self.samples[step] = event
            if len(self.samples) > SAMPLES:
                self._drop_sample()
        elif kind == "device":
            self.device.add(step, event)
        elif kind == "checkpoint" or kind in ENDS:
            self._mark(event)
            self.end = event if kind in ENDS else None

    def _drop_sample(self) -> None:
        """Drops one in the middle. Copies of images, which only the first one of a process has, go on to the next one."""
        steps = sorted(self.samples)
        dropped, after = self.samples.pop(steps[SAMPLES // 2]), self.samples[steps[SAMPLES // 2 + 1]]
        for old, new in zip(dropped["samples"], after["samples"], strict=False):
            for image, other in zip(old.get("images") or [], new.get("images") or [], strict=False):
                if "copy" in image and "copy" not in other:
                    other["copy"] = image["copy"]

    def _go_back(self, step: int) -> None:
        """Forgets what is done again."""
        self.steps.cut(step)
        self.device.cut(step)
        self.evaluations.cut(step + 1)
        self.samples = {at: event for at, event in self.samples.items() if at <= step}

    def _mark(self, event: Event) -> None:
        self.marks.append(event)
        if len(self.marks) > MARKS:
            del self.marks[MARKS // 2]

    @property
    def manifest(self) -> Event:
        """The manifest in the run's opening; empty before its first line."""
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
        last = self.steps.last
        return last["step"] + 1 if last else 0


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
    """True if a process holds the folder of a run, as the system lists its locks; nothing is touched."""
    try:
        held, inode = Path("/proc/locks").read_text(), run.stat().st_ino
    except OSError:
        return False
    return any(" FLOCK " in line and f":{inode} " in line for line in held.splitlines())


def history_of(log: Path, check: Callable[[Event], None] = lambda event: None) -> History:
    """The history recorded in a log so far. `check` sees every event first and may reject it."""
    history = History()
    stream = Stream(log)
    while events := stream.read():
        for event in events:
            check(event)
            history.take(event)
    return history
