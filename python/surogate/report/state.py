"""`trainer_state.json`: the history of a run in the form of transformers' trainer, for programs that read that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..stream import Event, History

NAME = "trainer_state.json"

#: Steps that are listed, at most: of a longer run every second, every third, …
MOST = 10_000


def trainer_state(history: History) -> dict[str, Any]:
    """Steps are counted from 1, as there."""
    steps = list(history.steps.values())
    stride = -(-len(steps) // MOST) or 1
    listed = [_step(event) for event in steps if event["step"] % stride == 0 or event is steps[-1]]
    epochs = {event["step"] + 1: event.get("epoch") for event in steps}
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
        "logging_steps": stride,
        "max_steps": history.total,
        "num_train_epochs": options.get("num_epochs"),
        "save_steps": options.get("save_steps"),
        "train_batch_size": options.get("per_device_train_batch_size"),
    }


def _step(event: Event) -> dict[str, Any]:
    told = {name: event.get(name) for name in ("epoch", "grad_norm", "learning_rate", "loss")}
    return {**told, "step": event["step"] + 1}


def _evaluation(at: int, event: Event, epoch: float | None) -> dict[str, Any]:
    return {"epoch": epoch, "eval_loss": event.get("loss"), "eval_runtime": event.get("seconds"), "step": at}


def places(events: list[Event]) -> set[Path]:
    """The folders in which checkpoints were just written."""
    return {Path(event["path"]).parent for event in events if event["event"] == "checkpoint"}


def text(history: History) -> str:
    """The file's contents."""
    return json.dumps(trainer_state(history), indent=2) + "\n"
