"""The reader that uploads what a run writes to its `output_dir` in a bucket.

Compares the local folder with the bucket again and again, so that what failed once is sent later, by this process or the
next one. Knows files and their names, not what is in them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..logs.stream import Event
from .remote import GROWING, MARK, WHOLE, Remote, digest, regular_files, step_of

#: Seconds between comparisons.
INTERVAL = 2.0

#: Seconds between uploads of files that grow, such as the log.
GROWING_INTERVAL = 15.0

#: Seconds before a failed upload is tried again, and for how long after the end of the run.
PAUSE, AFTERWARDS = 5.0, 300.0

#: The file in the local folder that says that the bucket has everything.
COMPLETE = ".uploaded"

#: The file in the local folder that names the folders that the bucket has, as they were then.
SENT = ".sent"

#: The way to send what is left.
AGAIN = "the same command with resume_from_checkpoint=true uploads it"

#: Names of files that are being written.
UNFINISHED = re.compile(r"\..*|.*\.tmp")


class Uploads:
    """Sends complete folders at once, files that grow from time to time, and everything at the end."""

    interval = INTERVAL
    wants_all = False

    def __init__(self, spec: dict[str, Any], output: Path) -> None:
        self._remote, self._limit = Remote(spec["address"]), int(spec["limit"])
        self._say: Callable[[str], None] = spec["say"]
        self._output = output
        #: Complete folders in the bucket, with their digests; none before the bucket was listed.
        self._there: dict[str, str] | None = None
        #: Files as they were sent last: size and time.
        self._sent: dict[str, tuple[int, int]] = {}
        self._due = 0.0
        self._has_failed = False
        #: Folders as they were when they were compared last.
        self._compared: dict[str, list[int]] = {}
        #: Seconds that a signal leaves for a checkpoint and its upload, until that was found to be too few; none for no limit.
        self._grace: int | None = spec.get("grace")
        #: Seconds that the slowest checkpoint took to be written.
        self._written = 0.0
        self._clear_snapshots()

    def _clear_snapshots(self) -> None:
        """Removes what readers left that were killed during an upload."""
        for snapshot in self._output.parent.glob(f".{self._output.name}.*.upload"):
            if not Path("/proc", snapshot.name.split(".")[-2]).exists():
                shutil.rmtree(snapshot, ignore_errors=True)

    def take(self, events: list[Event]) -> None:
        """Uploads what is new when there are events; after a failure, only when the pause is over."""
        self._written = max([self._written, *(event.get("seconds", 0.0) for event in events if event["event"] == "checkpoint")])
        if events:
            self._attempt(is_end=False)

    def close(self, end: Event | None) -> None:
        """Raises OSError where something is left that could not be sent."""
        until = time.monotonic() + AFTERWARDS
        while not self._attempt(is_end=True):
            if time.monotonic() > until:
                raise OSError(f"not everything is in {self._remote.address}; all of it is in {self._output}")
            time.sleep(PAUSE)
        (self._output / COMPLETE).write_text(self._remote.address + "\n", encoding="utf-8")

    def _attempt(self, is_end: bool) -> bool:
        """True if everything was sent that is to be sent now."""
        import obstore

        now = time.monotonic()
        if self._has_failed and not is_end and now < self._due:
            return False
        try:
            if self._there is None:
                marks = self._remote.marks(self._remote.names())
                self._there = {name: mark["digest"] for name, mark in marks.items()}
            for folder in sorted(self._output.iterdir(), key=lambda path: step_of(path.name) or 0):
                if WHOLE.fullmatch(folder.name) and folder.is_dir():
                    self._send_folder(folder)
            if is_end or self._has_failed or now >= self._due:
                self._send_files()
                self._due = now + GROWING_INTERVAL
            self._remove_old()
        except (obstore.exceptions.BaseError, OSError) as error:
            if not self._has_failed:
                self._say(f"the upload to {self._remote.address} failed: {self._remote.why(error)}; it is tried again")
            self._has_failed, self._due = True, time.monotonic() + PAUSE
            return False
        if self._has_failed:
            self._say(f"the upload to {self._remote.address} goes on")
        self._has_failed = False
        return True

    def _send_folder(self, folder: Path) -> None:
        """Sends a folder that the bucket does not have. A snapshot of hard links: the run may remove the folder meanwhile."""
        assert self._there is not None
        seen = _seen(folder)
        if self._compared.get(folder.name) == seen:
            return
        snapshot = self._output.parent / f".{self._output.name}.{os.getpid()}.upload"
        try:
            try:
                shutil.copytree(folder, snapshot, copy_function=os.link)
            except (shutil.Error, FileNotFoundError):
                return  # It was removed, or replaced: the next comparison finds what is there then.
            known = digest(snapshot)
            if self._there.get(folder.name) != known:
                # The manifest names the folder already; a checkpoint that it does not name would not be the run's. Where a
                # machine is lost, the log of its steps comes from here too.
                self._send_files()
                self._there.pop(folder.name, None)
                before = [name for name in self._remote.names() if name.startswith(f"{folder.name}/")]
                begun = time.monotonic()
                self._remote.put_folder(snapshot, folder.name, known, before)
                self._there[folder.name] = known
                self._check_grace(folder.name, time.monotonic() - begun)
        finally:
            shutil.rmtree(snapshot, ignore_errors=True)
        self._compared[folder.name] = seen
        (self._output / SENT).write_text(json.dumps(self._compared), encoding="utf-8")

    def _check_grace(self, name: str, seconds: float) -> None:
        """Reports once that a checkpoint and its upload take longer than a signal leaves."""
        if self._grace is None or step_of(name) is None or self._written + seconds <= self._grace:
            return
        self._say(
            f"{name} took {self._written:.1f} s to be written and {seconds:.1f} s to be uploaded, more than "
            f"`save_grace_seconds: {self._grace}`: after a signal the run ends before its checkpoint is in {self._remote.address}"
        )
        self._grace = None

    def _send_files(self) -> None:
        """Sends the files that changed: those of the run itself, and of trackers."""
        own = [path for path in sorted(self._output.iterdir()) if path.is_file() and not path.is_symlink()]
        for name in GROWING:
            own += regular_files(self._output / name)
        for path in own:
            name = str(path.relative_to(self._output))
            if UNFINISHED.fullmatch(path.name) or path.name == COMPLETE:
                continue
            try:
                status = path.stat()
                seen = (status.st_size, status.st_mtime_ns)
                if self._sent.get(name) != seen:
                    self._remote.put(name, path)
                    self._sent[name] = seen
            except FileNotFoundError:
                continue  # It was replaced by a newer one, which comes next.

    def _remove_old(self) -> None:
        """Removes checkpoints that neither the run keeps nor `save_total_limit` allows."""
        assert self._there is not None
        steps = sorted((step, name) for name in self._there if (step := step_of(name)) is not None)
        old = [name for _, name in steps[: -self._limit] if not (self._output / name).is_dir()]
        for name in old:
            there = [of for of in self._remote.names() if of.startswith(f"{name}/")]
            self._remote.remove([of for of in there if of == f"{name}/{MARK}"])
            self._remote.remove([of for of in there if of != f"{name}/{MARK}"])
            del self._there[name]


def left_behind(output: Path) -> str | None:
    """A message if the bucket does not have everything; None if it has."""
    if (output / COMPLETE).is_file():
        return None
    return f"not everything was uploaded; all of it is in {output}, and {AGAIN}"


def unsent(output: Path) -> str | None:
    """The folders that are not in the bucket, with a verb; without any, what else is missing. None before there is a run."""
    if not (output / "manifest.json").is_file() or (output / COMPLETE).is_file():
        return None
    sent = json.loads((output / SENT).read_text()) if (output / SENT).is_file() else {}
    folders = [of for of in output.iterdir() if WHOLE.fullmatch(of.name) and of.is_dir()]
    names = [of.name for of in folders if sent.get(of.name) != _seen(of)]
    names.sort(key=lambda name: (step_of(name) or 0, name))
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}" if names else "the end of the log is"


def _seen(folder: Path) -> list[int]:
    """The numbers of a folder that change with its content."""
    status = folder.stat()
    return [status.st_ino, status.st_mtime_ns]
