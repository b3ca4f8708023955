"""An empty working directory for libraries that prefer what lies in the working directory to what a name means.

Knows paths, and what tasks of lm-evaluation-harness say of their files; not what a task is.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Folders of the libraries below the harness, which may be named from where the user is.
FOLDERS = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_EVALUATE_CACHE", "HF_MODULES_CACHE", "XDG_CACHE_HOME")

#: Fields of a task's `dataset_kwargs` that name files.
OF_FILES = ("data_files", "data_dir", "cache_dir")


@contextlib.contextmanager
def empty_directory() -> Iterator[None]:
    """Works in a folder in which nothing lies, and returns to where it was."""
    before = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with tempfile.TemporaryDirectory(prefix="surogate-") as folder:
            os.chdir(folder)
            try:
                yield
            finally:
                os.fchdir(before)
    finally:
        os.close(before)


def absolute(text: str) -> str:
    """A path that is there, from the root; anything else, such as a name on the Hub, as it is."""
    return os.path.abspath(os.path.expanduser(text)) if os.path.lexists(os.path.expanduser(text)) else text


def make_absolute(options: Namespace) -> list[Path]:
    """Changes the paths of `surogate evaluate` to absolute ones. Returns the folders in which data of tasks are looked
    for: the working directory after those of the tasks' files.
    """
    for name in ("model", "adapter", "base"):
        if (value := getattr(options, name)) is not None:
            setattr(options, name, absolute(value))
    for name in ("output", "include_path"):
        if value := getattr(options, name):
            setattr(options, name, os.path.abspath(value))
    for name in FOLDERS:
        if value := os.environ.get(name):
            os.environ[name] = os.path.abspath(os.path.expanduser(value))
    tasks = [os.path.abspath(name) if is_file(name) else name for name in options.tasks.split(",")]
    options.tasks = ",".join(tasks)
    return [*(Path(name).parent if is_file(name) else Path(name).absolute() for name in tasks if name), Path.cwd()]


def is_file(task: str) -> bool:
    """Returns True for a file of a task, or a pattern of such files, and False for a name."""
    return task.endswith((".yaml", ".yml"))


def with_files(given: dict[str, Any] | None, folders: list[Path]) -> dict[str, Any] | None:
    """The arguments of a task's data with their files from the root: next to the task, else in the working directory."""
    if not given:
        return given

    def placed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: placed(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [placed(inner) for inner in value]
        if not isinstance(value, str) or "://" in value:
            return value
        found = [folder for folder in folders if any(folder.glob(value))] if not os.path.isabs(value) else []
        return str(found[0] / value) if found else value

    return {name: placed(value) if name in OF_FILES else value for name, value in given.items()}
