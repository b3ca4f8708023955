"""Calls while :meth:`Trainer.train` works."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

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
        return None if self._function(metrics) is not False else False
