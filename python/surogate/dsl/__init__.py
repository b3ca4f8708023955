"""The language in which architectures are written: docs/dsl.md.

A model is a tree of modules whose `forward` is recorded on symbolic tensors. What is recorded is
the IR of docs/ir.md; nothing is computed here.
"""

from . import ops
from .config import ModelConfig, Reader
from .model import build, model, reads_images
from .module import Layers, Module, Parameter
from .structure import Batch, Unset, output, region, repeat
from .task import Results, task
from .tensor import Tensor, each

__all__ = [
    "Batch",
    "Layers",
    "ModelConfig",
    "Module",
    "Parameter",
    "Reader",
    "Results",
    "Tensor",
    "Unset",
    "build",
    "each",
    "model",
    "ops",
    "output",
    "reads_images",
    "region",
    "repeat",
    "task",
]
