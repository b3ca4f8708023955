"""A node of a run on this machine: its process, what it says, and its end.

The process is `surogate sft`, as a user would start it. Does not know who asks for it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..storage.buckets import is_address
from ..storage.outputs import folder_of
from ..storage.remote import step_of
from ..terminal import warn

#: Variables that tell a process its place among others: those of whoever started the cluster do not count.
PLACES = re.compile(r"RANK|WORLD_SIZE|LOCAL_RANK|MASTER_(ADDR|PORT)|SLURM_.*|JOB_COMPLETION_INDEX|TORCHELASTIC_.*|SUROGATE_TOKEN.*")

#: Maximum number of lines that a node keeps until they are requested.
LINES = 10_000

#: Seconds that a process has to save and end, before it is killed.
SAVES = 25.0

#: Linux' number of the request to be killed when the parent ends.
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Start:
    """The settings that a node is started with."""

    task: str
    #: Name and text of the file of options.
    name: str
    text: str
    arguments: list[str]
    #: Folder in which relative paths begin.
    folder: str
    #: With tokens, so that it is shown nowhere: Ray writes arguments into its errors and logs as their `repr`.
    environment: dict[str, str] = field(repr=False)


@dataclass
class Said:
    """The output of a node since it was asked last."""

    lines: list[str] = field(default_factory=list)
    #: Lines of standard error.
    errors: list[str] = field(default_factory=list)
    #: Its exit code; None while it works. Minus the signal that killed it.
    code: int | None = None
    #: Why it was ended here, if it was.
    ended: str | None = None


class Node:
    """At most one process at a time. Every call returns soon."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._said = Said()
        self._process: subprocess.Popen[str] | None = None

    def describe(self) -> dict[str, str]:
        """Facts that must be equal on all nodes, by name."""
        from .. import _native

        facts = {"version of surogate": _native.__version__, "version of Python": platform.python_version()}
        try:
            text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
            facts["NVIDIA driver"] = next(iter(re.findall(r"\d+\.\d+(?:\.\d+)?", text)), text.strip())
        except OSError:
            pass  # A machine without one.
        return facts

    def hostname(self) -> str:
        """The machine's name."""
        return socket.gethostname()

    def free_port(self, address: str) -> int:
        """A free port of an address of this machine."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as free:
            free.bind((address, 0))
            return int(free.getsockname()[1])

    def sees(self, folder: str, path: str) -> bool:
        """True if a path exists, which may be relative to a folder. A bucket is seen from everywhere."""
        return is_address(path) or Path(folder, path).exists()

    def newest(self, folder: str, path: str) -> int | None:
        """The step of the newest checkpoint at a path, which may be relative to a folder; None where there is none."""
        place = folder_of(path) if is_address(path) else Path(folder, path)
        steps = [step for of in place.glob("checkpoint-*") if (step := step_of(of.name)) is not None and of.is_dir()]
        return max(steps, default=None)

    def start(self, of: Start) -> None:
        """Starts the process. Errors: a folder that is not there."""
        if not Path(of.folder).is_dir():
            raise FileNotFoundError(f"there is no folder `{of.folder}`, in which the command was given")
        self._said = Said()
        started = threading.Event()
        threading.Thread(target=self._run, args=(of, started), daemon=True).start()
        started.wait()

    def say(self, seconds: float) -> Said:
        """The output since the last call; waits up to the given time for some."""
        with self._changed:
            self._changed.wait_for(self._has_said, seconds)
            said, self._said = self._said, Said(code=self._said.code, ended=self._said.ended)
            return said

    def signal(self, number: int) -> None:
        """Sends a signal to the process, if there is one."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def end(self, why: str) -> None:
        """Ends the process, if there is one: as after a signal, or at once if that takes too long."""
        warn(f"surogate: {why}")
        self._said.ended = why
        self.signal(signal.SIGTERM)
        with self._changed:
            self._changed.wait_for(lambda: self._said.code is not None, SAVES)
        self.signal(signal.SIGKILL)

    def _has_said(self) -> bool:
        return bool(self._said.lines or self._said.errors) or self._said.code is not None

    def _run(self, of: Start, started: threading.Event) -> None:
        """Starts the process, and reads it to its end. The system ends the process with this thread."""
        code = 1
        try:
            with tempfile.TemporaryDirectory(prefix="surogate-") as own:
                code = self._read_all(self._popen(of, Path(own)), started)
        except OSError as error:
            self._said.errors.append(f"surogate: the process of the node cannot be started: {error}")
        started.set()
        with self._changed:
            self._said.code = code
            self._changed.notify_all()

    def _popen(self, of: Start, own: Path) -> subprocess.Popen[str]:
        file = own / of.name
        file.write_text(of.text, encoding="utf-8")
        kept = {name: value for name, value in os.environ.items() if not PLACES.fullmatch(name)}
        user_site = ["-s"] if sys.flags.no_user_site else []
        return subprocess.Popen(
            [sys.executable, "-P", *user_site, "-m", "surogate", of.task, str(file), *of.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=of.folder,
            env={**kept, **of.environment},
            # Signals of a terminal are for whoever leads the run, who passes them on.
            start_new_session=True,
            preexec_fn=_begin,
        )

    def _read_all(self, process: subprocess.Popen[str], started: threading.Event) -> int:
        self._process = process
        started.set()
        errors = threading.Thread(target=self._read, args=(process.stderr, "errors"), daemon=True)
        errors.start()
        self._read(process.stdout, "lines")
        errors.join()
        return process.wait()

    def _read(self, stream: Any, kind: str) -> None:
        for line in stream:
            with self._changed:
                lines: list[str] = getattr(self._said, kind)
                lines.append(line.rstrip("\n"))
                del lines[:-LINES]
                self._changed.notify_all()


def _begin() -> None:
    # Until the process has its own handler, which ends it at a checkpoint.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
