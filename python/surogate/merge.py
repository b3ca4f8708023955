"""`surogate merge`: a model with an adapter added to its weights, from folder to folder.

Knows the paths of adapter, model and result; the arithmetic is the engine's.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from . import _native, hub
from .arguments import UsageError
from .terminal import show


def run(options: Namespace) -> int:
    """Merges and says what was done."""
    adapter = hub.folder(options.adapter, what="adapter")
    if options.base and options.model:
        raise UsageError("--base and --model are two models to merge into: give one of them")
    model = options.base or options.model or _native.adapter_base(adapter)
    if not model:
        raise UsageError(f"{adapter} does not say which model it belongs to: give --model")
    output = Path(options.output) if options.output else adapter.parent / "merged"
    adapted, tensors, size, quantised = _native.merge(hub.folder(model), adapter, output, as_is=bool(options.base))
    show(f"{output}: {adapted} of {tensors} tensors adapted, {size / 1e9:.2f} GB")
    if options.base:
        show(f"the adapter was added to the weights of {model} as they are: another function than was trained")
    elif quantised:
        show(f"the adapter was trained on quantized weights ({quantised}): it was added to their values")
    return 0
