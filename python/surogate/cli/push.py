"""`surogate push`: the result of a run, or any folder of a model or adapter, to a repository of the Hugging Face Hub.

Knows folders and names; tokens, mirrors and offline mode are huggingface_hub's, and the engine says which files make a
model or an adapter.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import _native
from ..convert.export import result
from ..errors import ConfigError
from ..report.words import bytes_text
from ..storage import hub, json_file
from ..terminal import show, state

#: Ends of the names of fields that say from where something was loaded: of a folder of this machine only the name is
#: published.
SOURCES = ("name_or_path",)
#: The same of files: what does not begin like a path is no such place.
PLACES = ("_file", "_path", "_dir")
#: Files without such fields, which may be large.
WITHOUT_SOURCES = ("tokenizer.json", "vocab.json", "added_tokens.json")
INDEX = ".safetensors.index.json"

#: A repository in the cache of the Hub.
CACHED = re.compile(r"(?:^|/)models--([\w.-]+?)--([\w.-]+)(?:/|$)")

#: Names of files that are listed because they are not uploaded.
LISTED = 6
#: What is tried with a repository, in messages.
UPLOADED = "uploaded to"


def run(options: Namespace) -> int:
    """Uploads and says what and where to."""
    place = Path(options.run)
    if not place.is_dir():
        raise ConfigError(f"{place}: there is no such folder; give the folder of a run, a model or an adapter")
    source = result(place)
    if options.name.count("/") != 1:
        raise ConfigError(f"{options.name} is not the name of a repository: names on the Hub have the form owner/name")
    if options.dry_run:
        describe(source, options.name)
        show("Nothing was uploaded (--dry-run)")
        return 0
    prepare(options.name, not options.public)
    address = upload(source, options.name, not options.public)
    state(output=address)
    show(f"Uploaded {source}: {address}")
    return 0


def prepare(name: str, private: bool) -> None:
    """Makes the repository, if there is none: whoever may not is refused before anything is trained."""
    from huggingface_hub import HfApi

    hub.call_hub(f"repository `{name}`", lambda: HfApi().create_repo(name, private=private, exist_ok=True), UPLOADED)


def describe(folder: Path, name: str) -> list[Path]:
    """Shows the files of a folder that are uploaded, and reports those that are not. Returns them as paths in it."""
    files = _native.published(folder)
    if not files:
        raise ConfigError(f"{folder}: there are no files of a model or an adapter")
    show(f"Uploading to {name}:")
    state(files=[str(file) for file in files])
    for file in files:
        show(f"  {file} ({bytes_text((folder / file).stat().st_size)})")
    others = sorted(set(os.listdir(folder)) - {file.parts[0] for file in files})
    if others:
        more = f" and {len(others) - LISTED} more" if len(others) > LISTED else ""
        show(f"Not part of the model, so not uploaded: {', '.join(others[:LISTED])}{more}")
    return files


def upload(folder: Path, name: str, private: bool, *, quiet: bool = False) -> str:
    """The address of the repository, which then holds the files of the folder that make a model or an adapter."""
    from huggingface_hub import HfApi

    files = _native.published(folder) if quiet else describe(folder, name)
    text = "Upload of a result by Surogate"
    with _staged(folder, files) as staged:
        hub.call_hub(
            f"repository `{name}`",
            lambda: HfApi().upload_folder(repo_id=name, folder_path=staged, commit_message=text),
            UPLOADED,
        )
    return f"{HfApi().endpoint}/{name}"


@contextlib.contextmanager
def _staged(folder: Path, files: list[Path]) -> Iterator[Path]:
    """A folder with these files alone, without paths of this machine in them."""
    with tempfile.TemporaryDirectory(prefix="surogate-") as place:
        for file in files:
            target = Path(place) / file
            target.parent.mkdir(exist_ok=True)
            fields = json_file.read(folder / file) if _names_sources(file) else None
            if isinstance(fields, dict) and _without_paths(fields):
                target.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            else:
                target.symlink_to((folder / file).resolve())
        yield Path(place)


def _names_sources(file: Path) -> bool:
    return file.suffix == ".json" and file.name not in WITHOUT_SOURCES and not file.name.endswith(INDEX)


def _without_paths(value: Any) -> bool:
    """Replaces folders of this machine by their names, at any depth. Returns whether there were any."""
    if isinstance(value, list):
        return any([_without_paths(item) for item in value])
    if not isinstance(value, dict):
        return False
    changed = False
    for name, item in value.items():
        if not isinstance(item, str):
            changed |= _without_paths(item)
            continue
        if name.endswith(PLACES) and item.startswith(("/", "~")):
            value[name] = Path(item).name
        elif name.endswith(SOURCES):
            value[name] = public_name(item)
        changed |= value[name] != item
    return changed


def public_name(source: str) -> str:
    """A name on the Hub as it is, also where it names a folder of the Hub's cache; of any other path only the end."""
    if cached := CACHED.search(source):
        return f"{cached[1]}/{cached[2]}"
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or Path(source).exists():
        return Path(source).name or source.strip("/")
    return source
