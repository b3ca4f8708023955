"""The report of a run as one HTML file, during the run and afterwards, and the comparison of several runs.

Reads only logs, needs no engine, and the page loads nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ..errors import RunError
from ..logs.stream import Event, History, history_of, is_running, log_of
from ..storage import files
from . import shape, state

#: Seconds after which a browser reloads the page of a live run, and within which it is rewritten.
REFRESH = 10.0

#: Maximum share of the time spent on writing the page.
SHARE = 0.02

NAME = "report.html"


class LiveReport:
    """Keeps the page of a live run up to date."""

    wants_all = True

    def __init__(self, output: Path, say: Callable[[str], None]) -> None:
        self.interval = 1.0
        self._say = say
        self._failed: set[str] = set()
        self._output, self._path = output, output / NAME
        self._history = History()
        self._due = 0.0

    def take(self, events: list[Event]) -> None:
        """Adds events to the history, keeps its state with checkpoints, and writes the page when it is due."""
        folders = set()
        for event in events:
            self._history.take(event)
            if event["event"] == "checkpoint" and self._is_here():
                folders.add(Path(event["path"]).parent)
        for folder in folders:
            self._keep(folder / state.NAME, lambda path: state.replace(path, self._history))
        if time.monotonic() >= self._due and self._history.end is None:
            self._write(is_running=True)

    def _is_here(self) -> bool:
        """True if the newest process of the history writes to this folder: earlier ones may have had another, of another
        machine too."""
        return Path(self._history.manifest.get("output", "")).resolve() == self._output.resolve()

    def close(self, end: Event | None) -> None:
        """Writes the page of the ended run."""
        if self._history.opening:
            self._write(is_running=False)

    def _write(self, is_running: bool) -> None:
        from .page import render

        begin = time.monotonic()
        page = render(self._history, is_running, REFRESH)
        self._keep(self._path, lambda path: files.replace_page(path, page))
        now = time.monotonic()
        self._due = now + max(REFRESH / 2, (now - begin) / SHARE)

    def _keep(self, path: Path, write: Callable[[Path], None]) -> None:
        try:
            write(path)
            self._failed.discard(path.name)
        except OSError as error:
            # A full disk may have space later.
            if path.name not in self._failed:
                self._say(f"{path.name} cannot be written: {error}")
            self._failed.add(path.name)


def write(runs: list[Path], output: Path | None) -> Path:
    """Writes the page of a run, or the comparison of several; returns its path.

    Raises RunError if there is no log to read.
    """
    histories = [_history(run) for run in runs]
    if len(runs) == 1:
        from .page import render

        path = output or (runs[0] if runs[0].is_dir() else runs[0].parent) / NAME
        running = is_running(runs[0] if runs[0].is_dir() else runs[0].parent)
        text = render(histories[0], running, REFRESH)
    else:
        from .compare import render as side_by_side

        path = output or Path("comparison.html")
        text = side_by_side(list(zip(_names(runs, histories), histories, strict=True)))
    try:
        files.replace_page(path, text)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error}") from None
    return path


def _history(run: Path) -> History:
    log = log_of(run)
    if log is None:
        raise RunError(f"{run}: there is no log of a run here; give the `output_dir` of a run, or its log")

    def check(event: Event) -> None:
        if wrong := shape.problem(event):
            raise RunError(f"{log}: the event `{event['event']}` is not one of a run: {wrong}")

    history = history_of(log, check)
    if not history.opening:
        raise RunError(f"{log}: this is not the log of a run, or not one that this version can read")
    return history


def _names(runs: list[Path], histories: list[History]) -> list[str]:
    """The names of the runs; where those are the same, the ends of their paths that tell them apart."""
    names = [str(history.manifest.get("run", run.name)) for run, history in zip(runs, histories, strict=True)]
    parts = [run.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        if len(set(names)) == len(names):
            break
        names = ["/".join(of[-depth:]) for of in parts]
    return names
