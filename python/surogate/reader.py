"""A process beside a run that reads its log: `python -m surogate.reader '{"reader": …}'`.

It is told on standard input where the log is, and that input ends when the run's process does, however it does. What it
writes to standard output are sentences for the user. Whatever happens here, the run does not notice.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from .stream import ENDS, OPENINGS, Event, Stream

#: Seconds that a reader may take to come to its end after the run's.
PATIENCE = 600


class Reader(Protocol):
    """What is done with the events."""

    #: Seconds between two looks at the log.
    interval: float

    #: Whether the events of the run's earlier processes are wanted too.
    wants_all: bool

    def take(self, events: list[Event]) -> None:
        """The next events; the first of all is an opening."""

    def close(self, end: Event | None) -> None:
        """The run has ended: with this event, or without a word."""


class Run(threading.Thread):
    """Waits for the end of the run's process, at the other end of a pipe."""

    def __init__(self, fd: int) -> None:
        super().__init__(daemon=True)
        self.is_over = threading.Event()
        self._pipe = os.fdopen(fd, "rb")

    def log(self) -> Event | None:
        """Where the log is and the folder of the run; none if the run ends before it has one."""
        line = self._pipe.readline()
        return json.loads(line) if line else None

    def run(self) -> None:
        """Notes the end. Whoever hangs after it is ended some time later."""
        while self._pipe.readline():
            pass
        self.is_over.set()
        time.sleep(PATIENCE)
        os._exit(1)


def follow(stream: Stream, reader: Reader, is_over: threading.Event) -> None:
    """Hands events on until the run has ended."""
    last: Event | None = None
    seconds = 0.0
    if not reader.wants_all:
        stream.go_to_last_opening()
    while True:
        over = is_over.wait(seconds)
        while events := stream.read():
            last = next((event for event in reversed(events) if event["event"] in ENDS | OPENINGS), last)
            reader.take(events)
        end = last if last and last["event"] in ENDS else None
        if over or end:
            return reader.close(end)
        seconds = reader.interval


def make(spec: dict[str, Any], output: Path) -> Reader:
    """The reader that a description names."""
    if spec["reader"] == "report":
        from .report import LiveReport

        return LiveReport(output, spec["say"])
    from .trackers import tracker

    return tracker(spec, output)


def main() -> int:
    """Reads until the run has ended. The exit code says whether everything was done."""
    spec = json.loads(sys.argv[1])
    pipe, told = os.dup(0), os.fdopen(os.dup(1), "w", encoding="utf-8")
    silence = os.open(os.devnull, os.O_RDWR)
    # Clients of services print what they like, and read what is typed to the run.
    for fd in (0, 1, 2):
        os.dup2(silence, fd)

    def say(text: str) -> None:
        try:
            print(" ".join(text.split()), file=told, flush=True)
        except OSError:
            pass  # Nobody listens any more.

    os.nice(10)
    run = Run(pipe)
    try:
        announced = run.log()
        if announced is None:
            return 0
        run.start()
        spec["say"] = say
        follow(Stream(Path(announced["log"])), make(spec, Path(announced["output"])), run.is_over)
    except Exception as error:
        say(f"{spec['reader']} gets nothing more: {type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
