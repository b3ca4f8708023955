"""A run's folder in object storage: which folders there are complete, what goes up and what comes down.

A folder is complete when the object `upload.json` is in it, which is written last and names every file with its size.
Knows names and bytes; signing, credentials and retries are obstore's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RunError
from . import buckets

#: The object that makes a folder complete.
MARK = "upload.json"

#: Folders that appear at once, and whose files never change.
WHOLE = re.compile(r"checkpoint-(\d+)|adapter|model|merged")

#: Folders of trackers.
GROWING = ("tensorboard",)

#: Bytes that are sent at once, and how many parts at a time.
PART, AT_ONCE = 16 << 20, 4

#: Parts of an object, at most: servers take no more than 10 000.
PARTS = 9_000


class Remote:
    """The folder at an address such as `s3://bucket/path`."""

    def __init__(self, address: str) -> None:
        self._scheme, _, rest = address.partition("://")
        bucket, _, key = rest.rstrip("/").partition("/")
        self.address = f"{self._scheme}://{bucket}/{key}"
        if not bucket or not key or not {"", ".", ".."}.isdisjoint(key.split("/")):
            raise ConfigError(f"`output_dir` is `{address}`, expected `{self._scheme}://bucket/path`, no part of it empty, `.` or `..`")
        self._prefix = f"{key}/"
        try:
            self._store = buckets.store(self._scheme, bucket)
        except ImportError as error:
            raise RunError(f"`output_dir: {address}`: {buckets.INSTALL}") from error

    def why(self, error: Exception) -> str:
        """The meaning of an error of the store, in one line."""
        return buckets.reason(error, self._scheme)

    def names(self) -> dict[str, int]:
        """Every object below the address, with its size."""
        import obstore

        listed = (of for chunk in obstore.list(self._store, self._prefix) for of in chunk)
        return {of["path"].removeprefix(self._prefix): int(of["size"]) for of in listed}

    def check_writable(self) -> None:
        """Writes an object and removes it again. Raises RunError with the reason where that is refused."""
        import obstore

        # One name for all: what a killed process leaves, the next one removes.
        name = f"{self._prefix}trial"
        try:
            obstore.put(self._store, name, b"trial")
            try:
                obstore.delete(self._store, name)
            except FileNotFoundError:
                pass  # Another node has removed it.
        except (obstore.exceptions.BaseError, OSError) as error:
            why = "there is no such bucket" if isinstance(error, FileNotFoundError) else self.why(error)
            raise RunError(f"`output_dir: {self.address}`: nothing can be written there: {why}") from error

    def read(self, name: str) -> bytes:
        """The bytes of an object, by its name below the prefix."""
        import obstore

        return bytes(obstore.get(self._store, self._prefix + name).bytes())

    def put(self, name: str, path: Path) -> None:
        """Sends a file. The object appears when all of it is there."""
        import obstore

        size = path.stat().st_size
        obstore.put(self._store, self._prefix + name, path, chunk_size=max(PART, -(-size // PARTS)), max_concurrency=AT_ONCE)

    def put_text(self, name: str, text: str) -> None:
        """Writes an object of UTF-8 text; an object of that name is replaced."""
        import obstore

        obstore.put(self._store, self._prefix + name, text.encode())

    def remove(self, names: list[str]) -> None:
        """Deletes objects by their names below the prefix."""
        import obstore

        obstore.delete(self._store, [self._prefix + name for name in names])

    def marks(self, names: dict[str, int]) -> dict[str, dict[str, Any]]:
        """The complete folders among the objects, each with its mark. A mark that no run has written makes none."""
        found = {}
        for name in names:
            folder, _, last = name.rpartition("/")
            if last == MARK and WHOLE.fullmatch(folder):
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    mark = json.loads(self.read(name))
                    is_whole = all(names.get(f"{folder}/{file}") == size for file, size in mark["files"].items())
                    if is_whole and isinstance(mark["digest"], str):
                        found[folder] = mark
        return found

    def put_folder(self, folder: Path, name: str, digest: str, before: list[str]) -> None:
        """Sends a folder, in place of the objects that are there of an earlier one."""
        files = {str(path.relative_to(folder)): path for path in regular_files(folder)}
        old = [of for of in before if of.startswith(f"{name}/")]
        if old:
            # The mark first: what is left of the folder is never taken for a whole one.
            self.remove([of for of in old if of == f"{name}/{MARK}"])
            self.remove([of for of in old if of != f"{name}/{MARK}"])
        for file, path in files.items():
            self.put(f"{name}/{file}", path)
        sizes = {file: path.stat().st_size for file, path in files.items()}
        self.put_text(f"{name}/{MARK}", json.dumps({"digest": digest, "files": sizes}, indent=1))

    def get_folder(self, name: str, mark: dict[str, Any], target: Path) -> None:
        """Fetches the files of a complete folder."""
        for file in mark["files"]:
            if ".." in Path(file).parts or Path(file).is_absolute():
                raise RunError(f"{self.address}/{name}/{MARK}: names `{file}`, expected a file of the folder")
            self.get(f"{name}/{file}", target / file)

    def get(self, name: str, path: Path) -> None:
        """Fetches an object."""
        import obstore

        path.parent.mkdir(parents=True, exist_ok=True)
        of: Any = obstore.head(self._store, self._prefix + name)
        with path.open("wb") as file:
            buckets.receive(self._store, of, file, int(of["size"]))
            os.fsync(file.fileno())


def regular_files(folder: Path) -> Iterator[Path]:
    """The files of a folder and of those in it, links left out, in their order."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield path


def digest(folder: Path) -> str:
    """The digest of a complete folder: that of its files, or of a checkpoint's state, which holds the digests of the others."""
    found = hashlib.sha256()
    state = folder / "state.json"
    for path in [state] if state.is_file() else regular_files(folder):
        found.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(PART):
                found.update(block)
    return found.hexdigest()


def step_of(name: str) -> int | None:
    """Steps of a checkpoint, by its name."""
    match = WHOLE.fullmatch(name)
    return int(match[1]) if match and match[1] else None
