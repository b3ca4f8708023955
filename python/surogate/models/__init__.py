"""The architectures, one file each. Importing a file registers it."""

from ..dsl import build
from . import llama, qwen3

__all__ = ["build", "llama", "qwen3"]
