"""The processes that read a run's log: started before the run, given the path of its log, waited for after it.

They cannot affect the run: it shares with them only the log that it writes and a pipe that is never full. `reader.py`
knows what each of them does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import _native
from ..environment.import_path import trusted
from ..terminal import waiting, warn
from . import kubeflow

#: Seconds that a process may take to finish after the run before it is terminated.
TIMEOUT = 60.0

#: Seconds between two questions whether it is late.
LOOK = 0.5

#: Readers that need no package of their own.
BUILT_IN = {"metrics"}


class _Process:
    """A started reader."""

    def __init__(self, name: str, spec: dict[str, Any], path: list[str]) -> None:
        self.name = name
        self._was_ended = False
        # Errors before its first message, such as a traceback of its imports: a file, because no one drains a pipe.
        self._errors = os.fdopen(os.memfd_create("errors"), "r+b")
        user_site = ["-s"] if sys.flags.no_user_site else []
        self._process = subprocess.Popen(
            # `-P`: what lies in the working directory is data, a `json.py` too.
            [sys.executable, "-P", *user_site, "-m", "surogate.logs.reader"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # Interpreters started by a client are restricted in the same way.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"},
            # Only the run handles signals of the terminal.
            start_new_session=True,
        )
        # Not as an argument: every user of a machine can read those, and an address may hold a password.
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(spec) + "\n")
                self._process.stdin.flush()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def pipe(self) -> Path:
        """The file to which the path of the log is written."""
        assert self._process.stdin
        return Path(f"/dev/fd/{self._process.stdin.fileno()}")

    @property
    def exit_code(self) -> int | None:
        """The code with which it exited: 0 where it has processed the log, or there was none."""
        return self._process.poll()

    def let_go(self) -> None:
        """Signals that the run is over."""
        try:
            if self._process.stdin:
                self._process.stdin.close()
        except OSError:
            pass  # It has exited already.

    def wait(self, seconds: float) -> bool:
        """True if it exited in time."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> None:
        """Kills it with its children, unless it has exited."""
        if self._process.poll() is None:
            self._was_ended = True
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        # Its children may still hold their end of the pipe.
        self._listener.join(1.0)

    def _listen(self) -> None:
        """Forwards the messages of a reader, and reports an exit without a message."""
        said = False
        for line in self._process.stdout or ():
            said = True
            _native.say(line.strip())
        code = self._process.wait()
        if code and not said and not self._was_ended:
            _native.say(f"{self.name} receives no more data: {self._last_words(code)}")

    def _last_words(self, code: int) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        words = next((line.strip() for line in reversed(lines) if line.strip()), None)
        return words or (f"its process exited with code {code}" if code > 0 else f"its process was killed by signal {-code}")


class LogReaders:
    """The readers of one run: its trackers, the report if it has one, and the upload of its folder."""

    def __init__(self, trackers: list[dict[str, Any]], report: bool = True, upload: dict[str, Any] | None = None) -> None:
        self._path = trusted()
        self._processes: list[_Process] = []
        for spec in trackers:
            name = spec["tracker"]
            if name not in BUILT_IN and not is_installed(name, self._path):
                warn(f"surogate: report_to: {name}: the package is not installed, so {name} receives nothing")
                warn(f"surogate:   hint: pip install 'surogate[{name}]', or pip install {name}")
            else:
                self._start(name, {**spec, "reader": name})
        if kubeflow.is_requested():
            self._start("kubeflow", {"reader": "kubeflow"})
        if upload:
            self._start("upload", upload)
        if report:
            self._start("report", {"reader": "report"})

    def _start(self, name: str, spec: dict[str, Any]) -> None:
        try:
            self._processes.append(_Process(name, spec, self._path))
        except OSError as error:
            warn(f"surogate: {name} cannot be started: {error}")

    @property
    def pipes(self) -> list[Path]:
        """The files to which the path of the log is written."""
        return [process.pipe for process in self._processes]

    def has_failed(self, name: str) -> bool:
        """True if a reader could not be started, or did not get through the log."""
        return all(process.exit_code != 0 for process in self._processes if process.name == name)

    def abandon(self) -> None:
        """Ends all readers at once."""
        for process in self._processes:
            process.end()

    def finish(self, is_late: Callable[[], bool] = lambda: False) -> None:
        """Waits until all readers have processed the log; one that takes too long is terminated, and all as soon as it is
        late."""
        until = time.monotonic() + TIMEOUT
        for process in self._processes:
            process.let_go()
        try:
            for process in self._processes:
                if process.name == "upload":
                    with waiting("uploading"):
                        _wait(process, float("inf"), is_late)
                elif not _wait(process, until, is_late) and not is_late():
                    late = f"did not finish within {TIMEOUT:.0f} s after the run and was terminated"
                    warn(f"surogate: {process.name} {late}")
        except KeyboardInterrupt:
            warn("surogate: trackers and uploads were stopped early: the log is complete")
        finally:
            self.abandon()
            for text in _native.unsaid():
                warn(f"surogate: {text}")


def _wait(process: _Process, until: float, is_late: Callable[[], bool]) -> bool:
    """True if it exited in time."""
    while not process.wait(max(0.0, min(LOOK, until - time.monotonic()))):
        if is_late() or time.monotonic() > until:
            return False
    return True


def is_installed(package: str, path: list[str]) -> bool:
    """True if a package is in one of these folders, or built in. A folder that only has its name does not count."""
    found = (finder.find_spec(package, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return any(spec is not None and spec.has_location for spec in found)

