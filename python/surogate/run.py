"""Loads a configuration and builds the model that it names."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import _native, models
from .convert import extend
from .dsl import reads_images
from .errors import ConfigError
from .storage import hub


def load_config(
    config: str | os.PathLike[str] | Mapping[str, Any],
    task: str = "sft",
    overrides: list[tuple[str, str]] | None = None,
    reads_data: bool | None = True,
    run: str | None = None,
) -> _native.Config:
    """A configuration from a path, from YAML text (a string of several lines) or from a dict. `run` chooses one of several
    runs of a file.

    Raises ConfigError with every problem at once. Local files that are not there are problems, those of datasets only if
    the data are going to be read; with None no file is looked for.
    """
    overrides = overrides or []
    if isinstance(config, Mapping):
        return _native.Config.from_json(json.dumps(config, default=plain), task, overrides, reads_data)
    if isinstance(config, str) and ("\n" in config or ": " in config):
        return _native.Config.from_yaml(config, "<text>", task, overrides, reads_data)
    path = Path(config)
    return _native.Config.from_yaml(_text(path), str(path), task, overrides, reads_data, run)


def run_names(path: Path) -> list[str]:
    """The names of the runs that a file lists; none where it is one run."""
    return _native.Config.run_names(_text(path), str(path))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def plain(value: Any) -> Any:
    """A path as text, a scalar or an array of numpy as Python's numbers."""
    to_python = getattr(value, "tolist", None)
    return to_python() if to_python else os.fspath(value)


def with_teacher(config: _native.Config, weights: bool = True) -> _native.Config:
    """The configuration with the local folder of the teacher and its graph, where it names one."""
    if not config.teacher:
        return config
    folder = hub.folder(config.teacher, weights=weights, what="teacher")
    tasks = json.loads(config.recorded_of_teacher)
    return config.with_teacher(folder, models.build(hub.model_config(folder), tasks))


def open_source(config: _native.Config, weights: bool = True) -> tuple[Path, str]:
    """The folder of the configured model, with the new tokens that it gets, and its graph as IR."""
    weights = weights and config.needs_weights
    folder = hub.folder(config.model, weights=weights)
    if config.new_tokens:
        folder = extend.kept(folder, config.new_tokens, weights)
    elif config.adapter and weights and (Path(config.adapter) / "adapter_config.json").is_file():
        folder = extend.for_adapter(folder, Path(config.adapter))
    fields = json.loads(config.model_config(json.dumps(hub.model_config(folder))))
    images = reads_images(fields) and hub.with_data(config).data_have_images()
    tasks = json.loads(config.recorded_tasks)
    if images and "reward" in tasks:
        # Models with a tower have no head of scores, so that there is no graph to refuse the images of.
        raise ConfigError("`task: reward` does not go with images in the data yet\n  hint: remove the images")
    return folder, models.build(fields, tasks, images=images)
