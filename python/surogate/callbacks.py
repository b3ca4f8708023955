"""Calls while :meth:`Trainer.train` works."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from .metrics import EvaluationMetrics, StepMetrics

if TYPE_CHECKING:
    from .trainer import Trainer


class Callback:
    """Methods that :meth:`Trainer.train` calls. A method that returns False ends the training."""

    def on_start(self, trainer: Trainer) -> bool | None:
        """Called before the first step."""

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> bool | None:
        """Called after every step."""

    def on_evaluation(self, trainer: Trainer, metrics: EvaluationMetrics) -> bool | None:
        """Called after every evaluation."""

    def on_end(self, trainer: Trainer) -> bool | None:
        """Called at the end, also where an exception ended the training."""


class OnStep(Callback):
    """A function of the metrics of each step."""

    def __init__(self, function: Callable[[StepMetrics], object]) -> None:
        self._function = function

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> bool | None:
        """Calls the function; only its `False` ends the training."""
        return False if ends(self._function(metrics)) else None


def ends(answer: object) -> bool:
    """True for the answer of a callback that ends the training: False, also numpy's."""
    return isinstance(answer, (bool, np.bool_)) and not answer


def prepared(callbacks: Iterable[Callback | Callable[[StepMetrics], object]]) -> list[Callback]:
    """The callbacks with functions as callbacks of each step. Raises TypeError for what cannot be called so."""
    if not isinstance(callbacks, Iterable):
        raise TypeError(f"callbacks: {callbacks!r} is no list of callbacks")
    return [_prepared(of) for of in callbacks]


def _prepared(of: Callback | Callable[[StepMetrics], object]) -> Callback:
    if isinstance(of, Callback):
        return of
    if isinstance(of, type) or not callable(of):
        raise TypeError(f"callbacks: {of!r} is neither a function nor an instance of a class of surogate.Callback")
    return OnStep(of)
