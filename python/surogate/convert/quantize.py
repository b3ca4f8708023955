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
    """Quantizes and says what was done, or what would be."""
    if options.plan:
        _plan(options)
    else:
        on_model(options, lambda folder, name, output: _quantize(folder, name, options, output))
    return 0


def on_model(options: Namespace, act: Callable[[Path, str, Path], None]) -> None:
    """Acts on the folder of a model, with its name and the folder to write. An adapter is merged first, next to that."""
    output = _free(options)
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


def _free(options: Namespace) -> Path:
    """The folder to write. Raises ConfigError where something is in it."""
    output = Path(options.output)
    if os.path.lexists(output) and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} already exists: nothing is overwritten")
    return output


def _quantize(folder: Path, name: str, options: Namespace, output: Path) -> None:
    compression = _compression(folder, options, output)
    percent = 0

    def progress(done: int, whole: int) -> None:
        nonlocal percent
        percent = 100 * done // max(whole, 1)

    with waiting(lambda: f"quantizing, {percent} %"):
        matrices, (before, after), group, measured, notes, compared = compression.write(name, progress)
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


def _plan(options: Namespace) -> None:
    """Reports what would be written, and what measurements hold. A merged adapter has the shapes of its base."""
    output = _free(options)
    model, adapter = generate.places(options.model, None, options.base)
    folder = hub.folder(model) if adapter is None else extend.for_adapter(hub.folder(model), adapter)
    matrices, others, (before, after), group, notes, measuring = _compression(folder, options, output).plan()
    groups = f" in groups of {group}" if group else ""
    state(output=str(output), matrices=matrices, bytes=after, bytes_before=before)
    show(f"{output} would have {matrices} matrices as {options.scheme}{groups}, and {others} other tensors")
    show(f"{bytes_text(after)} instead of {bytes_text(before)}")
    if measuring is not None:
        tokens, layers, values, moments = measuring
        sums = f" and {bytes_text(moments)} of sums over them" if moments else ""
        held = f"up to {bytes_text(values)} of values{sums} on the host"
        show(f"Activations would be measured on {tokens:,} tokens, layer by layer ({layers}): {held}, besides a layer's weights")
    for note in notes:
        show(f"Note: {note}")


def _compression(folder: Path, options: Namespace, output: Path) -> _native.Compression:
    names = ("method", "smoothing_strength", "observer", "group_size", "asymmetric", "samples", "device")
    return _native.Compression(
        folder,
        models.build(hub.model_config(folder), images="towers" in options.include),
        options.scheme,
        output,
        calibration=calibration(folder, options.calibration) if options.calibration else None,
        included=options.include,
        site_packages=site_packages(),
        **{name: getattr(options, name) for name in names},
    )


def calibration(folder: Path, run: str) -> _native.Config:
    """The run whose rows are read, with the model that is quantized, on whose tokenizer they depend."""
    return hub.with_data(load_config(Path(run), "sft", [("model", str(folder))]))


def _advice(options: Namespace) -> str:
    """Suggestions of schemes that may lose less."""
    if options.scheme not in ("w4a16", "nvfp4a16", "mxfp4a16", "nvfp4"):
        return "try --scheme w8a16, and see whether the model is damaged"
    if options.method != "refine":
        return "try --method refine, or a scheme of 8 bits such as fp8-dynamic"
    finer = "a smaller --group-size, --asymmetric, " if options.scheme == "w4a16" else "--scheme w4a16, "
    return f"try {finer}more --samples, or a scheme of 8 bits such as fp8-dynamic"
