"""Files that this package writes, apart from those of the engine: new files, and its own pages, which it replaces. It
writes to no other existing file, links included.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

#: By this a page is known as one that may be replaced.
MARK = '<meta name="generator" content="surogate">'

#: How pages of earlier versions are known.
MARKS = (MARK.encode(), " · surogate</title>".encode())

#: Bytes of a page in which its mark stands.
HEAD = 4096


def is_trusted(path: Path) -> bool:
    """Returns True if an entry of a cache is this user's or the system owner's, and no one else may write it. Links are not
    followed.
    """
    status = path.lstat()
    owned = status.st_uid in (0, os.geteuid()) and not stat.S_ISLNK(status.st_mode)
    return owned and not status.st_mode & 0o022


def is_trusted_folder(path: Path) -> bool:
    """The same of a folder and everything in it, unless the folder is closed to others."""
    if not is_trusted(path) or not path.is_dir():
        return False
    return not path.stat().st_mode & 0o077 or all(map(is_trusted, path.rglob("*")))


def close_folders(root: Path, folder: Path) -> None:
    """Makes the folders of a cache from its root to one below it, for this user alone, and takes the right to write to those
    that are there from others: whoever writes to a folder exchanges what it holds. Raises OSError where one belongs to another
    user or is a link; the root may be one.
    """
    root.parent.mkdir(parents=True, exist_ok=True)
    below = folder.relative_to(root).parts
    for place in (root.joinpath(*below[:depth]) for depth in range(len(below) + 1)):
        with contextlib.suppress(FileExistsError):
            place.mkdir(mode=0o700)
        status = place.stat() if place == root else place.lstat()
        if status.st_uid not in (0, os.geteuid()) or not stat.S_ISDIR(status.st_mode):
            raise OSError(f"{place} is a link or belongs to another user: what it holds cannot be believed (remove it)")
        if status.st_mode & 0o022 and status.st_uid == os.geteuid():
            place.chmod(stat.S_IMODE(status.st_mode) & ~0o022)


@contextlib.contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """A hidden folder next to a path, which is removed at the end. What processes that were killed left of such folders is
    removed first; one that another process uses is locked and stays.
    """
    _clear_abandoned(path)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.export.", suffix=".tmp", dir=path.parent))
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _clear_abandoned(path: Path) -> None:
    """An empty folder stays: it may be about to be locked. Another process may remove any of them meanwhile."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.export\.[a-z0-9_]+\.tmp")
    for folder in (entry for entry in path.parent.iterdir() if ours.fullmatch(entry.name)):
        with contextlib.suppress(FileNotFoundError):
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and any(folder.iterdir()):
                with _locked(folder) as is_held:
                    if is_held:
                        shutil.rmtree(folder)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Holds the lock of a folder, which ends with the process, however that ends. Yields false where another process holds
    it or the file system has no locks.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = True
        except OSError:
            is_held = False
        yield is_held
    finally:
        os.close(handle)


def write_new(path: Path, text: str) -> None:
    """Writes a file that was not there. Raises FileExistsError where anything is."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)


def replace(path: Path, text: str) -> None:
    """Gives a file of this package new content, so that a reader sees either the old or the new one whole."""
    # A name that cannot be known before: a link that waits there would be followed.
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    fresh = Path(name)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        fresh.chmod(0o666 & ~_umask())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def replace_page(path: Path, text: str) -> None:
    """Replaces as :func:`replace` does, where nothing is or a page of this package. Raises FileExistsError where it is
    not one."""
    check_page(path)
    replace(path, text.replace("<head>", f"<head>{MARK}", 1))


def check_page(path: Path) -> None:
    """Raises FileExistsError where something is that is no page of this package."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_file():
        raise FileExistsError(f"{path} is not a file: only a page of surogate is replaced")
    with path.open("rb") as file:
        head = file.read(HEAD)
    if not any(mark in head for mark in MARKS):
        raise FileExistsError(f"{path} is not a page of surogate: only a page of surogate is replaced")


def _umask() -> int:
    """The process' umask, which can only be read by setting it."""
    with open("/proc/self/status", encoding="utf-8") as file:
        line = next((line for line in file if line.startswith("Umask:")), "Umask: 022")
    return int(line.split()[1], 8)
