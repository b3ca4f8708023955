"""`trainer_state.json`: the history of a run in the format of transformers' Trainer, for programs that read it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..logs.stream import Event, History
from ..storage import files

NAME = "trainer_state.json"


def trainer_state(history: History) -> dict[str, Any]:
    """Steps are counted from 1, as there; of a longer run every second, fourth, … is listed."""
    last = history.steps.last
    regular = list(history.steps.regular())
    # Windows of a thinned series have the length of the stride.
    listed = [_step(event) for event in regular if event["step"] % history.steps.stride == 0 or event is last]
    if last is not None and (not regular or regular[-1] is not last):
        listed.append(_step(last))
    epochs = {event["step"] + 1: event.get("epoch") for event in history.steps.values()}
    listed += [_evaluation(at, event, epochs.get(at)) for at, event in history.evaluations.items()]
    evaluations = {at: of["loss"] for at, of in history.evaluations.items() if of.get("loss") is not None}
    best = min(evaluations, key=lambda at: evaluations[at], default=None)
    options = history.options
    return {
        "best_metric": evaluations.get(best) if best is not None else None,
        "best_global_step": best,
        "epoch": epochs.get(history.done),
        "eval_steps": options.get("eval_steps"),
        "global_step": history.done,
        "is_local_process_zero": True,
        "is_world_process_zero": True,
        "log_history": sorted(listed, key=lambda entry: entry["step"]),
        "logging_steps": history.steps.stride,
        "max_steps": history.total,
        "num_train_epochs": options.get("num_epochs"),
        "save_steps": options.get("save_steps"),
        "train_batch_size": options.get("per_device_train_batch_size"),
    }


def _step(event: Event) -> dict[str, Any]:
    values = {name: event.get(name) for name in ("epoch", "grad_norm", "learning_rate", "loss")}
    return {**values, "step": event["step"] + 1}


def _evaluation(at: int, event: Event, epoch: float | None) -> dict[str, Any]:
    return {"epoch": epoch, "eval_loss": event.get("loss"), "eval_runtime": event.get("seconds"), "step": at}


def replace(path: Path, history: History) -> None:
    """Writes the file. Raises FileExistsError where one lies that this package did not write, as transformers' own."""
    fields = trainer_state(history)
    if os.path.lexists(path) and not _is_ours(path, fields):
        raise FileExistsError(f"{path} already exists, and surogate did not write it")
    files.replace(path, json.dumps(fields, indent=2) + "\n")


def _is_ours(path: Path, fields: dict[str, Any]) -> bool:
    """transformers reads no field that it does not know, so that the file is known by those that it has."""
    if path.is_symlink() or not path.is_file():
        return False
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.keys() == fields.keys()
