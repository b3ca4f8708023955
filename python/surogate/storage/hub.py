"""Downloads from the Hugging Face Hub: a model's folder, the files of a dataset. The engine sees only files.

Caches, tokens, mirrors and offline mode are huggingface_hub's: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import contextlib
import difflib
import glob
import importlib
import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .. import _native
from ..errors import ConfigError, ModelConfigError, RunError
from . import buckets, json_file

#: What is fetched from a repository: weights in safetensors, configuration, tokenizer, templates.
#: The card and the licence go on to what is made of the model.
COMPANIONS = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "README.md", "LICENSE*", "NOTICE*"]
PATTERNS = ["*.safetensors", *COMPANIONS]

#: What suffices when the weights are not needed.
PATTERNS_WITHOUT_WEIGHTS = COMPANIONS


def folder(model: str, *, weights: bool = True, what: str = "model") -> Path:
    """The local folder of a model: the path itself if it is one, else a hub repository's snapshot.
    `what` is the word for it in messages.
    """
    local = Path(_native.expand_path(model))
    if local.is_dir():
        return local
    if local.is_absolute() or model.startswith(".") or model.count("/") != 1:
        raise ConfigError(f"{what}: there is no folder `{model}`, and names on the Hub have the form `owner/name`")
    siblings = _siblings(local)
    # What a run has written is here; models in a folder of the owner's name may be, too.
    if siblings and what == "adapter":
        raise ConfigError(f"{what}: there is no folder `{model}`; {siblings}")
    from huggingface_hub import snapshot_download

    patterns = PATTERNS if weights else PATTERNS_WITHOUT_WEIGHTS
    try:
        return Path(call_hub(f"{what} `{model}`", lambda: snapshot_download(model, allow_patterns=patterns)))
    except RunError as error:
        raise RunError(f"{error}; there is no folder of that name either{f': {siblings}' if siblings else ''}") from error


def _siblings(missing: Path) -> str | None:
    """The folders next to a missing one, in words; None where there are none."""
    if not missing.parent.is_dir():
        return None
    names = sorted(path.name for path in missing.parent.iterdir() if path.is_dir())
    near = difflib.get_close_matches(missing.name, names, n=1)
    if near:
        return f"did you mean `{missing.parent / near[0]}`?"
    return f"`{missing.parent}` has {', '.join(names[:5])}{' …' if len(names) > 5 else ''}" if names else None


#: A set on the hub: `owner/name`, or `owner/name@revision`.
HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w][\w./-]*))?")

#: The beginning of the address of a file of a set, as fsspec writes it.
HUB_FILES = "hf://datasets/"
FILE_ADDRESS = re.compile(rf"{HUB_FILES}(?P<name>[^/@]+/[^/@]+)@(?P<revision>[^/]+)/(?P<file>.+)")

#: Characters of a README that are read.
MOST_OF_CARD = 1 << 24

#: What ends the name of a file, not of a set.
FILES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst", ".zstd")


def with_data(config: _native.Config) -> _native.Config:
    """The configuration with the files of its datasets on the hub and in buckets, which are fetched."""
    files, streamed = {}, {}
    for place, path, subset, split in config.data_sets:
        is_streamed = config.streams and place.startswith("datasets[")
        if buckets.is_address(path):
            if is_streamed:
                streamed[place] = buckets.listed(path, subset, split, FILES)
            else:
                files[place] = buckets.data_files(path, subset, split, FILES)
        elif is_name(path):
            if is_streamed:
                streamed[place] = listed(path, subset, split)
            else:
                files[place] = data_files(path, subset, split)
    config = config.with_files(files) if files else config
    return config.with_remote(sys.executable, streamed) if streamed else config


def is_name(path: str) -> bool:
    """True if a dataset's path is a name on the Hub."""
    return not Path(path).exists() and not path.endswith(FILES) and HUB_NAME.fullmatch(path) is not None


def with_local_data(config: _native.Config) -> tuple[_native.Config, list[str]]:
    """The same with what the hub's cache holds, and why the other datasets are not available. Nothing is downloaded."""
    files, unavailable = {}, []
    for place, path, subset, split in config.data_sets:
        if buckets.is_address(path):
            unavailable.append(f"`{path}` is in object storage")
        elif is_name(path):
            found = cached_files(path, subset, split)
            if found is None:
                unavailable.append(f"`{path}` is not in the hub's cache")
            else:
                files[place] = found
    return config.with_files(files) if files else config, unavailable


def cached_files(path: str, subset: str | None, split: str) -> list[Path] | None:
    """The files of a set on the hub, if the cache holds all of them in the revision that was fetched last."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError

    match = HUB_NAME.fullmatch(path)
    assert match is not None, "expected a name on the Hub"
    name, revision = match["name"], match["revision"] or "main"
    try:
        names = _cached_names(name, revision)
    except LocalEntryNotFoundError:
        return None

    def local(file: str) -> Path | None:
        found = try_to_load_from_cache(name, file, revision=revision, repo_type="dataset")
        return Path(found) if isinstance(found, str) else None

    card = local("README.md") if "README.md" in names else None
    text = _card(card) if card else None
    found = [local(file) for file in _native.choose_files(path, names, text, subset, split)]
    return [file for file in found if file is not None] if all(found) else None


def data_files(path: str, subset: str | None, split: str) -> list[Path]:
    """The local files of a set on the hub: only those of the subset and split are fetched."""
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    match = HUB_NAME.fullmatch(path)
    assert match is not None, "expected a name on the Hub"
    name, revision = match["name"], match["revision"]
    what = f"dataset `{path}`"

    def listed() -> list[str]:
        info = HfApi().dataset_info(name, revision=revision)
        return [file.rfilename for file in info.siblings or []]

    def cached() -> list[str]:
        return _cached_names(name, revision or "main")

    names = call_hub(what, lambda: _reached(what, listed, cached))
    card = None
    if "README.md" in names:
        fetch = partial(hf_hub_download, name, "README.md", repo_type="dataset", revision=revision)
        card = _card(Path(call_hub(what, fetch)))
    chosen = _native.choose_files(path, names, card, subset, split)
    patterns = [glob.escape(file) for file in chosen]
    download = partial(snapshot_download, name, repo_type="dataset", revision=revision, allow_patterns=patterns)
    place = Path(call_hub(what, download))
    return [place / file for file in chosen]


def listed(path: str, subset: str | None, split: str) -> list[tuple[str, int, str]]:
    """The files of a set on the hub as (address, bytes, version), without fetching them but for the README."""
    from huggingface_hub import HfApi, hf_hub_download

    match = HUB_NAME.fullmatch(path)
    assert match is not None, "expected a name on the Hub"
    name, revision = match["name"], match["revision"]
    what = f"dataset `{path}`"
    info = call_hub(what, lambda: HfApi().dataset_info(name, revision=revision, files_metadata=True))
    siblings = {file.rfilename: file for file in info.siblings or []}
    card = None
    if "README.md" in siblings:
        fetch_card = partial(hf_hub_download, name, "README.md", repo_type="dataset", revision=info.sha)
        card = _card(Path(call_hub(what, fetch_card)))
    chosen = _native.choose_files(path, list(siblings), card, subset, split)
    unsized = [file for file in chosen if siblings[file].size is None]
    if unsized:
        raise RunError(f"{what}: the Hub does not say how large `{unsized[0]}` is (set `streaming: false`)")
    address = f"{HUB_FILES}{name}@{info.sha}/"
    return [(address + file, int(siblings[file].size or 0), siblings[file].blob_id or "") for file in chosen]


def fetch(address: str, target: Path) -> None:
    """Writes a file of a set on the hub, as :func:`listed` names it, to a path; the hub's cache is not used."""
    from huggingface_hub import hf_hub_download

    match = FILE_ADDRESS.fullmatch(address)
    assert match is not None, "expected an address of `listed`"
    name, revision, file = match["name"], match["revision"], match["file"]
    own = target.parent / ".hub"
    download = partial(hf_hub_download, name, file, repo_type="dataset", revision=revision, local_dir=own)
    os.replace(call_hub(f"`{address}`", download), target)


def _card(readme: Path) -> str:
    """The beginning of a README, in which the list of a set's parts stands; there is no longer one that is meant."""
    with readme.open(encoding="utf-8", errors="replace") as file:
        return file.read(MOST_OF_CARD)


def _cached_names(name: str, revision: str) -> list[str]:
    """The files of a set as the cache knows them: by the listing that was fetched with them where there is one."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    storage = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
    reference = storage / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    snapshot = storage / "snapshots" / commit
    if not snapshot.is_dir():
        raise LocalEntryNotFoundError(f"{name} at {revision} was never fetched")
    names = {str(file.relative_to(snapshot)) for file in snapshot.rglob("*") if file.is_file()}
    listing = storage / "trees" / f"{commit}.json"
    if listing.is_file():
        entries = json.loads(listing.read_text(encoding="utf-8"))
        names |= set(entries.get("files", {}))
    return sorted(names)


def _reached(what: str, online: Callable[[], Any], offline: Callable[[], Any]) -> Any:
    """The hub's answer, else that of the cache: with a message unless offline mode is set."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return online()
    except OfflineModeIsEnabled:
        return offline()
    except HfHubHTTPError:
        raise
    except (OSError, _transport_error()) as error:
        try:
            found = offline()
        except LocalEntryNotFoundError:
            raise error from None
        warnings.warn(f"{what}: the Hub cannot be reached, so the cached files are used ({error})", stacklevel=2)
        return found


def _transport_error() -> type[Exception]:
    """The exception that the hub's HTTP library raises when there is no connection."""
    for name in ("httpx2", "httpx"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name).TransportError
    return OSError


def call_hub(what: str, call: Callable[[], Any], done: str = "downloaded from") -> Any:
    """The call's result; what the hub refuses becomes a word on what to do. `done`: what is tried, in messages."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return call()
    except HFValidationError as error:
        raise ConfigError(f"{what}: there is no such local path, and it is no name on the Hub: {error}") from error
    except GatedRepoError as error:
        hint = "ask for access on its page, then set HF_TOKEN to a token of yours"
        raise RunError(f"{what}: access to it must be granted ({hint})") from error
    except RepositoryNotFoundError as error:
        hint = "check the name; a private one needs HF_TOKEN"
        raise RunError(f"{what}: there is no such local path, and nothing of that name on the Hub ({hint})") from error
    except RevisionNotFoundError as error:
        raise RunError(f"{what}: the Hub has it, but not this revision") from error
    except LocalEntryNotFoundError as error:
        where = f"the cache {constants.HF_HUB_CACHE}"
        if constants.HF_HUB_OFFLINE:
            hint = "unset HF_HUB_OFFLINE to fetch it"
            raise RunError(f"{what}: not in {where}, and offline mode is on ({hint})") from error
        raise RunError(f"{what}: not in {where}, and the Hub cannot be reached: {error}") from error
    except (HfHubHTTPError, OSError, _transport_error()) as error:
        raise RunError(f"{what} cannot be {done} the Hub: {error}") from error


def model_config(path: Path) -> dict[str, Any]:
    """The contents of the folder's config.json."""
    file = path / "config.json"
    try:
        fields = json_file.read(file)
    except FileNotFoundError:
        raise ConfigError(f"{file}: not found; a model folder holds a config.json") from None
    if not isinstance(fields, dict):
        raise ModelConfigError("model", [f"{file} holds {type(fields).__name__}, expected an object"])
    if _native.has_own_head(path):
        if _ties(fields):
            said = f"`tie_word_embeddings` in {file} says that the head is the embedding, but the files hold an `lm_head.weight`"
            warnings.warn(
                f"{said} with other values: it is used, as transformers does, and results say `tie_word_embeddings: false`",
                stacklevel=2,
            )
        for part in (fields, fields.get("text_config")):
            if isinstance(part, dict) and (part is fields or "tie_word_embeddings" in part):
                part["tie_word_embeddings"] = False
    return fields


def _ties(fields: dict[str, Any]) -> bool:
    """True if a model's head is its embedding, by its configuration or the default of its architecture."""
    from .. import models  # noqa: F401  importing the architectures registers them
    from ..dsl.model import find

    try:
        found = find(fields)
        return bool(getattr(found.config.from_dict(found.name, fields), "tie_word_embeddings", False))
    except ModelConfigError:
        return bool(fields.get("tie_word_embeddings"))
