"""`surogate quantize`: a model with weights in fewer bits, as inference engines load it.

Knows the places of model, adapter and result; formats and arithmetic are the engine's.
"""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from . import _native, extend, files, generate, hub, merge, models
from .errors import ConfigError
from .report.words import bytes_text
from .terminal import show, state, waiting


def run(options: Namespace) -> int:
    """Quantizes and says what was done. An adapter is merged first, next to the result."""
    output = Path(options.output)
    if os.path.lexists(output) and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} already exists: nothing is overwritten")
    model, adapter = generate.places(options.model, None, options.base)
    if adapter is None:
        _quantize(hub.folder(model), model, options, output)
        return 0
    output.parent.mkdir(parents=True, exist_ok=True)
    with files.folder_beside(output) as folder:
        base, merged = extend.for_adapter(hub.folder(model), adapter), folder / "merged"
        *_, notes = _native.merge(base, adapter, merged, merge.names(base))
        for note in notes:
            show(f"Note: {note}")
        _quantize(merged, options.model, options, output)
    return 0


def _quantize(folder: Path, name: str, options: Namespace, output: Path) -> None:
    ir = models.build(hub.model_config(folder))
    percent = 0

    def progress(done: int, whole: int) -> None:
        nonlocal percent
        percent = 100 * done // max(whole, 1)

    with waiting(lambda: f"quantizing, {percent} %"):
        matrices, (before, after), group, notes = _native.compress(
            folder, ir, name, options.scheme, output, options.group_size, options.asymmetric, progress
        )
    groups = f" in groups of {group}" if group else ""
    size = f"{bytes_text(after)} instead of {bytes_text(before)}"
    state(output=str(output), matrices=matrices, bytes=after, bytes_before=before)
    show(f"{output}: {matrices} matrices as {options.scheme}{groups}, {size} (read back and compared)")
    for note in notes:
        show(f"Note: {note}")
