"""Surogate trains and fine-tunes large language models.

model = surogate.load("folder")                        # evaluation mode
logits = model.forward(input_ids)                      # numpy [B, T, V]
loss, gradients = model.loss_and_gradients(input_ids, labels)

trainer = surogate.Trainer("run.yaml")
for metrics in trainer:                                # or trainer.step(), trainer.train(callbacks=[…])
    print(metrics["loss"])
trainer.model.generate("Once upon a time")             # the weights as they are
trainer.export("result")
"""

# As in `typing`, which is not imported: `python -m surogate` would take one from the working directory.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from ._native import __version__
    from .callbacks import Callback
    from .errors import (
        ConfigError,
        DataError,
        DivergedError,
        MemoryPlanError,
        ModelConfigError,
        ModelError,
        NodeLostError,
        RunError,
        SurogateError,
    )
    from .images import process_images
    from .metrics import EvaluationMetrics, StepMetrics
    from .model import Model, load
    from .tokenizer import Tokenizer
    from .trainer import Trainer

__all__ = [
    "Callback",
    "ConfigError",
    "DataError",
    "DivergedError",
    "EvaluationMetrics",
    "MemoryPlanError",
    "Model",
    "ModelConfigError",
    "ModelError",
    "NodeLostError",
    "RunError",
    "StepMetrics",
    "SurogateError",
    "Tokenizer",
    "Trainer",
    "__version__",
    "load",
    "process_images",
]

#: Where the names are that are not in `errors`.
_PLACES = {
    "Callback": "callbacks",
    "EvaluationMetrics": "metrics",
    "Model": "model",
    "process_images": "images",
    "StepMetrics": "metrics",
    "Tokenizer": "tokenizer",
    "Trainer": "trainer",
    "__version__": "_native",
    "load": "model",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Names are imported when they are first used: numpy takes time that the command line does not have, and it
        answers Ctrl-C before the engine is loaded."""
        if name not in __all__:
            raise AttributeError(f"module `surogate` has no attribute `{name}`")
        from importlib import import_module

        value = getattr(import_module(f".{_PLACES.get(name, 'errors')}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
