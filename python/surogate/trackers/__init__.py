"""Trackers: services that receive the metrics of a run through their own clients.

This file lists the numbers of each event; each other file knows one client, which is imported only when it is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..logs.stream import OPENINGS, Event

_GIB = 1 << 30

#: Event → (group, numbers as they are).
_NUMBERS: dict[str, tuple[str, list[str]]] = {
    "step": (
        "train",
        [
            "loss",
            "grad_norm",
            "learning_rate",
            "epoch",
            "tokens",
            "seconds",
            "tokens_per_second",
            "mfu",
            "ceiling",
            "loss_scale",
            "busiest_expert",
            "router_entropy",
            "router_loss",
        ],
    ),
    "evaluation": ("eval", ["loss", "tokens", "seconds"]),
    "device": (
        "device",
        [
            "utilization",
            "memory_utilization",
            "clock_mhz",
            "memory_clock_mhz",
            "power_watts",
            "temperature_celsius",
        ],
    ),
}

#: Fields of steps and evaluations that are no metrics.
_PLAIN = ("event", "step", "time")

_BYTES = {"memory": "memory_gib", "memory_used": "memory_used_gib"}


def scalars(event: Event) -> tuple[int, dict[str, float]]:
    """The number of steps done at an event, and its values by names such as `train/loss`."""
    group, names = _NUMBERS.get(event["event"], ("", []))
    if not group:
        return 0, {}
    found = {f"{group}/{name}": event[name] for name in names if event.get(name) is not None}
    if event["event"] in ("step", "evaluation"):
        # Metrics of the task, such as rewards.
        found |= {
            f"{group}/{name}": value
            for name, value in event.items()
            if type(value) in (int, float) and name not in names and name not in _PLAIN and name not in _BYTES
        }
    for name, as_gib in _BYTES.items():
        if event.get(name) is not None:
            found[f"{group}/{as_gib}"] = event[name] / _GIB
    # An evaluation has the number of steps before it, other events count from 0.
    return event["step"] + (event["event"] != "evaluation"), found


def samples(event: Event) -> tuple[int, list[tuple[str, str]]]:
    """The number of steps done at an event, and the answers to `sample_prompts` in it, each after its prompt."""
    if event["event"] != "samples":
        return 0, []
    return event["step"], [(of["prompt"], of["text"]) for of in event["samples"]]


class Sparse:
    """A tracker that receives the steps that `logging_steps` asks for, and every other event."""

    def __init__(self, receiver: Any) -> None:
        self.wants_all, self.interval = receiver.wants_all, receiver.interval
        self._receiver = receiver
        self._every, self._total = 1, None

    def take(self, events: list[Event]) -> None:
        """Passes on the events that are due by `logging_steps`."""
        for event in events:
            if event["event"] in OPENINGS:
                self._every = (event.get("options") or {}).get("logging_steps") or 1
                self._total = (event.get("manifest") or {}).get("steps")
        self._receiver.take([event for event in events if self._is_due(event)])

    def _is_due(self, event: Event) -> bool:
        done = event.get("step", 0) + 1
        return event["event"] != "step" or done % self._every == 0 or done == self._total

    def close(self, end: Event | None) -> None:
        """Closes the tracker."""
        self._receiver.close(end)


def tracker(spec: dict[str, Any], output: Path) -> Sparse:
    """The tracker that a description names."""
    return Sparse(_client(spec, output))


def _client(spec: dict[str, Any], output: Path) -> Any:
    match spec["tracker"]:
        case "wandb":
            from .wandb import Wandb

            return Wandb(spec, output)
        case "aim":
            from .aim import Aim

            return Aim(spec, output)
        case "tensorboard":
            from .tensorboard import TensorBoard

            return TensorBoard(output)
        case other:
            raise ValueError(f"there is no tracker `{other}`")
