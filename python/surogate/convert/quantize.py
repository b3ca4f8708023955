"""`surogate quantize`: a model with weights in fewer bits, as inference engines load it.

Knows the places of model, adapter and result; formats and arithmetic are the engine's.
"""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from .. import _native, models
from ..cli import generate
from ..environment.cuda_libraries import site_packages
from ..errors import ConfigError
from ..report.words import bytes_text
from ..run import load_config
from ..storage import files, hub
from ..terminal import show, state, waiting
from . import extend, merge


def run(options: Namespace) -> int:
    """Quantizes and says what was done."""
    on_model(options, lambda folder, name, output: _quantize(folder, name, options, output))
    return 0


def on_model(options: Namespace, act: Callable[[Path, str, Path], None]) -> None:
    """Acts on the folder of a model, with its name and the folder to write. An adapter is merged first, next to that."""
    output = Path(options.output)
    if os.path.lexists(output) and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} already exists: nothing is overwritten")
    model, adapter = generate.places(options.model, None, options.base)
    if adapter is None:
        act(hub.folder(model), model, output)
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    with files.folder_beside(output) as folder:
        base, merged = extend.for_adapter(hub.folder(model), adapter), folder / "merged"
        *_, notes = _native.merge(base, adapter, merged, merge.names(base))
        for note in notes:
            show(f"Note: {note}")
        act(merged, options.model, output)


def _quantize(folder: Path, name: str, options: Namespace, output: Path) -> None:
    ir = models.build(hub.model_config(folder))
    percent = 0

    def progress(done: int, whole: int) -> None:
        nonlocal percent
        percent = 100 * done // max(whole, 1)

    with waiting(lambda: f"quantizing, {percent} %"):
        matrices, (before, after), group, measured, notes, compared = _native.compress(
            folder,
            ir,
            name,
            options.scheme,
            output,
            method=options.method,
            smoothing_strength=options.smoothing_strength,
            observer=options.observer,
            group_size=options.group_size,
            asymmetric=options.asymmetric,
            calibration=calibration(folder, options.calibration),
            samples=options.samples,
            device=options.device,
            site_packages=site_packages(),
            progress=progress,
        )
    groups = f" in groups of {group}" if group else ""
    size = f"{bytes_text(after)} instead of {bytes_text(before)}"
    state(output=str(output), matrices=matrices, bytes=after, bytes_before=before)
    show(f"{output}: {matrices} matrices as {options.scheme}{groups}, {size} (read back and compared)")
    if measured:
        show(f"Activations were measured on {measured:,} tokens")
    for note in notes:
        show(f"Note: {note}")
    if compared is None:
        show("Note: what it lost was not measured: --calibration run.yaml compares it with the model on the data of a run")
        return
    tokens, of_model, of_result, divergence, are_held_out, is_much = compared
    rows = "the validation data" if are_held_out else "further rows of the data"
    perplexities = f"perplexity {math.exp(of_result):.4f} instead of {math.exp(of_model):.4f}"
    show(f"{tokens:,} tokens of {rows}: {perplexities}, KL divergence {divergence:.5f}")
    if is_much:
        show(f"Note: the perplexity rose by more than 5 %: {_advice(options)}")


def calibration(folder: Path, run: str | None) -> _native.Config | None:
    """The run whose rows are read, with the model that is quantized, on whose tokenizer they depend."""
    if run is None:
        return None
    return hub.with_data(load_config(Path(run), "sft", [("model", str(folder))]))


def _advice(options: Namespace) -> str:
    """Suggestions of schemes that may lose less."""
    if options.scheme not in ("w4a16", "nvfp4a16", "mxfp4a16", "nvfp4"):
        return "try --scheme w8a16, and see whether the model is damaged"
    if options.method != "refine":
        return "try --method refine, or a scheme of 8 bits such as fp8-dynamic"
    finer = "a smaller --group-size, --asymmetric, " if options.scheme == "w4a16" else "--scheme w4a16, "
    return f"try {finer}more --samples, or a scheme of 8 bits such as fp8-dynamic"
