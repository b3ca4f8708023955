"""A model with further special tokens: `surogate extend` from folder to folder, and the option `new_tokens` of a run.

Knows paths and words; tokenizer and tables are the engine's.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from argparse import Namespace
from pathlib import Path

from .. import _native
from ..errors import RunError
from ..storage import files, hub
from ..terminal import show, state, warn

#: Tables grow to a multiple of this number of rows.
MULTIPLE = 64

#: Files of a model that are read for their contents; others are known by size and time.
SMALL = 1 << 26


def run(options: Namespace) -> int:
    """Extends and says what was done, and how the new rows are trained."""
    folder = hub.folder(options.model)
    output = Path(options.output)
    first, before, rows, tables = _native.extend(folder, options.tokens, options.multiple, output)
    ids = f"{first}" if len(options.tokens) == 1 else f"{first} to {first + len(options.tokens) - 1}"
    grown = f"{before} rows, as before" if rows == before else f"{rows} rows instead of {before}"
    state(output=str(output), first=first, rows=rows, tables=tables)
    show(f"{output}: {len(options.tokens)} new tokens with ids {ids}; {', '.join(tables)}: {grown}")
    modules = ", ".join(name.removesuffix(".weight").rsplit(".", 1)[-1] for name in tables if name.endswith(".weight"))
    show(f"To train them alongside an adapter: model: {output}, modules_to_save: [{modules}]")
    return 0


def for_adapter(model: Path, adapter: Path) -> Path:
    """The model of an adapter: one whose tokenizer and tables are the adapter's where these are longer."""
    found = _native.tokens_of_adapter(model, adapter)
    return model if found is None else kept(model, found[0], True, found[1])


def kept(model: Path, tokens: list[str], weights: bool, multiple: int = MULTIPLE) -> Path:
    """The folder of a run's model with its new tokens, among the caches; made where it is not there.

    Its name follows from the files of the model and the tokens, so that a run that is resumed finds it, and makes it
    again where it was removed. Without `weights` it has none, unless a run has made them.
    """
    folder = _native.cache_folder("extended")
    whole = folder / _name(model, tokens, multiple)
    if _is_kept(whole):
        return whole
    output = whole if weights else folder / f"{whole.name}-without-weights"
    if output != whole and _is_kept(output):
        return output
    try:
        first, _, rows, _ = _native.extend(model, tokens, multiple, output, weights)
    except _native.SurogateError:
        if output.is_dir() and files.is_trusted_folder(output):  # another process was faster
            return output
        raise
    output.chmod(0o700)
    if weights:
        warn(f"Note: the model with new_tokens (ids from {first}, {rows} rows) is stored in {output}")
    return output


def _is_kept(place: Path) -> bool:
    """Returns True if the cache has an entry that can be believed. One that others own or can write is removed."""
    if not os.path.lexists(place):
        return False
    if files.is_trusted_folder(place):
        return True
    warn(f"Note: {place} was or is in reach of other users, so it is made again")
    try:
        place.unlink() if place.is_symlink() else shutil.rmtree(place)
    except OSError as error:
        raise RunError(f"{place}: other users can write it, and it cannot be removed: {error}") from error
    return False


def _name(model: Path, tokens: list[str], multiple: int) -> str:
    parts = sorted(file for file in model.iterdir() if file.is_file())
    known = [(file.name, _mark(file)) for file in parts if not file.name.startswith(".")]
    text = json.dumps([str(model.resolve()), tokens, multiple, known])
    return f"{model.resolve().name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _mark(file: Path) -> str:
    status = file.stat()
    if status.st_size > SMALL or file.suffix == ".safetensors":
        return f"{status.st_size} {status.st_mtime_ns}"
    return hashlib.sha256(file.read_bytes()).hexdigest()
