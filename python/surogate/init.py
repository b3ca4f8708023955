"""`surogate init`: a commented run.yaml for a model, data and a machine, from plan and data check.

What a run costs is asked of the engine for each way to cut a step into micro-batches; nothing is estimated here. What
is not written stays at its default.
"""

from __future__ import annotations

import json
import os
import textwrap
from argparse import Namespace
from pathlib import Path
from typing import Any

from . import _native, files, hub
from .errors import MemoryPlanError, RunError
from .machine import site_packages
from .run import load_config, open_source
from .terminal import show

#: Rows of a step, if the user does not say otherwise.
ROWS = 8

#: Tokens of a row, at most, if the user does not say otherwise.
LONGEST = 2048

#: Rows of a data set that are looked at.
SAMPLES = 1000

#: Why the plan is not made of the data.
NOT_READ = "only the first rows of the data are looked at here"

_GIB = 1 << 30

Override = tuple[str, str]


def run(options: Namespace, overrides: list[Override]) -> int:
    """Writes the file, or prints it."""
    path = Path(options.output)
    taken = RunError(f"{path} exists, and nothing is overwritten: remove it, or name another with --output")
    if os.path.lexists(path):
        raise taken
    text = draft(options.model, options.dataset, options.task, options.machine, overrides)
    try:
        files.write_new(path, text)
    except FileExistsError:
        raise taken from None
    show(f"{path}: look it through, then: surogate {options.task} {path}")
    return 0


def draft(model: str, dataset: str, task: str, machine: str | None, overrides: list[Override]) -> str:
    """The text of the file. Raises what a run would: wrong options, a model or data that cannot be trained."""
    given = dict(overrides)
    base: dict[str, Any] = {"model": model, "datasets": [{"path": dataset, "type": "text" if task == "pt" else "auto"}]}
    if "sequence_len" not in given:
        base["sequence_len"] = min(LONGEST, _positions(base, task, overrides))
    data = _data(base, task, overrides)
    plan, rows, accumulation = _plan(base, task, overrides, machine)
    return _text(base, task, overrides, data, plan, rows, accumulation)


def _positions(base: dict[str, Any], task: str, overrides: list[Override]) -> int:
    """Positions that the model knows."""
    config = load_config(base, task, overrides)
    fields = hub.model_config(hub.folder(config.model, weights=False))
    return int(fields.get("max_position_embeddings") or fields.get("n_positions") or LONGEST)


def _data(base: dict[str, Any], task: str, overrides: list[Override]) -> str:
    """The table of the data check over the first rows."""
    sample = {**base, "datasets": [{**base["datasets"][0], "samples": SAMPLES}]}
    config = load_config(sample, task, overrides)
    folder, ir = open_source(config, weights=False)
    return _native.check_data(hub.with_data(config), folder, ir)


def _plan(
    base: dict[str, Any], task: str, overrides: list[Override], machine: str | None
) -> tuple[dict[str, Any], int, int]:
    """The fastest way to take a step's rows: (plan, rows of a micro-batch, micro-batches)."""
    given = dict(overrides)
    if "per_device_train_batch_size" in given or "gradient_accumulation_steps" in given:
        cuts = [(0, 0)]
    else:
        cuts = [(ROWS >> power, 1 << power) for power in range(ROWS.bit_length()) if ROWS >> power]
    found, refused = [], None
    for rows, accumulation in cuts:
        cut = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation} if rows else {}
        config = load_config({**base, **cut}, task, overrides)
        folder, ir = open_source(config, weights=False)
        try:
            text = _native.preview("plan.json", config, folder, ir, machine, site_packages(), [NOT_READ])
        except MemoryPlanError as error:
            refused = error
            continue
        plan = json.loads(text)
        found.append((plan, plan["batch"], plan["gradient_accumulation_steps"]))
    if not found:
        assert refused is not None, "every cut was planned or refused"
        raise refused
    # The speeds of the plan are exact to some percent: among those that are as good, the smallest plan.
    best = max(of[0]["estimate"]["tokens_per_second"] for of in found)
    near = [of for of in found if of[0]["estimate"]["tokens_per_second"] >= 0.97 * best]
    return min(near, key=lambda of: of[0]["memory_bytes"])


def _text(
    base: dict[str, Any],
    task: str,
    overrides: list[Override],
    data: str,
    plan: dict[str, Any],
    rows: int,
    accumulation: int,
) -> str:
    given = dict(overrides)
    machine, estimate = plan["machine"], plan["estimate"]
    share = f"{plan['memory_bytes'] / _GIB:.2f} of {machine['memory'] / _GIB:.0f} GiB"
    on_gpu = machine["arch"] != "cpu"
    speed = f", about {estimate['tokens_per_second']:.0f} tokens a second" if on_gpu else ""
    parts = [
        _remark(
            f"A run for `surogate {task}`. Every option that is not here has its default: docs/config.md lists them."
        ),
        _pair("model", base["model"]),
        "",
        _remark("What the first rows hold:"),
        *[f"#   {line}".rstrip() for line in data.splitlines() if not line.startswith("Note: the rows of")],
        "datasets:",
        f"  - path: {_scalar(base['datasets'][0]['path'])}",
        f"    type: {base['datasets'][0]['type']}",
        "",
        _pair("output_dir", given.pop("output_dir", f"output/{Path(base['model']).name}")),
        "",
        _remark("Tokens of a row. Several documents share one."),
        _pair("sequence_len", given.pop("sequence_len", base.get("sequence_len"))),
        _remark(
            f"Rows of a micro-batch × micro-batches = {rows * accumulation} rows in a step. "
            f"Planned for {machine['name']}: {share}{speed}."
        ),
        _pair("per_device_train_batch_size", rows),
        _pair("gradient_accumulation_steps", accumulation),
        "",
    ]
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        given.pop(name, None)
    lora = given.get("lora", "false" if task == "pt" else "true") == "true"
    defaults: list[tuple[str, str, str]] = [
        ("lora", str(lora).lower(), "Train adapters beside frozen weights (true), or all weights (false)."),
        ("learning_rate", "2e-4" if lora else "2e-5", "Rises over the first steps, then falls to 0."),
        ("lr_scheduler_type", "cosine", ""),
        ("warmup_ratio", "0.03", ""),
        ("num_epochs", "1", "Passes over the data; `max_steps` ends a run earlier."),
        ("eval_steps", "100", "The loss on rows that are held out, every so many steps."),
        ("save_steps", "100", "A checkpoint, every so many steps. A run goes on with --resume-from-checkpoint true."),
    ]
    for name, value, about in defaults:
        if about:
            parts.append(_remark(about))
        parts.append(_pair(name, given.pop(name, value)))
    decided = _decisions(plan)
    if decided:
        parts += ["", _remark("What the plan decided about memory; leave it to the plan, or set recompute_* yourself:")]
        parts += [f"#   {line}" for line in decided]
    if given:
        parts += ["", _remark("As asked for:"), *[_pair(name, value) for name, value in given.items()]]
    return "\n".join(parts) + "\n"


def _decisions(plan: dict[str, Any]) -> list[str]:
    """What is computed again or done in parts."""
    return [
        f"{of['decision']}: {of['part']}" + (f", layers {of['layers']}" if of["layers"] else "") + f" ({of['reason']})"
        for of in plan["decisions"]
        if of["decision"] != "kept"
    ]


def _pair(name: str, value: Any) -> str:
    return f"{name}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    """As YAML: words stay bare where nothing else could be meant."""
    text = str(value)
    plain = text and text[0].isalnum() or text.startswith(("/", "[", "{", "-", "."))
    return text if plain and ": " not in text and " #" not in text else json.dumps(text)


def _remark(text: str) -> str:
    return "\n".join(f"# {line}" for line in textwrap.wrap(text, 100))
