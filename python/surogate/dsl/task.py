"""Tasks: what is computed from a model's results to train it. Recorded as a model is, apart from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..errors import ModelError
from .module import Module
from .place import here
from .tensor import Tensor
from .trace import Trace

#: By the name that an entry of the program asks for.
TASKS: dict[str, type[Module]] = {}

T = TypeVar("T", bound=type[Module])


def task(name: str) -> Callable[[T], T]:
    """Registers a module as the task `name`. It is constructed with the model's config and its
    `forward(results, batch)` is recorded. It marks `loss_sum` and `weight_sum` with `output`: the loss is
    Σ `loss_sum` ÷ Σ `weight_sum` over the micro-batches of a step.

    An attribute `metrics` names the metrics whose sums are marked as `task_report`; `differences` those that are one of
    them minus another, as (name, minuend, subtrahend); `entries` lists what a step runs, of
    `reference` (log-probabilities of the targets before training, which the task reads as `batch.reference_logps`),
    `train` and `evaluate`, in this order. Settings of the run's options are keyword arguments."""

    def register(module: T) -> T:
        TASKS[name] = module
        return module

    return register


class Results:
    """The values that the model has marked with `output`, by name: `results["logits"]`."""

    def __getitem__(self, name: str) -> Tensor:
        known = Trace.current().outer.results
        if name not in known:
            raise ModelError(here(), f"the model has no output `{name}`; it has {', '.join(known) or 'none'}")
        return known[name]


def record(name: str, config: Any, trace: Trace, settings: Mapping[str, Any]) -> None:
    """Records a task after the model, with what the options say of it."""
    if name not in TASKS:
        raise ModelError(None, f"there is no task `{name}`; there are {', '.join(sorted(TASKS))}")
    from .structure import Batch

    module = TASKS[name](config, **settings)  # type: ignore[call-arg]
    declared = module.name_parameters()
    said = {key: list(getattr(module, key, ())) for key in ("metrics", "differences", "entries")}
    with trace.task(name, declared, said):
        module(Results(), Batch())
