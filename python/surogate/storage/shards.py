"""Files of streamed datasets, fetched for a run as it needs them: a process next to it, one line of JSON for each request and
answer.

    {"limit": bytes, "files": [[[address, bytes, version], …] or null, …]}       first: the files of each set
    {"request": 1, "get": [set, file], "next": [[set, file], …]}                 answer: {"request": 1, "path": …} or "error"
    {"release": [set, file]}                                                     no answer

What is fetched lies in a folder of this process's own and takes at most `limit` bytes: a file is removed once it is released,
and the folder at the end. Files that are needed next are fetched meanwhile, as far as there is room.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import _native
from ..environment.signals import leave_to_the_run
from ..errors import SurogateError
from . import buckets, files, hub

#: A file by the numbers of its set and of itself.
Id = tuple[int, int]


@dataclass
class Remote:
    """A file elsewhere."""

    address: str
    size: int
    version: str


class Held:
    """A file that is here or on its way."""

    def __init__(self, remote: Remote, path: Path) -> None:
        self.remote, self.path = remote, path
        self.is_here = threading.Event()
        self.error: str | None = None
        #: True between the request and the release.
        self.is_used = False


class Shelf:
    """The files that are here, of at most `limit` bytes."""

    def __init__(self, sets: list[list[Remote] | None], limit: int, folder: Path, fetch: Callable[[Remote, Path], None]) -> None:
        self.sets, self.limit, self.folder, self.fetch = sets, limit, folder, fetch
        self.held: dict[Id, Held] = {}

    def get(self, file: Id, following: list[Id]) -> Path:
        """The path of a file, once it is here; then the next ones are begun."""
        held = self.held.get(file) or self._begin(file)
        held.is_used = True
        # One at a time: the file that is waited for gets the whole connection.
        held.is_here.wait()
        if held.error is not None:
            self._remove(file)
            raise OSError(held.error)
        for ahead in following:
            remote = self._remote(ahead)
            if remote is None or ahead in self.held:
                continue
            if self._used() + remote.size > self.limit:
                break
            self._begin(ahead)
        return held.path

    def release(self, file: Id) -> None:
        """Removes a file that is read."""
        if file in self.held:
            self._remove(file)

    def _remote(self, file: Id) -> Remote | None:
        of_set = self.sets[file[0]]
        return of_set[file[1]] if of_set is not None else None

    def _used(self) -> int:
        return sum(held.remote.size for held in self.held.values())

    def _begin(self, file: Id) -> Held:
        """Begins to fetch a file, for which files that were fetched ahead make room."""
        remote = self._remote(file)
        assert remote is not None, "a file here is not requested"
        for other in [other for other, held in self.held.items() if not held.is_used]:
            if self._used() + remote.size <= self.limit:
                break
            self._remove(other)
        held = Held(remote, self.folder / f"{file[0]}-{file[1]}" / Path(remote.address).name)
        self.held[file] = held
        threading.Thread(target=self._run, args=(held,), daemon=True).start()
        return held

    def _run(self, held: Held) -> None:
        try:
            held.path.parent.mkdir(exist_ok=True)
            self.fetch(held.remote, held.path)
        except (SurogateError, OSError) as error:
            held.error = str(error)
        except Exception as error:  # noqa: BLE001  whatever a client raises ends the request and not the process
            held.error = f"{type(error).__name__}: {error}"
        finally:
            held.is_here.set()

    def _remove(self, file: Id) -> None:
        held = self.held.pop(file)
        # A transfer that goes on is waited for: its bytes are gone only then.
        held.is_here.wait()
        shutil.rmtree(held.path.parent, ignore_errors=True)


def fetch(remote: Remote, path: Path) -> None:
    """Writes a file elsewhere to a path. Raises what hub and buckets do."""
    if buckets.is_address(remote.address):
        buckets.fetch(remote.address, remote.size, remote.version, path)
    else:
        hub.fetch(remote.address, path)


def root() -> Path:
    """The folder of the folders of all streams: SUROGATE_STREAMS, else `surogate/streams` in the user's folder for caches."""
    if own := os.environ.get("SUROGATE_STREAMS"):
        return Path(own)
    return _native.cache_folder("streams")


def _read(asked: queue.Queue[dict[str, Any]], folder: Path) -> None:
    """Reads requests. At the end of the input it ends the process, whatever is still being fetched, and leaves nothing there."""
    for line in sys.stdin:
        asked.put(json.loads(line))
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def main() -> None:
    """Answers requests until there are no more."""
    leave_to_the_run()
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    # Libraries print to where answers would be.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.environ.setdefault("HF_XET_CHUNK_CACHE_SIZE_BYTES", "0")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    first = json.loads(sys.stdin.readline())
    sets = [None if of is None else [Remote(*file) for file in of] for of in first["files"]]
    place = root()
    place.mkdir(parents=True, exist_ok=True)
    with files.folder_beside(place / "stream") as folder:
        asked: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=_read, args=(asked, folder), daemon=True).start()
        (folder / "README").write_text("Files of a run that streams its data; they are removed at its end.\n", encoding="utf-8")
        shelf = Shelf(sets, int(first["limit"]), folder, fetch)
        while True:
            request = asked.get()
            if "release" in request:
                shelf.release((request["release"][0], request["release"][1]))
                continue
            answer: dict[str, Any] = {"request": request["request"]}
            try:
                found = shelf.get((request["get"][0], request["get"][1]), [(of, number) for of, number in request["next"]])
                answer["path"] = str(found)
            except OSError as error:
                answer["error"] = str(error)
            # A run that reads no answers has closed the input as well.
            with contextlib.suppress(BrokenPipeError):
                answers.write(json.dumps(answer) + "\n")
                answers.flush()


if __name__ == "__main__":
    main()
