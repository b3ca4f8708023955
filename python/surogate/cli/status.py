"""`surogate status`: how far a run is, what it wrote, how it ended; from its log alone.

For people a few lines, for programs one JSON object.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import RunError
from ..logs.stream import Event, History, history_of, is_running, log_of

#: Fields of the newest step and of the newest evaluation.
OF_STEP = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu", "memory", "epoch", "seconds", "reward")
OF_EVALUATION = ("step", "loss", "reward", "tokens")

#: Results, by their folders in the run's.
RESULTS = ("adapter", "model", "merged")


def of(run: Path) -> dict[str, Any]:
    """The state of the run in a folder, or of a log. Raises RunError where there is none."""
    log = log_of(run) if run.exists() else None
    if log is None:
        raise RunError(f"{run}: there is no log of a run (give the output_dir of a run, or its log)")
    history = history_of(log)
    folder = run if run.is_dir() else log.parent
    last, evaluation = history.steps.last or {}, history.evaluations.last
    checkpoints = [mark for mark in history.marks if mark["event"] == "checkpoint"]
    return {
        "run": history.manifest.get("run"),
        "state": _state(history, folder),
        "because": (history.end or {}).get("error"),
        "steps_done": history.done,
        "steps_planned": history.total,
        "seconds_left": _seconds_left(history, last),
        "step": {name: last.get(name) for name in OF_STEP} if last else None,
        "evaluation": {name: evaluation.get(name) for name in OF_EVALUATION} if evaluation else None,
        "checkpoint": checkpoints[-1]["path"] if checkpoints else None,
        "results": [str(folder / name) for name in RESULTS if (folder / name).is_dir()],
        "log": str(log),
        "time": last.get("time") or history.opening.get("time"),
    }


def _state(history: History, folder: Path) -> str:
    """`running`, `finished`, `interrupted` or `failed` as the log says, `killed` where it says nothing and no process is left."""
    if history.end is not None:
        return str(history.end["event"])
    return "running" if is_running(folder) else "killed"


def _judged(evaluation: dict[str, Any]) -> str:
    """The loss of an evaluation, or of sampled answers the reward."""
    if evaluation["loss"] is None:
        return "no reward" if evaluation["reward"] is None else f"reward {evaluation['reward']:.4f}"
    return f"{evaluation['loss']:.4f}"


def _seconds_left(history: History, last: Event) -> float | None:
    if history.total is None or not last or history.end is not None:
        return None
    return round(max(0, history.total - history.done) * float(last["seconds"]), 1)


def text(found: dict[str, Any]) -> str:
    """The same for people."""
    steps = f"{found['steps_done']} of {found['steps_planned'] or '?'} steps"
    left = f", about {found['seconds_left']:.0f} s left" if found["seconds_left"] is not None and found["state"] == "running" else ""
    lines = [f"{found['run']}: {found['state']}, {steps}{left}"]
    lines += [f"Error: {found['because']}"] if found["because"] else []
    if found["step"]:
        reward = f", reward {found['step']['reward']:.3f}" if found["step"]["reward"] is not None else ""
        lines.append(f"Loss: {found['step']['loss']:.4f}{reward} at {found['step']['tokens_per_second']:.0f} tok/s")
    if found["evaluation"]:
        lines.append(f"Evaluation: {_judged(found['evaluation'])} after {found['evaluation']['step']} steps")
    lines += [f"Checkpoint: {found['checkpoint']}"] if found["checkpoint"] else []
    return "\n".join([*lines, *(f"Result: {place}" for place in found["results"])])
