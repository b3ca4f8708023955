"""The local folder of a run with `output_dir: s3://…` or `gs://…`, and the files that an earlier process of it left in
the bucket.

`uploads.py` sends what the run writes; the engine knows only the local folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import _native
from ..errors import ConfigError, RunError
from ..terminal import warn
from . import buckets
from .remote import MARK, Remote, step_of
from .uploads import COMPLETE

#: Files of a run by which a later process knows it.
OF_RUN = ("manifest.json", "resolved.yaml", "trainer_state.json")

#: The folder for what is being fetched, in that of the run.
FETCHED = ".fetched"

#: The beginning of an address, with one slash too.
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def prepare(config: _native.Config) -> tuple[_native.Config, dict[str, Any] | None]:
    """The configuration with a local folder in place of an address, and the description of the reader that uploads from it;
    none for a local `output_dir`. The newest checkpoint in the bucket is fetched, if the run resumes and it is newer than
    what is here.

    Raises ConfigError where the options do not go together or the bucket holds another run, RunError where it cannot be
    written.
    """
    address = config.output_dir
    if not buckets.is_address(address):
        _refuse_addresses(config)
        return config, None
    if config.checkpoint_dir is not None:
        hint = f"remove it: checkpoints go to {address} with everything else"
        raise ConfigError(f"`checkpoint_dir: {config.checkpoint_dir}` does not go with an `output_dir` in a bucket ({hint})")
    remote = Remote(address)
    place = folder_of(address)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = "set SUROGATE_RUNS to a folder that can be written"
        raise RunError(f"`output_dir: {address}`: the local folder cannot be made: {error} ({hint})") from error
    with _locked(place):
        remote.check_writable()
        _take_up(remote, place, config.resumes_newest)
        (place / COMPLETE).unlink(missing_ok=True)
    spec = {"reader": "upload", "address": address, "limit": config.save_total_limit, "grace": config.save_grace_seconds}
    return config.with_output_dir(str(place)), spec


def _refuse_addresses(config: _native.Config) -> None:
    """Raises ConfigError where a local folder has the form of an address: what is written there is lost with the machine."""
    if ADDRESS.match(config.output_dir):
        raise ConfigError(f"`output_dir` is `{config.output_dir}`, expected a folder, `s3://bucket/path` or `gs://bucket/path`")
    if config.checkpoint_dir is not None and ADDRESS.match(config.checkpoint_dir):
        hint = "set `output_dir` to an address: checkpoints go there with everything else"
        raise ConfigError(f"`checkpoint_dir` is `{config.checkpoint_dir}`, expected a folder ({hint})")


def local(config: _native.Config) -> Path:
    """The folder of this machine that a run with these options writes to."""
    return folder_of(config.output_dir) if buckets.is_address(config.output_dir) else Path(config.output_dir)


def folder_of(address: str) -> Path:
    """The local folder of a run at an address: in SUROGATE_RUNS, else in `surogate/runs` in the user's folder for caches."""
    own = os.environ.get("SUROGATE_RUNS")
    root = Path(own).expanduser() if own else _native.cache_folder("runs")
    address = address.rstrip("/")
    server = buckets.origin(address.partition("://")[0])
    name = hashlib.sha256(f"{server} {address}".encode()).hexdigest()[:16]
    return root / f"{address.rpartition('/')[2][:40]}-{name}"


def _take_up(remote: Remote, place: Path, resumes: bool) -> None:
    import obstore

    # A killed process leaves it, which may have the size of a checkpoint.
    shutil.rmtree(place / FETCHED, ignore_errors=True)
    try:
        names = remote.names()
        if "manifest.json" not in names:
            return
        if not resumes:
            hint = "set `resume_from_checkpoint: true` to go on with it, choose another `output_dir`, or remove it"
            raise ConfigError(f"`output_dir: {remote.address}` holds another run ({hint})")
        there = json.loads(remote.read("manifest.json"))
        if not isinstance(there, dict):
            raise ValueError("manifest.json is no JSON object")
        here = json.loads((place / "manifest.json").read_text()) if (place / "manifest.json").is_file() else None
        marks = remote.marks(names)
        broken = sorted(name for name in names if name.endswith(f"/{MARK}") and name.removesuffix(f"/{MARK}") not in marks)
        if broken:
            warn(f"surogate: {remote.address} has folders that are not whole, so they are passed over: their {', '.join(broken)}")
        steps = {step: name for name in marks if (step := step_of(name)) is not None}
        newest = max(steps, default=0)
        local = max((step_of(path.name) or 0 for path in place.iterdir() if path.is_dir()), default=0)
        if here is not None and here.get("run_id") != there.get("run_id") and newest > 0:
            if local > 0:
                hint = f"remove {place} to go on with the one in the bucket"
                raise ConfigError(f"{place} has another run than {remote.address} ({hint})")
            # It ended before its first checkpoint: only its log is kept.
            aside = place.with_name(f"{place.name}-{here.get('run_id')}")
            place.rename(aside)
            place.mkdir()
            warn(f"surogate: {remote.address} has checkpoints of another process, so what was here is in {aside}")
        damaged = []
        for step in sorted((step for step in steps if step > local), reverse=True):
            why = _fetch(remote, place, names, steps[step], there)
            if why is None:
                break
            warn(f"surogate: {steps[step]} of {remote.address} is damaged ({why}), so an earlier checkpoint is used")
            damaged.append(steps[step])
        else:
            if damaged and not local:
                raise RunError(f"`output_dir: {remote.address}`: every checkpoint there is damaged: {', '.join(damaged)}")
    except (obstore.exceptions.BaseError, OSError, ValueError, KeyError, RecursionError) as error:
        raise RunError(f"`output_dir: {remote.address}`: the run there cannot be read: {remote.why(error)}") from error


def _fetch(remote: Remote, place: Path, names: dict[str, int], name: str, manifest: dict[str, Any]) -> str | None:
    """Brings a checkpoint, the log and what makes the folder this run's. Returns what is wrong with a checkpoint that is not
    whole, of which nothing is kept."""
    warn(f"surogate: fetching {name} from {remote.address}")
    mark = remote.marks({of: size for of, size in names.items() if of.startswith(f"{name}/")})[name]
    log = Path(str(manifest.get("log", ""))).name
    part = place / FETCHED
    try:
        remote.get_folder(name, mark, part / name)
        if why := _native.checkpoint_fault(part / name):
            return why
        # It appears under its name at once.
        os.rename(part / name, place / name)
        for file in (*OF_RUN, log):
            if file in names:
                remote.get(file, part / file)
                os.replace(part / file, place / file)
        return None
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """One process at a time, of those of this machine: the nodes of a run may share it."""
    with (place.parent / f".{place.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


