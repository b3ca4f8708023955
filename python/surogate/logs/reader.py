"""A process that reads the log of a run: `python -m surogate.logs.reader`.

It receives its task, `{"reader": …}`, and later the path of the log on standard input, which closes when the run's process
exits, for whatever reason. What
it writes to standard output are messages for the user. Nothing that happens here affects the run.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ..environment.signals import leave_to_the_run
from .stream import ENDS, OPENINGS, Event, Stream

#: Seconds that a reader may take to finish after the run. An upload takes as long as its bytes need.
TIMEOUTS: dict[str, float] = {"upload": float("inf")}
USUAL_TIMEOUT = 600.0


class Reader(Protocol):
    """Processes events."""

    #: Seconds between reads of the log.
    interval: float

    #: Whether events of earlier processes of the run are needed too.
    wants_all: bool

    def take(self, events: list[Event]) -> None:
        """The next events; the first of all is an opening."""

    def close(self, end: Event | None) -> None:
        """The run has ended: with this event, or without one."""


class Run(threading.Thread):
    """Waits for the exit of the run's process through a pipe."""

    def __init__(self, pipe: BinaryIO, timeout: float) -> None:
        super().__init__(daemon=True)
        self._timeout = timeout
        self.is_over = threading.Event()
        self._pipe = pipe

    def log(self) -> Event | None:
        """The path of the log and the folder of the run; none if the run ends before it has a log."""
        line = self._pipe.readline()
        return json.loads(line) if line else None

    def run(self) -> None:
        """Notes the end. A reader that hangs afterwards is terminated."""
        while self._pipe.readline():
            pass
        self.is_over.set()
        if self._timeout < float("inf"):
            time.sleep(self._timeout)
            os._exit(1)


def follow(stream: Stream, reader: Reader, is_over: threading.Event) -> None:
    """Passes events on until the run has ended."""
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
    """Creates the reader that a description names."""
    if spec["reader"] == "report":
        from ..report import LiveReport

        return LiveReport(output, spec["say"])
    if spec["reader"] == "metrics":
        from .prometheus import Metrics

        return Metrics(spec["address"], spec["say"])
    if spec["reader"] == "kubeflow":
        from .kubeflow import Progress

        return Progress(spec["say"])
    if spec["reader"] == "upload":
        from ..storage.uploads import Uploads

        return Uploads(spec, output)
    from ..trackers import tracker

    return tracker(spec, output)


def main() -> int:
    """Reads until the run has ended. The exit code says whether all events were processed."""
    leave_to_the_run()
    pipe, messages = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    line = pipe.readline()
    if not line:
        return 0
    spec = json.loads(line)
    silence = os.open(os.devnull, os.O_RDWR)
    # Clients may print anything, and would read what is typed to the run.
    for fd in (0, 1, 2):
        os.dup2(silence, fd)

    def say(text: str) -> None:
        try:
            print(" ".join(text.split()), file=messages, flush=True)
        except OSError:
            pass  # The run has exited.

    os.nice(10)
    run = Run(pipe, TIMEOUTS.get(spec["reader"], USUAL_TIMEOUT))
    try:
        announced = run.log()
        if announced is None:
            return 0
        run.start()
        spec["say"] = say
        follow(Stream(Path(announced["log"])), make(spec, Path(announced["output"])), run.is_over)
    except Exception as error:
        say(f"{spec['reader']} receives no more data: {type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
