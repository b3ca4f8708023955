"""`surogate merge`: a model with an adapter added to its weights, from folder to folder.

Knows the paths of adapter, model and result; the arithmetic is the engine's.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from .. import _native, models  # noqa: F401  importing the architectures registers them
from ..cli.arguments import UsageError
from ..dsl.model import find
from ..errors import ConfigError, ModelConfigError
from ..report.words import bytes_text
from ..storage import hub
from ..terminal import show, state
from . import extend


def adapter_folder(place: Path) -> Path:
    """The folder of the adapter: the place itself, or that of the run in it."""
    if (place / "adapter_config.json").is_file():
        return place
    if (place / "adapter" / "adapter_config.json").is_file():
        return place / "adapter"
    hint = "give the folder of an adapter, or of a run that has finished"
    raise ConfigError(f"{place}: there is no adapter here, neither adapter_config.json nor adapter/ ({hint})")


def run(options: Namespace) -> int:
    """Merges and says what was done."""
    adapter = adapter_folder(hub.folder(options.adapter, what="adapter"))
    if options.base and options.model:
        raise UsageError("--base and --model name two models to merge into: give one of them")
    model = options.base or options.model or _native.adapter_base(adapter)
    if not model:
        raise UsageError(f"{adapter} does not say which model it belongs to: give --model")
    output = Path(options.output) if options.output else adapter.parent / "merged"
    folder = extend.for_adapter(hub.folder(model), adapter)
    adapted, tensors, size, quantised, notes = _native.merge(
        folder, adapter, output, names(folder), as_is=bool(options.base)
    )
    state(output=str(output), adapted=adapted, tensors=tensors, bytes=size)
    show(f"{output}: {adapted} of {tensors} tensors adapted, {bytes_text(size)}")
    for note in notes:
        show(f"Note: {note}")
    if options.base:
        show(f"the adapter was added to the weights of {model} as they are: this is not the function that was trained")
    elif quantised:
        show(f"the adapter was trained on quantized weights ({quantised}): it was added to their values")
    return 0


def names(folder: Path) -> str:
    """The naming rules of a model's architecture, as JSON."""
    try:
        found = find(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        return json.dumps({"renamed": found.files.get("renamed", []), "adapters": found.adapters})
    except (OSError, ValueError, ModelConfigError):
        return "{}"  # merging needs no architecture: the engine says what is wrong with the folder
