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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import _native

#: Seconds that a process may take after the run to finish its work, before it is ended.
PATIENCE = 60.0


class Beside:
    """The readers of one run: its trackers, and who makes the report, if it is to have one."""

    def __init__(self, trackers: list[dict[str, Any]], report: bool = True) -> None:
        self._processes: dict[str, subprocess.Popen[str]] = {}
        for spec in trackers:
            name = spec["tracker"]
            if find_spec(name) is None:
                _warn(f"report_to: {name}: the package is not installed, so {name} gets nothing")
                _warn(f"  hint: pip install 'surogate[{name}]', or pip install {name}")
            else:
                self._start(name, {**spec, "reader": name})
        if report:
            self._start("report", {"reader": "report"})

    def _start(self, name: str, spec: dict[str, Any]) -> None:
        environment = {**os.environ, "PYTHONPATH": _import_path()}
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "surogate.reader", json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
                # Signals of the terminal are the run's.
                start_new_session=True,
            )
        except OSError as error:
            return _warn(f"{name} cannot be started: {error}")
        self._processes[name] = process
        threading.Thread(target=_listen, args=(process,), daemon=True).start()

    @property
    def doors(self) -> list[Path]:
        """Files that take the line which says where the log is."""
        pipes = (process.stdin for process in self._processes.values())
        return [Path(f"/dev/fd/{pipe.fileno()}") for pipe in pipes if pipe]

    def finish(self) -> None:
        """Waits until everybody has done with the log; who takes too long is ended."""
        until = time.monotonic() + PATIENCE
        for process in self._processes.values():
            _close(process)
        try:
            for name, process in self._processes.items():
                try:
                    process.wait(max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    _warn(f"{name} did not come to its end within {PATIENCE:.0f} s of the run's, and was ended")
        except KeyboardInterrupt:
            _warn("what was still to be handed on is left: the log has everything")
        finally:
            for process in self._processes.values():
                _end(process)
            for text in _native.unsaid():
                _warn(text)


def _close(process: subprocess.Popen[str]) -> None:
    try:
        if process.stdin:
            process.stdin.close()
    except OSError:
        pass  # It has ended already.


def _end(process: subprocess.Popen[str]) -> None:
    """Ends it with what it has started, if it has not ended by itself."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _listen(process: subprocess.Popen[str]) -> None:
    """Hands on what a reader says."""
    for line in process.stdout or ():
        _native.say(line.strip())


def _import_path() -> str:
    """The reader imports what this process would, from wherever it was started."""
    return os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in sys.path))


def _warn(text: str) -> None:
    print(f"surogate: {text}", file=sys.stderr)
