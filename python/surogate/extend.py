"""`surogate extend`: a model with further special tokens, from folder to folder.

Knows paths and words; tokenizer and tables are the engine's.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from . import _native, hub
from .terminal import show


def run(options: Namespace) -> int:
    """Extends and says what was done, and how the new rows are trained."""
    folder = hub.folder(options.model)
    output = Path(options.output)
    first, before, rows, tables = _native.extend(folder, options.tokens, options.multiple, output)
    ids = f"{first}" if len(options.tokens) == 1 else f"{first} to {first + len(options.tokens) - 1}"
    grown = f"{before} rows, as before" if rows == before else f"{rows} rows instead of {before}"
    show(f"{output}: {len(options.tokens)} new tokens with ids {ids}; {', '.join(tables)}: {grown}")
    modules = ", ".join(name.removesuffix(".weight").rsplit(".", 1)[-1] for name in tables if name.endswith(".weight"))
    show(f"To train them alongside an adapter: model: {output}, modules_to_save: [{modules}]")
    return 0
