"""Surogate trains and fine-tunes large language models.

model = surogate.load("folder")                        # evaluation mode
logits = model.forward(input_ids)                      # numpy [B, T, V]
loss, gradients = model.loss_and_gradients(input_ids, labels)

trainer = surogate.Trainer("run.yaml")
metrics = trainer.step()
trainer.export("result")
"""

from ._native import __version__
from .errors import (
    ConfigError,
    DataError,
    DivergedError,
    MemoryPlanError,
    ModelConfigError,
    ModelError,
    RunError,
    SurogateError,
)

__all__ = [
    "ConfigError",
    "DataError",
    "DivergedError",
    "MemoryPlanError",
    "Model",
    "ModelConfigError",
    "ModelError",
    "RunError",
    "SurogateError",
    "Tokenizer",
    "Trainer",
    "__version__",
    "load",
]


def __getattr__(name: str) -> object:
    """`load`, `Model`, `Tokenizer` and `Trainer` are imported when they are first used: numpy takes time that
    the command line does not have."""
    if name in ("load", "Model"):
        from . import model

        return getattr(model, name)
    if name == "Trainer":
        from .trainer import Trainer

        return Trainer
    if name == "Tokenizer":
        from .tokenizer import Tokenizer

        return Tokenizer
    raise AttributeError(f"module `surogate` has no attribute `{name}`")
