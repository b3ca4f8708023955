"""Processes beside a run: started before it, told where its log is, waited for after it.

None of them can harm the run: it shares nothing with them but a file that it writes and a pipe that is never full. What
each does is known to `reader.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from . import _native
from .import_path import trusted
from .terminal import warn

#: Seconds that a process may take after the run to finish its work, before it is ended.
PATIENCE = 60.0


class _Process:
    """A reader that was started."""

    def __init__(self, name: str, spec: dict[str, Any], path: list[str]) -> None:
        self.name = name
        self._was_ended = False
        # Complaints before its first word, a traceback of its imports above all: a file, because nobody empties a pipe.
        self._complaints = os.fdopen(os.memfd_create("complaints"), "r+b")
        user_site = ["-s"] if sys.flags.no_user_site else []
        self._process = subprocess.Popen(
            # `-P`: what lies in the working directory is data, a `json.py` too.
            [sys.executable, "-P", *user_site, "-m", "surogate.reader", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            # Interpreters that the client of a service starts are to be as careful.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"},
            # Signals of the terminal are the run's.
            start_new_session=True,
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def door(self) -> Path:
        """The file that takes the line which says where the log is."""
        assert self._process.stdin
        return Path(f"/dev/fd/{self._process.stdin.fileno()}")

    def let_go(self) -> None:
        """Tells it that the run is over."""
        try:
            if self._process.stdin:
                self._process.stdin.close()
        except OSError:
            pass  # It has ended already.

    def wait(self, seconds: float) -> bool:
        """Whether it came to its end in time."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> None:
        """Ends it with what it has started, if it has not ended by itself."""
        if self._process.poll() is None:
            self._was_ended = True
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        # What it started may still hold its end of the pipe.
        self._listener.join(1.0)

    def _listen(self) -> None:
        """Hands on what a reader says, and that it ended without having said why."""
        said = False
        for line in self._process.stdout or ():
            said = True
            _native.say(line.strip())
        code = self._process.wait()
        if code and not said and not self._was_ended:
            _native.say(f"{self.name} gets nothing more: {self._last_words(code)}")

    def _last_words(self, code: int) -> str:
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").split("\n")
        words = next((line.strip() for line in reversed(lines) if line.strip()), None)
        return words or (f"its process ended with {code}" if code > 0 else f"its process was ended by signal {-code}")


class Beside:
    """The readers of one run: its trackers, and who makes the report, if it is to have one."""

    def __init__(self, trackers: list[dict[str, Any]], report: bool = True) -> None:
        self._path = trusted()
        self._processes: list[_Process] = []
        for spec in trackers:
            name = spec["tracker"]
            if not is_installed(name, self._path):
                warn(f"surogate: report_to: {name}: the package is not installed, so {name} gets nothing")
                warn(f"surogate:   hint: pip install 'surogate[{name}]', or pip install {name}")
            else:
                self._start(name, {**spec, "reader": name})
        if report:
            self._start("report", {"reader": "report"})

    def _start(self, name: str, spec: dict[str, Any]) -> None:
        try:
            self._processes.append(_Process(name, spec, self._path))
        except OSError as error:
            warn(f"surogate: {name} cannot be started: {error}")

    @property
    def doors(self) -> list[Path]:
        """Files that take the line which says where the log is."""
        return [process.door for process in self._processes]

    def finish(self) -> None:
        """Waits until everybody has done with the log; who takes too long is ended."""
        until = time.monotonic() + PATIENCE
        for process in self._processes:
            process.let_go()
        try:
            for process in self._processes:
                if not process.wait(max(0.0, until - time.monotonic())):
                    late = f"did not come to its end within {PATIENCE:.0f} s of the run's, and was ended"
                    warn(f"surogate: {process.name} {late}")
        except KeyboardInterrupt:
            warn("surogate: what was still to be handed on is left: the log has everything")
        finally:
            for process in self._processes:
                process.end()
            for text in _native.unsaid():
                warn(f"surogate: {text}")


def is_installed(package: str, path: list[str]) -> bool:
    """Whether it lies in one of these folders, or is found without any. A folder that only has its name is none."""
    found = (finder.find_spec(package, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return any(spec is not None and spec.has_location for spec in found)

