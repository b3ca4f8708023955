"""`surogate init`: a commented run.yaml for a model, data and a machine, from plan and data check.

The engine plans the run for each possible split of a step into micro-batches; nothing is estimated here. Options that are
not written keep their defaults.
"""

from __future__ import annotations

import json
import os
import re
import textwrap
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import _native
from ..environment.cuda_libraries import site_packages
from ..errors import ConfigError, MemoryPlanError, RunError
from ..run import load_config, open_source, with_teacher
from ..storage import files, hub
from ..terminal import show, state, waiting
from . import foreign, init_samples
from .arguments import UsageError

#: Rows per step by default.
ROWS = 8

#: Maximum tokens per row by default.
LONGEST = 2048

#: Rows of a dataset that are read.
SAMPLES = 1000

#: Optimizer steps of a run, at least, where the data allow it.
STEPS = 20

#: Options that say how many steps there are.
PAIR = ("per_device_train_batch_size", "gradient_accumulation_steps")
OF_STEPS = {"max_steps", "batch_size", *PAIR}
#: Tasks whose losses compare the rows of a micro-batch, or that sample answers for them.
OF_WINDOWS = {"grpo", "kto", "orpo", "cpo"}

#: Why the plan does not use the data.
NOT_READ = "only the first rows of the data are read here"

#: Notes of the data check that are of this look at the first rows, or of no use in the file.
UNTOLD = ("Note: the rows of", "Note: texts are encoded by")

_GIB = 1 << 30

Override = tuple[str, str]


#: Learning rates of tasks that compare or judge answers, with adapters and without: the tasks' papers take far smaller ones than
#: supervised fine-tuning.
RATES = {
    "dpo": ("5e-6", "5e-7"),
    "kto": ("5e-6", "5e-7"),
    "orpo": ("8e-6", "5e-6"),
    "cpo": ("5e-6", "1e-6"),
    "reward": ("1e-4", "1e-5"),
    "grpo": ("1e-5", "1e-6"),
}


def run(options: Namespace, overrides: list[Override]) -> int:
    """Writes the file, or prints it."""
    path = Path(options.output)
    taken = RunError(f"{path} already exists and is not overwritten: remove it, or choose another with --output")
    if os.path.lexists(path):
        raise taken
    task: str = options.task
    notes: list[str] = []
    if options.source:
        text, task, notes = converted(Path(options.source), options.model, options.dataset, overrides)
    elif options.model is None or options.dataset is None:
        raise UsageError("init needs MODEL and DATASET, or --from with the configuration of another tool")
    else:
        text = draft(options.model, options.dataset, task, options.machine, overrides)
    try:
        files.write_new(path, text)
    except FileExistsError:
        raise taken from None
    for line in notes:
        show(line)
    state(output=str(path), task=task)
    show(f"{path}: review it, then run: surogate {task} {path}")
    return 0


def converted(
    source: Path, model: str | None, dataset: str | None, overrides: list[Override]
) -> tuple[str, str, list[str]]:
    """The text for the configuration of another tool, the command that runs it, and lines on what has no counterpart."""
    try:
        found = foreign.convert(source.read_text(encoding="utf-8"), str(source))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: cannot be read: {error}") from None
    found.options |= {"model": model} if model else {}
    found.options |= {"datasets": [{"path": dataset, "type": "auto"}]} if dataset else {}
    load_config(found.options, found.task, overrides, reads_data=None)
    notes = [f"{source} ({found.tool}): {len(found.options)} options"]
    if found.left_out:
        notes += ["Without a counterpart:", *[f"  {line}" for line in foreign.remarks(found)]]
    for name, value in overrides:
        found.options[name] = json.loads(_native.read_yaml(value, "command line"))
    return foreign.text(found, source.name), found.task, notes


def draft(model: str, dataset: str, task: str, machine: str | None, overrides: list[Override]) -> str:
    """The text of the file. Raises what a run would: wrong options, a model or data that cannot be trained."""
    given = dict(overrides)
    base: dict[str, Any] = {"model": model, "datasets": [{"path": dataset, "type": "text" if task == "pt" else "auto"}]}
    if "sequence_len" not in given:
        base["sequence_len"] = min(LONGEST, _positions(base, task, overrides))
    if task == "grpo":
        look = _look_at_prompts(base, task, overrides)
        data, changes = init_samples.chosen(base, given, look)
        rows = init_samples.ANSWERS
    else:
        data, rows, changes = _data(base, task, overrides)
    base |= changes
    plan, cut = _plan(base, task, overrides, machine, rows)
    return _text(base, task, overrides, data, plan, cut)


def _look_at_prompts(base: dict[str, Any], task: str, overrides: list[Override]) -> Callable[[dict[str, Any]], tuple[str, str]]:
    """A function that checks the first rows of the data with more options and returns the table and the counts as
    JSON."""

    def look(changes: dict[str, Any]) -> tuple[str, str]:
        sample = {**base, **changes, "datasets": [{**base["datasets"][0], "samples": SAMPLES}]}
        config = load_config(sample, task, overrides)
        folder, ir = open_source(config, weights=False)
        return _native.check_data(hub.with_data(config), folder, ir)

    return look


def _positions(base: dict[str, Any], task: str, overrides: list[Override]) -> int:
    """Positions that the model knows."""
    config = load_config(base, task, overrides)
    fields = hub.model_config(hub.folder(config.model, weights=False))
    return int(fields.get("max_position_embeddings") or fields.get("n_positions") or LONGEST)


def _data(base: dict[str, Any], task: str, overrides: list[Override]) -> tuple[str, int, dict[str, Any]]:
    """The table of the data check over the first rows, the rows of a step, and options with which few data make enough
    steps: rows of one document, more epochs."""
    given = dict(overrides)
    free = "num_epochs" not in given

    def look(**changes: Any) -> tuple[str, dict[str, Any]]:
        sample = {**base, "num_epochs": 1, **changes, "datasets": [{**base["datasets"][0], "samples": SAMPLES}]}
        config = load_config(sample, task, overrides)
        folder, ir = open_source(config, weights=False)
        table, counts = _native.check_data(hub.with_data(config), folder, ir)
        return table, json.loads(counts)

    table, counts = look(per_device_train_batch_size=ROWS, gradient_accumulation_steps=1)
    if counts["datasets"][0]["rows_read"] >= SAMPLES or OF_STEPS & given.keys():
        return table, ROWS, {}
    changes: dict[str, Any] = {}
    for changes in [{}] if "sample_packing" in given else [{}, {"sample_packing": False}]:
        for power in range(ROWS.bit_length()):
            rows = ROWS >> power
            table, counts = look(per_device_train_batch_size=rows, gradient_accumulation_steps=1, **changes)
            if counts["steps"] >= STEPS:
                return table, rows, changes
    if free:
        changes = {**changes, "num_epochs": -(-STEPS // max(1, counts["steps"]))}
        table, _ = look(per_device_train_batch_size=1, gradient_accumulation_steps=1, **changes)
    return table, 1, changes


def _plan(
    base: dict[str, Any], task: str, overrides: list[Override], machine: str | None, step: int
) -> tuple[dict[str, Any], dict[str, int]]:
    """The plan, and the options that say how many rows a step has: those of all devices, whose split is left to the plan, or
    the fastest split where the loss compares the rows of a micro-batch."""
    given = dict(overrides)
    cuts: list[dict[str, int]] = [{PAIR[0]: step >> power, PAIR[1]: 1 << power} for power in range(step.bit_length())]
    if "batch_size" in given or any(name in given for name in PAIR):
        cuts = [{}]
    elif task not in OF_WINDOWS and (devices := _devices(given, machine)):
        of_all = {"batch_size": step * devices}
        cuts = [of_all, {**of_all, "micro_batch_size": 1}]
    found: list[tuple[Any, dict[str, Any]]] = []
    refused: MemoryPlanError | None = None
    for cut in cuts:
        if found and "micro_batch_size" in cut:
            break
        config = with_teacher(load_config({**base, **cut}, task, overrides), weights=False)
        folder, ir = open_source(config, weights=False)
        try:
            with waiting(f"planning {' × '.join(map(str, cut.values()))} rows per step"):
                text = _native.preview("plan.json", config, folder, ir, machine, site_packages(), [NOT_READ])
        except MemoryPlanError as error:
            refused = error
            continue
        found.append((json.loads(text), cut))
    if not found:
        assert refused is not None, "every split was planned or rejected"
        raise refused
    # Planned speeds are accurate to some percent: among equally fast splits, take the smallest plan.
    best = max(of[0]["estimate"]["tokens_per_second"] for of in found)
    near = [of for of in found if of[0]["estimate"]["tokens_per_second"] >= 0.97 * best]
    return min(near, key=lambda of: of[0]["memory_bytes"])


def _devices(given: dict[str, str], machine: str | None) -> int:
    """The number of devices that the options or the machine name; 0 means all that are present at the start."""
    named = re.match(r"(\d+)x", machine or "")
    return int(named[1]) if named else int(given.get("gpus", "1"))


def _text(
    base: dict[str, Any],
    task: str,
    overrides: list[Override],
    data: str,
    plan: dict[str, Any],
    cut: dict[str, int],
) -> str:
    given = dict(overrides)
    cut = cut or {name: int(given[name]) for name in ("batch_size", *PAIR) if name in given}
    step = cut.get("batch_size", plan["batch"] * plan["micro_steps"])
    machine, estimate = plan["machine"], plan["estimate"]
    share = f"{plan['memory_bytes'] / _GIB:.2f} of {machine['memory'] / _GIB:.0f} GiB"
    on_gpu = machine["arch"] != "cpu"
    speed = f", about {estimate['tokens_per_second']:.0f} tokens per second" if on_gpu else ""
    parts = [
        _remark(
            f"A run for `surogate {task}`. Options that are not listed have their defaults, see docs/config.md. Learning rate, "
            "schedule, warm-up and epochs are written here because other values than the defaults suit most runs better."
        ),
        _pair("model", base["model"]),
        "",
        _remark("Data check of the first rows:"),
        *[f"#   {line}".rstrip() for line in data.splitlines() if not line.startswith(UNTOLD)],
        "datasets:",
        f"  - path: {_scalar(base['datasets'][0]['path'])}",
        f"    type: {base['datasets'][0]['type']}",
        "",
        _pair("output_dir", given.pop("output_dir", f"output/{Path(base['model']).name}")),
        "",
        *(init_samples.lines(base, given, _remark) if task == "grpo" else []),
        _remark(_of_rows(base, task)),
        _pair("sequence_len", given.pop("sequence_len", base.get("sequence_len"))),
        *_unpacked(base),
        _remark(
            f"{step} {'answers' if task == 'grpo' else 'rows'} per step{'' if 'batch_size' in cut else ' on each device'}, "
            f"{plan['batch']} at once. Planned for {machine['name']}: {share}{speed}."
        ),
        *[_pair(name, value) for name, value in cut.items()],
        "",
    ]
    for name in cut:
        given.pop(name, None)
    lora = given.get("lora", "false" if task == "pt" else "true") == "true"
    defaults: list[tuple[str, str, str]] = [
        ("lora", str(lora).lower(), "Train a LoRA adapter (true) or all weights (false)."),
        ("learning_rate", RATES.get(task, ("2e-4", "2e-5"))[0 if lora else 1], "Peak value: warms up over the first steps, then decays to 0."),
        ("lr_scheduler_type", "cosine", ""),
        ("warmup_ratio", "0.03", ""),
        ("num_epochs", str(base.get("num_epochs", 1)), "Passes over the data; `max_steps` ends the run earlier."),
        ("eval_steps", "100", "Steps between evaluations on held-out rows."),
        ("save_steps", "100", "Steps between checkpoints. Resume with --resume-from-checkpoint true."),
    ]
    if task == "grpo":
        defaults = [of for of in defaults if of[0] != "eval_steps"]
    for name, value, about in defaults:
        if about:
            parts.append(_remark(about))
        parts.append(_pair(name, given.pop(name, value)))
    decided = _decisions(plan)
    if decided:
        parts += ["", _remark("Memory decisions of the plan; set recompute_* to override them:")]
        parts += [f"#   {line}" for line in decided]
    if given:
        parts += ["", _remark("Options from the command line:"), *[_pair(name, value) for name, value in given.items()]]
    return "\n".join(parts) + "\n"


def _of_rows(base: dict[str, Any], task: str) -> str:
    if task == "grpo":
        return "Tokens per row: a prompt with its answer."
    return "Tokens per row." if "sample_packing" in base else "Tokens per row. Documents are packed into rows."


def _unpacked(base: dict[str, Any]) -> list[str]:
    """The lines of a run of few documents."""
    if "sample_packing" not in base:
        return []
    return [_remark("One document per row: packed, so few would make few optimizer steps."), "sample_packing: false"]


def _decisions(plan: dict[str, Any]) -> list[str]:
    """The lines on tensors that are recomputed, offloaded or chunked."""
    decided = [of for of in plan["decisions"] if of["value"] is True or of["value"] > 1]
    return [of["words"]["sentence"] for of in decided]


def _pair(name: str, value: Any) -> str:
    return f"{name}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    """A value as YAML: words stay bare where nothing else could be meant."""
    text = str(value)
    plain = text and text[0].isalnum() or text.startswith(("/", "[", "{", "-", "."))
    return text if plain and ": " not in text and " #" not in text else json.dumps(text)


def _remark(text: str) -> str:
    return "\n".join(f"# {line}" for line in textwrap.wrap(text, 100))
