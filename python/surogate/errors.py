"""The exceptions of Surogate.

Every message gives the place, the value found, the value expected and, where possible, a hint.
"""

from __future__ import annotations

from ._native import ConfigError, DataError, DivergedError, MemoryPlanError, NodeLostError, RunError, SurogateError

__all__ = [
    "ConfigError",
    "DataError",
    "DivergedError",
    "MemoryPlanError",
    "ModelConfigError",
    "ModelError",
    "NodeLostError",
    "RunError",
    "SurogateError",
]


class ModelError(SurogateError):
    """A model's `forward` records something that does not fit together.

    `place` is `file:line` of the line in the model's source.
    """

    def __init__(self, place: str | None, message: str) -> None:
        self.place = place
        super().__init__(f"{place}: {message}" if place else message)


class ModelConfigError(SurogateError):
    """The model's config.json needs something that the architecture's file does not implement.

    `problems` holds one line for each field; all of them are found before the error is raised.
    """

    def __init__(self, architecture: str, problems: list[str]) -> None:
        self.problems = problems
        lines = "\n".join(f"  {problem}" for problem in problems)
        super().__init__(f"config.json of a {architecture}:\n{lines}")
