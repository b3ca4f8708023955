"""From the name of a model to a local folder. The engine only ever sees folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import ConfigError, ModelConfigError, RunError

#: What is fetched from a repository: weights in safetensors, configuration, tokenizer, templates.
PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model", "merges.txt"]

#: What suffices when the weights are not needed.
PATTERNS_WITHOUT_WEIGHTS = ["*.json", "*.jinja", "tokenizer.model", "merges.txt"]


def folder(model: str, *, weights: bool = True, what: str = "model") -> Path:
    """The local folder of a model: the path itself if it is one, else a hub repository's snapshot.
    `what` is the word for it in messages.

    Caches, tokens, mirrors and offline mode are huggingface_hub's: HF_HOME, HF_TOKEN, HF_ENDPOINT,
    HF_HUB_OFFLINE.
    """
    local = Path(model).expanduser()
    if local.is_dir():
        return local
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ConfigError(f"{what}: there is no folder `{model}`, and hub names have the form `owner/name`")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = PATTERNS if weights else PATTERNS_WITHOUT_WEIGHTS
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise RunError(f"{what}: `{model}` is no local folder and cannot be fetched from the hub: {error}") from error


def model_config(path: Path) -> dict[str, Any]:
    """The contents of the folder's config.json."""
    file = path / "config.json"
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: not found; a model folder holds a config.json") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise ModelConfigError("model", [f"{file} holds {type(fields).__name__}, expected an object"])
    return fields
