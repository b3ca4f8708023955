"""`surogate prune`: a smaller model of the same architecture, from a model and rows that show what it needs.

Knows the places of model, data and result; what stays is the engine's choice.
"""

from __future__ import annotations

import json
import math
import os
from argparse import Namespace
from pathlib import Path

from .. import _native, models
from ..cli.arguments import UsageError
from ..environment.cuda_libraries import site_packages
from ..storage import hub
from ..terminal import show, state, waiting
from . import quantize

#: Options that say how large the result is.
SIZES = ["layers", "hidden_size", "intermediate_size", "heads", "key_value_heads", "experts", "parameters", "latency"]

#: Tokens of prompt and answer of the request that a latency is of.
REQUEST = (512, 128)


def run(options: Namespace) -> int:
    """Prunes and says what was done."""
    if all(getattr(options, size) is None for size in SIZES):
        flags = ", ".join("--" + size.replace("_", "-") for size in SIZES)
        raise UsageError(f"it is not said how large the result is: give at least one of {flags}")
    if options.latency is None and (options.machine is not None or options.request is not None):
        given = "--machine" if options.machine is not None else "--request"
        raise UsageError(f"{given}: without --latency it has no effect")
    if options.latency is not None and options.parameters is not None:
        raise UsageError("--latency and --parameters both choose the widths: give one")
    if options.scores is not None and os.path.lexists(options.scores):
        raise UsageError(f"--scores {options.scores}: already exists, nothing is overwritten")
    quantize.on_model(options, lambda folder, name, output: _prune(folder, name, options, output))
    return 0


def _prune(folder: Path, name: str, options: Namespace, output: Path) -> None:
    request = options.request or REQUEST
    with waiting(lambda: "measuring and pruning"):
        (before, after), latency, sizes, measured, compared = _native.prune(
            folder,
            models.build(hub.model_config(folder)),
            name,
            output,
            calibration=quantize.calibration(folder, options.calibration),
            build=lambda fields: models.build(json.loads(fields)),
            **{size: getattr(options, size) for size in SIZES},
            request=request,
            machine=options.machine,
            layers_by=options.layers_by,
            over_tokens=options.over_tokens,
            over_rows=options.over_rows,
            scores=options.scores,
            samples=options.samples,
            device=options.device,
            site_packages=site_packages(),
        )
    changed = ", ".join(f"{name} {now} instead of {then}" for name, then, now in sizes)
    tokens, of_model, of_result, divergence, are_held_out = compared
    state(output=str(output), parameters=after, parameters_before=before)
    show(f"{output}: {after:,} parameters instead of {before:,} ({changed})")
    if latency is not None:
        then, now, machine = latency
        prompt, answer = request
        tokens_of = f"a prompt of {prompt:,} tokens and an answer of {answer:,}"
        show(f"On {machine} {tokens_of} are expected to take {now:.3f} ms instead of {then:.3f}")
    show(f"Activations were measured on {measured:,} tokens")
    rows = "the validation data" if are_held_out else "further rows of the data"
    perplexities = f"perplexity {math.exp(of_result):.4f} instead of {math.exp(of_model):.4f}"
    show(f"{tokens:,} tokens of {rows}: {perplexities}, KL divergence {divergence:.5f}")
    show(f"Note: what it lost comes back by training: surogate distil with teacher: {name} and model: {output}")
